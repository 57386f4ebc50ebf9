"""The words of the house: nestings, settings, outcomes and what was observed, as plain frozen data. Nothing here imports jax or flax."""
