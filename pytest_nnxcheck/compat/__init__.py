"""Every touch of a name of jax or flax that depends on the version, or that is not public; and every compiler of a chip.

Each function says what it is for, why there is no public way, and on which versions it was tried:
jax 0.4.33 and 0.5.3 with flax 0.10.2, jax 0.6.2 with flax 0.10.7, jax 0.10.2 with flax 0.12.8, jax 0.12 with flax 0.12.12
("all versions" below).
"""
