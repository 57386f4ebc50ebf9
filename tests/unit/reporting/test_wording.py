"""What is said of each finding, from its data alone."""

from dataclasses import replace
from typing import get_args

import pytest

from pytest_nnxcheck.core.facts import ArrayType, HeldTwice, LargeLine, Leak, Recast, Saved, Stack
from pytest_nnxcheck.core.nesting import Layer, Misfit, MisfitKind, Nesting
from pytest_nnxcheck.core.notes import CapturedBy, CapturedNode, FactKind
from pytest_nnxcheck.core.outcome import (
    ConstantsCaptured,
    LostBuffer,
    MadeInEndedTrace,
    MemoryWasted,
    Outcome,
    PeakOverBudget,
    SharedBuffer,
    StateCopied,
    StateTouched,
    TracerLeft,
    UpdateDropped,
    ValueDiffers,
    ViewedBuffer,
    Violation,
)
from pytest_nnxcheck.core.peak import Bound, Figures, Split
from pytest_nnxcheck.reporting import hints, notes, report, tally
from pytest_nnxcheck.reporting.memory_breakdown import advice
from pytest_nnxcheck.reporting.wording import worded

KIB = 1024
FLOAT, HALF = ArrayType("float32", (4, 64)), ArrayType("bfloat16", (4, 64))
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


def test_what_has_no_row_is_counted():
    touched = said("tracers", *(StateTouched(f"model.w{n}", layer=CLOSURE) for n in range(40)))
    assert touched.details[-2:] == (("", "and 34 more"), ("left by", "jit[closure]"))


def test_the_seconds_of_a_nesting_add_up():
    held, violated = Outcome(Nesting(), "held", seconds=5.0), Outcome(Nesting(), "violated", seconds=0.5)
    assert tally.worse(held, violated).seconds == tally.worse(violated, held).seconds == 5.5
    assert tally.worse(held, violated).verdict == "violated"


def test_a_tracer_that_is_left():
    violation = left(LEAK, replace(LEAK, path="model.first", line=""))
    assert violation.summary == "tracers remain in model.last, model.first"
    assert violation.details == (
        ("leaked", "model.last   attribute float32[3]   <- DynamicJaxprTracer"),
        ("", "created at m.py:7"),
        ("leaked", "model.first   attribute float32[3]   <- DynamicJaxprTracer"),
        ("left by", "jit[closure]"),
    )
    assert violation.hint.startswith(
        "keep the value in an nnx.Variable, and pass the module as an argument: model.last"
    )
    assert left(replace(LEAK, layer=None)).details[-1] == ("left by", "the call itself, un-nested")


def test_findings_without_a_row_are_counted():
    assert ("", "and 2 more") in left(*[LEAK] * 8).details
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
    assert hints.asks_to_hand_on(violation) == is_asked
    assert (violation.hint == hints.captured_by("jit")) == is_asked


def test_variables_that_cannot_be_written_and_leaves_that_were_touched():
    pinned = said("tracers", MadeInEndedTrace("model.w", type="Param float32[3]"))
    assert pinned.summary == "model.w was made in a trace that has ended: flax refuses every write to it"
    assert pinned.details == (("pinned", "model.w   Param float32[3]"),)
    touched = said("tracers", StateTouched("model.w", layer=Layer("eval_shape")))
    assert (touched.summary, touched.hint) == ("eval_shape changed model.w", "")
    assert touched.details == (("changed", "model.w"), ("left by", "eval_shape"))


def test_a_peak_over_its_budget_with_all_that_broke_the_bound():
    over = PeakOverBudget(figures=FIGURES)
    copied, captured = StateCopied(figures=FIGURES, bytes=6 * KIB), ConstantsCaptured(figures=FIGURES, bytes=64 * KIB)
    violation = said("memory", over, copied, captured)
    assert violation.summary == "peak 13.0 KiB is over the budget of 12.0 KiB"
    assert violation.details == (
        ("", "the program holds 1.50 more copies of its state at the peak"),
        ("", "the call captures 64.0 KiB of constants; XLA keeps 0 B of that in this program"),
        (
            "peak",
            "13.0 KiB = arguments 4.0 KiB + outputs 2.0 KiB + temporaries 8.0 KiB + constants 0 B - aliased 1.0 KiB",
        ),
        ("budget", "12.0 KiB (2x the expected peak)"),
        ("expected", "6.0 KiB   state 4.0 KiB"),
    )
    assert violation.hint == hints.hint("scan writes back", checkpoint=" under jax.checkpoint")
    assert said("memory", copied).summary == "the program holds 1.50 more copies of its state at the peak"
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


@pytest.mark.parametrize(
    "piece, text",
    [
        (
            Recast(0, "m.py:3", "float32", "float32[64]", KIB, widens=True, looped=False, name="model.w"),
            "1.0 KiB float32[64]: all of model.w once more in another dtype; keep it in float32 (m.py:3)",
        ),
        (
            Recast(9, "", "float32", "float32[64]", KIB, widens=True, looped=True),
            "1.0 KiB float32[64]: all of an input once more in another dtype; cast it inside the loop, a step's part at a time",
        ),
        (
            HeldTwice((0, 1, 2), "joined", "m.py:3", ("float32[64]",), KIB, ("model.q", "model.k", "model.v")),
            "1.0 KiB: all of model.q and 2 more once more, joined into one array; keep them in one Variable, or take each by itself (m.py:3)",
        ),
        (
            Saved("m.py:3", 4, 8 * KIB, 0),
            "8.0 KiB, the largest part of the peak: what 4 steps of a scan save for the backward pass, 2.0 KiB each; wrap its body in nnx.remat, or let the policy save less (m.py:3)",
        ),
        (
            Stack("", "float32[64]", KIB, read=True),
            "1.0 KiB float32[64]: a scan stacks its outputs, of which one step is read; carry that one",
        ),
        (
            Stack("", "float32[64]", KIB, read=False),
            "1.0 KiB float32[64]: a scan stacks its outputs, which nothing reads; do not return it",
        ),
        (
            LargeLine("m.py:3", 2 * KIB, "float32[64]", "dot", KIB),
            "2.0 KiB, float32[64] dot: one line holds more than state, inputs and outputs together, 1.0 KiB (m.py:3)",
        ),
    ],
)
def test_advice_on_the_un_nested_call(piece, text):
    assert advice(piece) == text
    assert said("memory", MemoryWasted(advice=(piece, piece))).details == (("advice", text),)


def test_buffers_that_cannot_be_donated():
    shared = SharedBuffer("a", other="b", twice=True)
    assert said("donation", shared).summary == "a and b share a buffer: XLA refuses to donate it twice"
    beside = replace(shared, twice=False)
    assert said("donation", beside).summary == "a and b share a buffer: XLA refuses to donate it and use it beside that"
    viewed = said("donation", shared, ViewedBuffer("c", holder="model.view"))
    assert viewed.details == (("viewed", "c is viewed by model.view: its buffer cannot be reused"),)


@pytest.mark.parametrize(
    "facts, why",
    [
        ({"cause": "not returned"}, "not returned"),
        ({"cause": "dtype", "new": HALF}, "became bfloat16[4,64]: dtype changed"),
        ({"cause": "shape", "new": FLOAT, "output": True}, "an output is float32[4,64]: shape changed"),
        ({"cause": "sharding", "shardings": ("P('x')", "P()")}, "sharding changed from P('x') to P()"),
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


def test_a_dtype_that_changed_is_named_with_its_line():
    lost = LostBuffer("model.w", cause="dtype", type=FLOAT, new=HALF, line="m.py:3")
    hint = "cast the new value back to float32 before it is stored or returned: it becomes another at m.py:3"
    assert said("donation", lost).hint == hint


VALUE = ValueDiffers("model.w", label="differs", of="Param", type="int32[2]", want="1", have="2", wrong=1, elements=2)


@pytest.mark.parametrize(
    "finding, summary, row",
    [
        (
            VALUE,
            "model.w differs from that of the un-nested call",
            ("differs", "model.w   Param int32[2]   1 expected, 2 after, 1 of 2 elements"),
        ),
        (
            replace(VALUE, label="dropped", want=0.123456, have=-1e-9, size=0.5, allowed=0.001),
            "model.w kept its old value: the update was dropped",
            (
                "dropped",
                "model.w   Param int32[2]   largest difference 0.5 (0.001 allowed): 0.12346 expected, -1e-09 after, 1 of 2 elements",
            ),
        ),
        (
            ValueDiffers("model.w", label="missing", of="Param"),
            "model.w is missing: the call adds it",
            ("missing", "model.w   Param after the run"),
        ),
        (
            ValueDiffers("model.w", label="added", of="Param"),
            "model.w was added: the call adds no such leaf",
            ("added", "model.w   Param that the call does not add"),
        ),
        (
            ValueDiffers("model.w", label="deleted", of="Param", type="int32[2]"),
            "model.w was donated, and no new value took its place",
            ("deleted", "model.w   Param int32[2] was donated, and no new value took its place"),
        ),
        (
            ValueDiffers("output[0]", label="differs", want="'mean'", have="'sum'"),
            "output[0] differs from that of the un-nested call",
            ("differs", "output[0]   'mean' expected, 'sum' after"),
        ),
        (
            ValueDiffers("model.n", label="attribute", of="attribute", type="int", want="1", have="missing"),
            "model.n: 1 expected, missing after",
            ("attribute", "model.n   1 expected, missing after"),
        ),
    ],
)
def test_a_value_that_differs(finding, summary, row):
    violation = said("parity", finding)
    assert (violation.summary, violation.details) == (summary, (row,))


def test_an_update_that_a_transform_inside_the_call_makes_to_a_copy():
    finding = ValueDiffers("model.n", label="dropped", of="BatchStat", type="int32[]", want="1", have="0", cause="copy")
    violation = said("parity", finding)
    assert violation.summary == "model.n kept its old value: a transform inside the call updated a copy of it"
    assert violation.hint == hints.hint("jax transform")
    plain = said("parity", replace(finding, cause=""))
    assert (plain.summary, plain.hint) == ("model.n kept its old value: the update was dropped", "")


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
    assert set(notes.MISFITS) == {*get_args(MisfitKind)}
    assert set(notes.FACTS) == {*get_args(FactKind)}


def left_out(nesting, misfit, **more):
    return Outcome(Nesting.parse(nesting), "rejected", unfit=True, misfit=misfit, **more)


def test_layers_that_cannot_take_a_call_for_one_reason_share_a_line():
    scan, loop, cond = map(Layer, ("scan", "while_loop", "cond"))
    added = Misfit("added", "model.hidden", layer=scan)
    outcomes = (
        left_out("scan", added),
        left_out("while_loop", replace(added, layer=loop)),
        left_out("jit > scan", added),
        left_out("cond", replace(added, branches=True, layer=cond)),
        left_out("grad", Misfit("no parameter"), reason="known (grad)"),
        left_out("jit > vmap", None, reason="not run: vmap is left out", excluded=True),
        Outcome(Nesting.parse("remat"), "held"),
    )
    assert report.left_out(outcomes) == [
        "scan, while_loop left out: each carries the state, and the call adds model.hidden to it",
        "cond left out: it hands on the state where it skips the call, and the call adds model.hidden to it",
        "grad left out: the state holds no floating point nnx.Param to differentiate by",
    ]
    assert worded(outcomes[2]).reason == "scan carries the state, and the call adds model.hidden to it"
    assert report.left_out(outcomes[2:3]) == [f"jit > scan left out: {worded(outcomes[2]).reason}"]
