"""What is said of findings, from their data alone: tests/golden/messages.txt has the messages that no model of the other tests comes to.

The other messages are shown where they are true: in the documents, which are executed, and in tests/engine.
"""

import json
from dataclasses import replace
from typing import get_args

import documents
import pytest
from test_records import violates

from pytest_nnxcheck import Breach, Layer, Nesting, Outcome, Violation
from pytest_nnxcheck.core.facts import ArrayType, Evidence, Leak
from pytest_nnxcheck.core.nesting import Misfit, MisfitKind
from pytest_nnxcheck.core.notes import FACTS, CapturedBy, CapturedNode, Fact, FactKind, texts
from pytest_nnxcheck.core.on_target import Collective, OnTarget, Spread
from pytest_nnxcheck.core.peak import Bound, Figures, PeakLine, Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.invariants.advice import MemoryWasted
from pytest_nnxcheck.invariants.donation import LostBuffer, LostOnTarget, ViewedBuffer
from pytest_nnxcheck.invariants.memory import (
    ConstantsCaptured,
    CopiedOnTarget,
    DoesNotFit,
    OverBudgetOnTarget,
    PeakOverBudget,
    StateCopied,
)
from pytest_nnxcheck.invariants.parity import ValueDiffers
from pytest_nnxcheck.invariants.tracers import StateTouched, TracerLeft
from pytest_nnxcheck.invariants.updates import ReadStale, WriteLost
from pytest_nnxcheck.jaxprs.waste import HeldTwice
from pytest_nnxcheck.reporting import earlier, left_out, memory_breakdown, records, report, target_rows
from pytest_nnxcheck.reporting.violations import worded
from pytest_nnxcheck.subject.copies import Read, Write
from pytest_nnxcheck.values.effects import Difference

KIB, GIB = 2**10, 2**30
CLOSURE = Layer("jit", "closure")
FLOAT = ArrayType("float32", (4, 64))
TOTALS = Split(4 * KIB, 2 * KIB, 8 * KIB, KIB, 0)
FIGURES = Figures(TOTALS, Bound(6 * KIB, 12 * KIB, "2x"), 4 * KIB, 1, "scan writes back, checkpoint")
LEAK = Leak("model.last", "attribute", "DynamicJaxprTracer", "float32[3]", "m.py:7", str(CLOSURE), "module")
JOINED = HeldTwice((0, 1, 2), "joined", "m.py:3", ("float32[64]",), KIB, ("model.q", "model.k", "model.v"))
CAPTURED = CapturedBy("jit", "m.py:3", (CapturedNode("model", "Linear"), CapturedNode("self.block", "Block")))
V5E = OnTarget("v5e", limit=round(15.75 * GIB), peak=round(3.1 * GIB), seconds=1.5)
H100 = OnTarget("h100", limit=round(59.33 * GIB), share=0.75, peak=20 * GIB, seconds=2.0)
LARGE = replace(V5E, fits=False, peak=round(18.2 * GIB))
REFUSED = replace(V5E, fits=False, peak=None, refused="RESOURCE_EXHAUSTED: used 18.83G of 15.75G hbm")
LEFT_OUT = OnTarget("h100", left_out="RuntimeError: cuDNN not found.")
LOST = replace(V5E, donated=12, lost=("model.kernel",), lost_too=2)
EVERYTHING = replace(LOST, split=Split(1, 2, 3, 4, 5), unpadded=GIB, copies=GIB, state=2 * GIB, wheel="libtpu 0.0.50.1")
IN_BYTES = Bound(GIB, 2 * GIB, asked="2.0 GiB")

BUDGETS = {
    "the default": Bound(1, KIB, "2x", default=True),
    "a multiple": Bound(1, KIB, "1.5x"),
    "bytes": Bound(1, KIB, asked="1.0 KiB"),
    "as it was written": Bound(1, 2000, asked="2KB"),
    "bytes, of a nesting that may take more": Bound(1, 3 * KIB, "2x", asked="2.0 KiB"),
}
LEAKS = {
    "of a module": {},
    "of a Variable that a closure captured": {"holder": "Param"},
    "of a Variable that a jit was handed": {"holder": "Param", "layer": "jit"},
    "of the call itself": {"holder": "Param", "layer": ""},
    "before the call": {"before": True, "layer": ""},
    "of a global": {"holder": "global", "place": "outside"},
}
LOSSES = {
    "no alias": {"cause": "not reused", "abstract": True},
    "no buffer": {"cause": "not reused", "pointers": (255,)},
    "longer": {"cause": "shape", "new": ArrayType("float32", (5, 64)), "output": True},
}
DIFFERENCES = {
    "missing": {"of": "Param"},
    "added": {"of": "Param"},
    "deleted": {"of": "Param", "type": "int32[2]"},
    "attribute": {"of": "attribute", "type": "int", "want": "1", "have": "nothing"},
}


def differs(label, **difference):
    return ValueDiffers("model.w", difference=Difference("model.w", label, **difference))


LOST_WRITE = WriteLost("model.b", write=Write((), "m.py:4", "jax.jit"))
STALE_READ = ReadStale("model.g", read=Read((), "m.py:7", "model.apply (closure of f: g)"))
FINDINGS = {
    **{f"tracer {name}": [TracerLeft(LEAK.path, leak=replace(LEAK, **leak))] for name, leak in LEAKS.items()},
    "tracers without a row": [TracerLeft(LEAK.path, leak=LEAK)] * 8,
    "touched leaves without a row": [StateTouched(f"model.w{n}", layer=Layer("eval_shape")) for n in range(40)],
    "all that broke the bound": [
        PeakOverBudget(figures=FIGURES),
        StateCopied(figures=FIGURES, bytes=6 * KIB),
        ConstantsCaptured(figures=FIGURES, bytes=64 * KIB),
    ],
    "several devices, no cause": [PeakOverBudget(figures=replace(FIGURES, devices=8, cause=""))],
    **{name: [PeakOverBudget(figures=replace(FIGURES, bound=bound))] for name, bound in BUDGETS.items()},
    "one piece of advice twice": [MemoryWasted(advice=(JOINED, JOINED))],
    "a view": [ViewedBuffer("b", holder="model.view"), ViewedBuffer("c", holder="model.view")],
    "views without a row": [ViewedBuffer("c", holder="model.view")] * 13,
    "lost writes": [LOST_WRITE, replace(LOST_WRITE, path="model.c"), STALE_READ],
    "a lost write, and two lines": [
        LOST_WRITE,
        WriteLost("model.d", write=Write((), "m.py:5", "jax.checkpoint", "m.py:9")),
    ],
    "a lost write of the call's own copy": [WriteLost("model.d", write=Write((), "", ""))],
    **{f"lost, {name}": [LostBuffer("model.w", type=FLOAT, **lost)] for name, lost in LOSSES.items()},
    **{f"differs, {label}": [differs(label, **difference)] for label, difference in DIFFERENCES.items()},
    "of your own": [Breach("model.w", summary="it is wrong", details=[["why", "so"]], hint="mend it")] * 8,
    "does not fit": [DoesNotFit(on=LARGE)],
    "does not fit a slice": [DoesNotFit(on=replace(LARGE, target="v5e:2x4"))],
    "does not fit the largest slice": [DoesNotFit(on=replace(LARGE, target="v5e:16x16"))],
    "refused": [DoesNotFit(on=replace(REFUSED, target="h100"))],
    "over a budget in bytes": [OverBudgetOnTarget(on=replace(H100, peak=round(3.4 * GIB)), bound=IN_BYTES)],
    "copied on a target": [CopiedOnTarget(on=replace(V5E, copies=GIB, state=GIB), cause="returned")],
    "copied on both": [StateCopied(figures=FIGURES, bytes=KIB), CopiedOnTarget(on=replace(V5E, copies=GIB, state=GIB))],
    "does not fit, and no cause": [PeakOverBudget(figures=replace(FIGURES, cause="")), DoesNotFit(on=LARGE)],
    "lost on a target": [LostOnTarget(on=LOST), LostOnTarget(on=replace(LOST, lost=tuple("abcd")))],
}
ON_TARGETS = [
    V5E,
    replace(LARGE, peak=V5E.limit + 2**24),
    replace(LARGE, unpadded=round(10.92 * GIB)),
    replace(LARGE, unpadded=17 * GIB),
    REFUSED,
    H100,
    replace(H100, share=0.9),
    replace(H100, peak=H100.limit - GIB // 2, most=H100.limit + GIB // 4),
    replace(V5E, peak=17 * GIB),  # before jax 0.7.2 there is the sum alone, which may be over a limit that the compiler of a TPU keeps
    LEFT_OUT,
    OnTarget("h100", limit=GIB),
    replace(V5E, copies=2 * GIB, state=GIB),
    LOST,
    replace(V5E, donated=1, lost_too=1),
    replace(REFUSED, donated=12, state=GIB),
]  # fmt: skip
NOTES = [
    LEAK,
    CAPTURED,
    "TypeError: no",
    Fact("peak on target", ("v5e",), peaks=(round(18.2 * GIB), round(6.82 * GIB))),
    Fact("left out on target", ("h100",), "RuntimeError: no"),
    Fact("nothing on target", ("v5e", "h100"), "no nesting with an outer jit was run"),
    Fact("asks for devices", ("v5e",), "model.py:219 asked jax.devices()"),
    Fact("answered", ("1 of TPU v5 lite on v5e",), "model.py:219 asked jax.devices()"),
]
SENDING = OnTarget(
    "2*v5e:2x2",
    collectives=(
        Collective("all-reduce", 13, 6 * 2**20, "dcn"),
        Collective("all-gather", 1, 3 * KIB, "ici", at_least=True),
    ),
    flops=425_295_872,
    accessed=82 * 2**20,
    spread=(Spread(("data", "model"), 2, 12_582_912, 6 * 2**20), Spread((), 1, 999, 4 * KIB)),
)
PLACES = [
    PeakLine("", (), True, 1, 0, KIB, 0, 0),
    PeakLine("", (), False, 1, KIB, 0, 0, 0),
    PeakLine("", (), False, 1, 0, 0, KIB, 0),
    PeakLine("scan[closure]", (), False, 1, KIB, 0, 0, 0),
    PeakLine("a.py:1", tuple("bcde"), False, 1, KIB, 0, 0, 0),
]


def message(findings, evidence=None, explained=(), invariant="memory"):
    """The words of a violation, a line each."""
    violation = Violation(invariant, findings=tuple(findings), explained=explained)
    (found,) = worded(Outcome(Nesting(), "violated", (violation,), evidence=evidence)).violations
    rows = [f"  {label}: {text}" for label, text in (*found.details, ("hint", found.hint)) if text]
    return "\n".join([found.summary, *rows])


def test_what_is_said_of_findings(golden):
    both, touched = (
        replace(documents.EVIDENCE, targets=(LARGE, LEFT_OUT)),
        [StateTouched("model.w", layer=Layer("eval_shape"))],
    )
    parts = {
        **{name: message(findings) for name, findings in FINDINGS.items()},
        "on the CPU and on targets": message(
            [StateCopied(figures=FIGURES, bytes=GIB), *FINDINGS["does not fit"]], both
        ),
        "on targets": message(FINDINGS["does not fit"], both),
        "advice beside targets": message([MemoryWasted(advice=(JOINED,))], both),
        "nothing measured": message(FINDINGS["does not fit"], Evidence(targets=(LARGE,))),
        "explained": message(touched, explained=(CAPTURED, "TypeError: no"), invariant="tracers"),
        "rows of targets": "\n".join(text for _, text in target_rows.rows(ON_TARGETS)),
        "rows of a program on targets": "\n".join(": ".join(row) for row in target_rows.program(SENDING)),
        "targets in a few words": "\n".join(target_rows.brief([on]) for on in ON_TARGETS),
        "notes": "\n".join(texts(NOTES)),
        "places of a peak": "\n".join(map(memory_breakdown.heading, PLACES)),
        "layers left out": "\n".join(left_out.layers_left_out(layers_left_out())),
    }
    golden("messages.txt", "".join(f"--- {name}\n{text}\n\n" for name, text in parts.items()))


def layers_left_out():
    added = Misfit("added", "model.hidden", layer=Layer("scan"))
    misfits = {
        "scan": added,
        "while_loop": replace(added, layer=Layer("while_loop")),
        "jit > scan": added,
        "cond": replace(added, branches=True, layer=Layer("cond")),
        "grad": Misfit("no parameter"),
        "jit > vmap": None,
    }
    unfit = [Outcome(Nesting.parse(text), "rejected", unfit=True, misfit=misfit) for text, misfit in misfits.items()]
    return [*unfit, Outcome(Nesting.parse("remat"), "held")]


def test_every_kind_of_misfit_and_of_fact_has_its_sentence():
    assert set(left_out.MISFITS) == {*get_args(MisfitKind)}
    assert set(FACTS) == {*get_args(FactKind)}


def test_what_targets_say_comes_once_and_a_violation_that_found_nothing_keeps_its_text():
    memory, donation = (Violation(name, findings=tuple(FINDINGS[of])) for name, of in (("memory", "does not fit"), ("donation", "lost on a target")))  # fmt: skip
    bare = Violation("tracers", "it leaks", (("leaked", "model.w"),), "mend it")
    found = worded(Outcome(Nesting(), "violated", (bare, memory, donation), evidence=Evidence(targets=(LARGE,))))
    assert found.violations[0] == bare
    assert [sum(row[0] == "v5e" for row in violation.details) for violation in found.violations] == [0, 1, 0]


# --- two calls in one test


def held(*on, nesting="jit", verdict="held", **more):
    """An outcome that has compiled for targets, and nothing else."""
    asserted = Settings().invariants
    return Outcome(Nesting.parse(nesting), verdict, evidence=Evidence(targets=on), asserted=asserted, **more)


def test_of_two_calls_the_worse_outcome_is_kept_and_the_seconds_add_up():
    held_, violated = Outcome(Nesting(), "held", seconds=5.0), Outcome(Nesting(), "violated", seconds=0.5)
    assert report.worse(held_, violated).seconds == report.worse(violated, held_).seconds == 5.5
    assert report.worse(held_, violated).verdict == "violated"
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
        (replace(H100, peak=H100.limit), replace(H100, most=H100.limit + 1)),
    ],
)
def test_which_program_is_worse(better, worse):
    for order in ((better, worse), (worse, better)):
        assert report.worst_of_targets(order) == (worse,)


def test_the_line_of_a_test_has_the_worst_program_of_each_target():
    refused = held(REFUSED, LEFT_OUT, nesting="jit > scan")
    checked = report.Report((held(V5E, H100), held(LARGE, LEFT_OUT, nesting="jit > vmap"), refused), Settings())
    said = "does not fit v5e: 18.2 of 15.75 GiB; fits h100: 20.0 of 59.33 GiB"
    assert str(checked) == f"3 nestings: 3 passed; {said}"
    assert dict(report.properties(report.head(checked)))["nnx_targets"] == said
    assert "nnx_targets" not in dict(report.properties(report.head(report.Report((held(),), Settings()))))


def test_a_target_survives_the_trip_through_json():
    found = documents.document(documents.ended("t.py::t", [held(EVERYTHING, LEFT_OUT)]))
    text = records.render(found)
    assert violates(json.loads(text)) == []
    assert earlier.parse(text) == found
    assert found.nestings[0].targets == (EVERYTHING, LEFT_OUT)
