"""Calls that write to a copy of their state, or read it past their arguments, each with a healthy twin; and calls that work on copies on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx import clone
from healthy import FLAX, WIDTH, Case, assign, numbers, rngs
from jax import eval_shape

MODULES_ARE_TREES = (0, 12)
"""The flax from which a transform of jax takes a module."""


@dataclass(frozen=True)
class Twins:
    """Factories of a faulty case and of its healthy twin, and a text of the finding. ``since`` is the first flax that takes the faulty one."""

    faulty: Callable[[], Case]
    healthy: Callable[[], Case]
    says: str
    since: tuple[int, ...] = (0, 10)


class Normed(nnx.Module):
    """A layer with statistics."""

    def __init__(self) -> None:
        self.linear, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), nnx.BatchNorm(WIDTH, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.linear(x))


class Noisy(nnx.Module):
    """A layer whose state is a count of random numbers."""

    def __init__(self) -> None:
        self.linear, self.dropout = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), nnx.Dropout(0.5, rngs=rngs())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


class Decodes(nnx.Module):
    """Writes a row of its cache, and reads the whole."""

    def __init__(self) -> None:
        self.rows, self.index = nnx.Variable(jnp.zeros((4, WIDTH))), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        assign(self.rows, jax.lax.dynamic_update_slice(self.rows[...], x, (self.index[...], 0)))
        assign(self.index, self.index[...] + 1)
        return self.rows[...].sum(0)


def forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


def batch() -> jax.Array:
    return numbers((3, WIDTH))


def of(
    model: Callable[[], Any], function: Callable[..., Any], *more: Callable[[], Any], rows: int = 3
) -> Callable[[], Case]:
    """A factory of ``function(model, *more, x)``."""
    return lambda: Case(function, (model(), *(make() for make in more), numbers((rows, WIDTH))))


def square(model: Any, x: jax.Array) -> jax.Array:
    return (model(x) ** 2).mean()


def trains_and_reports(model: Any, optimizer: Any, x: jax.Array) -> Any:
    loss, gradients = nnx.value_and_grad(square)(model, x)
    optimizer.update(*([model] if FLAX >= (0, 11) else []), gradients)
    return loss, gradients


def trains(model: Any, optimizer: Any, x: jax.Array) -> jax.Array:
    return trains_and_reports(model, optimizer, x)[0]


def training(step: Callable[..., Any]) -> Callable[[], Case]:
    def make() -> Case:
        model = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        wrt = {"wrt": nnx.Param} if FLAX >= (0, 11) else {}
        return Case(step, (model, nnx.Optimizer(model, optax.adam(1e-3), **wrt), batch()))

    return make


def follows(model: Any, average: Any, x: jax.Array) -> jax.Array:
    """Move an average of the parameters."""
    state = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, nnx.state(average), nnx.state(model))
    nnx.update(average, state)
    return model(x)


def synchronizes(model: Any, target: Any, x: jax.Array) -> jax.Array:
    """Put the parameters of a model into another, and call that."""
    nnx.update(target, nnx.state(model))
    return target(x)


def linear() -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs())


def functional(*, hands_back: bool) -> Callable[..., jax.Array]:
    """A forward call of pure functions, whose new state is handed back, or is not."""

    def call(model: Any, x: jax.Array) -> jax.Array:
        graphdef, state = nnx.split(model)

        @jax.jit
        def pure(state: Any, x: jax.Array) -> Any:
            model = nnx.merge(graphdef, state)
            return model(x), nnx.state(model) if hands_back else None

        y, new = pure(state, x)
        if hands_back:
            nnx.update(model, new)
        return y

    return call


def updates_optimizer(*, hands_back: bool) -> Callable[..., Any]:
    def call(model: Any, optimizer: Any, x: jax.Array) -> Any:
        graphdef, state = nnx.split((model, optimizer))

        @jax.jit
        def pure(state: Any, x: jax.Array) -> Any:
            pair = nnx.merge(graphdef, state)
            loss = trains(*pair, x)
            return loss, nnx.state(pair) if hands_back else None

        loss, new = pure(state, x)
        if hands_back:
            nnx.update((model, optimizer), new)
        return loss

    return call


def rematerializes(wrapper: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda model, x: 2 * wrapper(forward)(model, x)


class Gated(nnx.Module):
    """A gate that it applies by a function: one that captured the gate of ``__init__``, or that is handed the gate."""

    def __init__(self, *, captures: bool) -> None:
        self.gate = gate = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.captures = captures
        self.apply = (lambda x: nnx.relu(gate(x))) if captures else (lambda gate, x: nnx.relu(gate(x)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.apply(x) if self.captures else self.apply(self.gate, x)


class Curved(nnx.Module):
    """A learnable number."""

    def __init__(self) -> None:
        self.curvature = nnx.Param(jnp.float32(1.0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.curvature[...]


def curved(*, captures: bool) -> Case:
    """A step of an optimizer that asks a function for the curvature of the model."""
    model = Curved()

    class Scales:
        """The optimizer."""

        def __init__(self) -> None:
            self.curvature = lambda: model.curvature[...]

        def __call__(self, model: Any, x: jax.Array) -> jax.Array:
            return model(x) / (self.curvature() if captures else model.curvature[...])

    return Case(Scales(), (model, batch()))


class Recurs(nnx.Module):
    """A recurrent cell that keeps its own state, which has the type of its input and of its result."""

    def __init__(self) -> None:
        self.linear, self.h = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), nnx.Variable(jnp.zeros((3, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        assign(self.h, jnp.tanh(self.linear(self.h[...]) + x))
        return self.linear(self.h[...])


def merged(graphdef: Any, *states: Any) -> Any:
    """A copy: from flax 0.11 on `nnx.merge` shares the Variables of a state."""
    return nnx.merge(graphdef, *states, **({"copy": True} if FLAX >= (0, 11) else {}))


def beside(outputs: Callable[[Any, jax.Array], Any], hands_back: bool) -> Callable[[], Case]:
    """A factory of a cell under a jit of pure functions, with outputs that are no state; the healthy one puts the new state back."""

    def call(cell: Any, x: jax.Array) -> Any:
        graphdef, state = nnx.split(cell)

        @jax.jit
        def pure(state: Any, x: jax.Array) -> Any:
            cell = merged(graphdef, state)
            return outputs(cell, x), nnx.state(cell) if hands_back else None

        out, new = pure(state, x)
        if hands_back:
            nnx.update(cell, new)
        return out

    return of(Recurs, call)


def beside_twins(outputs: Callable[[Any, jax.Array], Any], says: str = "cell.h keeps") -> Twins:
    return Twins(beside(outputs, hands_back=False), beside(outputs, hands_back=True), says)


def descends(loss_of: Callable[[Callable[[Any], Any]], Callable[[Any], Any]], hands_back: bool) -> Callable[[], Case]:
    """A factory of a gradient step whose statistics are an extra output of the loss, or are dropped."""

    def step(model: Any, x: jax.Array) -> None:
        graphdef, params, rest = nnx.split(model, nnx.Param, ...)

        def loss(params: Any) -> Any:
            copy = merged(graphdef, params, rest)
            return (copy(x) ** 2).mean(), nnx.state(copy, nnx.BatchStat) if hands_back else None

        gradients, statistics = jax.grad(loss_of(loss), has_aux=True)(params)
        nnx.update(model, jax.tree.map(lambda old, gradient: old - 0.1 * gradient, params, gradients))
        if hands_back:
            nnx.update(model, statistics)

    return of(Normed, step)


def in_a_checkpointed_scan(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def scanned(params: Any) -> Any:
        _, (losses, more) = jax.lax.scan(jax.checkpoint(lambda carry, _: (carry, loss(params))), 0, None, length=1)
        return losses.sum(), jax.tree.map(lambda leaf: leaf[0], more)

    return scanned


COPIED: dict[str, Twins] = {
    "statistics": Twins(
        of(Normed, jax.jit(forward)),
        of(Normed, nnx.jit(forward)),
        "model.norm.mean, model.norm.var keep",
        MODULES_ARE_TREES,
    ),
    "cache": Twins(
        of(Decodes, jax.jit(forward), rows=1),
        of(Decodes, nnx.jit(forward), rows=1),
        "model.index, model.rows keep",
        MODULES_ARE_TREES,
    ),
    "step": Twins(training(jax.jit(trains)), training(nnx.jit(trains)), "model.kernel", MODULES_ARE_TREES),
    "average": Twins(
        of(linear, jax.jit(follows), linear),
        of(linear, nnx.jit(follows), linear),
        "average.bias, average.kernel keep",
        MODULES_ARE_TREES,
    ),
    "checkpoint": Twins(
        of(Normed, rematerializes(jax.checkpoint)),
        of(Normed, rematerializes(nnx.remat)),
        "jax.checkpoint at",
        MODULES_ARE_TREES,
    ),
    "functional": Twins(
        of(Normed, functional(hands_back=False)),
        of(Normed, functional(hands_back=True)),
        "model.norm.mean, model.norm.var keep",
    ),
    "functional step": Twins(
        training(updates_optimizer(hands_back=False)),
        training(updates_optimizer(hands_back=True)),
        "model.bias, model.kernel, ... keep",
    ),
    "beside a result": beside_twins(lambda cell, x: {"logits": cell(x)}),
    "beside a result and a number": beside_twins(lambda cell, x: (cell(x), x.mean())),
    "beside a loss and a result": beside_twins(lambda cell, x: ((y := cell(x)).mean(), y)),
    "beside what is computed of it": beside_twins(lambda cell, x: (cell(x), {"h": cell.h[...] / 2})),
    "beside its sum": beside_twins(lambda cell, x: {"y": cell(x), "h": cell.h[...].sum(0) / 3}),
    "beside its gradients": Twins(
        training(jax.jit(trains_and_reports)), training(nnx.jit(trains_and_reports)), "model.kernel", MODULES_ARE_TREES
    ),
    "under a gradient of a jit": Twins(
        descends(jax.jit, hands_back=False), descends(jax.jit, hands_back=True), "model.norm.mean, model.norm.var keep"
    ),
    "under a gradient of a scan": Twins(
        descends(in_a_checkpointed_scan, hands_back=False),
        descends(in_a_checkpointed_scan, hands_back=True),
        "model.norm.mean, model.norm.var keep",
    ),
    "synchronized": Twins(
        of(linear, jax.jit(synchronizes), linear),
        of(linear, nnx.jit(synchronizes), linear),
        "target.bias, target.kernel keep",
        MODULES_ARE_TREES,
    ),
    "closure": Twins(
        lambda: Case(Gated(captures=True), (batch(),)),
        lambda: Case(Gated(captures=False), (batch(),)),
        "model.gate.kernel is read past the arguments",
    ),
    "optimizer": Twins(
        lambda: curved(captures=True), lambda: curved(captures=False), "model.curvature is read past the arguments"
    ),
}
"""What is copied, or captured -> the twins."""


# --- copies on purpose


def evaluates_clone(model: Any, x: jax.Array) -> jax.Array:
    return nnx.clone(model)(x)


def evaluates_deepcopy(model: Any, x: jax.Array) -> jax.Array:
    return copy.deepcopy(model)(x)


def asks_for_shapes(model: Any, x: jax.Array) -> jax.Array:
    return x * len(nnx.eval_shape(forward, model, x).shape)


def evaluates_imported_clone(model: Any, x: jax.Array) -> jax.Array:
    return clone(model)(x)


def asks_for_shapes_imported(model: Any, x: jax.Array) -> jax.Array:
    return x * eval_shape(lambda state, x: forward(nnx.merge(nnx.graphdef(model), state), x), nnx.state(model), x).size


def asks_for_the_program(model: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(model)
    return x * len(jax.make_jaxpr(lambda state, x: nnx.merge(graphdef, state)(x))(state, x).eqns)


def asks_for_the_lowered_program(model: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(model)
    jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, x)
    return x


KINDS = (nnx.Param, nnx.BatchStat) if FLAX >= (0, 12) else (nnx.VariableState,)
"""The types of the leaves of a state."""


def variables(state: Any) -> list[Any]:
    return jax.tree.leaves(state, is_leaf=lambda leaf: type(leaf) in KINDS)


def clips_gradients(model: Any, x: jax.Array) -> Any:
    """Write to the gradients, in place."""
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    for gradient in variables(gradients):
        assign(gradient, jnp.clip(*jax.tree.leaves(gradient), -1, 1))
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients))


def sums_squares(model: Any, x: jax.Array) -> Any:
    """Add up in a state of zeros, as elastic weight consolidation does."""
    total = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    for row in x:
        gradients = nnx.grad(lambda model, row=row: (model(row[None]) ** 2).mean())(model)
        nnx.update(total, jax.tree.map(lambda sum_, gradient: sum_ + gradient**2, total, gradients))
    return sum(leaf.sum() for leaf in jax.tree.leaves(total))


def evaluates_merged(model: Any, x: jax.Array) -> jax.Array:
    graphdef, state = nnx.split(model)
    merged = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf * 1, state))
    merged.eval()
    return merged(x)


def adapts_clone(model: Any, x: jax.Array) -> Any:
    """The inner loop of MAML: a step on a copy, and the gradient of the loss after it."""

    def after_step(model: Any) -> jax.Array:
        gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
        fast = nnx.clone(model)
        nnx.update(fast, jax.tree.map(lambda leaf, step: leaf - 0.1 * step, nnx.state(fast, nnx.Param), gradients))
        return (fast(x) ** 2).mean()

    return nnx.grad(after_step)(model)


def adapts_merged(model: Any, x: jax.Array) -> Any:
    """The same by parameters: no Variable is written."""

    def after_step(model: Any) -> jax.Array:
        graphdef, state = nnx.split(model)
        gradients = jax.grad(lambda state: (nnx.merge(graphdef, state)(x) ** 2).mean())(state)
        fast = nnx.merge(graphdef, jax.tree.map(lambda leaf, step: leaf - 0.1 * step, state, gradients))
        return (fast(x) ** 2).mean()

    return nnx.grad(after_step)(model)


def looks_ahead(model: Any, x: jax.Array) -> jax.Array:
    """Decode two rows on a copy, then the first."""
    ahead = nnx.clone(model)
    later = ahead(x) + ahead(x)
    return model(x) + later


def hands_out(what: Callable[[Any], Any]) -> Callable[..., Any]:
    """A forward call whose copy, or its state, or its arrays, are returned."""

    @jax.jit
    def call(model: Any, x: jax.Array) -> Any:
        return model(x), what(model)

    return call


class Remembers(nnx.Module):
    """Keeps the mean of its last batch, whatever the one before was."""

    def __init__(self) -> None:
        self.mean = nnx.BatchStat(jnp.zeros((WIDTH,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        assign(self.mean, x.mean(0))
        return 2.0 * x


def scans_merged(model: Any, x: jax.Array) -> Any:
    """A scan over steps of pure functions, whose last state is returned as arrays."""
    graphdef, state = nnx.split(model)

    def step(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graphdef, state)
        out = model(x)
        return nnx.state(model), out

    state, out = jax.lax.scan(step, state, x[None])
    return out, jax.tree.leaves(state)


def by_row(reduce: Callable[[Any], Any], out: Callable[[Any], Any], **options: Any) -> Callable[..., Any]:
    """A forward call by rows of a batch, whose statistics are returned as their mean."""

    def call(model: Any, x: jax.Array) -> Any:
        graphdef, state = nnx.split(model)

        def row(x: jax.Array) -> Any:
            copy = merged(graphdef, state)
            return copy(x[None]), reduce({"mean": copy.norm.mean[...], "var": copy.norm.var[...]})

        y, statistics = jax.vmap(row, **options)(x)
        return y, out(statistics)

    return call


def means(statistics: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.mean(0), statistics)


def masks(cell: Any, x: jax.Array) -> Any:
    """A step of a recurrent cell that keeps the old state in some rows."""
    graphdef, state = nnx.split(cell)

    @jax.jit
    def step(state: Any, x: jax.Array) -> Any:
        copy = merged(graphdef, state)
        old, y = copy.h[...], copy(x)
        return y, jnp.where(x[:, :1] > 0, copy.h[...], old)

    return step(state, x)


def decodes(model: Any, x: jax.Array) -> Any:
    """A scan that stacks the caches of all steps, and returns the last."""
    graphdef, state = nnx.split(model)

    def step(state: Any, x: jax.Array) -> Any:
        copy = merged(graphdef, state)
        y = copy(x)
        return nnx.state(copy), (y, copy.rows[...])

    state, (y, rows) = jax.lax.scan(step, state, jnp.stack([x, x]))
    return {"y": y, "rows": rows[-1], "index": merged(graphdef, state).index[...]}


class TwoCells(nnx.Module):
    """A cell, and another one."""

    def __init__(self) -> None:
        self.one, self.other = Recurs(), Recurs()


def moves(cells: Any, x: jax.Array) -> jax.Array:
    """Call a copy of one cell, and put what it is then into the other."""
    graphdef, state = nnx.split(cells.one)

    @jax.jit
    def pure(state: Any, x: jax.Array) -> Any:
        cell = merged(graphdef, state)
        return cell(x), nnx.state(cell)

    y, state = pure(state, x)
    nnx.update(cells.other, state)
    return y


@jax.jit
def first_stage(model: Any, x: jax.Array) -> Any:
    return model, model(x)


@jax.jit
def second_stage(model: Any, x: jax.Array) -> Any:
    return model(2 * x), model


def in_two_stages(model: Any, x: jax.Array) -> Any:
    y, model = second_stage(*first_stage(model, x))
    return {"model": model, "y": y}


@jax.jit
def swaps(model: Any, x: jax.Array) -> jax.Array:
    """Call with other parameters, and put the old ones back."""
    kept = model.kernel[...]
    assign(model.kernel, kept / 2)
    y = model(x)
    assign(model.kernel, kept)
    return y


class SharesArray(nnx.Module):
    """A module whose Variable holds the array of a default argument."""

    TABLE = numbers((WIDTH,))

    def __init__(self) -> None:
        self.table = nnx.Variable(self.TABLE)

    def __call__(self, x: jax.Array, table: jax.Array = TABLE) -> jax.Array:
        return x * self.table[...] + table


ON_PURPOSE: dict[str, tuple[Callable[[], Case], tuple[int, ...]]] = {
    "clone": (of(Normed, evaluates_clone), (0, 10)),
    "deepcopy": (of(Normed, evaluates_deepcopy), (0, 10)),
    "shapes": (of(Normed, asks_for_shapes), (0, 10)),
    "imported clone": (of(Normed, evaluates_imported_clone), (0, 10)),
    "imported eval_shape": (of(Normed, asks_for_shapes_imported), (0, 10)),
    "program": (of(Normed, asks_for_the_program), (0, 10)),
    "lowered program": (of(Normed, asks_for_the_lowered_program), (0, 10)),
    "gradients clipped in place": (of(linear, clips_gradients), (0, 10)),
    "squares of gradients": (of(linear, sums_squares), MODULES_ARE_TREES),
    "merged": (of(Normed, evaluates_merged), (0, 10)),
    "MAML by a clone": (of(linear, adapts_clone), (0, 10)),
    "MAML by parameters": (of(linear, adapts_merged), (0, 10)),
    "look-ahead": (of(Decodes, looks_ahead, rows=1), (0, 10)),
    "average": (of(linear, follows, linear), (0, 10)),
    "synchronized": (of(linear, synchronizes, linear), (0, 10)),
    "module returned": (of(Decodes, hands_out(lambda model: model), rows=1), MODULES_ARE_TREES),
    "state returned": (of(Decodes, hands_out(nnx.state), rows=1), MODULES_ARE_TREES),
    "arrays returned": (
        of(Decodes, hands_out(lambda model: (model.rows[...], model.index[...])), rows=1),
        MODULES_ARE_TREES,
    ),
    "array returned that was written blindly": (
        of(Remembers, hands_out(lambda model: {"mean": model.mean[...]})),
        MODULES_ARE_TREES,
    ),
    "the same out of a scan": (of(Remembers, scans_merged), (0, 10)),
    "means of statistics": (of(Normed, by_row(lambda each: each, means)), (0, 10)),
    "means of statistics by name": (
        of(
            Normed,
            by_row(
                lambda each: jax.lax.pmean(each, "rows"),
                lambda each: each,
                axis_name="rows",
                out_axes=(0, None),
            ),
        ),
        (0, 10),
    ),
    "masked": (of(Recurs, masks), (0, 10)),
    "moved to another": (of(TwoCells, moves), (0, 10)),
    "stacked in a scan": (of(Decodes, decodes, rows=1), (0, 10)),
    "two stages": (of(Normed, in_two_stages), MODULES_ARE_TREES),
    "swapped and put back": (of(linear, swaps), MODULES_ARE_TREES),
    "new state that is computed on": (
        of(Normed, hands_out(lambda model: jax.tree.map(lambda leaf: leaf * leaf, nnx.state(model)))),
        MODULES_ARE_TREES,
    ),
    "handed out by a remat": (of(linear, jax.jit(rematerializes(nnx.remat))), MODULES_ARE_TREES),
    "handed out by a gradient": (
        of(linear, jax.jit(nnx.value_and_grad(square))),
        MODULES_ARE_TREES,
    ),
    "default argument": (lambda: Case(SharesArray(), (batch(),)), (0, 10)),
}
"""Calls that work on copies, and lose nothing; each with the first flax that takes it."""
