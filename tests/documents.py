"""Reports of runs that never were, for the tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from pytest_nnxcheck import Layer, Nesting, Outcome, Report, Violation
from pytest_nnxcheck.core.catalogue import FURTHER, STYLES, TRANSFORMS
from pytest_nnxcheck.core.facts import Evidence, Leak, Lost
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.peak import Buffer, Captured, PeakLine, Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import records, report
from pytest_nnxcheck.reporting.records import Document, Place, Record, RunRecord

RUN = RunRecord(
    "2026-01-02T03:04:05+00:00",
    12.5,
    1,
    "3.13.0",
    "Linux",
    {"pytest-nnxcheck": "0.1.0", "jax": "0.12.0", "flax": "0.12.12"},
)
MIB = 1024 * 1024
SPLIT = Split(arguments=2 * MIB, outputs=MIB, temporaries=3 * MIB, aliased=MIB, constants=24)
EVIDENCE = Evidence(
    split=SPLIT,
    expected=3 * MIB,
    un_nested=Split(2 * MIB, MIB, MIB, MIB, 0),
    buffers=(
        Buffer(MIB, "float32[512,512]", "temporary", "copy", ("model.py:7", "test_model.py:9"), "model.kernel", True),
    ),
    places=(PeakLine("model.py:7", ("test_model.py:9",), False, 1, 3 * MIB, 0, 0, MIB),),
    captured=(Captured(MIB, "float32[512,512]", "model.py:5", "model.TABLE"),),
    leaks=(Leak("model.last", "attribute", "DynamicJaxprTracer", "float32[3]", "model.py:8", "scan"),),
    moves=(Lost("model.kernel", "float32[3]", "bfloat16[3]"),),
    reusable=("x",),
)
MEMORY = Violation(
    "memory", "peak 5.0 MiB is over the budget of 4.0 MiB", (("buffer", "1.0 MiB temporary"),), "donate the state"
)


def outcome(nesting: str, verdict: str = "held", **more: Any) -> Outcome:
    budget = (4 if verdict == "violated" else 6) * MIB
    if nesting.startswith("jit"):
        more = {"peak": SPLIT.peak, "budget": budget, "evidence": EVIDENCE} | more
    if verdict == "violated":
        more = {"violations": (MEMORY,)} | more
    if verdict in ("held", "violated"):
        more = {"asserted": ("tracers", "updates", "memory", "donation")} | more
    return Outcome(Nesting.parse(nesting), verdict, seconds=0.25, **more)  # type: ignore[arg-type]


HELD = (outcome("un-nested"), outcome("jit"), outcome("scan"))
BROKEN = (
    outcome("un-nested"),
    outcome("jit"),
    outcome("jit > scan", "violated"),
    outcome("vmap", "failed", reason="TypeError: no batch"),
    outcome("scan[closure]", "rejected", reason="TraceContextError: other trace level"),
    outcome("remat > scan", "rejected", reason="the carry changes its type", unfit=True),
    outcome("jit > vmap", "expected", expected=("vmap",), reason="TypeError: no batch"),
)


def ended(
    nodeid: str, outcomes: Iterable[Outcome] = HELD, *, end: str = "passed", not_run: int = 0, **more: Any
) -> Record:
    """The record of a test that pytest has seen end."""
    found = report.record(Report(tuple(outcomes), Settings(), test_id=nodeid, argument=nodeid, not_run=not_run))
    place = Place(nodeid.partition("::")[0], 3)
    return replace(found, head=replace(found.head, **{"outcome": end, "place": place} | more))


def nested(record: Record, at: int = 0, **changed: Any) -> Record:
    """The record with other values in one of its nestings."""
    nestings = [*record.nestings]
    nestings[at] = replace(nestings[at], **changed)
    return replace(record, nestings=tuple(nestings))


def document(*tests: Record) -> Document:
    return records.document(RUN, tests)


def mixed(**more: Any) -> Document:
    """One test that fails, with other values in its broken nesting, and one that passes."""
    broken = nested(ended("test_model.py::test_broken", BROKEN, end="failed"), 2, **more)
    return document(broken, ended("test_model.py::test_holds"))


ON_TARGETS = (
    OnTarget("v5e", limit=16 * 2**30, peak=4 * 2**30, seconds=1.5),
    OnTarget("h100", limit=60 * 2**30, fits=False, left_out="no compiler"),
)


def whole() -> Document:
    """A run with all that a page may have: every verdict, modes, targets, notes and advice, a program, a test that was skipped."""
    leak = Violation("tracers", "tracers remain in model.last", (("leaked", "model.last"),), "keep it")
    broken = (*BROKEN, outcome("jit > remat", "violated", violations=(leak,), program="prog.py"))
    on_targets = outcome("jit > scan", evidence=replace(EVIDENCE, targets=ON_TARGETS))
    in_modes = [outcome("graph: jit"), outcome("tree: jit", "failed", reason="TypeError: <tree>")]
    large = OnTarget("v5e", limit=16 * 2**30, fits=False, refused="RESOURCE_EXHAUSTED")
    rows = (("un-nested", "peak 5.0 MiB under a plain jax.jit"), ("line", "model.py:7   3.0 MiB"))
    more: dict[str, Any] = {"notes": ("scan left out: x",), "advice": ("write <less>",), "un_nested_peak": rows}
    return records.document(
        replace(RUN, project="<decoder>", commit="0123456789abcdef"),
        [
            nested(
                ended("test_model.py::test_broken", broken, end="failed", not_run=12), -1, program_text="print('<b>')\n"
            ),
            ended("test_model.py::test_holds", [*HELD, on_targets], **more),
            ended("test_model.py::test_large", [outcome("jit", evidence=replace(EVIDENCE, targets=(large,)))]),
            ended("test_model.py::test_modes", in_modes, end="xfailed"),
            ended("test_model.py::test_skipped", [], end="skipped", message="needs 8 devices"),
        ],
    )


def many(count: int) -> Document:
    """One test with so many nestings, each with the buffers of a real program."""
    layers = [Layer(transform, style) for transform in (*TRANSFORMS, *FURTHER[:4]) for style in STYLES]
    triples = [Nesting((one, two, three)) for one in layers for two in layers for three in layers]
    evidence = EVIDENCE
    evidence = type(evidence)(
        **{n: getattr(evidence, n) for n in evidence.__slots__} | {"buffers": evidence.buffers * 10}
    )
    each = max(1, count // 10)
    tests = [
        ended(
            f"tests/test_model.py::test_number_{number}",
            [
                outcome(str(nesting), "violated" if at % 9 == 0 else "held", peak=5000, budget=9000, evidence=evidence)
                for at, nesting in enumerate(triples[:each])
            ],
            end="failed",
        )
        for number in range(count // each)
    ]
    return document(*tests)


def hostile_texts(parts: list[str]) -> st.SearchStrategy[str]:
    """Texts that hold parts of somebody's markup, among characters of any kind."""
    pieces = st.sampled_from(parts) | st.text(st.characters(), max_size=3)
    return st.lists(pieces, min_size=1, max_size=5).map("".join).filter(str.strip)
