"""A call as jax traces it: a function of arrays alone, which the messages of jax call by the user's names."""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.subject.subject import Subject

__tracebackhide__ = True  # pytest shows the frames of the user, not these


Key = tuple[Path, int]
"""One array of a state: the path of its Variable, and its number among the arrays of that."""


def on_arrays(
    body: Callable[..., Any], subject: Subject, state: Any = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``body(module, *inputs)`` as a function of the leaves of the module and the inputs, and these arguments.

    The module is that of the call, or another ``state`` of it. Its arrays are not copied: a trace reads no values, and those that an earlier
    trace handed out have none.
    """
    own = subject.fresh() if subject.abstract or subject.in_refs else subject.state
    graphdef, leaves = flax_modes.split(own if state is None else state)

    def of_leaves(leaves: Any, *inputs: Any) -> Any:
        return body(nnx.merge(graphdef, leaves), *inputs)

    return in_users_words(of_leaves, subject), (leaves, *subject.inputs)


def in_users_words(traced: Callable[..., Any], subject: Subject) -> Callable[..., Any]:
    """``traced(state, *inputs)`` under the name, the file and the line of the user's function, with the user's names for the arguments.

    It sets the attributes that `inspect.unwrap` and `inspect.signature` follow, which jax asks.
    """

    def call(state: Any, *inputs: Any) -> Any:
        return traced(state, *inputs)

    function = inspect.unwrap(getattr(subject.function, "__func__", subject.function))
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not inspect.isfunction(function) and callable(function):
        function = inspect.unwrap(type(function).__call__)
    if inspect.isfunction(function):
        call.__wrapped__ = function  # type: ignore[attr-defined]
        call.__name__, call.__qualname__ = function.__name__, function.__qualname__
    state = "_".join(subject.labels.values()) or "state"
    kind = inspect.Parameter.POSITIONAL_ONLY
    names = identifiers((state, *subject.input_names))
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return call


def identifiers(labels: tuple[str, ...]) -> Iterator[str]:
    """A Python name for each label, none twice: ``batch['x']`` is ``batch_x``."""
    seen: set[str] = set()
    for label in labels:
        plain = re.sub(r"\W+", "_", label).strip("_") or "argument"
        plain = f"_{plain}" if plain[0].isdigit() else plain
        number = 2
        name = plain
        while name in seen:
            name, number = f"{plain}_{number}", number + 1
        seen.add(name)
        yield name


def numbered(state: Any) -> Iterator[tuple[Key, Any]]:
    """The leaves of a state, each with its path and its number among the arrays of one Variable."""
    seen: Counter[Path] = Counter()
    for path, leaf in graph.flat_state(state):
        yield (path, seen[path]), leaf
        seen[path] += 1
