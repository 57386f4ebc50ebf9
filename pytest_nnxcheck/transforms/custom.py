"""Transforms of the user's own: how one is registered, and the check that its layer keeps the signature of every layer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_nnxcheck.core.catalogue import (
    CALL_FIRST,
    FURTHER,
    MODES,
    REGISTERED,
    STYLES,
    TRANSFORMS,
    Registered,
    invariant_names,
)
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.text import Unreadable, near, one_of, place_of

if TYPE_CHECKING:
    from pytest_nnxcheck.transforms.layers import Plan, Program

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_Function = TypeVar("_Function", bound=Callable[..., Any])
_WORD = re.compile(r"[A-Za-z_]\w*")
NAMED = "write @register_transform('scan_layers')"
_SIGNATURE = "a layer keeps the signature layer(state, *inputs) -> out, where out is what f(state, *inputs) returned"


def register_transform(name: str, *, style: str = "argument") -> Callable[[_Function], _Function]:
    """Register the decorated function as a transform of your own, so that ``transforms`` and ``nesting`` can name it.

    The function takes the program inside the layer, ``f(state, *inputs) -> out``. It returns a function of the same signature, with the
    same effect on the state. Write it in a conftest.py, or above the `check`. Raises `CheckError` if the name cannot be used.
    """
    _refuse_name(name)
    try:
        one_of("style", style, STYLES)
    except Unreadable as error:
        raise CheckError(f"register_transform({name!r}): {error}") from None

    def register(function: _Function) -> _Function:
        if not callable(function):
            raise CheckError(f"register_transform({name!r}) got {function!r:.60}, write it above a function of f")
        place = place_of(function)
        known = REGISTERED.get((name, style))
        if known is not None and known.place != place:
            raise CheckError(
                f"the transform {name!r} with the style {style!r} is registered twice, at {near(known.place)} and at"
                f" {near(place)}: give one of them another name, or another style"
            )
        REGISTERED[name, style] = Registered(function, place)
        return function

    return register


def _refuse_name(name: object) -> None:
    example = "write a new word such as 'scan_layers'"
    if callable(name):
        raise CheckError(f"register_transform has no name, {NAMED} above the function")
    if not isinstance(name, str) or not _WORD.fullmatch(name):
        raise CheckError(
            f"register_transform({name!r}): that is not a word that a layer can be written with, {example}"
        )
    taken = {
        "a transform": (*TRANSFORMS, *FURTHER, CALL_FIRST),
        "an invariant": invariant_names(),
        "a mode of flax": MODES,
    }
    for what, words in taken.items():
        if name in words:
            raise CheckError(f"register_transform({name!r}): {name!r} is the name of {what} already, {example}")


def made_by(name: str, registered: Registered) -> Callable[[Program, Plan], Program]:
    """The layers of a registered transform. They raise `CheckError` where one does not keep the signature."""
    who = f"the registered transform {name!r} ({near(registered.place)})"

    def make(f: Program, plan: Plan) -> Program:
        def layer(state: Any, *inputs: Any) -> Any:
            program = registered.function(f)
            if not callable(program):
                raise CheckError(f"{who} returned {_describe(program)}, not a function: {_SIGNATURE}")
            out = program(state, *inputs)
            if plan.shapes is not None and _types(out) != _types(plan.shapes):
                got, expected = _describe(out), _describe(plan.shapes)
                raise CheckError(f"{who} returned {got}, where the program inside it returns {expected}: {_SIGNATURE}")
            return out

        return layer

    return make


def _types(tree: Any) -> Any:
    """The structure of a tree, and the types of its leaves."""
    import jax

    from pytest_nnxcheck.compat.arrays import array_type

    leaves, structure = jax.tree.flatten(tree)
    return structure, [*map(array_type, leaves)]


def _describe(tree: Any) -> str:
    """A tree with the types of its arrays for leaves: ``(float32[2,3], int32[])``."""
    import jax

    from pytest_nnxcheck.compat.arrays import describe

    return re.sub(r"'([^']*)'", r"\1", str(jax.tree.map(describe, tree)))
