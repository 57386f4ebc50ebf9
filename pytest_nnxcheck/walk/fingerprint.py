"""What tells one call from another: code and static values, compared without running anybody's ``==``, ``hash`` or ``repr``; and, in `equal` alone, as jax compares them.

A test body makes its functions and configurations anew for every nesting, so identity says too little; a name says too little
as well, for two lambdas of one test have the same.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from pytest_nnxcheck.walk.raw_access import MISSING, cell_content, layout, top_package

DEEPEST, LONGEST = 5, 200
_ATOMS = (str, int, float, complex, bool, bytes, type(None), type(...), range, slice)


def fingerprint(value: Any, depth: int = DEEPEST) -> Any:
    """A hashable stand-in, equal for values that behave alike: code by its code object, objects by class and attributes."""
    cls = type(value)
    if cls in _ATOMS:
        return (cls, repr(value))
    if isinstance(value, type) or depth == 0:
        return id(value) if isinstance(value, type) else cls.__qualname__
    if cls is FunctionType:
        return of_function(value, depth - 1)
    if cls is MethodType:
        return (fingerprint(value.__func__, depth - 1), fingerprint(value.__self__, depth - 1))
    if hasattr(cls, "shape") and hasattr(cls, "dtype"):
        return (cls.__qualname__, str(value.shape), str(value.dtype))
    return (cls.__qualname__, *of_items(value, depth - 1), *of_attributes(value, depth - 1))


def of_function(function: FunctionType, depth: int) -> Any:
    cells = tuple(map(cell_content, function.__closure__ or ()))
    parts = (function.__defaults__, tuple((function.__kwdefaults__ or {}).items()), cells)
    return (function.__code__, *(fingerprint(part, depth) for part in parts))


def of_items(value: Any, depth: int) -> tuple[Any, ...]:
    if isinstance(value, dict):
        pairs = list(dict.items(value))[:LONGEST]
        return (len(value), *(fingerprint(item, depth) for pair in pairs for item in pair))
    if isinstance(value, list | tuple):
        return (len(value), *(fingerprint(item, depth) for item in list(value)[:LONGEST]))
    if isinstance(value, set | frozenset):
        return (frozenset(fingerprint(item, depth) for item in value),)
    return ()


def of_attributes(value: Any, depth: int) -> tuple[Any, ...]:
    """Attributes of the user's objects; those of a library's are its own business, but for what a wrapper wraps."""
    stored = layout(type(value))
    own = stored.read(value) or {}
    if top_package(type(value)) in ("jax", "jaxlib", "flax"):
        own = {name: own[name] for name in ("__wrapped__", "fun", "f") if name in own}
    pairs = [*own.items(), *((name, held) for name, held in stored.read_slots(value) if held is not MISSING)]
    return tuple((name, fingerprint(held, depth)) for name, held in pairs[:LONGEST])


def equal(one: Any, other: Any, *, unknown: bool) -> bool:
    """Whether two static values are equal to jax, which asks their ``==``; ``unknown`` where that raises, as for arrays."""
    if one is other:
        return True
    try:
        return bool(one == other)
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        return unknown


def show(value: Any) -> str:
    """A static value for messages, whatever its ``__repr__`` does."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the user's code may raise anything
        text = f"<{type(value).__qualname__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
