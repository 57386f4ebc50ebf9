"""The public reports as importable models and subject functions.

Each is the reporter's program in our own words, scaled down where the original needs an accelerator: the names that a
finding prints (``backbone.kernel``, ``blocks``), the structure and the transforms are the report's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from healthy import FLAX, assign, node_list, numbers
from probes import remat_takes_graph_updates

# google/flax#4520


class Report4520(nnx.Module):
    """google/flax#4520: a backbone of stacked layers, made by `nnx.vmap` and scanned over in the call.

    float32 ``[..., 16] -> [..., 10]``. With the module captured by closure (``jax.eval_shape(model, x)``) flax 0.10.2
    leaves tracers in ``backbone.kernel`` and ``backbone.bias``.
    """

    def __init__(self, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_layer(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(32, 32, rngs=rngs)

        self.stem = nnx.Linear(16, 32, rngs=rngs)
        self.backbone = make_layer(rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return layer(x)

        return self.head(forward(self.stem(x), self.backbone))


def report_4520(rngs: nnx.Rngs) -> Report4520:
    """The model of google/flax#4520."""
    return Report4520(rngs)


def inputs_4520() -> tuple[jax.Array]:
    """Inputs of `Report4520`."""
    return (numbers((4, 16)),)


# google/flax#4871


class Matrix(nnx.Module):
    """One layer of google/flax#4871: a square matrix, ``[width] -> [width]``."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.param = nnx.Param(jax.random.normal(rngs(), (width, width)) / width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.param @ x


class Report4871(nnx.Module):
    """google/flax#4871: a stack of ``depth`` matrices scanned over in the call; takes a number, returns a number.

    The report has 50 layers of 10 000 x 10 000. On flax 0.10.2 a `jax.lax.scan` whose body captures a module that was
    called before holds the whole stack a second time; newer flax rejects the program.
    """

    def __init__(self, depth: int, width: int, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(out_axes=nnx.StateAxes({...: 0}))
        def make_block(rngs: nnx.Rngs) -> Matrix:
            return Matrix(width, rngs)

        self.width = width
        self.blocks = make_block(rngs)

    def __call__(self, x: Any) -> jax.Array:
        @nnx.scan(in_axes=(nnx.StateAxes({...: 0}), nnx.Carry), out_axes=nnx.Carry)
        def through(block: Matrix, x: jax.Array) -> jax.Array:
            return block(x)

        return through(self.blocks, jnp.broadcast_to(x, (self.width,))).sum()


def report_4871(rngs: nnx.Rngs, depth: int = 50, width: int = 200) -> Report4871:
    """The model of google/flax#4871, scaled to 8 MB of parameters."""
    return Report4871(depth, width, rngs)


def run_4871(model: Report4871, call_first: bool, loops: int = 200) -> Callable[[Any, Any], jax.Array]:
    """The jitted ``run(state, x)`` of the report: merge, perhaps one call, then a `jax.lax.scan` over the calls.

    With ``x=0`` and no first call the scan traces its body twice, for the carry turns from integer to float: the first
    trace left its tracers in the merged module, and flax 0.10.2 raises `jax.errors.UnexpectedTracerError`, on
    jax 0.4.33 while tracing, on jax 0.5.3 not before the program runs.
    """
    graphdef = nnx.split(model)[0]

    @jax.jit
    def run(state: Any, x: Any) -> jax.Array:
        merged = nnx.merge(graphdef, state)
        if call_first:
            x = merged(x)

        def step(x: Any, _: None) -> tuple[jax.Array, None]:
            return merged(x), None

        return jax.lax.scan(step, x, None, length=loops)[0]

    return run


# A scan over nnx.remat, the live form of google/flax#4871

Remat = Literal["remat", "no_graph_updates", "checkpoint", "functional", "none"]
Block = Callable[[jax.Array], jax.Array]


class TanhLayer(nnx.Module):
    """``[batch, width] -> [batch, width]`` with one kernel."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (width, width)) / width)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.kernel)


def call_block(block: Block, x: jax.Array) -> jax.Array:
    """The function that `nnx.remat` wraps."""
    return block(x)


def call_checkpointed(block: nnx.Module, x: jax.Array) -> jax.Array:
    """`jax.checkpoint` over split and merge: the body hands no parameters back, so `nnx.scan` need not stack them."""
    graphdef, state = nnx.split(block)
    return jax.checkpoint(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def rematerialized(how: Remat) -> Callable[[Any, jax.Array], jax.Array]:
    """The way a block is called inside `nnx.scan`: by `nnx.remat`, by one of its two cures, or plainly."""
    if how == "remat":
        return nnx.remat(call_block)
    if how == "no_graph_updates":
        return nnx.remat(call_block, graph_updates=False)
    return call_checkpointed if how == "checkpoint" else call_block


def nnx_scanned(how: Remat, layers: nnx.Module, x: jax.Array) -> jax.Array:
    """The stacked layers applied one after the other by `nnx.scan`."""
    call = rematerialized(how)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x: jax.Array, layer: nnx.Module) -> jax.Array:
        return call(layer, x)

    return forward(x, layers)


def jax_scanned(layers: nnx.Module, x: jax.Array) -> jax.Array:
    """The same by `jax.lax.scan` and `jax.checkpoint` over split and merge: parameters go in and never come out."""
    graphdef, state = nnx.split(layers)

    @jax.checkpoint
    def step(x: jax.Array, state: Any) -> tuple[jax.Array, None]:
        return nnx.merge(graphdef, state)(x), None

    return jax.lax.scan(step, x, state)[0]


class ScanOverRemat(nnx.Module):
    """Layers scanned over, each rematerialized: the usual build of a language model, and what keeps flax#4871 alive.

    float32 ``[batch, width] -> [batch, width]``. With ``how="remat"`` every further call in one program holds one more
    copy of the stacked kernels, on every version. The cures: ``"functional"`` on every version, ``"checkpoint"`` from
    flax 0.10.7 on (before, `nnx.scan` itself copies, as ``"none"`` shows), ``"no_graph_updates"`` from flax 0.12.6 on.
    """

    def __init__(self, rngs: nnx.Rngs, how: Remat = "remat", depth: int = 8, width: int = 128) -> None:
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_layer(rngs: nnx.Rngs) -> TanhLayer:
            return TanhLayer(width, rngs)

        self.how: Remat = how
        self.layers = make_layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax_scanned(self.layers, x) if self.how == "functional" else nnx_scanned(self.how, self.layers, x)


def cures() -> tuple[Remat, ...]:
    """The values of ``how`` that rematerialize without a copy on the installed version of flax."""
    if remat_takes_graph_updates():
        return ("no_graph_updates", "checkpoint", "functional")
    return ("checkpoint", "functional") if FLAX >= (0, 10, 7) else ("functional",)


def inputs_scan_over_remat() -> tuple[jax.Array]:
    """Inputs of `ScanOverRemat`."""
    return (numbers((4, 128)),)


def call_twice(model: Block, x: jax.Array) -> jax.Array:
    """The subject: two calls of the model in one program."""
    return model(model(x))


# google/flax#4819


class Report4819(nnx.Module):
    """google/flax#4819: a stack of linear layers, optionally rematerialized and optionally scanned over.

    float32 ``[batch, 20] -> [batch, 20]``. A `nnx.while_loop` that captures the model works in none of the
    combinations but the one with neither.
    """

    def __init__(self, rngs: nnx.Rngs, remat: bool, scan: bool, depth: int = 10) -> None:
        self.remat = remat
        self.scan = scan
        make = partial(nnx.Linear, 20, 20)
        if scan:
            self.blocks = nnx.split_rngs(splits=depth)(nnx.vmap(lambda rngs: make(rngs=rngs)))(rngs)
        else:
            self.blocks = node_list(make(rngs=rngs) for _ in range(depth))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._scanned(x) if self.scan else self._unrolled(x)

    @property
    def _call(self) -> Callable[[nnx.Linear, jax.Array], jax.Array]:
        return nnx.remat(call_block) if self.remat else call_block

    def _unrolled(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = self._call(block, x)
        return x

    def _scanned(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: nnx.Linear) -> jax.Array:
            return self._call(block, x)

        return forward(x, self.blocks)


def report_4819(rngs: nnx.Rngs, remat: bool, scan: bool) -> Report4819:
    """The model of google/flax#4819 in one of its four combinations."""
    return Report4819(rngs, remat, scan)


def autoregressive_decode(model: Report4819, x: jax.Array, steps: int = 5) -> jax.Array:
    """The decoding loop of the report: the body of the `nnx.while_loop` captures the model."""

    def unfinished(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[1] < steps

    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, step = carry
        return model(x), step + 1

    return nnx.while_loop(unfinished, body, (x, jnp.array(0)))[0]


def autoregressive_decode_in_carry(model: Report4819, x: jax.Array, steps: int = 5) -> jax.Array:
    """The form that works: the model in the carry of the loop."""

    def unfinished(carry: tuple[Report4819, jax.Array, jax.Array]) -> jax.Array:
        return carry[2] < steps

    def body(carry: tuple[Report4819, jax.Array, jax.Array]) -> tuple[Report4819, jax.Array, jax.Array]:
        model, x, step = carry
        return model, model(x), step + 1

    return nnx.while_loop(unfinished, body, (model, x, jnp.array(0)))[1]


def inputs_4819() -> tuple[jax.Array]:
    """Inputs of `Report4819`."""
    return (numbers((2, 20)),)


# Donated pointers


class Pair(nnx.Module):
    """Two arrays of ``n`` float32 elements: their addresses before and after a donating step can be compared."""

    def __init__(self, n: int) -> None:
        self.a = nnx.Param(jnp.arange(n, dtype=jnp.float32))
        self.b = nnx.Param(jnp.ones(n, jnp.float32))


def step_in_place(pair: Pair) -> None:
    """The healthy step: every leaf is written with its own shape and dtype."""
    assign(pair.a, pair.a[...] + 1)
    assign(pair.b, pair.b[...] * 2)


def step_other_dtype(pair: Pair) -> None:
    """``b`` comes back as bfloat16: its buffer cannot be reused."""
    assign(pair.a, pair.a[...] + 1)
    assign(pair.b, (pair.b[...] * 2).astype(jnp.bfloat16))


def step_drops_one(pair: Pair) -> None:
    """``b`` is not returned: its buffer is freed, or kept, but holds no new value."""
    assign(pair.a, pair.a[...] + pair.b[...])
    del pair.b


Arrays = tuple[jax.Array, ...]


def arrays_step(a: jax.Array, b: jax.Array) -> Arrays:
    """The healthy step on plain arrays, to be jitted with ``donate_argnums=(0, 1)``."""
    return a + 1, b * 2


def arrays_step_other_dtype(a: jax.Array, b: jax.Array) -> Arrays:
    """The second array comes back as bfloat16."""
    return a + 1, (b * 2).astype(jnp.bfloat16)


def arrays_step_drops_one(a: jax.Array, b: jax.Array) -> Arrays:
    """The second array does not come back."""
    return (a + b,)


# jax-ml/jax#926 (the memory figures are those of jax-ml/jax#1273, which it led to)


def ten_convolutions(x: jax.Array) -> jax.Array:
    """Ten 3x3 convolutions of one channel, ``[batch, height, width, 1]`` in and out.

    Peak 4.0 times the input, 2.0 times where the input is donated. The report's input is 2 GiB.
    """
    kernel = jnp.ones((3, 3, 1, 1))
    for _ in range(10):
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x


def inputs_926(batch: int = 64) -> tuple[jax.Array]:
    """Inputs of `ten_convolutions`: 4 KiB an element of the batch."""
    return (numbers((batch, 32, 32, 1)),)
