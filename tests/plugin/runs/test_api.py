"""The machinery of examples outside pytest: `check` and `assert_invariants`, with the engine of fake_engine.py."""

import copy
import inspect
import re

import hypothesis
import pytest
from checking import Example, nnx_wrap
from fake_engine import RUNS, Model, has
from flax import nnx
from hypothesis import strategies as st

import pytest_nnxcheck
from pytest_nnxcheck import CheckError, InvariantViolation, TracerResidue, Wrapped, assert_invariants, check
from pytest_nnxcheck.core.outcome import BodyFinished, BodyStarted, NestingFinished, NestingStarted
from pytest_nnxcheck.core.settings import DEFAULTS
from pytest_nnxcheck.runner import hypothesis_test
from pytest_nnxcheck.runner.run import Run

pytestmark = pytest.mark.usefixtures("fake")
UN_NESTED = has()


def verdicts(report):
    return {str(outcome.nesting): outcome.verdict for outcome in report.outcomes}


def test_invariants_broken_together_are_shown_together_in_the_order_of_the_rows():
    report = check(Model(tracers=has("scan"), memory=has("scan")), 1, sweep="singles", max_examples=0)
    assert not report.ok
    rows = [line.split()[0] for line in str(report).splitlines() if re.match(r"  \w", line)]
    assert rows == ["nesting", "tracers", "hint", "leaked", "memory", "hint", "leaked", "steps", "tried", "replay"]


def test_a_drawn_violation_shrinks_to_the_smallest():
    report = check(Model(tracers=lambda nesting: len(nesting) == 3), 1, sweep="singles", max_examples=20)
    assert str(report.broken[0].nesting) == "jit > jit > jit"


@pytest.mark.parametrize("name", ["tracers", "memory", "donation"])
def test_assert_invariants_raises_the_type_of_the_invariant(name):
    with pytest.raises(InvariantViolation) as caught:
        assert_invariants(Model(**{name: has("jit")}), 1)
    assert (
        type(caught.value).__name__
        == {"tracers": "TracerResidue", "memory": "MemoryBudgetExceeded", "donation": "DonationLost"}[name]
    )
    assert str(caught.value) == str(check(Model(**{name: has("jit")}), 1))
    assert str(caught.value.outcome.nesting) == "jit"


def test_a_refused_closure_style_is_probed_once_and_drawn_no_more():
    report = check(Model(rejected=lambda nesting: "[closure]" in str(nesting)), 1, max_examples=50)
    assert [text for text in RUNS if "[closure]" in text] == ["eval_shape[closure]"]
    assert sum(outcome.verdict == "rejected" for outcome in report.outcomes) == 6
    assert any("[jax_closure]" in text for text in RUNS[25:])
    (note,) = report.notes
    assert note == (
        "closure refused by this flax, as for every module that a call changes, or hands to a transform of its own:"
        " eval_shape[closure] raises TraceContextError: other trace level; drawn no more"
    )
    assert report.ok


def test_a_rejection_can_be_made_a_failure():
    report = check(Model(rejected=has("eval_shape[closure]")), 1, on_rejection="fail")
    assert not report.ok
    with pytest.raises(InvariantViolation, match=r"nnx nesting not supported by flax: eval_shape\[closure\]"):
        assert_invariants(Model(rejected=has("eval_shape[closure]")), 1, on_rejection="fail")


def test_every_nesting_rejected_is_an_error():
    why = r"nnx nothing was checked: every nesting was rejected \(TraceContextError: other trace level\)"
    with pytest.raises(CheckError, match=why):
        check(Model(rejected=lambda nesting: len(nesting) > 0), 1, styles="closure")
    with pytest.raises(CheckError, match=why):
        check(Model(rejected=has("jit[closure]")), 1, nesting="jit[closure]")


def test_one_nesting_alone():
    report = check(Model(tracers=has("scan")), 1, nesting="jit > scan[argument]")
    assert RUNS == ["jit > scan"]
    assert "jit > scan   replayed, no other was run" in str(report)
    assert verdicts(check(Model(), 1, nesting="un-nested")) == {"un-nested": "held"}


def test_a_nested_failure_is_reported_and_raised():
    model = Model(failed=has("scan"))
    report = check(model, 1)
    assert verdicts(report)["scan"] == "failed"
    assert str(report).startswith("nnx nesting raised: scan\n")
    with pytest.raises(TypeError, match="carry") as caught:
        assert_invariants(model, 1)
    told, around = caught.value.__notes__
    assert "nesting     scan   un-nested, the same test body passed" in told
    assert "replay      check(..., nesting='scan')" in told
    assert around.splitlines() == [
        "  passes      scan[functional], scan[closure], scan[jax_closure]   (of 3",
        "              similar nestings)",
        "  steps       un-nested passes, scan raises",
    ]


def test_a_replay_that_raises_claims_nothing_of_the_un_nested_call():
    with pytest.raises(TypeError, match="carry") as caught:
        assert_invariants(Model(failed=has("scan")), 1, nesting="scan")
    assert "nesting     scan   the un-nested call was not run" in caught.value.__notes__[0]


def test_keyword_arguments_of_the_subject():
    def subject(x, *, scale):
        return x * scale

    assert check(subject, 1, kwargs={"scale": 2}, sweep="probes").ok
    with pytest.raises(CheckError, match=r"check\(\.\.\., scale=\.\.\.\): unknown setting 'scale'"):
        check(subject, 1, scale=2)
    with pytest.raises(
        CheckError, match=r"check\(\.\.\., memory_budget=\.\.\.\): memory_budget='5MBfoo' is not a size"
    ):
        check(Model(), 1, memory_budget="5MBfoo")


def test_a_wrapped_object_is_the_subject_in_all_but_the_call():
    module = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    wrapped = nnx_wrap(module)
    assert wrapped.kernel is module.kernel
    assert wrapped.out_features == 3
    wrapped.out_features = 4
    assert module.out_features == 4
    assert inspect.signature(wrapped) == inspect.signature(module)
    assert repr(wrapped) == "nnx_wrap(Linear)"
    assert nnx_wrap(wrapped).__wrapped__ is module
    del wrapped.out_features
    assert not hasattr(module, "out_features")
    again = copy.copy(wrapped)
    assert isinstance(again, Wrapped)
    assert again.__wrapped__ is module
    with pytest.raises(AttributeError, match="no_such"):
        _ = wrapped.no_such


def test_a_wrapped_function_keeps_its_name_and_its_text():
    def train_step(model, batch):
        """One step."""

    wrapped = nnx_wrap(train_step)
    assert (wrapped.__name__, wrapped.__doc__) == ("train_step", "One step.")
    assert list(inspect.signature(wrapped).parameters) == ["model", "batch"]
    assert isinstance(wrapped, Wrapped)


def test_a_wrapped_object_called_outside_of_a_test_says_what_to_do():
    with pytest.raises(CheckError, match="called outside of a test with @pytest.mark.nnx_invariants"):
        nnx_wrap(Model())(1)


def test_a_wrapped_argument_is_unwrapped():
    inner = Model()

    def step(model, x):
        assert model is inner
        return x

    assert check(step, nnx_wrap(inner), 1, sweep="probes").ok


def test_check_inside_a_test_of_hypothesis():
    @hypothesis.settings(suppress_health_check=list(hypothesis.HealthCheck), max_examples=3)
    @hypothesis.given(st.integers())
    def property_test(x):
        assert check(Model(), x, sweep="probes", max_examples=2).ok

    property_test()


def test_public_names_are_lazy_and_complete():
    assert set(pytest_nnxcheck.__all__) <= set(dir(pytest_nnxcheck))
    assert pytest_nnxcheck.check is check
    assert pytest_nnxcheck.TracerResidue is TracerResidue
    with pytest.raises(AttributeError, match="no attribute 'chek'"):
        _ = pytest_nnxcheck.chek


def run_of(step, *listeners):
    def body():
        step(1)

    run = Run(DEFAULTS)
    run.listeners += listeners
    hypothesis_test.build(body, run, ())()
    return run


def test_known_causes_are_told_even_un_nested():
    with pytest.raises(TypeError) as caught:
        check(Model(failed=UN_NESTED, causes=("the loop at m.py:3 captured the model",)), 1)
    assert caught.value.__notes__ == ["  note        the loop at m.py:3 captured the model"]


def test_every_execution_of_the_body_is_an_example_of_its_own_which_ends(monkeypatch):
    ended = []
    monkeypatch.setattr(Example, "__exit__", lambda example, *_: ended.append(example))
    run = run_of(nnx_wrap(Model()))
    assert len({id(example) for example in ended}) == len(ended) == len(RUNS)
    assert all(example.memo is run.memo for example in ended)


def test_listeners_hear_of_every_nesting_and_of_its_body():
    heard = []
    run = run_of(nnx_wrap(Model()), heard.append)
    assert [type(event) for event in heard] == [NestingStarted, BodyStarted, BodyFinished, NestingFinished] * len(RUNS)
    assert [str(event.nesting) for event in heard[::4]] == RUNS
    assert [event.outcome for event in heard[3::4]] == list(run.outcomes.values())
    assert [event.drawn for event in heard[::4]] == [False] * (len(RUNS) - 3) + [True] * 3
    assert all(event.nesting in bodies.outcomes for bodies, event in zip(heard[2::4], heard[3::4], strict=True))
