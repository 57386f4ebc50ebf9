"""The programs that every tool gets: one bug each, and a twin that is healthy. The variables of the process name one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.children import ROOT

sys.path.insert(0, str(ROOT / "tests" / "corpus"))
import bugs

PROGRAM, TWIN = "COMPARISON_PROGRAM", "COMPARISON_TWIN"
Twin = Literal["broken", "healthy"]
Function = Callable[..., Any]


@dataclass(frozen=True)
class Program:
    """A subject with its arguments, which pytest-nnxcheck gets, and the jitted program around it, which the others get."""

    subject: Function
    args: tuple[Any, ...]
    jitted: Callable[[Function], Function]
    """Puts the jit that shows the bug around the subject, or around the subject inside of a tool's own wrapper."""
    passed: tuple[Any, ...]
    """What the jitted program is called with."""
    reference: Function | None = None
    """The same values by other means, where the subject itself is what drops them."""

    def run(self, program: Function) -> Any:
        """Call a program twice: retracing and what a first call leaves behind show in the second."""
        program(*self.passed)
        return jax.block_until_ready(program(*self.passed))

    @property
    def state_bytes(self) -> int:
        """The bytes of the modules' arrays."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.args[0])))


def captured(subject: Function, model: nnx.Module, x: jax.Array) -> Program:
    """`jax.jit` over a function that captures the module."""
    return Program(subject, (model, x), lambda f: jax.jit(lambda x: f(model, x)), (x,))


def passed_in(subject: Function, *args: Any, reference: Function | None = None, **options: Any) -> Program:
    """`nnx.jit` with the module as an argument."""
    return Program(subject, args, lambda f: nnx.jit(f, **options), args, reference)


def functional(subject: Function, model: nnx.Module, x: jax.Array) -> Program:
    """`jax.jit` over split and merge."""
    graphdef, state = nnx.split(model)
    return Program(subject, (model, x), lambda f: jax.jit(lambda s, x: f(nnx.merge(graphdef, s), x)), (state, x))


def call(model: Any, x: jax.Array) -> Any:
    """The subject of most programs: the module's own call."""
    return model(x)


def call_twice(model: Any, x: jax.Array) -> Any:
    """Two calls in one program."""
    return model(model(x))


BY_JAX, BY_NNX = jax.jit(call), nnx.jit(call)


def jitted_by_jax(model: Any, x: jax.Array) -> Any:
    """A jit of jax that gets the module: newer flax lets it take a copy apart."""
    return BY_JAX(model, x)


def jitted_by_nnx(model: Any, x: jax.Array) -> Any:
    """The same by flax."""
    return BY_NNX(model, x)


class KeepsMean(nnx.Module):
    """Keeps a value of its call in a plain dict."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.debug: dict[str, jax.Array] = {}

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 16) to (batch, 16)."""
        self.debug["mean"] = x.mean()
        return self.linear(x)


class ReturnsMean(nnx.Module):
    """Returns the value instead."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(batch, 16) to (batch, 16), and the mean."""
        return self.linear(x), x.mean()


class WrittenOut(nnx.Module):
    """The model of google/flax#4520 with its layers written out in place of the scan."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Linear(16, 32, rngs=rngs)
        self.backbone = bugs.node_list(nnx.Linear(32, 32, rngs=rngs) for _ in range(3))
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 16) to (batch, 10)."""
        x = self.stem(x)
        for layer in self.backbone:
            x = layer(x)
        return self.head(x)


class CountsInPython(nnx.Module):
    """Counts its calls in a Python number, which is part of the program: every call is traced anew."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.calls: Any = 0

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 16) to (batch, 16)."""
        self.calls += 1
        return self.linear(x)


class CountsInVariable(nnx.Module):
    """Counts its calls in a Variable."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 16) to (batch, 16)."""
        bugs.assign(self.calls, self.calls[...] + 1)
        return self.linear(x)


def tracer(twin: Twin) -> Program:
    """A tracer left behind in a module's attribute."""
    return captured(call, KeepsMean() if twin == "broken" else ReturnsMean(), jnp.ones((4, 16)))


def flax_4520(twin: Twin) -> Program:
    """google/flax#4520: a captured module whose call scans over its layers."""
    model = bugs.report_4520 if twin == "broken" else WrittenOut
    return captured(call, model(nnx.Rngs(0)), *bugs.inputs_4520())


def flax_4871(twin: Twin) -> Program:
    """google/flax#4871 as it lives on: a scan over rematerialized layers, called twice in one program. 64 MiB of parameters."""
    how: bugs.Remat = "remat" if twin == "broken" else bugs.cures()[0]
    model = bugs.ScanOverRemat(nnx.Rngs(0), how, depth=16, width=1024)
    return functional(call_twice, model, jnp.ones((4, 1024)))


def donation(twin: Twin) -> Program:
    """A donated leaf that comes back in another dtype."""
    step = bugs.step_other_dtype if twin == "broken" else bugs.step_in_place
    return passed_in(step, bugs.Pair(100_000), donate_argnums=0)


def retracing(twin: Twin) -> Program:
    """A Python number that changes with every call."""
    return passed_in(call, CountsInPython() if twin == "broken" else CountsInVariable(), jnp.ones((4, 16)))


def dropped_update(twin: Twin) -> Program:
    """A `jax.jit` that gets a module, and updates a copy of it; that of nnx hands the update back."""
    subject = jitted_by_jax if twin == "broken" else jitted_by_nnx
    norm = nnx.BatchNorm(16, use_running_average=False, rngs=nnx.Rngs(0))
    return passed_in(subject, norm, bugs.numbers((4, 16)), reference=call)


PROGRAMS: dict[str, Callable[[Twin], Program]] = {
    "tracer in an attribute": tracer,
    "google/flax#4520": flax_4520,
    "copy of google/flax#4871": flax_4871,
    "lost donation": donation,
    "retracing": retracing,
    "dropped update": dropped_update,
}


def chosen() -> Program:
    """The program that the variables name."""
    twin = os.environ[TWIN]
    assert twin in {"broken", "healthy"}
    return PROGRAMS[os.environ[PROGRAM]](twin)  # type: ignore[arg-type]
