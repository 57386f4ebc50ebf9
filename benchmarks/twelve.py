"""Twelve nestings of a call, written by hand as a careful user would: the objects are built for each, and nothing of the plugin is used.

Six are under `nnx.jit`: no leak, a peak of at most twice that of the plain call, donated buffers that are used again. Six are not: no leak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import subjects
from benchmarks.bare import buffers

INNER = (("remat",), ("scan",), ("loop",), ("remat", "scan"), ("scan", "remat"), ("loop", "remat"))
NESTINGS = tuple((*outer, *inner) for outer in (("jit",), ()) for inner in INNER)

Modules = tuple[Any, ...]


def call_of(name: str) -> tuple[Callable[..., Any], Modules, tuple[Any, ...]]:
    """A function, the modules that it is called with, and its other arguments."""
    function, args = subjects.make(name)
    if isinstance(function, nnx.Module):
        return (lambda module, *xs: module(*xs)), (function,), args
    count = sum(isinstance(each, nnx.Module | nnx.Optimizer) for each in args)
    return function, args[:count], args[count:]


def remat(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """The call, computed again for its gradient."""
    del count
    wrapped: Callable[..., Any] = nnx.remat(f)
    return wrapped


def scan(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Two steps, the first ``count`` arguments carried."""

    def wrapped(*args: Any) -> Any:
        xs = args[count:]

        @nnx.scan(in_axes=(nnx.Carry, *[None] * len(xs)), out_axes=(nnx.Carry, 0), length=2)
        def run(modules: Modules, *xs: Any) -> Any:
            return modules, jax.tree.leaves(f(*modules, *xs))[0]

        return run(args[:count], *xs)[1][0]

    return wrapped


def loop(f: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Two steps of a loop over the pure state."""

    def wrapped(*args: Any) -> Any:
        graphdef, state = nnx.split(args[:count])

        def body(_: Any, state: Any) -> Any:
            modules = nnx.merge(graphdef, state)
            f(*modules, *args[count:])
            return nnx.state(modules)

        nnx.update(args[:count], jax.lax.fori_loop(0, 2, body, state))
        return jnp.zeros(())

    return wrapped


WRAPPERS = {"remat": remat, "scan": scan, "loop": loop}


def peak(compiled: Any) -> int:
    """Bytes at the peak of a compiled program."""
    used = compiled.memory_analysis()
    bound = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
    return int(bound - used.alias_size_in_bytes)


def plain_peak(name: str) -> int:
    """That of the call alone."""
    function, modules, xs = call_of(name)
    return peak(nnx.jit(function).lower(*modules, *xs).compile())


def check(name: str, nesting: Sequence[str], plain: int) -> int:
    """One nesting. Returns how many donated buffers were not used again. Raises `AssertionError` for a leak or a peak."""
    function, modules, xs = call_of(name)
    for layer in reversed(nesting):
        if layer != "jit":
            function = WRAPPERS[layer](function, len(modules))
    with jax.checking_leaks():
        if nesting[0] != "jit":
            function(*modules, *xs)
            return check_state(modules)
        jitted = nnx.jit(function, donate_argnums=tuple(range(len(modules))))
        before = buffers(nnx.state(modules))
        compiled = jitted.lower(*modules, *xs).compile()
        assert peak(compiled) <= 2 * plain + 65536
        compiled(*modules, *xs)
    check_state(modules)
    return len(buffers(nnx.state(modules)) - before)


def check_state(modules: Modules) -> int:
    """No tracer is left in the modules."""
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(nnx.state(modules)))
    return 0
