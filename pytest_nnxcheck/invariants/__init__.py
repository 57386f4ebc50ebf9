"""The invariants: one file each, whose ``judge`` takes a case and gives a judgement. Nothing here runs anything, or knows jax.

An invariant is a row of `core.catalogue.INVARIANT_ROWS` and a file of that name; those of the user's own are all judged by `own`.
"""
