"""The plain frozen data that all folders share: nestings, settings, outcomes and facts. Nothing here imports jax or flax."""
