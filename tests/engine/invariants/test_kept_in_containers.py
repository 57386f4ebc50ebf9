"""Arrays that a module keeps in containers which no transform carries out: each is told where to keep them instead."""

from __future__ import annotations

import collections
import contextvars
import functools
import queue
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import call, hint, needs_kept_tracers
from flax import nnx
from healthy import BATCH, FLAX, assign, numbers
from leaky import LEAKY, Keeps, sets

from pytest_nnxcheck.core.notes import captured_by

RECENT: collections.deque[Any] = collections.deque(maxlen=100)
LAST: contextvars.ContextVar[Any] = contextvars.ContextVar("last", default=None)


def hint_on(*subject: Any, nesting: str = "jit") -> str:
    (violation,) = call(*subject, nesting=nesting).outcome.violations
    return violation.hint


def plain_object(path: str) -> str:
    return hint("plain object", path=path)


@pytest.mark.parametrize(
    "module, said",
    [
        (lambda: Keeps(collections.deque, lambda m, y: m.kept.append(y)), plain_object("model.kept[0]")),
        (lambda: Keeps(queue.Queue, lambda m, y: m.kept.put(y)), plain_object("model.kept.queue[0]")),
        (lambda: Keeps(lambda: None, sets(lambda y: functools.partial(print, y))), plain_object("model.kept.args[0]")),
        (lambda: Keeps(lambda: None, sets(lambda y: SimpleNamespace(view={0: y}.values()))), plain_object("list(model.kept.view)[0][0]")),
        (lambda: Keeps(lambda: None, lambda _, y: RECENT.append(y)), hint("outlives", holder="a deque outside of the module")),
        (lambda: Keeps(lambda: None, lambda _, y: LAST.set(y)), hint("outlives", holder="a context variable")),
    ],
    ids=["deque", "queue", "partial", "view", "global deque", "context variable"],
)  # fmt: skip
def test_each_container_has_its_advice(module, said):
    assert hint_on(module(), numbers(BATCH)) == said


@needs_kept_tracers
def test_a_tuple_is_not_asked_to_be_declared_as_data():
    said = hint("plain value, container", path="model.kept[0]", holder="tuple")
    assert hint_on(Keeps(lambda: None, sets(lambda y: (y, 1))), numbers(BATCH)) == said


def test_in_a_variable_of_the_module_it_holds():
    cured = Keeps(lambda: nnx.BatchStat(jnp.zeros(BATCH)), lambda module, y: assign(module.kept, y))
    assert call(cured, numbers(BATCH), nesting="jit").outcome.verdict == "held"


class Pairs(nnx.Module):
    """Counts in a Variable whose value is a dict, or a tuple, of arrays."""

    def __init__(self, value: Any) -> None:
        self.pair = nnx.Variable(value)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.pair.value = jax.tree.map(lambda array: array + x, self.pair.value)
        return x


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="flax from 0.10.7 on refuses to write a captured Variable")
@pytest.mark.parametrize("value", [{"a": jnp.ones(3)}, (jnp.ones(3), jnp.ones(3))], ids=["dict", "tuple"])
def test_what_a_captured_variable_holds_is_no_plain_value(value):
    assert hint_on(Pairs(value), jnp.ones(3), nesting="jit[closure]") == captured_by("jit")
    assert call(Pairs(value), jnp.ones(3), nesting="jit").outcome.verdict == "held"


def test_what_a_variable_has_as_metadata_goes_into_one_of_its_own():
    """Under a remat: a jit of flax drops it in silence."""
    twins = LEAKY["variable_metadata"]
    leaky, healthy = twins.leaky(), twins.healthy()
    said = hint("metadata", path="model.linear.kernel.norm (metadata)")
    assert hint_on(leaky.subject, *leaky.args, nesting="remat") == said
    assert call(healthy.subject, *healthy.args, nesting="remat").outcome.verdict == "held"
