"""Put the layers of a call under `nnx.remat` while it runs, as its user would in the source: a cure of a peak that a gradient makes.

A call with scans has their bodies under `jax.checkpoint`. In any other the layers are several modules of one class that one module holds.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph, staging
from pytest_nnxcheck.compat.owner import is_of_jax_or_flax, of_frame
from pytest_nnxcheck.core.text import near
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.jaxprs import flow

__tracebackhide__ = True  # pytest shows the frames of the user, not these


_PLACED: ContextVar[dict[str, None]] = ContextVar("placed")
"""The names of what was put under a remat. A dict that the class of a layer leads to would be put back with all that the call changed."""


def differentiates(call: Call) -> bool:
    """True if the call, or its nesting, takes a gradient."""
    return call.profile.training.differentiates or any(layer.row.pair == "gradients" for layer in call.nesting.layers)


def layers_of(call: Call) -> tuple[type, ...]:
    """The classes that a module of the call holds several instances of; none that is inside another such, and none where the call has scans.

    An argument of the call is no layer.
    """
    subject, jaxpr = call.subject, call.profile.program.jaxpr
    if jaxpr is not None and any(eqn.primitive.name == staging.SCAN for eqn in flow.all_equations(jaxpr)):
        return ()
    arguments = {id(node) for _, node in subject.roots(subject.state)}
    nodes: dict[tuple[Any, ...], Any] = {
        tuple(path): node for path, node in flax_modes.iter_graph(subject.state) if issubclass(type(node), nnx.Module)
    }
    modules = {path: node for path, node in nodes.items() if callable(node) and id(node) not in arguments}
    siblings = Counter((path[:-1], type(node)) for path, node in modules.items())
    chosen: dict[tuple[Any, ...], type] = {}
    for path, node in sorted(modules.items(), key=lambda item: len(item[0])):
        if siblings[path[:-1], type(node)] > 1 and not any(path[: len(outer)] == outer for outer in chosen):
            chosen[path] = type(node)
    return tuple(dict.fromkeys(chosen.values()))


@contextlib.contextmanager
def under_remat(layers: Sequence[type]) -> Iterator[dict[str, None]]:
    """Put these layers, or without any the bodies of the user's scans, under a remat for a while. What is traced meanwhile is forgotten.

    Gives the names of those that were called. They are put there before the objects of a call are looked at, which puts back what the call changes.
    """
    placed: dict[str, None] = {}
    token, scan = _PLACED.set(placed), jax.lax.scan

    def of_body(body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        if caller := caller_of(frame.f_back if frame else None):
            placed[f"the body of the scan at {near(f'{caller.f_code.co_filename}:{caller.f_lineno}')}"] = None
            body = jax.checkpoint(body, prevent_cse=False)
        return scan(body, *args, **kwargs)

    jax.clear_caches()
    try:
        with contextlib.ExitStack() as patches:
            for layer in layers:
                patches.enter_context(mock.patch.object(layer, "__call__", rematted(layer)))
            if not layers:
                patches.enter_context(mock.patch.object(jax.lax, staging.SCAN, of_body))
            yield placed
    finally:
        _PLACED.reset(token)
        jax.clear_caches()


def rematted(layer: Any) -> Callable[..., Any]:
    """The ``__call__`` of a class under `nnx.remat`; what is no array is no argument of that."""
    original: Callable[..., Any] = layer.__call__
    name = f"{layer.__name__}.__call__"
    options: dict[str, Any] = {"graph_updates": False} if graph.remat_updates_can_be_off() else {}

    @functools.wraps(original)
    def under_remat(module: Any, *args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        arrays = {key: value for key, value in given.items() if holds_arrays(value)}

        def body(module: Any, *values: Any) -> Any:
            inside = given | dict(zip(arrays, values, strict=True))
            return original(module, *(inside[at] for at in range(len(args))), **{name: inside[name] for name in kwargs})

        _PLACED.get({})[name] = None
        return nnx.remat(body, **options)(module, *arrays.values())

    return under_remat


def holds_arrays(value: Any) -> bool:
    """True if a value is a graph node, or made of arrays alone."""
    leaves = jax.tree.leaves(value)
    is_made = bool(leaves) and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    return graph.is_graph_node(value) or is_made


def caller_of(frame: FrameType | None) -> FrameType | None:
    """The user's frame that called a function of jax, or a function of flax that did; `None` where a generated layer called it."""
    while frame is not None and is_of_jax_or_flax(frame):
        frame = frame.f_back
    return frame if frame is not None and of_frame(frame) == "user" else None
