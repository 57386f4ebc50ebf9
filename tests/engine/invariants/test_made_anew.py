"""Objects that the body makes anew for each nesting: where a jit tells two of the same code apart, a note of `recompilation` names the part and the cure."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import optax
import pytest
from checking import Example, call, some
from flax import nnx
from healthy import BATCH, HEALTHY, WIDTH, node_list, numbers, rngs

from pytest_nnxcheck.core.notes import texts
from pytest_nnxcheck.engine.example import Memo

NUMBERS = itertools.count()


class Config:
    """Of the same content each time, and equal to itself alone."""

    def __init__(self) -> None:
        self.width = WIDTH


@dataclasses.dataclass(frozen=True)
class Settings:
    """Equal by value."""

    width: int = WIDTH


class Holds(nnx.Module):
    """A layer with a static part."""

    def __init__(self, part) -> None:
        self.linear, self.part = nnx.Linear(WIDTH, WIDTH, rngs=rngs()), part

    def __call__(self, x):
        return self.linear(x)


class HoldsAll(nnx.Module):
    """Layers in a list, with a function among them."""

    def __init__(self, function) -> None:
        self.layers = node_list([Holds(None), function, Holds(None)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def with_hook(hook):
    model = Holds(None)
    model.linear.kernel = nnx.Param(model.linear.kernel[...], hook=hook)
    return model


def relu(x):
    return x * (x > 0)


ADAM = optax.adam(1e-3)
MADE = {
    "a lambda": (lambda: Holds(lambda x: x), "model.part (test_made_anew.<lambda>.<locals>.<lambda>)"),
    "a function": (lambda: Holds(relu), ""),
    "a partial": (lambda: Holds(functools.partial(relu)), "model.part (a partial of test_made_anew.relu)"),
    "in a tuple": (lambda: Holds((relu, lambda x: x)), "model.part[1] (test_made_anew.<lambda>.<locals>.<lambda>)"),
    "in a list of layers": (lambda: HoldsAll(lambda x: x), "model.layers[1] (test_made_anew.<lambda>.<locals>.<lambda>)"),
    "functions in a list of layers": (lambda: HoldsAll(relu), ""),
    "an object": (lambda: Holds(Config()), "model.part (a Config)"),
    "equal by value": (lambda: Holds(Settings()), ""),
    "a number": (lambda: Holds(7), ""),
    "another number": (lambda: Holds(next(NUMBERS)), "model.part ("),
    "metadata": (lambda: with_hook(lambda: None), "model.linear.kernel.hook (test_made_anew.<lambda>"),
    "equal metadata": (lambda: with_hook(relu), ""),
}  # fmt: skip


def traces_of_two(make, *args) -> int:
    """How often a jit of the user's own traces two models that the same code makes."""
    traces = []

    @nnx.jit
    def step(model, *args):
        traces.append(None)

    step(make(), *args)
    step(make(), *args)
    return len(traces)


def told_of(make, *args, invariants="recompilation", calls=2, memo=None):
    """The notes of a test whose body makes the model anew in each run."""
    memo, told = memo or Memo(), {}
    for nesting in ("un-nested", "jit", "remat")[:calls]:
        with Example(memo) as example:
            found = call(
                lambda model, *args: None, make(), *args, nesting=nesting, invariants=invariants, example=example
            )
        told.update(dict.fromkeys(texts(found.facts.notes)))
    return [text for text in told if "the body makes its objects anew" in text]


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_part_that_is_another_each_time_is_named(name):
    make, part = MADE[name]
    assert (traces_of_two(make) == 2) == bool(part)
    told = told_of(make, calls=3)
    assert len(told) == bool(part)
    for text in told:
        assert f"no two have an equal {part}" in text
        assert text.endswith("make that once, outside, and hand it in")


@pytest.mark.parametrize("name", some(sorted(HEALTHY), {"batch_norm_train", "dropout", "linear"}))
def test_a_healthy_model_that_is_made_anew_gets_a_note_where_a_jit_tells_it_apart(name):
    nodes = [value for value in (HEALTHY[name]().subject, *HEALTHY[name]().args) if isinstance(value, nnx.Module)]
    if not nodes:
        pytest.skip("the subject is no module")

    def make():
        case = HEALTHY[name]()
        return next(value for value in (case.subject, *case.args) if isinstance(value, nnx.Module))

    assert bool(told_of(make)) == (traces_of_two(make) == 2)


def step(model, optimizer, x):
    return model(x)


@pytest.mark.slow
def test_an_optimizer_whose_transformation_is_made_anew_is_named_by_its_functions():
    def trained(tx):
        model = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def told(make_tx):
        memo, said = Memo(), []
        for nesting in ("un-nested", "jit"):
            with Example(memo) as example:
                found = call(
                    step,
                    *trained(make_tx()),
                    numbers(BATCH),
                    nesting=nesting,
                    invariants="recompilation",
                    example=example,
                )
            said += texts(found.facts.notes)
        return said

    (text,) = told(lambda: optax.adam(1e-3))
    assert "optimizer.tx.init (optax." in text
    assert "optimizer.tx.update (optax." in text
    assert told(lambda: ADAM) == []


def test_the_same_objects_in_each_run_get_none():
    model = Holds(lambda x: x)
    assert told_of(lambda: model) == []


def test_what_differs_by_value_is_no_fault_of_a_body_with_arguments_of_its_own():
    assert told_of(MADE["another number"][0], memo=Memo(same_arguments=False)) == []
    assert len(told_of(MADE["a lambda"][0], memo=Memo(same_arguments=False))) == 1
