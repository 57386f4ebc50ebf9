"""What watch mode says, and what it reads out of JAX' own warning."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest

from pytest_nnxcheck.compat import compile_cache
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.invariants.tracers import MadeInEndedTrace, TracerLeft
from pytest_nnxcheck.watch import leftovers, programs
from pytest_nnxcheck.watch.leftovers import Look, Reported
from pytest_nnxcheck.watch.message import LeftBehind, headline, message, summary
from pytest_nnxcheck.watch.programs import UnusedBuffers

LEAK = Leak("model.last", "Param", "DynamicJaxprTracer", "float32[3]", "model.py:8 (forward)", layer="")
TRACER = TracerLeft("model.last", leak=LEAK)
PINNED = MadeInEndedTrace("model.count", type="Param float32[]")


def unused(dtype, count, leaves, line=""):
    return UnusedBuffers(type=dtype, count=count, leaves=leaves, line=line)


def test_the_message_says_what_where_and_what_to_write():
    finding = LeftBehind(added=(TRACER, PINNED))
    assert message("test_a.py::test_a", finding).splitlines() == [
        "nnx watch: tracers in model.last; Variables of a trace that has ended: model.count",
        "  test        test_a.py::test_a",
        "  leaked      model.last   DynamicJaxprTracer float32[3] in Param",
        "              created at model.py:8 (forward)",
        "  pinned      model.count   Param float32[]",
        "  hint        build it outside of the transform, or hand it out as an",
        "              output of nnx.jit or nnx.eval_shape, which make it anew",
        "  see         @pytest.mark.nnx_invariants on a test of this module names",
        "              the smallest failing nesting, and similar ones that pass",
    ]


def test_a_long_list_is_cut():
    finding = LeftBehind(added=(TRACER,) * 9 + (unused("float32[]", 1, ()),) * 8)
    rows = [row.strip() for row in message("a", finding).splitlines()]
    assert "and 3 more" in rows
    assert "and 2 more" in rows


@pytest.mark.parametrize(
    "buffers, shown, row",
    [
        (unused("float32[4]", 1, ("m.a",)), "m.a", "float32[4]   m.a"),
        (unused("float32[4]", 2, ("m.a", "m.b")), "m.a, m.b", "float32[4]   m.a, m.b"),
        (unused("float32[4]", 1, ("m.a", "m.b")), "float32[4]", "float32[4]   1 of m.a, m.b"),
        (unused("float32[4]", 1, ()), "float32[4]", "float32[4]   no local variable holds it"),
    ],
)
def test_a_donated_leaf_is_named_where_its_type_tells_it(buffers, shown, row):
    finding = LeftBehind(added=(buffers,))
    assert headline(finding) == f"donated for nothing: {shown}"
    assert f"  donated     {row}" in message("a", finding).splitlines()


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


def test_a_warning_that_the_test_expects_is_its_own_business():
    with programs.noted() as unused, pytest.warns(UserWarning, match="donated"):
        warnings.warn("Some donated buffers were not usable: float32[3].", stacklevel=1)
    assert unused == []


class Slotted:
    __slots__ = ()


@pytest.mark.parametrize("make", [Slotted, type("Plain", (), {})])
def test_what_was_reported_is_not_reported_again(make):
    reported, value, other = Reported(), make(), make()
    assert reported.new(Look(((value, TRACER),))) == (TRACER,)
    assert reported.new(Look(((value, TRACER), (other, PINNED)))) == (PINNED,)
    assert reported.new(Look(((value, TRACER), (other, PINNED)))) == ()


def test_an_object_at_the_address_of_one_that_is_gone_is_reported():
    reported = Reported()
    reported._references[id(TRACER)] = lambda: None
    assert reported.new(Look(((TRACER, TRACER),))) == (TRACER,)


class Suite:
    shared = ["a"]  # noqa: RUF012 - a class attribute of the user's

    def helper(self):
        return self.model

    def other(self):
        raise NotImplementedError

    def test_it(self):
        return self.helper()


def test_the_roots_of_a_method_are_its_instance_and_the_helpers_that_it_names():
    suite = Suite()
    suite.model = {}
    names = [name for name, _ in leftovers.of_test(Suite.test_it, suite, [("fixture", [])])]
    assert {"fixture", "self.model", "Suite.shared", "Suite.helper", "test_it"} <= {*names}
    assert "Suite.other" not in names
    assert leftovers.of_other_tests(suite) == (suite, Suite)
    assert leftovers.of_other_tests(None) == ()


def test_the_function_that_a_decorator_wraps_is_looked_at_too():
    def inner():
        return 1

    def outer():
        return inner()

    outer.__wrapped__ = inner
    assert leftovers.bodies(outer) == (outer, inner)
    assert leftovers.bodies(len) == ()


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((3, 0, [], [""]), "3 tests watched: nothing was left behind"),
        ((1, 0, ["tracers"], []), "1 test watched: 1 left tracers behind"),
        ((9, 1, ["pinned", "tracers", "tracers", "donation"], []), "9 tests watched: 2 left tracers behind, 1 left Variables of an ended trace behind, 1 donated for nothing; 1 checked in part: they reach too many objects"),
        ((2, 0, [], ["", "local variables of tests, and calls of modules, are watched from Python 3.12 on"]), "2 tests watched: nothing was left behind; local variables of tests, and calls of modules, are watched from Python 3.12 on"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_counts(arguments, text):
    assert summary(*arguments) == text
