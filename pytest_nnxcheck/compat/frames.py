"""The functions of jax and flax that are a transform at work, as frames of Python have them.

No public way to ask what a frame is: names of functions, many of them private, read by profiling hooks. Tried on all versions.
"""

from __future__ import annotations

LAX = ("scan", "while_loop", "fori_loop", "cond", "switch")
"""The transforms of `jax.lax`, which `nnx` has too."""

GRADIENTS = ("grad", "value_and_grad")

CALLED = ("jit", "remat", "checkpoint", "vmap", "eval_shape", *LAX, *GRADIENTS)
"""The transforms that a user's code calls by these names; flax' functions have ``_wrapper`` behind them."""

NNX_TWINS = {"checkpoint": "remat", **{name: name for name in (*LAX, *GRADIENTS)}}
"""What nnx has in place of a transform of jax."""

TRANSFORM_FRAMES = {
    **{name: name for name in LAX},
    **{f"{name}_wrapper": name for name in ("scan", "vmap", "jit", "grad")},
    "_cond": "cond",
    "vmap_f": "vmap",
    "grad_f": "grad",
    "value_and_grad_f": "value_and_grad",
    "fun_remat": "checkpoint",
}
"""The functions of jax and flax that carry a transform out; those that only ask for shapes are not among them."""

_JITS = ("JitWrapped.__call__", "SimpleJitWrapped.__call__")

BODIES = "flax.nnx.nn"
"""The layers of flax: code of a library, but a body like the user's."""


def transform_of(name: str, qualified: str) -> str | None:
    """The transform that a function of jax or flax carries out, by its name and its qualified name."""
    return TRANSFORM_FRAMES.get(name) or ("jit" if qualified in _JITS else None)
