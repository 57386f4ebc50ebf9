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
    """Two layers; each subclass changes its own attributes, or those of a module inside."""

    def __init__(self) -> None:
        self.first, self.second = Scale(), Scale(3.0)
        self.kept: Any = None
        self.extra: Any = "to be deleted"

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.second(self.first(x))
        self.change(y)
        return y


class AddsVariables(Model):
    def change(self, y):
        self.added = data([nnx.BatchStat(y), nnx.BatchStat(y + 1)])


class FillsNone(Model):
    def change(self, y):
        self.kept = data([nnx.BatchStat(y)])


class AddsInside(Model):
    def change(self, y):
        self.first.kept = data({"last": nnx.BatchStat(y)})


class AddsNodeContainers(Model):
    def change(self, y):
        self.listed = node_list([nnx.BatchStat(y)])
        self.named = node_dict({"last": nnx.BatchStat(y)})


class DeletesAttributes(Model):
    def change(self, y):
        del self.extra, self.second


class TiesLayers(Model):
    def change(self, y):
        self.second = self.first


class UntiesLayers(Model):
    def __init__(self):
        super().__init__()
        self.second = self.first

    def change(self, y):
        self.second = Scale(5.0)


class AddsAlias(Model):
    def change(self, y):
        self.alias = data([self.first, self.first.factor])


class AddsModuleAround(Model):
    def change(self, y):
        self.around = AddsAlias()
        self.around.first = self.first


class GrowsDict(Model):
    def __init__(self):
        super().__init__()
        self.layers = data({"b": Scale(), "c": Scale()})

    def change(self, y):
        self.layers = data({"a": Scale(7.0), **self.layers})


class SwapsLayers(Model):
    def change(self, y):
        self.first, self.second = self.second, self.first


class CountsInLayers(Model):
    def __init__(self):
        super().__init__()
        self.layers = node_list([Scale(), Scale()])

    def change(self, y):
        for layer in self.layers:
            layer.calls = 1


EFFECTS = (
    AddsVariables, FillsNone, AddsInside, AddsNodeContainers, DeletesAttributes, TiesLayers, UntiesLayers, AddsAlias,
    AddsModuleAround, GrowsDict, SwapsLayers, CountsInLayers,
)  # fmt: skip


class AddsArrays(Model):
    def change(self, y):
        self.added = data([y, {"twice": y * 2}])


class FillsStaticList(Model):
    def __init__(self):
        super().__init__()
        self.kept = []

    def change(self, y):
        self.kept = data([y])


class BecomesStatic(Model):
    def __init__(self):
        super().__init__()
        self.kept = data([jnp.zeros(3)])

    def change(self, y):
        self.kept = nnx.static("none")


class MixesLayersAndArrays(Model):
    def __init__(self):
        super().__init__()
        self.kept = data([Scale(), jnp.zeros(3)])

    def change(self, y):
        self.kept[1] = self.kept[1] + y


OF_DATA = (AddsArrays, FillsStaticList, BecomesStatic, MixesLayersAndArrays)


def assert_same(mine: Any, eager: Any) -> None:
    """The same attributes, of the same kind for flax, with the same aliases and values."""
    (graphdef, leaves), (expected, values) = flax_modes.split(mine), flax_modes.split(eager)
    assert graphdef == expected
    assert [(path, value.tolist()) for path, value in graph.flat_state(leaves)] == [
        (path, value.tolist()) for path, value in graph.flat_state(values)
    ]


@pytest.mark.parametrize("module", [*EFFECTS, *(OF_DATA if HAS_DATA else ())], ids=lambda module: module.__name__)
@pytest.mark.parametrize("nesting", ["un-nested", "jit"])
def test_the_attributes_are_those_that_an_eager_call_leaves(module, nesting):
    eager, mine = module(), module()
    first, factor = mine.first, mine.first.factor
    eager(X)
    found = call(mine, X, nesting=nesting, shortcuts="off", invariants="tracers")
    assert found.outcome.verdict == "held", text(found)
    assert_same(mine, eager)
    nodes = [node for _, node in flax_modes.iter_graph(mine)]
    assert any(node is first for node in nodes), "the user's own layer is another one now"
    assert any(node is factor for node in nodes), "the user's own Variable is another one now"
