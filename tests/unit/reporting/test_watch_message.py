"""What watch mode says, and what it reads out of JAX' own warning."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from pytest_nnxcheck.compat import compile_cache
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.invariants.tracers import MadeInEndedTrace, TracerLeft
from pytest_nnxcheck.watch import programs
from pytest_nnxcheck.watch.leftovers import Look, Reported
from pytest_nnxcheck.watch.message import LeftBehind, message, summary
from pytest_nnxcheck.watch.programs import UnusedBuffers

LEAK = Leak("model.last", "Param", "DynamicJaxprTracer", "float32[3]", "model.py:8 (forward)", layer="")
TRACER = TracerLeft("model.last", leak=LEAK)
PINNED = MadeInEndedTrace("model.count", type="Param float32[]")


def unused(dtype, count, leaves, line=""):
    return UnusedBuffers(type=dtype, count=count, leaves=leaves, line=line)


LEFT = {
    "leaked and pinned": (TRACER, PINNED),
    "a long list": (TRACER,) * 9 + (unused("float32[]", 1, ()),) * 8,
    "one leaf": (unused("float32[4]", 1, ("m.a",), "a.py:1"),),
    "as many leaves as buffers": (unused("float32[4]", 2, ("m.a", "m.b")),),
    "more leaves than buffers": (unused("float32[4]", 1, ("m.a", "m.b")),),
    "no leaf": (unused("float32[4]", 1, ()),),
}
ENDS = [
    (3, 0, [], [""]),
    (1, 0, ["tracers"], []),
    (9, 1, ["pinned", "tracers", "tracers", "donation"], []),
    (2, 0, [], ["", "local variables of tests, and calls of modules, are watched from Python 3.12 on"]),
]


def test_the_messages_of_watched_tests_and_the_last_lines_of_runs(golden):
    messages = [f"# {name}\n{message('test_a.py::test_a', LeftBehind(added=found))}\n" for name, found in LEFT.items()]
    golden("watch.txt", "\n".join([*messages, "# the end of a run", *(summary(*each) for each in ENDS), ""]))


@pytest.mark.parametrize("warns", [True, False])
def test_of_one_type_what_says_more_is_told_and_of_others_what_jax_warned_of(monkeypatch, warns):
    monkeypatch.setattr(compile_cache, "warns_of_widened", lambda: warns)
    plain, other = unused("bfloat16[4]", 1, ("m.a",), line="a.py:1"), unused("float32[4]", 1, (), line="a.py:1")
    wider, unwarned = replace(plain, new="float32"), replace(plain, type="bfloat16[8]", new="float32")
    assert programs.merged([plain, other], [wider, unwarned]) == (other, wider, *([] if warns else [unwarned]))


@pytest.mark.parametrize(
    "text, types",
    [
        ("float32[4,8].\nSee an explanation at https://docs.jax.dev/x[1].", ("float32[4,8]",)),
        ("ShapedArray(float32[8]), ShapedArray(int32[]).\nSee", ("float32[8]", "int32[]")),
        ("float32[4@data,8], key<fry>[2]", ("float32[4,8]", "key<fry>[2]")),
    ],
)
def test_the_types_of_a_warning_are_read_as_every_jax_writes_them(text, types):
    assert programs.types_in(f"Some donated buffers were not usable: {text}") == types


def test_a_warning_is_noted_and_goes_on_to_who_listened_before():
    weights = object()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with programs.noted() as unused:
            warnings.warn("Some donated buffers were not usable: float32[3].", stacklevel=1)
            warnings.warn("another", stacklevel=1)
        warnings.warn("Some donated buffers were not usable: float32[4].", stacklevel=1)
    assert [buffers.type for buffers in unused] == ["float32[3]"]
    assert [str(warning.message)[-11:] for warning in heard] == ["float32[3].", "another", "float32[4]."]
    assert weights


def test_an_object_at_the_address_of_one_that_is_gone_is_reported():
    reported = Reported()
    reported._references[id(TRACER)] = lambda: None
    assert reported.new(Look(((TRACER, TRACER),))) == (TRACER,)
