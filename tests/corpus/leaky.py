"""Known leak patterns, each with a healthy twin that computes the same and keeps no tracer.

Every leaky module runs eagerly, and holds a tracer once it was called under `nnx.jit` on the newest flax. Where a leak
lives outside the module (a class, a default, a cache) the factory clears it, so that every case starts clean.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from healthy import BATCH, WIDTH, Case, assign, node_dict, node_list, numbers, rngs
from probes import keeps_tracers


@dataclass(frozen=True)
class Twins:
    """Factories of a leaky case and of its healthy twin, and the text that the path of the leak contains.

    ``leaks`` says whether the installed flax lets the call leak under `nnx.jit`, or hands the value back as state, or refuses the call.
    ``raises`` is what the leaky call ends with under any trace.
    """

    leaky: Callable[[], Case]
    healthy: Callable[[], Case]
    path: str
    leaks: bool = True
    raises: type[Exception] | None = None


def case(module: type[nnx.Module]) -> Case:
    """A fresh case ``[3, width] -> [3, width]`` of a module class that takes rngs alone."""
    return Case(module(rngs()), (numbers(BATCH),))


class Layer(nnx.Module):
    """What all these modules have in common: one linear layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)


def blank() -> nnx.BatchStat[jax.Array]:
    """Where a healthy twin keeps an output."""
    return nnx.BatchStat(jnp.zeros(BATCH))


class Keeps(Layer):
    """Keeps its last output: ``start`` makes the place, unless it is None, and ``keep(module, output)`` writes there."""

    def __init__(self, start: Callable[[], Any], keep: Callable[[Any, jax.Array], object]) -> None:
        super().__init__(rngs())
        place = start()
        if place is not None:
            self.kept = place
        self.keep = keep

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.keep(self, y)
        return y


def sets(make: Callable[[jax.Array], Any]) -> Callable[[Any, jax.Array], None]:
    """For `Keeps`: set the attribute to what is made of the output."""
    return lambda module, y: setattr(module, "kept", make(y))


# An attribute that was None


class KeepsLast(Layer):
    """Keeps its last output in a field that was `None`."""

    last: jax.Array | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.last = y
        return y


class KeepsLastSetInInit(Layer):
    """The same with the `None` written in the constructor: the newest flax refuses the eager call, and leaks under jit."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.last: jax.Array | None = None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.last = y
        return y


class KeepsLastInVariable(Layer):
    """Keeps its last output in a Variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.last = blank()

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        assign(self.last, y)
        return y


# A plain list


class LogsToList(Layer):
    """Appends its output to a plain list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.log: list[jax.Array] = []

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.log.append(y)
        return y


class LogsToVariables(Layer):
    """Writes its output into the one Variable of a list."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.log = node_list([blank()])

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        assign(self.log[0], y)
        return y


# A dict


class DebugsToDict(Layer):
    """Keeps its output in a plain dict."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.debug: dict[str, jax.Array] = {}

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.debug["pre"] = y
        return nnx.relu(y)


class DebugsToVariables(Layer):
    """Keeps its output in the one Variable of a dict."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.debug = node_dict({"pre": blank()})

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        assign(self.debug["pre"], y)
        return nnx.relu(y)


# A closure cell


def make_remembering_norm() -> Callable[[jax.Array], jax.Array]:
    """A normalization that remembers its last scale in a cell."""
    scale: jax.Array | None = None

    def norm(x: jax.Array) -> jax.Array:
        nonlocal scale
        scale = jnp.sqrt(jnp.mean(x**2))
        return x / scale

    return norm


def make_norm() -> Callable[[jax.Array], jax.Array]:
    """A normalization whose cell holds a number."""
    epsilon = 1e-6

    def norm(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2) + epsilon)

    return norm


class ClosureNorm(Layer):
    """A layer with a normalization that is a function."""

    def __init__(self, rngs: nnx.Rngs, norm: Callable[[jax.Array], jax.Array]) -> None:
        super().__init__(rngs)
        self.norm = norm

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


# A class attribute


class TracksLargest(Layer):
    """Keeps its largest output in an attribute of the class."""

    largest: ClassVar[jax.Array | None] = None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        TracksLargest.largest = jnp.max(y)
        return y


class TracksLargestInVariable(Layer):
    """Keeps its largest output in a Variable; the class holds a name."""

    largest_name: ClassVar[str] = "largest"

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.largest = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        assign(getattr(self, self.largest_name), jnp.max(y))
        return y


def tracks_largest() -> Case:
    TracksLargest.largest = None
    return case(TracksLargest)


# A default argument


class Memoizes(Layer):
    """Keeps a mask by length in a mutable default."""

    def __call__(self, x: jax.Array, memo: dict[int, jax.Array] = {}) -> jax.Array:  # noqa: B006 - the leak itself
        if len(x) not in memo:
            memo[len(x)] = jnp.tril(jnp.ones((len(x), len(x))))
        return memo[len(x)] @ self.linear(x)


class MemoizesNumbers(Layer):
    """Keeps a number by length in a mutable default."""

    def __call__(self, x: jax.Array, memo: dict[int, float] = {}) -> jax.Array:  # noqa: B006 - twin of the leak
        memo.setdefault(len(x), len(x) ** -0.5)
        return memo[len(x)] * self.linear(x)


def memoizes(module: type[Layer]) -> Case:
    (memo,) = module.__call__.__defaults__ or ({},)
    memo.clear()
    return case(module)


# A cached function


@functools.lru_cache
def positions(length: int) -> jax.Array:
    """A table of positions as a jax array: computed under a trace, the cache keeps a tracer."""
    return jnp.sin(jnp.arange(length, dtype=jnp.float32))


@functools.lru_cache
def host_positions(length: int) -> np.ndarray[Any, Any]:
    """The same table by NumPy, which no trace can reach."""
    return np.sin(np.arange(length, dtype=np.float32))


class AddsPositions(Layer):
    """Adds the cached table."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + positions(x.shape[-1])


class AddsHostPositions(Layer):
    """Adds the table that was cached on the host."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) + host_positions(x.shape[-1])


def adds_positions() -> Case:
    positions.cache_clear()
    return case(AddsPositions)


def adds_host_positions() -> Case:
    host_positions.cache_clear()
    return case(AddsHostPositions)


# Metadata of a Variable


class AnnotatesKernel(Layer):
    """Renews its kernel with the norm as metadata."""

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.linear.kernel[...]
        self.linear.kernel = nnx.Param(kernel, norm=jnp.linalg.norm(kernel))
        return self.linear(x)


class KeepsKernelNorm(Layer):
    """Renews its kernel with a text as metadata, and keeps the norm in a Variable."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.linear.kernel = nnx.Param(self.linear.kernel[...], unit="none")
        self.norm = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        assign(self.norm, jnp.linalg.norm(self.linear.kernel[...]))
        return self.linear(x)


# Kept by a call that raises afterwards


class ChecksRange(Layer):
    """Keeps its output for the message, then asks for its value, which no trace can give."""

    seen: ClassVar[list[jax.Array]] = []

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        ChecksRange.seen.append(y)
        if jnp.max(jnp.abs(y)) > 1e6:
            raise ValueError("out of range")
        return y


class ChecksShape(Layer):
    """Keeps the shape for the message and checks that."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        ChecksShape.seen[:] = [y.shape]
        if y.shape[-1] != WIDTH:
            raise ValueError("wrong width")
        return y


def checks_range() -> Case:
    ChecksRange.seen.clear()
    return case(ChecksRange)


# A caught exception


class KeepsErrors(Layer):
    """Catches the error of a concrete branch and keeps it: its frames hold the tracers of the call."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.errors: list[Exception] = []

    def __call__(self, x: jax.Array) -> jax.Array:
        try:
            return self.linear(x) if x.max() > 0 else x
        except jax.errors.TracerBoolConversionError as error:
            self.errors.append(error)
            return self.linear(x)


class DropsErrors(Layer):
    """Catches the same error and forgets it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        try:
            return self.linear(x) if x.max() > 0 else x
        except jax.errors.TracerBoolConversionError:
            return self.linear(x)


# A static field of an argument


class Log:
    """Rows that a call writes."""

    def __init__(self) -> None:
        self.rows: list[Any] = []


@jax.tree_util.register_pytree_node_class
class Context:
    """What jax takes apart: an array, and a log that every copy shares."""

    def __init__(self, x: jax.Array, log: Log) -> None:
        self.x, self.log = x, log

    def tree_flatten(self) -> tuple[tuple[jax.Array], Log]:
        return (self.x,), self.log

    @classmethod
    def tree_unflatten(cls, log: Log, children: tuple[jax.Array]) -> Context:
        return cls(*children, log)


def logs_output(module: Layer, context: Context) -> jax.Array:
    y: jax.Array = module.linear(context.x)
    context.log.rows.append(y)
    return y


def logs_shape(module: Layer, context: Context) -> jax.Array:
    y: jax.Array = module.linear(context.x)
    context.log.rows.append(y.shape)
    return y


def in_context(function: Callable[..., jax.Array]) -> Case:
    return Case(function, (Layer(rngs()), Context(numbers(BATCH), Log())))


LEAKY: dict[str, Twins] = {
    "none_attribute": Twins(lambda: case(KeepsLast), lambda: case(KeepsLastInVariable), ".last", keeps_tracers()),
    "plain_list": Twins(lambda: case(LogsToList), lambda: case(LogsToVariables), ".log[0]", keeps_tracers()),
    "dict": Twins(lambda: case(DebugsToDict), lambda: case(DebugsToVariables), ".debug['pre']", keeps_tracers()),
    "closure_cell": Twins(
        lambda: Case(ClosureNorm(rngs(), make_remembering_norm()), (numbers(BATCH),)),
        lambda: Case(ClosureNorm(rngs(), make_norm()), (numbers(BATCH),)),
        ".norm (closure of make_remembering_norm.<locals>.norm: scale)",
    ),
    "class_attribute": Twins(tracks_largest, lambda: case(TracksLargestInVariable), "TracksLargest.largest"),
    "default_argument": Twins(
        lambda: memoizes(Memoizes), lambda: memoizes(MemoizesNumbers), "memo[3] (default of Memoizes.__call__)"
    ),
    "cached_function": Twins(adds_positions, adds_host_positions, "positions.cache[8]"),
    "variable_metadata": Twins(lambda: case(AnnotatesKernel), lambda: case(KeepsKernelNorm), ".linear.kernel.norm"),
    "raises_afterwards": Twins(
        checks_range, lambda: case(ChecksShape), "ChecksRange.seen[0]", raises=jax.errors.TracerBoolConversionError
    ),
    "caught_exception": Twins(lambda: case(KeepsErrors), lambda: case(DropsErrors), "errors[0]"),
    "static_field": Twins(lambda: in_context(logs_output), lambda: in_context(logs_shape), "context.log.rows[0]"),
}
"""Name of the place -> the twins."""
