"""Code that asks jax what it runs on is judged by the branch that it takes on the target."""

from __future__ import annotations

import functools
import os

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import default_backend as backend_of_module
from test_on_targets import checked, found, on

from pytest_nnxcheck import CheckError
from pytest_nnxcheck.core.chips import GIB
from pytest_nnxcheck.engine import observe
from pytest_nnxcheck.invariants.memory import DoesNotFit

ONE = {"nesting": "jit", "invariants": "memory,donation"}
WIDTH = 70_000  # a square of float32 has 18.3 GiB: more than a v5e, less than an h100


class Branching(nnx.Module):
    """Computes a square of its width on one platform, and nothing on others."""

    def __init__(self, platform, asks):
        self.w, self.platform, self.asks = nnx.Param(jnp.zeros((WIDTH,))), platform, asks

    def __call__(self, x):
        if self.asks() != self.platform:
            return self.w[...] * x
        return self.w[...] * jnp.sort(self.w[...][:, None] * self.w[...] * x, axis=0)[0]


@functools.lru_cache
def remembered():
    return jax.default_backend()


def backend():
    return jax.default_backend()


def by_name():
    return backend_of_module()


ASKS = {
    "jax.default_backend": backend,
    "jax.devices": lambda: jax.devices()[0].platform,
    "jax.local_devices": lambda: jax.local_devices()[0].platform,
    "jax.extend.backend": lambda: __import__("jax.extend").extend.backend.get_backend().platform,
    "from jax import": by_name,
    "functools.lru_cache": remembered,
    "device_kind": lambda: "tpu" if jax.devices()[0].device_kind.startswith("TPU v5") else "cpu",
    "a backend that is missing here": lambda: "tpu" if has_tpu() else "cpu",
}


def has_tpu():
    try:
        return bool(jax.devices("tpu"))
    except RuntimeError:
        return False


def branching(platform, asks, **settings):
    model = nnx.eval_shape(lambda: Branching(platform, asks))
    return checked(model, jax.ShapeDtypeStruct((), jnp.float32), **{**ONE, "target": "v5e", **settings})


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_the_branch_of_the_chip_is_judged_whoever_asks_in_which_way(asks):
    for _ in range(2):
        assert found(branching("tpu", asks), DoesNotFit) == {"v5e"}
    assert not found(branching("cpu", asks), DoesNotFit)


def test_each_target_gets_its_own_answers_and_a_note_says_which():
    report = branching("tpu", backend, target="v5e,h100")
    assert found(report, DoesNotFit) == {"v5e"}
    assert on(report, "h100").peak < GIB
    healthy = branching("neither", backend, target="v5e,h100")
    (note,) = (each for each in healthy.notes if " asked jax.default_backend(): " in each)
    assert note.endswith('asked jax.default_backend(): answered "tpu" on v5e, "gpu" on h100')
    assert "test_branches_on_targets.py:" in note


def in_the_environment():
    if "TEST_BACKEND" not in os.environ:
        os.environ["TEST_BACKEND"] = jax.default_backend()
    return os.environ["TEST_BACKEND"]


def test_an_answer_that_the_code_keeps_is_noted(monkeypatch):
    monkeypatch.setenv("TEST_BACKEND", "")
    monkeypatch.delenv("TEST_BACKEND")
    report = branching("tpu", in_the_environment)
    assert report.ok
    assert any("keeps the answer, which is the CPU's: on v5e another branch may run" in note for note in report.notes)


def test_the_count_is_that_of_the_chip():
    def counting(model, x):
        return model(x) * (jax.device_count() + jax.local_device_count() + len(jax.devices("cpu")))

    report = checked(counting, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8)), target="v5e", **ONE)
    told = [note.partition(" asked ")[2] for note in report.notes]
    assert told == [f"jax.{name}(): answered 1 on v5e" for name in ("device_count", "local_device_count")]


@jax.jit
def traced_before(x):
    return jnp.sort(x[:, None] * x, axis=0)[0] if jax.default_backend() == "tpu" else x


def test_a_jit_that_keeps_its_trace_is_traced_anew_before_and_after():
    class Jitted(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.zeros((WIDTH,)))

        def __call__(self, x):
            return traced_before(self.w[...] * x)

    for _ in range(2):
        model = nnx.eval_shape(Jitted)
        report = checked(model, jax.ShapeDtypeStruct((), jnp.float32), target="v5e", **ONE)
        assert found(report, DoesNotFit) == {"v5e"}
        traced_before.trace(jax.ShapeDtypeStruct((WIDTH,), jnp.float32))
    assert "sort" not in str(traced_before.trace(jax.ShapeDtypeStruct((WIDTH,), jnp.float32)).jaxpr)


def test_a_mesh_of_the_devices_that_were_answered_is_one_of_this_machine():
    def constrained(model, x):
        mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
        return jax.lax.with_sharding_constraint(
            model(x), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        )

    report = checked(constrained, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8)), **ONE)
    assert report.ok
    assert not [each for each in (on(report, "v5e"), on(report, "h100")) if each.left_out]


def test_what_raises_on_the_target_alone_is_not_checked_there_and_says_why():
    def refusing(model, x):
        if jax.default_backend() == "gpu":
            raise NotImplementedError("no kernel for GPUs")
        return model(x)

    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    report = checked(refusing, model, x, **ONE)
    assert report.ok
    assert on(report, "v5e").fits
    assert on(report, "h100").left_out.endswith("the call raises NotImplementedError: no kernel for GPUs")
    with pytest.raises(CheckError, match="no kernel for GPUs"):
        checked(refusing, model, x, target="h100", target_strict="on", **ONE)


def test_a_call_that_asks_nobody_is_not_traced_again(monkeypatch):
    monkeypatch.setattr(observe, "on_machine", lambda *_: 1 / 0)
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    assert on(checked(model, x, target="v5e", **ONE), "v5e").peak
    asks = checked(lambda model, x: model(x) * jax.device_count(), model, x, target="v5e", **ONE)
    assert "ZeroDivisionError" in on(asks, "v5e").left_out


def test_jax_is_as_it_was():
    before = jax.devices, jax.default_backend, backend_of_module, jax.sharding.Mesh.__new__
    branching("neither", by_name)

    def failing(model, x):
        return model(x) if backend_of_module() == "cpu" else 1 / 0

    checked(failing, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8)), target="v5e", **ONE)
    assert (jax.devices, jax.default_backend, backend_of_module, jax.sharding.Mesh.__new__) == before
    assert remembered() == jax.default_backend() == "cpu"
