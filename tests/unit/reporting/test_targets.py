"""What is said of the compilers of targets, from data alone: in the message, in the line of a test, and in reports."""

import json
from dataclasses import replace

import documents
import pytest
from test_records import violates

from pytest_nnxcheck import Nesting, Outcome, Violation
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.notes import Fact, texts
from pytest_nnxcheck.core.peak import Bound, Figures, OnTarget, Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.invariants.advice import MemoryWasted
from pytest_nnxcheck.invariants.donation import LostOnTarget
from pytest_nnxcheck.invariants.memory import (
    CopiedOnTarget,
    DoesNotFit,
    OverBudgetOnTarget,
    PeakOverBudget,
    StateCopied,
)
from pytest_nnxcheck.reporting import earlier, records, report, target_rows
from pytest_nnxcheck.reporting.violations import worded

GIB = 2**30
V5E = OnTarget("v5e", limit=round(15.75 * GIB), peak=round(3.1 * GIB), seconds=1.5)
H100 = OnTarget("h100", limit=round(59.33 * GIB), share=0.75, peak=20 * GIB, seconds=2.0)
LARGE = replace(V5E, fits=False, peak=round(18.2 * GIB))
REFUSED = replace(V5E, fits=False, peak=None, refused="RESOURCE_EXHAUSTED: used 18.83G of 15.75G hbm")
LEFT_OUT = OnTarget("h100", left_out="RuntimeError: cuDNN not found.")
LOST = replace(V5E, donated=12, lost=("model.kernel",), lost_too=2)
EVERYTHING = replace(LOST, split=Split(1, 2, 3, 4, 5), unpadded=GIB, copies=GIB, state=2 * GIB, wheel="libtpu 0.0.50.1")
SHARE = ", the 75 % of the memory that jax takes by default (XLA_PYTHON_CLIENT_MEM_FRACTION)"
FIGURES = Figures(Split(4 * GIB, 2 * GIB, 2 * GIB, GIB, 0), Bound(GIB, 2 * GIB, "2x"), GIB, 1, "returned")
BUDGET = Bound(GIB, 2 * GIB, written="2GiB")


def said(invariant, *findings, evidence=None):
    """The violation with its sentences."""
    violation = Violation(invariant, findings=findings)
    return worded(Outcome(Nesting(), "violated", (violation,), evidence=evidence)).violations[0]


def held(*on, nesting="jit", verdict="held", **more):
    """An outcome that has compiled for targets, and nothing else."""
    return Outcome(Nesting.parse(nesting), verdict, evidence=Evidence(targets=on), **more)


# --- the rows of a message


@pytest.mark.parametrize(
    "on, text",
    [
        (V5E, "fits: peak 3.1 GiB of 15.75 GiB"),
        (replace(LARGE, peak=V5E.limit + 2**24), "peak 15.77 GiB does not fit 15.75 GiB"),
        (replace(LARGE, unpadded=round(10.92 * GIB)), "peak 18.2 GiB does not fit 15.75 GiB; 40 % of it is padding"),
        (replace(LARGE, unpadded=17 * GIB), "peak 18.2 GiB does not fit 15.75 GiB"),
        (REFUSED, "does not fit 15.75 GiB: RESOURCE_EXHAUSTED: used 18.83G of 15.75G hbm"),
        (H100, f"fits: peak 20.0 GiB of 59.33 GiB{SHARE}"),
        (replace(H100, share=0.9), f"fits: peak 20.0 GiB of 59.33 GiB{SHARE}".replace("75 %", "90 %").replace(" by default", "")),
        # Before jax 0.7.2 there is the sum alone, which may be over a limit that the compiler of a TPU keeps.
        (replace(V5E, peak=17 * GIB), "fits: its compiler takes the program, whose totals sum up to 17.0 GiB"),
        (LEFT_OUT, "not checked: RuntimeError: cuDNN not found."),
        (OnTarget("h100", limit=GIB), "compiles; this compiler reports no totals"),
        (replace(V5E, copies=2 * GIB, state=GIB), "fits: peak 3.1 GiB of 15.75 GiB; 2.00 copies of the state"),
        (
            LOST,
            "fits: peak 3.1 GiB of 15.75 GiB; 9 of 12 donated leaves kept; 2 lose their buffer there and on the CPU",
        ),
        (
            replace(V5E, donated=1, lost_too=1),
            "fits: peak 3.1 GiB of 15.75 GiB; 0 of 1 donated leaves kept; 1 loses its buffer there and on the CPU",
        ),
        (replace(REFUSED, donated=12, state=GIB), target_rows.fit(REFUSED)),
    ],
)  # fmt: skip
def test_the_row_of_a_target(on, text):
    assert target_rows.rows([on]) == ((on.target, text),)


# --- what breaks


@pytest.mark.parametrize(
    "finding, summary",
    [
        (DoesNotFit(on=LARGE), "the program does not fit a v5e: peak 18.2 GiB of 15.75 GiB"),
        (
            DoesNotFit(on=replace(LARGE, target="v5e:2x4")),
            "the program does not fit a device of v5e:2x4: peak 18.2 GiB of 15.75 GiB",
        ),
        (DoesNotFit(on=replace(REFUSED, target="h100")), "the program does not fit an h100: it needs more than 15.75 GiB"),
        (
            OverBudgetOnTarget(on=replace(H100, peak=round(3.4 * GIB)), bound=BUDGET),
            "peak 3.4 GiB on h100 is over the budget of 2.0 GiB",
        ),
        (
            CopiedOnTarget(on=replace(V5E, copies=GIB, state=GIB)),
            "the program holds 1.00 extra copies of its state on v5e",
        ),
    ],
)  # fmt: skip
def test_what_breaks_memory_on_a_target(finding, summary):
    assert said("memory", finding).summary == summary
    mixed = said("memory", PeakOverBudget(figures=FIGURES), finding)
    assert mixed.summary == "peak 7.0 GiB is over the budget of 2.0 GiB"
    assert mixed.details[0] == ("", summary)


def test_donated_leaves_that_lose_their_buffer_on_a_target():
    several = replace(LOST, lost=("model.a", "model.b", "model.c", "model.d"))
    one = said("donation", LostOnTarget(on=LOST), LostOnTarget(on=several), evidence=Evidence(targets=(LOST,)))
    assert one.summary == "1 of 12 donated leaves loses its buffer on v5e: model.kernel"
    assert one.details == (
        ("lost", "4 of 12 donated leaves lose their buffer on v5e: model.a, model.b, model.c, ..."),
        *target_rows.rows([LOST]),
    )


def test_all_targets_have_a_row_after_the_figures_and_before_the_bytes_of_the_cpu():
    evidence = replace(documents.EVIDENCE, targets=(LARGE, LEFT_OUT))
    on_cpu = ("on the CPU", "peak 5.0 MiB; the rows below are of this program")
    both = said("memory", StateCopied(figures=FIGURES, bytes=GIB), DoesNotFit(on=LARGE), evidence=evidence)
    labels = ["", "peak", "budget", "expected", "state", "v5e", "h100", "on the CPU", "un-nested", "line"]
    assert [label for label, _ in both.details][: len(labels)] == labels
    assert on_cpu in both.details
    alone = said("memory", DoesNotFit(on=LARGE), evidence=evidence)
    assert [label for label, _ in alone.details][:4] == ["v5e", "h100", "on the CPU", "un-nested"]
    wasted = said("memory", MemoryWasted(advice=()), evidence=evidence)
    assert [label for label, _ in wasted.details][:2] == ["v5e", "h100"]
    nothing_measured = said("memory", DoesNotFit(on=LARGE), evidence=Evidence(targets=(LARGE,)))
    assert nothing_measured.details == target_rows.rows([LARGE])
    for_cpu_alone = said("memory", StateCopied(figures=FIGURES, bytes=GIB), evidence=documents.EVIDENCE)
    assert on_cpu not in for_cpu_alone.details
    assert said("tracers", evidence=evidence).details == ()


def test_what_targets_say_is_told_once_where_memory_and_donation_break():
    memory = Violation("memory", findings=(DoesNotFit(on=LARGE),))
    donation, tracers = Violation("donation", findings=(LostOnTarget(on=LOST),)), Violation("tracers")
    evidence = Evidence(targets=(LARGE,))
    both = worded(Outcome(Nesting(), "violated", (tracers, memory, donation), evidence=evidence))
    assert [violation.details for violation in both.violations] == [(), target_rows.rows([LARGE]), ()]
    alone = worded(Outcome(Nesting(), "violated", (tracers, donation), evidence=evidence))
    assert [violation.details for violation in alone.violations] == [(), target_rows.rows([LARGE])]


def test_a_budget_that_only_a_target_breaks_is_told_with_its_origin():
    assert said("memory", OverBudgetOnTarget(on=H100, bound=BUDGET)).details == (
        ("budget", "2.0 GiB (memory_budget 2GiB)"),
    )


def test_hints_of_targets():
    unfit, copied = DoesNotFit(on=LARGE), CopiedOnTarget(on=V5E, cause="returned")
    assert said("memory", unfit).hint.endswith("or shard over more devices: v5e:1x2, v5e:2x2")
    assert "leave the state out of what the call returns: its caller has it in" in said("memory", copied).hint
    assert (
        "leave the state out of what the call returns: its caller has it in"
        in said("memory", StateCopied(figures=FIGURES, bytes=GIB), unfit).hint
    )
    assert (
        said("memory", StateCopied(figures=replace(FIGURES, cause=""), bytes=GIB), unfit).hint
        == said("memory", unfit).hint
    )
    assert said("memory", CopiedOnTarget(on=V5E)).hint == ""


@pytest.mark.parametrize(
    "name, larger",
    [
        ("v5e:2x4", ("v5e:4x4", "v5e:4x8")),
        ("h100:8", ("h100:16", "h100:32")),
        ("v7x", ("v7x:1x1x1", "v7x:1x1x2")),
        ("v5e:16x16", ()),
    ],
)
def test_the_next_slices(name, larger):
    assert target_rows.larger_slices(name) == larger
    assert ("shard" in DoesNotFit(on=replace(LARGE, target=name)).cure()) == bool(larger)


@pytest.mark.parametrize(
    "fact, text",
    [
        (
            Fact("peak on target", ("v5e",), peaks=(round(18.2 * GIB), round(6.82 * GIB))),
            "the un-nested peak on v5e is 2.67 times the CPU's: 18.2 GiB and 6.8 GiB",
        ),
        (Fact("left out on target", ("h100",), "RuntimeError: no"), "not checked on h100: RuntimeError: no"),
        (
            Fact("nothing on target", ("v5e", "h100"), "no nesting with an outer jit was run"),
            "no program was compiled for v5e, h100: no nesting with an outer jit was run",
        ),
        (
            Fact("asks for devices", ("v5e",), "jax.devices() at model.py:219"),
            "jax.devices() at model.py:219 is asked while the call is traced, and answers with what jax has here: on v5e another branch may run",
        ),
    ],
)
def test_facts_of_targets(fact, text):
    assert texts([fact]) == (text,)


# --- the line of a test, and JUnit


def test_the_line_of_a_test_has_the_worst_program_of_each_target():
    refused = held(REFUSED, LEFT_OUT, nesting="jit > scan")
    checked = report.Report((held(V5E, H100), held(LARGE, LEFT_OUT, nesting="jit > vmap"), refused), Settings())
    assert dict(report.properties(report.head(checked)))["nnx_targets"] == (
        "does not fit v5e: 18.2 of 15.75 GiB; fits h100: 20.0 of 59.33 GiB"
    )
    assert str(checked) == ("3 nestings: 3 passed; does not fit v5e: 18.2 of 15.75 GiB; fits h100: 20.0 of 59.33 GiB")
    assert "nnx_targets" not in dict(report.properties(report.head(report.Report((held(),), Settings()))))


@pytest.mark.parametrize(
    "on, text",
    [
        (replace(V5E, peak=2**29), "fits v5e: 512.0 MiB of 15.75 GiB"),
        (REFUSED, "does not fit v5e: more than 15.75 GiB"),
        (LEFT_OUT, "not checked on h100"),
        (OnTarget("h100", limit=GIB), "compiles for h100"),
    ],
)
def test_a_target_in_a_few_words(on, text):
    assert target_rows.brief([on]) == text


# --- two calls in one test


def test_of_two_calls_the_worse_program_of_each_target_is_kept():
    small, large = held(V5E, LEFT_OUT, peak=5), held(LARGE, H100)
    for both in (report.worse(small, large), report.worse(large, small)):
        assert {on.target: (on.peak, on.seconds) for on in both.evidence.targets} == {
            "v5e": (LARGE.peak, 3.0),
            "h100": (H100.peak, 2.0),
        }


@pytest.mark.parametrize(
    "better, worse",
    [
        (V5E, replace(V5E, peak=4 * GIB)),
        (V5E, REFUSED),
        (LEFT_OUT, OnTarget("h100", limit=GIB)),
    ],
)
def test_which_program_is_worse(better, worse):
    for order in ((better, worse), (worse, better)):
        assert report.worst_of_targets(order) == (worse,)


def test_the_targets_of_a_call_are_kept_beside_the_evidence_of_another():
    broken = Outcome(Nesting.parse("jit"), "violated", (Violation("tracers"),), evidence=documents.EVIDENCE)
    for both in (report.worse(broken, held(V5E)), report.worse(held(V5E), broken)):
        assert both.evidence == replace(documents.EVIDENCE, targets=(V5E,))
    failed = Outcome(Nesting.parse("jit"), "failed")
    assert report.worse(failed, held(V5E)).evidence == Evidence(targets=(V5E,))


# --- reports


def test_a_target_survives_the_trip_through_json():
    found = documents.document(documents.ended("t.py::t", [held(EVERYTHING, LEFT_OUT)]))
    text = records.render(found)
    assert violates(json.loads(text)) == []
    assert earlier.parse(text) == found
    assert found.nestings[0].targets == (EVERYTHING, LEFT_OUT)
