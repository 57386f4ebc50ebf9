"""One call checked: verdicts, what happens to the user's objects, memory and donation."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import Example, broken, call, flat, full, text
from flax import nnx
from healthy import assign, numbers, rngs
from probes import value_of

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.checks import check_call as checking_call
from pytest_nnxcheck.checks.check_call import check_call
from pytest_nnxcheck.core.settings import DEFAULTS
from pytest_nnxcheck.engine import ran
from pytest_nnxcheck.engine.example import Memo
from pytest_nnxcheck.engine.observe import observe
from pytest_nnxcheck.subject.profile import profile
from pytest_nnxcheck.subject.subject import identifiers

X = jnp.ones((2, 4))


class Norm(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=rngs())

    def __call__(self, x):
        return self.norm(x)


# --- verdicts


RAISES = """
import jax.numpy as jnp
import pytest
from flax import nnx

class Net(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        if jnp.all(x > 1):
            return x
        return self.linear(x)

@pytest.mark.nnx_invariants(effort="quick")
def test_net(nnx_wrap):
    nnx_wrap(Net())(jnp.ones((2, 4)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--tb=auto", "--tb=short", "--nnx-invariants=parity"])
def test_frames_of_the_plugin_are_not_shown(pytester, inner_args, option):
    pytester.makepyfile(RAISES)
    result = pytester.runpytest_inprocess(*inner_args, "-p", "no:cacheprovider", option)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*if jnp.all(x > 1):"])
    assert "a trace has no values: for an if on one write jnp.where or nnx.cond," in flat(result.stdout.str())
    assert "pytest_nnxcheck/" not in result.stdout.str()


class Trainer:
    """A plain object that counts its steps in Python."""

    def __init__(self):
        self.model, self.steps = Norm(), 0

    def step(self, x):
        self.steps += 1
        return self.model(x).sum()


@pytest.mark.parametrize("invariants", ["tracers,memory,donation", "parity,finite,recompilation"])
@pytest.mark.parametrize("nesting", ["un-nested", "jit", "jit > scan", *full("scan", "jit > vmap", "jit > grad")])
def test_a_plain_object_counts_one_step_whatever_the_plugin_traces_besides(nesting, invariants):
    trainer = Trainer()
    assert call(trainer.step, X, nesting=nesting, invariants=invariants).outcome.verdict == "held"
    assert trainer.steps == 1


@pytest.mark.parametrize("kind", ["function", "module", "method", "partial"])
def test_what_jax_says_of_the_call_names_the_users_function_and_arguments(kind):
    class Branches(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return x * 2 if jnp.asarray(self.w) > 0 else x

        method = __call__

    def step(model, batch):
        return model(batch["x"]) if batch["x"].sum() > 0 else batch["x"]

    module = Branches()
    subject, args, where = {
        "function": (step, (module, {"x": X}), "function step at"),
        "module": (module, (X,), "function __call__ at"),
        "method": (module.method, (X,), "function __call__ at"),
        "partial": (functools.partial(step, module), ({"x": X},), "function step at"),
    }[kind]
    said = str(call(subject, *args, nesting="jit").error)
    assert f"while tracing the {where} {__file__}" in said
    assert re.search(r"argument (batch_x|model\['w'\]\.(raw_)?value)", said)
    assert "pytest_nnxcheck" not in said


def test_every_argument_has_a_name_of_its_own():
    labels = ("model", "batch['x']", "batch.x", "1", "größe", "")
    assert list(identifiers(labels)) == ["model", "batch_x", "batch_x_2", "_1", "größe", "argument"]


# --- the user's objects


def test_the_module_sees_its_state_advance_and_is_put_back_at_the_end():
    model, x = Norm(), numbers((8, 4))
    before = model.norm.mean[...]
    with Example() as example:
        call(model, x, example=example, nesting="jit")
        first = np.asarray(model.norm.mean[...])
        call(model, x, example=example, nesting="jit")
        assert not np.array_equal(first, before)
        assert not np.array_equal(model.norm.mean[...], first)
    assert model.norm.mean[...] is before


def test_a_second_call_is_known_from_the_first_and_a_listener_hears_of_both(monkeypatch):
    evaluated, compiled, heard, memo = [], [], [], Memo()
    monkeypatch.setattr(
        checking_call, "profile", lambda subject, before: evaluated.append(subject) or profile(subject, before)
    )
    monkeypatch.setattr(ran, "observe", lambda *args: compiled.append(args) or observe(*args))
    for _ in range(2):
        with Example(memo) as example:
            again = check_call(
                nnx.Linear(4, 4, rngs=rngs()),
                (X,),
                {},
                nesting=Nesting.parse("jit > scan"),
                settings=DEFAULTS,
                example=example,
                publish=heard.append,
            )
    assert again.outcome.verdict == "held"
    assert (len(evaluated), len(compiled)) == (1, 1), "the profile, and the program that the nesting is measured by"
    # Before the call is traced for the first time, and before each run.
    profiles = [known.profile for known in memo.known.values()]
    assert [event.profile for event in heard] == [None, *profiles, *profiles]


# --- memory


def test_memory_is_asserted_only_where_the_outermost_layer_is_jit():
    model, x = nnx.Linear(64, 64, rngs=rngs()), jnp.ones((8, 64))
    assert call(model, x, nesting="scan > jit", memory_budget=1).outcome.verdict == "held"
    assert call(model, x, nesting="jit > scan", memory_budget="0.01x").outcome.verdict == "violated"


def test_a_generated_closure_captures_the_state_by_construction():
    assert call(nnx.Linear(256, 256, rngs=rngs()), jnp.ones((2, 256)), nesting="jit[closure]").outcome.verdict == "held"


# --- donation


class Tied(nnx.Module):
    def __init__(self, *, share):
        self.weight = nnx.Param(numbers((4, 4)))
        value = self.weight[...] if share else jnp.copy(self.weight[...])
        self.average = nnx.BatchStat(value)

    def __call__(self, x):
        assign(self.average, self.average[...] * 0.9 + self.weight[...] * 0.1)
        return x @ self.average[...]


def test_a_view_held_by_the_module_is_named():
    class Log:
        def __init__(self, initial):
            self.initial = initial

    viewed = Tied(share=False)
    viewed.log = Log(np.asarray(viewed.average[...]))
    found = call(viewed, X, nesting="jit")
    assert broken(found) == ["donation"]
    assert "model.average is viewed by model.log.initial" in text(found)
    copied = Tied(share=False)
    copied.log = Log(np.array(copied.average[...]))
    assert call(copied, X, nesting="jit").outcome.verdict == "held"


def test_a_swap_is_noted_and_not_judged():
    class Swaps(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(jnp.ones(8)), nnx.Param(jnp.zeros(8))

        def __call__(self):
            a, b = self.a[...], self.b[...]
            assign(self.a, b)
            assign(self.b, a)

    assert call(Swaps(), nesting="jit").outcome.verdict == "held"


def test_a_donation_that_the_outer_jit_drops_is_noted():
    step = jax.jit(lambda state, x: (state + x.sum(), x * 2), donate_argnums=0)

    def subject(model, x):
        new, y = step(model.average[...], x)
        assign(model.average, new)
        return y

    found = call(subject, Tied(share=False), X, nesting="jit")
    assert found.outcome.verdict == "held"
    assert "1 donated operands of a jit inside the call" in text(found)


def test_nothing_is_donated_where_the_user_says_none():
    found = call(Tied(share=True), X, nesting="jit", donate="none")
    assert found.outcome.verdict == "held", text(found)


def test_host_values_have_no_buffer_to_keep():
    class Host(nnx.Module):
        def __init__(self):
            self.scale = nnx.Param(np.ones((4,), np.float32))
            self.step = nnx.Param(3)

        def __call__(self, x):
            return x * value_of(self.scale) * value_of(self.step)

    assert call(Host(), X, nesting="jit").outcome.verdict == "held"


REFUSED = RuntimeError("takes no tracers")


class Refuses(nnx.Module):
    """Raises an exception that the program keeps where it is traced; ``anew`` raises one of its own."""

    def __init__(self, anew=False):
        self.anew = anew

    def __call__(self, x):
        if isinstance(x, jax.core.Tracer):
            raise RuntimeError("takes no tracers") if self.anew else REFUSED
        return x


def test_an_exception_that_the_program_keeps_has_no_frames_of_a_trace_of_ours():
    assert call(Refuses(), X).outcome.verdict == "held"
    assert REFUSED.__traceback__ is None
    assert call(Refuses(anew=True), X).outcome.verdict == "held"
    assert call(Refuses(anew=True), X, nesting="jit").outcome.verdict == "failed"
