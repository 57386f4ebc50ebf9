"""Objects of libraries whose insides are their own business: those that hold state are opened, so that no trace of ours leaves a tracer in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, near, text
from flax import nnx
from healthy import BATCH, numbers
from kept_tracers import look, tracer_of

from pytest_nnxcheck import check
from pytest_nnxcheck.subject.subject import bind


class KerasVariable:
    """What Keras keeps an array in where its layers are no modules of flax."""

    __module__ = "keras.src.backend.common.variables"

    def __init__(self, value: jax.Array) -> None:
        self._value = value


class SeedGenerator:
    """Counts in its state, past the check of flax, as Keras does; ``graph`` stands for all that a layer is linked with."""

    __module__ = "keras.src.random.seed_generator"

    def __init__(self, state: Any, graph: Any = None) -> None:
        self.state = state
        self.graph = graph

    def next(self, *, count: bool) -> jax.Array:
        own = self.state
        if isinstance(own, jax.Array):
            value = self.state
            self.state = value + count if count else value
            return value
        name = next(name for name in ("_raw_value", "raw_value", "_value") if hasattr(own, name))
        value = getattr(own, name)
        if count:
            object.__setattr__(own, name, value + 1)
        return value


STATES = {"array": jnp.array, "Variable": nnx.Variable, "Variable of the library": KerasVariable}
HOLDERS: dict[str, Any] = {
    "": lambda seed: seed,
    "[0]": lambda seed: [seed],
    "['key']": lambda seed: {"key": seed},
    ".seed": lambda seed: SimpleNamespace(seed=seed),
}


class Noise(nnx.Module):
    def __init__(self, holder: str, state: Any, *, count: bool) -> None:
        self.seed = HOLDERS[holder](SeedGenerator(state(jnp.zeros(2))))
        self.holder, self.count = holder, count

    def __call__(self, x: jax.Array) -> jax.Array:
        seed = self.seed
        if self.holder:
            seed = seed.seed if self.holder == ".seed" else seed[0 if self.holder == "[0]" else "key"]
        return x + seed.next(count=self.count).sum()


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("state", STATES)
def test_a_tracer_in_the_state_of_a_librarys_object_is_found(state, holder):
    model = Noise(holder, STATES[state], count=True)
    places = look(("model", model)).places
    leaky = call(model, numbers(BATCH), nesting="jit")
    assert broken(leaky) == ["tracers"]
    assert f"tracers remain in model.seed{holder}.state" in text(leaky)
    assert f"created at {near(__file__)}:" in text(leaky)
    assert not [*places.changes()]
    assert call(Noise(holder, STATES[state], count=False), numbers(BATCH), nesting="jit").outcome.verdict == "held"


@pytest.mark.slow
def test_the_un_nested_call_does_not_die_of_a_trace_of_ours():
    un_nested, under_jit, *_ = check(Noise("", nnx.Variable, count=True), numbers(BATCH), effort="quick").outcomes
    assert (un_nested.verdict, under_jit.verdict) == ("held", "violated")
    assert check(Noise("", nnx.Variable, count=False), numbers(BATCH), effort="quick").ok


@pytest.mark.parametrize("state", STATES)
def test_an_argument_of_a_library_is_opened_as_one_of_the_users_own(state):
    def noisy(seed, x):
        return x + seed.next(count=False).sum()

    opened = bind(noisy, (SeedGenerator(STATES[state](jnp.zeros(2))), numbers(BATCH)), {})
    assert any(name.startswith("seed.state") for name in (*opened.input_names, *opened.labels.values()))
    closed = bind(noisy, (SeedGenerator(None), numbers(BATCH)), {})
    assert [name for name, _ in closed.static] == ["seed"]


def test_what_holds_no_state_stays_closed():
    """A cache of a library may hold tracers by keys that nobody else has, and a layer is linked with thousands of objects."""
    cache = SeedGenerator(None, graph={"key": tracer_of(jax.jit)})
    assert not look(("cache", cache)).tracers
    linked = SeedGenerator(
        jnp.zeros(2), graph=[SeedGenerator(None, graph=[object() for _ in range(99)]) for _ in range(99)]
    )
    assert len(look(("seed", linked)).seen) < 200
