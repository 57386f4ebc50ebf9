"""The way out, tried: the user's own loops and branches once more, with the modules they captured handed to them.

A loop that captured a module is run as one that has it in its carry, a branch as one that has it among its operands: the same
functions, their closures bound anew. Only what was seen to hold is told.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.engine.causes import closure_of, rehearse
from pytest_nnxcheck.subject.subject import Subject

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Told = dict[str, None]
"""What was done in the place of the call as it is, each once."""

Nodes = tuple[tuple[str, Any], ...]
"""Name and value of captured graph nodes, each once."""

Swap = dict[int, Any]
"""Identity of a captured graph node to the one that takes its place."""


def holds(subject: Subject) -> tuple[str, ...]:
    """What the call does where its loops are handed the modules they captured: ``while_loop by argument, with model in its carry``.

    Empty where nothing was captured by a loop or a branch, or where the call does not hold that way either. An abstract call is not
    made, so nothing is said of it.
    """
    if subject.abstract:
        return ()
    told: Told = {}
    made = rehearse(subject, lambda: instead(subject, told))
    return tuple(told) if told and made.error is None and not made.leaks else ()


@contextlib.contextmanager
def instead(subject: Subject, told: Told) -> Iterator[None]:
    """For the time of one call, the transforms hand on what their functions captured."""
    with contextlib.ExitStack() as stack:
        for name, twin in TWINS.items():
            nnx_one = getattr(nnx, name)
            for original in (nnx_one, getattr(jax.lax, name)):
                ours = functools.partial(choose, twin, nnx_one, original, told)
                for names in places_of(subject, name):
                    if names.get(name) is original:
                        stack.enter_context(mock.patch.dict(names, {name: ours}))
        yield


def choose(
    twin: Callable[..., Any],
    nnx_one: Callable[..., Any],
    original: Callable[..., Any],
    told: Told,
    *args: Any,
    **more: Any,
) -> Any:
    """The transform of flax with the captured nodes handed to it; as it was written where nothing was captured."""
    nodes = captured(*args, *more.values())
    return twin(nnx_one, nodes, told, *args, **more) if nodes else original(*args, **more)


def places_of(subject: Subject, name: str) -> list[dict[str, Any]]:
    """Where the user's code finds a transform: in the libraries, and in the module that imported it by name."""
    home = sys.modules.get(getattr(subject.function, "__module__", None) or "")
    return [vars(nnx), vars(jax.lax), *([vars(home)] if home is not None and name in vars(home) else [])]


def while_loop(
    loop: Callable[..., Any], nodes: Nodes, told: Told, cond_fun: Any, body_fun: Any, init_val: Any, **more: Any
) -> Any:
    told[f"while_loop by argument, with {named(nodes)} in its carry"] = None

    def unfinished(carry: Any) -> Any:
        return bind(cond_fun, nodes, carry)(carry[-1])

    def body(carry: Any) -> Any:
        return (*carry[:-1], bind(body_fun, nodes, carry)(carry[-1]))

    return loop(unfinished, body, (*values(nodes), init_val), **more)[-1]


def fori_loop(
    loop: Callable[..., Any],
    nodes: Nodes,
    told: Told,
    lower: Any,
    upper: Any,
    body_fun: Any,
    init_val: Any,
    **more: Any,
) -> Any:
    told[f"fori_loop by argument, with {named(nodes)} in its carry"] = None

    def body(step: Any, carry: Any) -> Any:
        return (*carry[:-1], bind(body_fun, nodes, carry)(step, carry[-1]))

    return loop(lower, upper, body, (*values(nodes), init_val), **more)[-1]


def cond(
    branch: Callable[..., Any], nodes: Nodes, told: Told, pred: Any, true_fun: Any, false_fun: Any, *operands: Any
) -> Any:
    return branch(pred, *branched(cond.__name__, nodes, told, (true_fun, false_fun)), *values(nodes), *operands)


def switch(branch: Callable[..., Any], nodes: Nodes, told: Told, index: Any, branches: Any, *operands: Any) -> Any:
    return branch(index, branched(switch.__name__, nodes, told, branches), *values(nodes), *operands)


def branched(name: str, nodes: Nodes, told: Told, functions: Any) -> list[Callable[..., Any]]:
    """The branches as functions of the captured nodes and their operands."""
    told[f"{name} by argument, with {named(nodes)} among its operands"] = None

    def handed(function: Any) -> Callable[..., Any]:
        return lambda *given: bind(function, nodes, given)(*given[len(nodes) :])

    return [handed(function) for function in functions]


TWINS: dict[str, Callable[..., Any]] = {twin.__name__: twin for twin in (while_loop, fori_loop, cond, switch)}


def captured(*given: Any) -> Nodes:
    """The graph nodes that the functions among the arguments of a transform captured, each once, by ``name (type)``."""
    found: dict[int, tuple[str, Any]] = {}
    for function in (each for one in given for each in (one if isinstance(one, list | tuple) else [one])):
        for name, value in closure_of(function).items():
            if compat.is_graph_node(value):
                found.setdefault(id(value), (f"{name} ({type(value).__name__})", value))
    return tuple(found.values())


def named(nodes: Nodes) -> str:
    return ", ".join(name for name, _ in nodes)


def values(nodes: Nodes) -> list[Any]:
    return [node for _, node in nodes]


def bind(function: Any, nodes: Nodes, now: Any) -> Callable[..., Any]:
    """The function with other nodes in the place of those that it captured: the first of ``now``."""
    swap = {id(old): new for old, new in zip(values(nodes), now, strict=False)}
    if isinstance(function, types.MethodType):
        return types.MethodType(rebound(function.__func__, swap), swap.get(id(function.__self__), function.__self__))
    return rebound(function, swap)


def rebound(function: Any, swap: Swap) -> Callable[..., Any]:
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        bare: Callable[..., Any] = function
        return bare
    cells = tuple(exchanged(cell, swap) for cell in function.__closure__)
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def exchanged(cell: Any, swap: Swap) -> Any:
    """The cell itself where it is not to be exchanged: the function may write to it."""
    try:
        return types.CellType(swap[id(cell.cell_contents)]) if id(cell.cell_contents) in swap else cell
    except ValueError:
        return cell
