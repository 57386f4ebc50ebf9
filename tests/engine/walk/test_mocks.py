"""Mocks of `unittest.mock`: what they are handed is the record of a test, and no state. A tracer among it is a note."""

import sys
from itertools import product
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from checking import FEW, call, line, text
from flax import nnx

from pytest_nnxcheck import check

X = jnp.ones((2, 4))
THIS = sys.modules[__name__]
WRITER = mock.MagicMock()
SEEN = []


class Writer:
    def add(self, name, value):
        return name, float(value)


def log(value):
    return float(value)


def own_writer():
    return Writer()


class Logs(nnx.Module):
    """Tells a mock what it computes; ``tell`` gets it and the value."""

    def __init__(self, tell, writer=None):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.tell = tell
        self.writer = writer

    def __call__(self, x):
        y = self.linear(x)
        self.tell(self, y)
        return y


TOLD = {
    "a global": (lambda _, y: WRITER.add_scalar("loss", y.mean()), None, "WRITER.add_scalar"),
    "by name": (lambda _, y: WRITER.add(value=y), None, "WRITER.add"),
    "an attribute": (lambda model, y: model.writer(y), mock.Mock, "model.writer"),
    "in containers": (lambda model, y: model.writer.add({"loss": [y.mean()]}), mock.Mock, "model.writer.add"),
    "what it returns": (lambda model, y: model.writer.open().add(y), mock.MagicMock, "model.writer.open().add"),
    "in a with": (lambda model, y: in_a_with(model.writer, y), mock.MagicMock, "model.writer.open().__enter__().add"),
    "a specification": (
        lambda model, y: model.writer.add("y", y),
        lambda: mock.create_autospec(Writer, instance=True),
        "model.writer.add",
    ),
    "with a name of its own": (
        lambda model, y: model.writer.sub.add(y),
        lambda: mock.Mock(sub=mock.Mock(name="sub")),
        "model.writer",
    ),
    "what is set in it": (lambda model, y: setattr(model.writer, "last", y), mock.Mock, "model.writer.last"),
    "a module": (lambda model, _: model.writer(model.linear), mock.Mock, "model.writer"),
}


def in_a_with(writer, value):
    with writer.open() as file:
        file.add(value)


@pytest.mark.parametrize(
    "nesting, told", [*product(["jit"], TOLD), ("jit > scan", "a global"), ("jit > scan", "an attribute")]
)
def test_a_mock_that_is_handed_a_tracer_is_a_note(told, nesting):
    tell, make, path = TOLD[told]
    report = check(Logs(tell, make and make()), X, nesting=nesting)
    assert report.ok
    (note, *_) = report.notes
    assert note.startswith(f"a mock keeps a tracer in {path}")
    assert "is a mock" not in note  # a value that is set on one is none


def test_the_note_has_the_line_and_is_said_once():
    def tell(_, y):
        WRITER.add_scalar("loss", y.max())

    report = check(Logs(tell), X, transforms="jit,scan", **FEW)
    assert report.ok
    (note,) = report.notes
    assert f"(made at {line(tell, 'y.max')}" in note


@pytest.mark.parametrize("what", ["log", "Writer.add"])
def test_a_function_that_a_mock_stands_for(what):
    owner, name = (THIS, "log") if what == "log" else (Writer, "add")
    tell = (lambda _, y: log(y.mean())) if what == "log" else (lambda _, y: own_writer().add("y", y.mean()))
    with mock.patch.object(owner, name, autospec=True):
        report = check(Logs(tell), X, transforms="jit,scan", **FEW)
    assert report.ok
    assert f"a mock keeps a tracer in {what}" in report.notes[0]


def test_what_a_mock_stands_for_raises_and_what_keeps_the_tracer_beside_it_leaks():
    assert call(Logs(lambda _, y: log(y.mean())), X, nesting="jit").outcome.verdict == "failed"

    def keeps(_, y):
        WRITER.add(y)
        SEEN.append(y)

    found = call(Logs(keeps), X, nesting="jit")
    assert [violation.invariant for violation in found.outcome.violations] == ["tracers"]
    assert "SEEN[0]" in text(found)


QUIET = {
    "shapes": lambda _, y: WRITER.add("shape", y.shape, y.dtype, 3),
    "on the host": lambda _, y: jax.debug.callback(WRITER.add, y),
    "asked alone": lambda _, y: WRITER.step + 1 if WRITER.enabled is None else y,
    "its configuration": lambda _, y: y * WRITER.scale.shape[0],
    "the module's name": lambda model, _: WRITER.add(type(model).__name__),
    "an array of NumPy": lambda _, y: WRITER.add(jnp.shape(y)[0]),
}


@pytest.mark.parametrize("quiet", QUIET)
def test_a_mock_that_gets_no_tracer_is_quiet(quiet):
    WRITER.scale = jnp.ones(3)
    report = check(Logs(QUIET[quiet]), X, transforms="jit,scan", **FEW)
    assert report.ok
    assert report.notes == ()


def test_tracers_of_earlier_calls_and_arrays_that_were_donated_since_are_the_tests_own():
    writer = mock.Mock()
    gone = jnp.ones(3)
    writer.add(gone)
    gone.delete()
    jax.jit(lambda x: (writer.add(x), x)[1])(jnp.ones(3))
    report = check(Logs(lambda *_: None, writer), X, transforms="jit", **FEW)
    assert report.ok
    assert report.notes == ()


def test_a_body_may_count_the_calls():
    """A trace that the test did not ask for leaves no record."""
    writer = mock.Mock()
    for nesting in ("un-nested", "jit"):
        before = writer.add.call_count
        call(Logs(lambda model, _: model.writer.add(3), writer), X, nesting=nesting, invariants="tracers,parity")
        assert writer.add.call_count == before + 1
