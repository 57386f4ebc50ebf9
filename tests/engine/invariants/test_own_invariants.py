"""Invariants of the user's own: what they are handed, what they may give, and what is said where they fail."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import HEALTHY, WIDTH, assign, numbers, rngs

from pytest_nnxcheck import (
    Breach,
    CheckError,
    Invariant,
    InvariantViolation,
    assert_invariants,
    check,
    register_invariant,
    register_transform,
)
from pytest_nnxcheck.core.notes import texts

INPUT = numbers((3, WIDTH))
pytestmark = pytest.mark.usefixtures("forgotten")


def linear():
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs())


def keeps_types(call):
    """A leaf keeps its type."""
    for path, leaf in call.after.items():
        if path in call.before and leaf.dtype != call.before[path].dtype:
            yield Breach(
                path, summary=f"{path} became {leaf.dtype}", details=[("kind", call.kinds[path])], hint="cast it back"
            )


class Promotes(nnx.Module):
    def __init__(self, dtype):
        self.one, self.two = (nnx.BatchStat(jnp.ones(WIDTH, dtype)) for _ in range(2))

    def __call__(self, x):
        for leaf in (self.one, self.two):
            assign(leaf, leaf[...] + x.mean(axis=0))
        return x


@pytest.mark.parametrize("nesting", ["un-nested", "jit", "scan[functional]", "jit > vmap", "remat > jit"])
def test_a_broken_and_a_healthy_twin(nesting):
    register_invariant(Invariant("keeps_types", keeps_types))
    found = call(Promotes(jnp.bfloat16), INPUT, nesting=nesting, invariants="keeps_types")
    if not found.outcome.unfit:  # a loop refuses a carry of another type
        assert broken(found) == ["keeps_types"], found.outcome
        (violation,) = found.outcome.violations
        assert (violation.summary, violation.hint) == ("model.one became float32", "cast it back")
        assert violation.details == (
            ("where", "model.one"),
            ("kind", "BatchStat"),
            ("also", "model.two became float32"),
            ("kind", "BatchStat"),
        )
    found = call(Promotes(jnp.float32), INPUT, nesting=nesting, invariants="keeps_types")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.slow
def test_the_message_shrinks_and_the_exception_has_the_outcome():
    register_invariant(
        Invariant("no_loops", lambda call: [Breach(summary="too deep")] if len(call.nesting) > 1 else [])
    )
    with pytest.raises(InvariantViolation) as caught:
        assert_invariants(linear(), INPUT, invariants="no_loops", transforms="jit,remat,scan", styles="argument")
    lines = [" ".join(line.split()) for line in str(caught.value).splitlines()]
    assert lines[0] == "nnx invariant broken: no_loops"
    assert "no_loops too deep" in lines
    assert any(line == "program none: no program can look for no_loops without the plugin" for line in lines)
    assert caught.value.outcome.violations[0].invariant == "no_loops"
    assert len(caught.value.outcome.nesting) == 2


def test_what_an_invariant_is_handed():
    seen = {}
    register_invariant(Invariant("looks", lambda call: seen.update({str(call.nesting): call}) or ()))
    for nesting in ("un-nested", "jit > scan"):
        case = HEALTHY["batch_norm_train"]()
        assert call(case.subject, *case.args, nesting=nesting, invariants="looks,memory").outcome.verdict == "held"
    un_nested, scanned = seen["un-nested"], seen["jit > scan"]
    assert un_nested.before.keys() == un_nested.after.keys() == scanned.after.keys() == scanned.kinds.keys()
    assert un_nested.kinds["model.mean"] == "BatchStat"
    assert un_nested.outputs["output"].shape == scanned.outputs["output"].shape
    assert (un_nested.memory, un_nested.compiled) == (None, None)
    assert scanned.memory.peak > 0

    def made(model, x):
        return nnx.Linear(2, 3, rngs=nnx.Rngs(0)), model(x)

    assert call(made, nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones(2), invariants="looks").outcome.verdict == "held"
    assert [array.shape for array in seen["un-nested"].outputs.values()] == [(3,), (2, 3), (2,)], "one of them is lost"
    assert "ENTRY" in scanned.compiled.as_text()
    assert not scanned.abstract


def test_one_about_compiled_programs_is_asked_under_a_jit_alone():
    seen = []
    register_invariant(Invariant("compiled", lambda call: seen.append(str(call.nesting)) or (), compiled=True))
    for nesting in ("un-nested", "remat > jit", "jit > remat"):
        call(linear(), INPUT, nesting=nesting, invariants="compiled")
    assert seen == ["jit > remat"]


@pytest.mark.slow
@pytest.mark.parametrize("values", [True, False])
def test_values_are_there_whether_it_says_so_or_not(values):
    ran = []

    def sums(call):
        ran.append(str(call.nesting))
        if sum(float(jnp.sum(leaf)) for leaf in [*call.after.values(), *call.outputs.values()]) > 1e9:
            yield Breach(summary="large")

    register_invariant(Invariant("sums", sums, values=values))
    case = HEALTHY["batch_norm_train"]()
    report = check(case.subject, *case.args, invariants="sums", styles="argument", max_examples=0, sweep="singles")
    assert report.ok, str(report)
    assert {"un-nested", "scan", "jit > scan"} & {*ran} == {"un-nested", "scan"}


def test_a_call_that_is_abstract_is_not_shown_to_one_that_reads_values():
    seen = []
    register_invariant(Invariant("reads", lambda call: seen.append(call) or (), values=True))
    register_invariant(Invariant("types", lambda call: seen.append(call.abstract) or ()))
    model = nnx.eval_shape(linear)
    found = call(model, jax.ShapeDtypeStruct(INPUT.shape, INPUT.dtype), nesting="jit", invariants="reads,types")
    assert found.outcome.verdict == "held"
    assert seen == [True]
    assert texts(found.facts.notes) == (
        "reads not asserted: the state or the inputs are abstract, and nothing was run",
    )


@pytest.mark.slow
def test_one_that_is_on_by_default_is_in_every_check_from_there_on():
    assert "asked" not in {v.invariant for v in check(linear(), INPUT, nesting="jit").violations}
    register_invariant(Invariant("asked", lambda call: [Breach(summary="always")], default=True))
    assert [v.invariant for v in check(linear(), INPUT, nesting="jit").violations] == ["asked"]
    assert check(linear(), INPUT, nesting="jit", invariants="tracers").ok


# --- what raises, or gives something else


def raises(call):
    raise KeyError("gone")


def yields_then_raises(call):
    yield Breach(summary="first")
    raise ValueError("then")


@pytest.mark.slow
@pytest.mark.parametrize(
    "function, told",
    [
        (raises, "raised KeyError: 'gone' under"),
        (yields_then_raises, "raised ValueError: then under"),
        (lambda call: None, "raised TypeError: "),
        (lambda call: 3, "raised TypeError: "),
        (lambda call: "broken", "gave 'broken', where breaches are expected: write yield Breach(summary="),
        (lambda call: ["broken"], "gave ['broken'], where breaches are expected"),
        (lambda call: [Breach(summary=3)], "gave [Breach("),
        (lambda call: [Breach(summary="x", details=["row"])], "gave [Breach("),
        (lambda call: [Breach(summary="x", details=5)], "gave [Breach("),
        (lambda call: True, "raised TypeError: "),
    ],
)
def test_the_error_names_the_invariant_and_its_place_and_nothing_is_lost(function, told):
    register_invariant(Invariant("mine", function))
    found = call(linear(), INPUT, invariants="tracers,mine")
    assert found.outcome.verdict == "failed"
    assert isinstance(found.error, CheckError)
    place = f"test_own_invariants.py:{function.__code__.co_firstlineno})"
    assert "the invariant 'mine' (" in str(found.error)
    assert f"{place} {told}" in str(found.error)
    with pytest.raises(CheckError, match="the invariant 'mine'"):
        check(linear(), INPUT, nesting="jit > scan", invariants="tracers,mine")


def test_an_object_that_raises_where_it_is_read_is_an_error_of_the_invariant_that_asked():
    class Unreadable(int):
        """A plain value that has no text."""

        def __repr__(self):
            raise ValueError("no text")

    class Keeps(nnx.Module):
        def __init__(self):
            self.number = Unreadable(3)

        def __call__(self, x):
            return x * 2

    register_invariant(Invariant("mine", lambda call: []))
    for nesting in ("un-nested", "remat"):
        told = rf"the invariant 'mine' \(.*test_own_invariants.py:\d+\) raised ValueError: no text under {nesting}"
        with pytest.raises(CheckError, match=told):
            check(Keeps(), INPUT, nesting=nesting, invariants="mine")


def test_what_another_invariant_found_is_told_before_the_error():
    register_invariant(Invariant("mine", raises))
    found = call(linear(), INPUT, nesting="jit", invariants="memory,mine", memory_budget="1B")
    assert broken(found) == ["memory"]
    assert any("the invariant 'mine'" in note for note in found.outcome.notes)


@pytest.mark.parametrize(
    "invariant, message",
    [
        ("mine", "register_invariant got 'mine', write pytest_nnxcheck.Invariant('name', function)"),
        (Invariant("mine", 3), "the function of the invariant 'mine' is 3, write a function of a call"),
        (Invariant("two words", raises), "'two words' is no name of an invariant"),
        (Invariant(3, raises), "3 is no name of an invariant"),
        (Invariant("memory", raises), "'memory' is the name of an invariant already"),
        (Invariant("scan", raises), "'scan' is the name of a transform already"),
    ],
)
def test_what_cannot_be_registered(invariant, message):
    with pytest.raises(CheckError) as caught:
        register_invariant(invariant)
    assert message in str(caught.value)


def test_a_name_taken_twice_names_both_places():
    register_invariant(Invariant("mine", raises))
    register_invariant(Invariant("mine", raises, values=True))
    with pytest.raises(CheckError, match="handed in twice, from .*test_own.*py:.* and from .*test_own.*py:"):
        register_invariant(Invariant("mine", keeps_types))
    with pytest.raises(CheckError, match="'mine' is the name of an invariant already"):
        register_transform("mine")(lambda f: f)


# --- in a suite

CONFTEST = """
from pytest_nnxcheck import Breach, Invariant

def mine(call):
    {body}

def pytest_nnx_invariants(config):
    return [Invariant("mine", mine, default=True)]
"""
TEST = """
import jax.numpy as jnp
import pytest
from flax import nnx

@pytest.mark.nnx_invariants(styles="argument", max_examples=0, sweep="singles")
def test_linear(nnx_wrap):
    nnx_wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))(jnp.ones((1, 2)))
"""
PROMOTES = """
class Promotes(nnx.Module):
    def __init__(self):
        self.mean = nnx.BatchStat(jnp.ones(2, jnp.bfloat16))

    def __call__(self, x):
        set_value = getattr(self.mean, "set_value", lambda value: setattr(self.mean, "value", value))
        set_value(self.mean[...] + x.mean(0))
        return x

"""


@pytest.fixture
def suite(pytester, inner_args):
    def run(*args, body="return []", conftest=CONFTEST, test=TEST):
        pytester.makeconftest(conftest.replace("{body}", body))
        pytester.makepyfile(test_linear=test)
        start = pytester.runpytest_subprocess if "-n1" in args else pytester.runpytest_inprocess
        return start(*inner_args, *args)

    return run


@pytest.mark.parametrize("workers", [[], pytest.param(["-n1"], marks=pytest.mark.slow)])
def test_one_that_raises_shows_the_users_traceback_and_none_of_ours(suite, pytester, workers):
    result = suite(*workers, "--nnx-report=out.json", body="raise KeyError('gone')")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*KeyError: 'gone'", "*the invariant 'mine' (conftest.py:3) raised KeyError: 'gone' under un-nested"]
    )
    assert "pytest_nnxcheck/" not in result.stdout.str()
    assert "During handling of" not in result.stdout.str()
    (nesting,) = json.loads((pytester.path / "out.json").read_text())["nestings"]
    assert "the invariant 'mine' (conftest.py:3) raised KeyError" in nesting["reason"]


@pytest.mark.slow
def test_the_conftest_of_the_documents_finds_what_it_is_written_for(suite):
    page = (Path(__file__).parents[3] / "docs" / "own_invariants.md").read_text()
    conftest = page.partition("```python\n")[2].partition("```")[0]
    suite(conftest=conftest).assert_outcomes(passed=1)
    promoting = TEST.replace("nnx.Linear(2, 2, rngs=nnx.Rngs(0))", "Promotes()").replace(
        "@pytest", PROMOTES + "@pytest"
    )
    result = suite("--nnx-nesting=jit", conftest=conftest, test=promoting)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["E*nnx invariant broken: *", "E*model.mean became float32", "E*cast it back to bfloat16"]
    )
