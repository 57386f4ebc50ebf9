"""Subjects and calls that are refused, with what to change: deleted arrays, hijax Variables, models that compare arrays, a trace."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from checking import TAKES_REFERENCES, Example, call
from flax import nnx
from healthy import rngs
from probes import reference_variable

from pytest_nnxcheck import CheckError
from pytest_nnxcheck.engine.example import Memo

X = jnp.ones((2, 4))


def test_what_a_constructor_was_given_and_kept_is_no_leak_of_an_abstract_module():
    class Keeps(nnx.Module):
        def __init__(self, rngs):
            self.settings = Settings({"rngs": rngs})
            self.linear = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Settings:
        def __init__(self, given):
            self.given = given

    model = nnx.eval_shape(lambda: Keeps(nnx.Rngs(0)))
    assert call(model, X, nesting="jit").outcome.verdict == "held"


@pytest.mark.skipif(not hasattr(nnx, "var_defaults"), reason="this flax has no hijax Variables")
def test_hijax_variables_are_refused():
    with nnx.var_defaults(hijax=True):
        model = nnx.Linear(4, 4, rngs=rngs())
    with pytest.raises(CheckError, match=r"model.(bias|kernel) is a hijax Variable, which is not supported"):
        call(model, X)


class Remembers(nnx.Module):
    """A layer that keeps its last output in a mutable array, in a Variable or beside one."""

    def __init__(self, ref):
        self.linear = nnx.Linear(4, 4, rngs=rngs())
        self.last = ref

    def __call__(self, x):
        y = self.linear(x)
        self.last[...] = y
        return y


@pytest.mark.skipif(
    not hasattr(jax, "new_ref") or TAKES_REFERENCES, reason="this jax has no mutable arrays, or they are taken"
)
def test_mutable_arrays_are_refused_by_old_versions():
    told = r" is a mutable array of jax \(jax.Ref\), which is not supported: keep a plain array in an nnx.Variable"
    ref = jax.new_ref(jnp.zeros((2, 4)))
    for subject, args, name in [
        (Remembers(ref), (X,), "model.last"),
        (Remembers(reference_variable(jnp.zeros((2, 4)))), (X,), "model.last"),
        (lambda model, x, last: model(x), (nnx.Linear(4, 4, rngs=rngs()), X, ref), "last"),
        (lambda model, x: model(x[0]), (nnx.Linear(4, 4, rngs=rngs()), [X, ref]), r"x\[1\]"),
    ]:
        for nesting in ("un-nested", "jit"):
            with pytest.raises(CheckError, match=f"^{name}{told}$"):
                call(subject, *args, nesting=nesting)
    assert call(Remembers(nnx.Variable(jnp.zeros((2, 4)))), X, nesting="jit").outcome.verdict == "held"


@dataclasses.dataclass
class Rope:
    table: jax.Array


@dataclasses.dataclass(eq=False)
class ByIdentity:
    table: jax.Array


@dataclasses.dataclass
class ByTheRest:
    table: jax.Array = dataclasses.field(compare=False)


class Net(nnx.Module):
    def __init__(self, rope):
        self.rope, self.linear = rope(jnp.arange(4.0)), nnx.Linear(4, 4, rngs=rngs())

    def __call__(self, x):
        return self.linear(x * self.rope.table)


def of_one_test(*models):
    """Calls with these models in the runs of one body."""
    memo = Memo()
    for model in models:
        with Example(memo) as example:
            assert call(model, X, nesting="jit", example=example).outcome.verdict == "held"


@pytest.mark.slow
def test_a_second_model_whose_plain_object_compares_arrays_is_refused_as_jax_does():
    jitted = nnx.jit(lambda model, x: model(x))
    jitted(Net(Rope), X)
    with pytest.raises(ValueError, match=r"ambiguous|equality|comparable"):
        jitted(Net(Rope), X)
    told = r"model.rope is a Rope with arrays, and == of two such objects raises. A jitted function that meets a second model"
    with pytest.raises(CheckError, match=told):
        of_one_test(Net(Rope), Net(Rope))
    for rope in (ByIdentity, ByTheRest):
        of_one_test(Net(rope), Net(rope))


def test_a_module_with_deleted_arrays_is_refused():
    model = nnx.Linear(4, 4, rngs=rngs())
    model.kernel[...].delete()
    with pytest.raises(CheckError, match=r"model.kernel is deleted before the call: an earlier step donated it"):
        call(model, X, nesting="jit")


def test_a_call_inside_a_trace_is_refused():
    """Which of its tracers are alive cannot be told there; one that is handed in outside of any trace is a finding."""
    told = "holds tracers before the call, in .*: the call is made inside a transform. .* call it there, outside of any transform"
    for transform in (jax.jit, jax.vmap, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x)):
        with pytest.raises(CheckError, match=told):
            transform(lambda x: call(nnx.Linear(4, 4, rngs=rngs()), x, nesting="scan").output)(X)
