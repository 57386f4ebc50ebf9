"""What a call does to the attributes of its modules, the user's own objects have afterwards: as after an eager call, marks of flax included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import call, text
from flax import nnx
from healthy import node_dict, node_list

from pytest_nnxcheck.compat import flax_modes, graph

X = jnp.ones(3)
HAS_DATA = hasattr(nnx, "data")
data = getattr(nnx, "data", lambda value: value)
"""Flax before 0.12 takes every list for data."""


class Scale(nnx.Module):
    def __init__(self, factor: float = 2.0) -> None:
        self.factor = nnx.Param(jnp.float32(factor))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.factor[...]


class Model(nnx.Module):
    """Two layers, and what `start` sets beside them; `change` is what a call does to the attributes."""

    def __init__(self, change: Any, **start: Any) -> None:
        self.first, self.second = Scale(), Scale(3.0)
        self.kept: Any = None
        self.extra: Any = "to be deleted"
        self.change = change
        for name, value in start.items():
            setattr(self, name, value)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.second(self.first(x))
        self.change(self, y)
        return y


def sets(**made: Any) -> Any:
    """Set attributes of the model to what is made of it and its output."""

    def change(model: Model, y: jax.Array) -> None:
        for name, make in made.items():
            setattr(model, name, make(model, y))

    return change


def keeps_inside(model, y):
    model.first.kept = data({"last": nnx.BatchStat(y)})


def deletes(model, y):
    del model.extra, model.second


def swaps(model, y):
    model.first, model.second = model.second, model.first


def counts_in_layers(model, y):
    for layer in model.layers:
        layer.calls = 1


def adds_in_place(model, y):
    model.kept[1] = model.kept[1] + y


def tied():
    model = Model(sets(second=lambda model, y: Scale(5.0)))
    model.second = model.first
    return model


def around(model, y):
    model.around = Model(keeps_inside)
    model.around.first, model.around.alias = model.first, data([model.first, model.first.factor])


EFFECTS = {
    "adds Variables": lambda: Model(sets(added=lambda _, y: data([nnx.BatchStat(y), nnx.BatchStat(y + 1)]))),
    "fills None": lambda: Model(sets(kept=lambda _, y: data([nnx.BatchStat(y)]))),
    "adds inside": lambda: Model(keeps_inside),
    "adds node containers": lambda: Model(sets(listed=lambda _, y: node_list([nnx.BatchStat(y)]), named=lambda _, y: node_dict({"y": nnx.BatchStat(y)}))),
    "deletes attributes": lambda: Model(deletes),
    "ties layers": lambda: Model(sets(second=lambda model, y: model.first)),
    "unties layers": tied,
    "adds an alias": lambda: Model(sets(alias=lambda model, y: data([model.first, model.first.factor]))),
    "adds a module around": lambda: Model(around),
    "grows a dict": lambda: Model(sets(layers=lambda model, y: data({"a": Scale(7.0), **model.layers})), layers=data({"b": Scale(), "c": Scale()})),
    "swaps layers": lambda: Model(swaps),
    "counts in layers": lambda: Model(counts_in_layers, layers=node_list([Scale(), Scale()])),
}  # fmt: skip
OF_DATA = {
    "adds arrays": lambda: Model(sets(added=lambda _, y: data([y, {"twice": y * 2}]))),
    "fills a static list": lambda: Model(sets(kept=lambda _, y: data([y])), kept=[]),
    "becomes static": lambda: Model(sets(kept=lambda *_: nnx.static("none")), kept=data([jnp.zeros(3)])),
    "mixes layers and arrays": lambda: Model(adds_in_place, kept=data([Scale(), jnp.zeros(3)])),
}
ALL = {**EFFECTS, **(OF_DATA if HAS_DATA else {})}


def assert_same(mine: Any, eager: Any) -> None:
    """The same attributes, of the same kind for flax, with the same aliases and values."""
    (graphdef, leaves), (expected, values) = flax_modes.split(mine), flax_modes.split(eager)
    assert graphdef == expected
    assert [(path, value.tolist()) for path, value in graph.flat_state(leaves)] == [
        (path, value.tolist()) for path, value in graph.flat_state(values)
    ]


@pytest.mark.parametrize("effect", ALL)
@pytest.mark.parametrize("nesting", ["un-nested", "jit"])
def test_the_attributes_are_those_that_an_eager_call_leaves(effect, nesting):
    eager, mine = ALL[effect](), ALL[effect]()
    mine.change = eager.change  # another function would be another graph
    first, factor = mine.first, mine.first.factor
    eager(X)
    found = call(mine, X, nesting=nesting, shortcuts="off", invariants="tracers")
    assert found.outcome.verdict == "held", text(found)
    assert_same(mine, eager)
    nodes = [node for _, node in flax_modes.iter_graph(mine)]
    assert any(node is first for node in nodes), "the user's own layer is another one now"
    assert any(node is factor for node in nodes), "the user's own Variable is another one now"
