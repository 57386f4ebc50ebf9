"""The bounded walk that finds every tracer reachable from a module, the subject's code, its inputs, or an exception.

The walk only reads: it runs no user code, no jax operation, and binds no primitive, so that it can run inside a trace.
Bounded means that nothing starts at the level of the process: library code is never entered, of a function only the globals
that it names are opened, and of a user's module only the attributes that the function names.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pytest_nnxcheck.inspection.open_code import CODE
from pytest_nnxcheck.inspection.open_data import openers_for
from pytest_nnxcheck.inspection.raw_access import mro
from pytest_nnxcheck.inspection.snapshot import Places
from pytest_nnxcheck.inspection.visit import Found, Name, Visit

T = TypeVar("T")
YOUNG, OLD = 1, 2
"""The generations that are collected: inside a nesting, where the collector is held back, what it made is young."""


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What a walk met: tracers, nearest first and each once; jax and NumPy arrays, graph nodes and the user's classes of such, with
    their paths; the mutable places.

    ``complete`` is false where a fuse ended the walk or an object could not be read: what lies behind was not looked at.
    """

    tracers: tuple[Found, ...]
    arrays: tuple[tuple[str, Any], ...]
    nodes: tuple[tuple[str, Any], ...]
    places: Places
    objects: int
    complete: bool = True


def walk(roots: Iterable[tuple[str, object]], most: int | None = None, left_out: Iterable[object] = ()) -> Walk:
    """Walk breadth first from (name, object): modules, the subject's function, inputs, a caught exception; ``most`` replaces the fuse, and
    what is ``left_out`` is not opened.

    Exceptions among the roots come last, so that what only they hold is marked as ``passing``. Raises nothing of its own.
    """
    visit = Visit(functools.partial(openers_for, code=CODE), most)
    visit.seen.update((id(value), value) for value in left_out)
    named = [(Name(name), value) for name, value in roots]
    errors = [is_exception(value) for _, value in named]
    visit.run([root for root, error in zip(named, errors, strict=True) if not error])
    visit.passing = True
    visit.run([root for root, error in zip(named, errors, strict=True) if error])
    arrays, nodes = tuple(visit.arrays), tuple(visit.nodes)
    return Walk(tuple(visit.tracers), arrays, nodes, visit.places, len(visit.seen) - 1, visit.complete)


def without_garbage(look: Callable[[], T], finds: Callable[[T], object] = bool, generation: int = YOUNG) -> T:
    """What ``look`` gives; where it finds something, once more when garbage is collected.

    A cache with weak keys has an entry until the cycle that its key is part of is collected: what only that keeps, nobody is left to use.
    """
    seen = look()
    if not finds(seen):
        return seen
    del seen
    gc.collect(generation)
    return look()


def holds_beside(node: object, leaves: Iterable[object]) -> bool:
    """Whether tracers are reachable from a graph node that are none of its leaves: its structure holds them, which jax compares later on."""
    own = {id(leaf) for leaf in leaves}
    return any(id(leaked.tracer) not in own for leaked in walk([("", node)]).tracers)


def is_exception(value: object) -> bool:
    return any(base is BaseException for base in mro(type(value)))
