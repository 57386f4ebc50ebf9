"""Reports of runs that never were, for the tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from pytest_nnxcheck import Layer, Nesting, Outcome, Report, Violation
from pytest_nnxcheck.core.catalogue import FURTHER, STYLES, TRANSFORMS
from pytest_nnxcheck.core.facts import Evidence, Leak, Lost
from pytest_nnxcheck.core.peak import Buffer, Captured, PeakLine, Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import records

RUN = {
    "started": "2026-01-02T03:04:05+00:00",
    "seconds": 12.5,
    "exit_status": 1,
    "python": "3.13.0",
    "platform": "Linux",
    "packages": {"pytest-nnxcheck": "0.1.0", "jax": "0.12.0", "flax": "0.12.12"},
}
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
) -> records.Records:
    """The records of a test that pytest has seen end."""
    found = records.of_report(Report(tuple(outcomes), Settings(), test_id=nodeid, argument=nodeid, not_run=not_run))
    found["test"].update({"outcome": end, "place": {"file": nodeid.partition("::")[0], "line": 3}} | more)
    return found


def document(*tests: records.Records) -> dict[str, Any]:
    return records.document(RUN, tests)


def mixed() -> dict[str, Any]:
    """One test that fails, and one that passes."""
    return document(ended("test_model.py::test_broken", BROKEN, end="failed"), ended("test_model.py::test_holds"))


def many(count: int) -> dict:
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
