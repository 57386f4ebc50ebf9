"""What watch mode says, and what it reads out of JAX' own warning."""

from __future__ import annotations

from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.invariants.tracers import MadeInEndedTrace, TracerLeft
from pytest_nnxcheck.watch.leftovers import Look, Reported
from pytest_nnxcheck.watch.message import LeftBehind, message, summary

LEAK = Leak("model.last", "Param", "DynamicJaxprTracer", "float32[3]", "model.py:8 (forward)", layer="")
TRACER = TracerLeft("model.last", leak=LEAK)
PINNED = MadeInEndedTrace("model.count", type="Param float32[]")


LEFT = {
    "leaked and pinned": (TRACER, PINNED),
    "a long list": (TRACER,) * 9,
}
ENDS = [
    (3, 0, [], [""]),
    (1, 0, ["tracers"], []),
    (9, 1, ["pinned", "tracers", "tracers"], []),
    (2, 0, [], ["", "local variables of tests are watched from Python 3.12 on"]),
]


def test_the_messages_of_watched_tests_and_the_last_lines_of_runs(golden):
    messages = [f"# {name}\n{message('test_a.py::test_a', LeftBehind(added=found))}\n" for name, found in LEFT.items()]
    golden("watch.txt", "\n".join([*messages, "# the end of a run", *(summary(*each) for each in ENDS), ""]))


def test_an_object_at_the_address_of_one_that_is_gone_is_reported():
    reported = Reported()
    reported._references[id(TRACER)] = lambda: None
    assert reported.new(Look(((TRACER, TRACER),))) == (TRACER,)
