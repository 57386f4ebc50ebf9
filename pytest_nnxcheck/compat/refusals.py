"""Recognise the exceptions by which jax or flax refuses a call: by type and place, by their text only where nothing else helps.

Most of them decide a verdict: a change of their words in a new version must fail a test.
"""

from __future__ import annotations

import pathlib
import traceback

import jax
from flax import errors, nnx

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_WORDS = ("graph=", "graph_updates", "tree mode", "tree-mode", "graph mode", "graph-mode", "captured variable")
"""Words of flax about its modes; no type names one."""


def is_tracer_error(error: BaseException | None) -> bool:
    """True if jax raised the exception because a tracer of an ended trace was used. All versions."""
    return isinstance(error, jax.errors.UnexpectedTracerError)


def asks_for_value(error: BaseException | None) -> bool:
    """True if jax raised the exception because Python asked for the value of a tracer. All versions.

    Public, but for a slice whose ends are tracers, a plain IndexError, and for a shape of tracers, a plain TypeError, with a sentence of jax': one of these.
    """
    classes = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    )
    sentences = ("static start/stop/step", "Slice entries must be static")
    is_slice = isinstance(error, IndexError) and any(sentence in str(error) for sentence in sentences)
    is_shape = isinstance(error, TypeError) and "Shapes must be 1D sequences of concrete values" in str(error)
    return isinstance(error, classes) or is_slice or is_shape


def is_refusal(error: BaseException | None) -> bool:
    """True if flax refused to touch a graph node from another trace level.

    `TraceContextError` is public; for a Variable flax raises a plain ValueError from its own files. All versions.
    """
    return isinstance(error, errors.TraceContextError) or _nnx_says(error, ("from different trace level",))


def _nnx_says(error: BaseException | None, words: tuple[str, ...]) -> bool:
    """True if the exception is a plain ValueError out of the files of `flax.nnx` with one of these words."""
    if not isinstance(error, ValueError) or not any(word in str(error).lower() for word in words):
        return False
    return is_of_flax(error)


def is_mode_refusal(error: BaseException | None, mode: str) -> bool:
    """True if flax refused a thing that a mode cannot do: shared Variables in tree mode, `nnx.StateAxes` without graph updates.

    Flax raises a plain ValueError from its own files, whose text names the mode or its flags. In the current mode, and in graph mode, the
    exception is the user's own: no other mode would do better. All versions.
    """
    return mode not in ("current", "graph") and _nnx_says(error, _WORDS)


def mode_words(error: BaseException) -> str:
    """The part of an exception of flax that is about its mode: the paths and the sentence that names the mode, without the advice.

    ``Duplicate Param (model.a, model.b): Tree mode (graph=False) does not support shared references``. Flax 0.12.
    """
    text = str(error).partition("Consider the following")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    paths = ", ".join(line.removeprefix("- ").lstrip(".") for line in lines if line.startswith("- "))
    sentences = [line for line in lines if any(word in line.lower() for word in _WORDS)] or lines[:1] or [""]
    subject = f"{lines[0].partition('(')[0].strip()} ({paths}): " if paths else ""
    return f"{type(error).__name__}: {subject}{sentences[0].rstrip('. ')}"


def is_of_flax(error: BaseException) -> bool:
    """True if code of flax raised the exception, and not of jax, as far as its traceback tells."""
    return (
        error.__traceback__ is not None
        and str(pathlib.Path(nnx.__file__).parent) in traceback.extract_tb(error.__traceback__)[-1].filename
    )


_OF_CPU = (
    "not found for platform cpu",
    "is not supported by XLA:CPU",
    "supported on CPU backend",
    "is not supported by dot_general on CPU",
)
"""Words of jax and XLA about a primitive that another platform lowers: no rule for it, no code for it, a kernel of Pallas, or a precision of a product."""


def is_of_platform(error: BaseException | None) -> bool:
    """True if jax or XLA refused a program that it can lower for another platform: a kernel of Pallas, `jax.lax.ragged_all_to_all`.

    No type says so. Tried on all versions.
    """
    return error is not None and any(words in str(error) for words in _OF_CPU)


_MESH = ("mesh context", "context mesh", "mesh in context")
"""Words of flax and jax about code that names axes of a mesh where none is set."""


def asks_for_mesh(error: BaseException) -> bool:
    """True if flax or jax refused to run without a mesh. No type says so. Tried on jax 0.5.3, 0.6.2 and 0.12."""
    return any(words in str(error) for words in _MESH)


def branch_in_a_loop(error: BaseException, transforms: list[str]) -> bool:
    """True if jax fails an ``assert`` without text in its rule for conditionals, under ``transforms`` inside a jit: no one layer raises alone.

    A call that draws random numbers, in a branch, in a loop, differentiated. Tried on all versions: jax 0.4.33, 0.5.3 and 0.6.2 fail it, jax
    0.10.2 and 0.12 do not.
    """
    names = iter(transforms)
    kinds = (("grad",), ("scan", "fori_loop"), ("cond", "switch"))
    return (
        type(error) is AssertionError and not str(error) and all(any(name in kind for name in names) for kind in kinds)
    )
