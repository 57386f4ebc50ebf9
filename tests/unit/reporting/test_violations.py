"""What is said of findings, from their data alone: how many have a row, and the sentences that no model of the other tests comes to.

The other sentences are shown where they are true: in the documents, which are executed, and in tests/engine.
"""

from dataclasses import replace
from typing import get_args

import pytest

from pytest_nnxcheck import Layer, Nesting, Outcome, Violation
from pytest_nnxcheck.core.facts import ArrayType, Leak
from pytest_nnxcheck.core.nesting import Misfit, MisfitKind
from pytest_nnxcheck.core.notes import FACTS, CapturedBy, CapturedNode, FactKind, captured_by
from pytest_nnxcheck.core.peak import Bound, Figures, Split
from pytest_nnxcheck.invariants.advice import HeldTwice, MemoryWasted
from pytest_nnxcheck.invariants.donation import LostBuffer, UpdateDropped, ViewedBuffer
from pytest_nnxcheck.invariants.memory import ConstantsCaptured, PeakOverBudget, StateCopied
from pytest_nnxcheck.invariants.parity import ValueDiffers
from pytest_nnxcheck.invariants.tracers import StateTouched, TracerLeft, asks_to_hand_on
from pytest_nnxcheck.reporting import left_out, report
from pytest_nnxcheck.reporting.violations import worded
from pytest_nnxcheck.values.effects import Difference

KIB = 1024
FLOAT = ArrayType("float32", (4, 64))
CLOSURE = Layer("jit", "closure")
FIGURES = Figures(
    Split(4 * KIB, 2 * KIB, 8 * KIB, KIB, 0), Bound(6 * KIB, 12 * KIB, "2x"), 4 * KIB, 1, "scan writes back, checkpoint"
)
LEAK = Leak("model.last", "attribute", "DynamicJaxprTracer", "float32[3]", "m.py:7", str(CLOSURE), "module")


def said(invariant, *findings, explained=()):
    """The violation with its sentences."""
    violation = Violation(invariant, findings=findings, explained=explained)
    return worded(Outcome(Nesting(), "violated", (violation,))).violations[0]


def left(*leaks):
    return said("tracers", *(TracerLeft(leak.path, leak=leak) for leak in leaks))


def differs(path, **difference):
    return ValueDiffers(path, difference=Difference(path, **difference))


def test_the_seconds_of_a_nesting_add_up():
    held, violated = Outcome(Nesting(), "held", seconds=5.0), Outcome(Nesting(), "violated", seconds=0.5)
    assert report.worse(held, violated).seconds == report.worse(violated, held).seconds == 5.5
    assert report.worse(held, violated).verdict == "violated"


def test_findings_without_a_row_are_counted():
    touched = said("tracers", *(StateTouched(f"model.w{n}", layer=CLOSURE) for n in range(40)))
    assert touched.details[-2:] == (("", "and 34 more"), ("leaked by", "jit[closure]"))
    assert ("", "and 2 more") in left(*[LEAK] * 8).details
    touched = said("tracers", *(StateTouched(f"model.w{n}", layer=CLOSURE) for n in range(40)))
    assert touched.details[-2:] == (("", "and 34 more"), ("leaked by", "jit[closure]"))
    dropped = said("donation", *[UpdateDropped("optimizer.step")] * 13)
    assert len(dropped.details) == 12, "the first is the summary"
    assert dropped.details[-1] == ("", "and 1 more")
    assert len(said("donation", *[UpdateDropped("optimizer.step")] * 12).details) == 11


@pytest.mark.parametrize(
    "holder, layer, is_asked",
    [
        ("Param", CLOSURE, True),
        ("Param", Layer("jit"), False),
        ("Param", None, False),
        ("list", CLOSURE, False),
        ("global", CLOSURE, False),
    ],
)
def test_handing_the_module_on_is_asked_of_what_a_closure_holds(holder, layer, is_asked):
    violation = left(replace(LEAK, holder=holder, layer=str(layer or "")))
    assert asks_to_hand_on(violation) == is_asked
    assert (violation.hint == captured_by("jit")) == is_asked


def test_all_that_broke_the_bound_comes_before_the_figures():
    over, copied = PeakOverBudget(figures=FIGURES), StateCopied(figures=FIGURES, bytes=6 * KIB)
    violation = said("memory", over, copied, ConstantsCaptured(figures=FIGURES, bytes=64 * KIB))
    assert violation.summary == "peak 13.0 KiB is over the budget of 12.0 KiB"
    assert [label for label, _ in violation.details] == ["", "", "peak", "budget", "expected", "state"]
    captured = "the call captures 64.0 KiB of constants; XLA keeps 0 B of that in this program"
    assert violation.details[1] == ("", captured)
    assert "scan with jax.lax.scan over the state of nnx.split, with nnx.merge in" in violation.hint
    several = said("memory", PeakOverBudget(figures=replace(FIGURES, devices=8, cause="")))
    assert several.details[-1] == ("devices", "8, the bytes are those of one")
    assert several.hint == ""


@pytest.mark.parametrize(
    "bound, row",
    [
        (Bound(1, KIB, "2x", default=True), "1.0 KiB (2x the expected peak + 64 KiB, the default)"),
        (Bound(1, KIB), "1.0 KiB (memory_budget)"),
        (Bound(1, 2000, written="2KB"), "2.0 KiB (memory_budget 2KB)"),
        (
            Bound(1, 2000 + KIB, axes=KIB, written="2KB"),
            "3.0 KiB (memory_budget 2KB + 1.0 KiB for the nesting's own axes)",
        ),
        (Bound(1, 3 * KIB, axes=KIB), "3.0 KiB (memory_budget 2.0 KiB + 1.0 KiB for the nesting's own axes)"),
    ],
)
def test_where_a_budget_comes_from(bound, row):
    assert dict(said("memory", PeakOverBudget(figures=replace(FIGURES, bound=bound))).details)["budget"] == row


def test_a_piece_of_advice_is_given_once():
    piece = HeldTwice((0, 1, 2), "joined", "m.py:3", ("float32[64]",), KIB, ("model.q", "model.k", "model.v"))
    text = "1.0 KiB: all of model.q and 2 more once more, joined into one array; keep them in one Variable, or take each of them separately (m.py:3)"
    assert said("memory", MemoryWasted(advice=(piece, piece))).details == (("advice", text),)


def test_a_view_of_a_donated_buffer():
    viewed = said("donation", UpdateDropped("optimizer.step"), ViewedBuffer("c", holder="model.view"))
    assert viewed.details == (("viewed", "c is viewed by model.view: its buffer cannot be reused"),)
    assert (
        "copy the view: np.array(view), or drop it before the step"
        in said("donation", ViewedBuffer("c", holder="model.view")).hint
    )


@pytest.mark.parametrize(
    "facts, why",
    [
        ({"cause": "not reused", "abstract": True}, "no output of the compiled program is aliased with it"),
        ({"cause": "not reused", "pointers": (255,)}, "not reused by XLA (no buffer after)"),
        (
            {"cause": "not reused", "pointers": (255, 256), "debug_nans": True},
            "jax_debug_nans keeps the old value (pointer 0xff before, 0x100 after)",
        ),
    ],
)
def test_why_a_buffer_was_lost(facts, why):
    lost = LostBuffer("model.w", type=FLOAT, **facts)
    assert said("donation", lost).summary == f"model.w   float32[4,64]   {why}"


@pytest.mark.parametrize(
    "finding, summary, row",
    [
        (
            differs("model.w", label="missing", of="Param"),
            "model.w is missing: the call adds it",
            ("missing", "model.w   Param after the run"),
        ),
        (
            differs("model.w", label="added", of="Param"),
            "model.w was added: the call adds no such leaf",
            ("added", "model.w   Param that the call does not add"),
        ),
        (
            differs("model.w", label="deleted", of="Param", type="int32[2]"),
            "model.w was donated, and no new value took its place",
            ("deleted", "model.w   Param int32[2] was donated, and no new value took its place"),
        ),
        (
            differs("model.n", label="attribute", of="attribute", type="int", want="1", have="nothing"),
            "model.n: expected 1, as after the same calls one by one (a loop makes one call in each step), got nothing",
            ("attribute", "model.n   expected 1, got nothing"),
        ),
    ],
)
def test_a_value_that_differs(finding, summary, row):
    violation = said("parity", finding)
    assert (violation.summary, violation.details) == (summary, (row,))


def test_what_explains_a_failure_becomes_rows_of_a_violation_and_notes_of_an_exception():
    captured = CapturedBy("jit", "m.py:3", (CapturedNode("model", "Linear"), CapturedNode("self.block", "Block")))
    text = "jit at m.py:3 captured model (Linear), self.block (Block); pass the module as an argument: nnx.jit(f)(model, block, x)"
    touched = StateTouched("model.w", layer=Layer("eval_shape"))
    assert said("tracers", touched, explained=(captured,)).details[-1] == ("cause", text)
    assert said("tracers", touched, explained=("TypeError: no",)).details[-1] == ("raises", "TypeError: no")
    failed = worded(Outcome(Nesting(), "failed", notes=("first",), facts=(LEAK, captured)))
    assert failed.notes == ("first", "tracer left in model.last: float32[3], created at m.py:7", text)


def test_a_violation_that_found_nothing_keeps_the_text_that_it_was_made_with():
    violation = Violation("memory", "over the budget", (("peak", "1 B"),), "use less")
    assert worded(Outcome(Nesting(), "violated", (violation,))).violations == (violation,)


def test_every_kind_of_misfit_and_of_fact_has_its_sentence():
    assert set(left_out.MISFITS) == {*get_args(MisfitKind)}
    assert set(FACTS) == {*get_args(FactKind)}


def unfit(nesting, misfit, **more):
    return Outcome(Nesting.parse(nesting), "rejected", unfit=True, misfit=misfit, **more)


def test_layers_that_cannot_take_a_call_for_one_reason_share_a_line():
    scan, loop, cond = map(Layer, ("scan", "while_loop", "cond"))
    added = Misfit("added", "model.hidden", layer=scan)
    outcomes = (
        unfit("scan", added),
        unfit("while_loop", replace(added, layer=loop)),
        unfit("jit > scan", added),
        unfit("cond", replace(added, branches=True, layer=cond)),
        unfit("grad", Misfit("no parameter"), reason="known (grad)"),
        unfit("jit > vmap", None, reason="not run: vmap is left out"),
        Outcome(Nesting.parse("remat"), "held"),
    )
    assert left_out.layers_left_out(outcomes) == [
        "scan, while_loop left out: each carries the state, and the call adds model.hidden to it",
        "cond left out: it hands on the state where it skips the call, and the call adds model.hidden to it",
        "grad left out: the state holds no floating point nnx.Param to differentiate by",
    ]
    assert worded(outcomes[2]).reason == "scan carries the state, and the call adds model.hidden to it"
    assert left_out.layers_left_out(outcomes[2:3]) == [f"jit > scan left out: {worded(outcomes[2]).reason}"]
