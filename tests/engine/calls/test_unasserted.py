"""Invariants that a test asserts, and no nesting could break: the summary says so. Tracers that a test does not assert: a note says that they remain."""

import jax
import jax.numpy as jnp
import pytest
from checking import FEW, call, flat
from flax import nnx

from pytest_nnxcheck import CheckError, check
from pytest_nnxcheck.compat import graph

SEEN = []


class Keeps(nnx.Module):
    """Keeps its input outside of the module."""

    def __call__(self, x):
        SEEN.append(x)
        return x * 2


class Forgets(nnx.Module):
    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize("cls", [Keeps, Forgets])
@pytest.mark.parametrize("nesting", ["jit", "scan"])
def test_the_output_is_there(cls, nesting):
    found = call(cls(), jnp.ones((2, 4)), nesting=nesting, invariants="memory,parity")
    assert found.outcome.verdict == "held"
    assert found.output.shape == (2, 4)
    assert (found.output == 2).all()


class CountsAndKeeps(nnx.Module):
    """Counts its calls, and keeps its input among the metadata of the count."""

    def __init__(self):
        self.count = nnx.Variable(jnp.zeros((4,)))

    def __call__(self, x):
        self.count.value = self.count.value + 1
        graph.set_metadata(self.count, "kept", x)
        return x * 2


@pytest.mark.filterwarnings("ignore:'.value'")
@pytest.mark.parametrize("nesting", ["jit", "remat"])
def test_a_state_that_keeps_a_tracer_is_not_handed_back(nesting):
    """On flax 0.10 it has arrays that the program has deleted."""
    model = CountsAndKeeps()
    assert call(model, jnp.ones((2, 4)), nesting=nesting, invariants="memory").outcome.verdict == "held"
    assert (model.count.value >= 0).all()
    assert not isinstance(graph.variable_metadata(model.count).get("kept"), jax.core.Tracer)


def test_a_note_says_that_tracers_remain():
    said = "tracers remain in SEEN[0]: the invariants do not name tracers"
    noted = {cls: check(cls(), jnp.ones((2, 4)), nesting="jit", invariants="memory").notes for cls in (Keeps, Forgets)}
    assert any(note.startswith(said) for note in noted[Keeps])
    assert not noted[Forgets]
    asserted = check(Keeps(), jnp.ones((2, 4)), nesting="jit")
    assert not asserted.ok
    assert not any(said in note for note in asserted.notes)


def test_what_raises_un_nested_may_leave_tracers_under_a_jit():
    def keeps_and_raises(x):
        SEEN.append(x)
        raise ValueError("never ends")

    said = flat(str(check(keeps_and_raises, jnp.ones((2, 4)), transforms="jit", **FEW)))
    assert "tracers remain in SEEN[" in said
    assert "raises un-nested already: ValueError: never ends" in said


@pytest.mark.slow
def test_donation_alone_asks_for_a_call_that_donates():
    """A function of arrays has no state, which is what is donated by default; of its arguments one can be."""
    with pytest.raises(CheckError, match=r"nothing was checked: donation .* \(donate is state\): donate what"):
        check(lambda x: x * 2, jnp.ones((2, 4)), invariants="donation", effort="quick")
    assert check(lambda x: x * 2, jnp.ones((2, 4)), invariants="donation", effort="quick", donate="all").ok


class Constant(nnx.Module):
    def __call__(self):
        return 3


LINEAR, ONES, TABLE = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), jnp.arange(4)


def test_an_invariant_that_no_nesting_could_break_is_in_the_summary():
    for transforms in ("eval_shape", "vmap,remat"):
        report = check(LINEAR, ONES, transforms=transforms, **FEW)
        assert report.ok
        assert "; memory and donation not asserted: no nesting has an outer jit" in str(report)
    said = "; donation not asserted: no program donates a buffer (donate is state)"
    assert said in str(check(lambda x: x * 2, ONES, transforms="jit", **FEW))
    assert "not asserted" not in str(check(lambda x: x * 2, ONES, transforms="jit", donate="all", **FEW))


@pytest.mark.parametrize("settings", [{}, {"donate": "none"}, {"invariants": "tracers"}, {"invariants": "memory"}])
def test_what_the_settings_leave_out_is_not_missed(settings):
    assert "not asserted" not in str(check(LINEAR, ONES, transforms="jit", **FEW, **settings))


def test_a_replay_says_that_the_un_nested_call_was_not_run():
    assert str(check(LINEAR, ONES, nesting="jit")).endswith("; updates not asserted: the un-nested call was not run")


def test_nothing_is_said_beside_a_failure():
    assert "not asserted" not in str(check(Keeps(), ONES, transforms="scan", **FEW))


@pytest.mark.parametrize("subject", [lambda: 1, lambda: "text", lambda: None, Constant(), lambda flag="on": flag])
def test_a_call_without_arrays_checks_nothing(subject):
    why = "nothing was checked: .* the call gets no array, .*: wrap a module, or a function that takes one"
    with pytest.raises(CheckError, match=why):
        check(subject, transforms="jit,scan", **FEW)


@pytest.mark.parametrize(
    "subject", [lambda: LINEAR(ONES), lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0)), lambda: TABLE, lambda: jnp.ones(3)]
)
def test_a_call_that_makes_its_arrays_is_checked_and_the_summary_says_what_it_gets(subject):
    report = check(subject, transforms="jit,scan", invariants="tracers,memory", **FEW)
    assert report.ok
    assert str(report).endswith("; called with no module and no array: <lambda>")


def test_a_body_that_expects_the_exception_of_the_call_is_checked_for_tracers():
    def refuses(x):
        raise ValueError(x.shape)

    found = call(refuses, ONES, nesting="jit")
    assert found.outcome.verdict == "failed"
    assert found.outcome.asserted == ("tracers",)
