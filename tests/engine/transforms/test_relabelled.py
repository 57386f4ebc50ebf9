"""A call that changes the metadata of a Variable: what carries it is left out with the reason, as where a type changes."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from checking import FEW, call, has_modes
from flax import nnx
from healthy import assign, numbers, rngs
from leaky import LEAKY

from pytest_nnxcheck import check

CARRY = "scan,while_loop,fori_loop"
BRANCH = "cond,switch"


def label(variable, **metadata):
    """Set metadata as the installed flax writes it."""
    for name, value in metadata.items():
        if hasattr(variable, "set_metadata"):
            variable.set_metadata(**{name: value})
        else:
            setattr(variable, name, value)


class Decoder(nnx.Module):
    """Keeps its place in a cache, whose axes a first step names otherwise."""

    names = ()

    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, rngs=rngs())
        self.place = nnx.Cache(jnp.zeros((), jnp.int32), axes=("layers",))

    def __call__(self, x):
        assign(self.place, self.place[...] + 1 if hasattr(self.place, "__getitem__") else self.place.value + 1)
        label(self.place, axes=tuple(map(str, self.names)))
        return self.linear(x)


class Steady(Decoder):
    """The healthy twin: an equal name, in a tuple of its own."""

    names = ("layers",)


class Reads(Decoder):
    """Names the axes and writes no value: a functional layer hands on nothing of it."""

    def __call__(self, x):
        label(self.place, axes=())
        return self.linear(x)


class Adds(Decoder):
    """Metadata that was not there."""

    def __call__(self, x):
        label(self.place, seen=True)
        return self.linear(x)


def left_out(model, transforms, styles="argument"):
    """The layers that cannot take the call, with the reason; whether all else held."""
    report = check(model, numbers((2, 4)), **{**FEW, "styles": styles}, transforms=f"jit,remat,{transforms}")
    assert report.ok, str(report)
    return {str(outcome.nesting): outcome.reason for outcome in report.outcomes if outcome.unfit}


@pytest.mark.parametrize(
    "transforms, why",
    [
        (CARRY, "{} carries the state, and a carry keeps its metadata"),
        (BRANCH, "its branches return the same metadata"),
    ],
)
def test_a_loop_and_a_branch_say_what_they_would_have_to_change(transforms, why):
    reasons = left_out(Decoder(), transforms)
    assert {*reasons} == {*transforms.split(",")}
    for layer, reason in reasons.items():
        assert reason.endswith(f"{why.format(layer)}: the call turns axes of model.place from ('layers',) into ()"), (
            reason
        )
    assert not left_out(Steady(), transforms, "argument,functional")


@pytest.mark.slow
def test_metadata_that_is_new_was_nothing():
    assert "the call turns seen of model.place from nothing into True" in left_out(Adds(), "scan")["scan"]


def test_a_functional_layer_carries_what_is_written():
    written, read = (left_out(cls(), f"{CARRY},{BRANCH}", "functional") for cls in (Decoder, Reads))
    assert {*written} == {f"{name}[functional]" for name in f"{CARRY},{BRANCH}".split(",")}
    assert not read


def test_a_vmap_and_a_second_call_take_it():
    for nesting in ("vmap", "call_first", "jit > vmap"):
        assert call(Decoder(), numbers((2, 4)), nesting=nesting).outcome.verdict == "held"


@has_modes
@pytest.mark.parametrize("mode", ["graph_no_updates", "tree"])
def test_every_mode_has_the_reason(mode):
    report = check(Decoder(), numbers((2, 4)), **FEW, transforms="jit,scan", modes=mode)
    assert report.ok, str(report)
    assert next(outcome.reason for outcome in report.outcomes if outcome.unfit).endswith("from ('layers',) into ()")


def test_a_tracer_in_metadata_is_a_leak_and_no_reason():
    case = LEAKY["variable_metadata"].leaky()
    found = call(case.subject, *case.args, nesting="scan")
    assert found.outcome.misfit is None
    assert found.outcome.verdict in ("violated", "failed")


class Compared:
    """Metadata whose ``==`` raises, as it does in every transform."""

    def __eq__(self, other):
        if isinstance(other, Compared):
            raise TypeError("not to be compared")
        return False

    __hash__ = None


@pytest.mark.parametrize(
    "make, verdict", [(Compared, "failed"), (lambda: (1.5, "tag"), "held")], ids=["never equal", "equal"]
)
def test_metadata_that_cannot_be_compared_gives_no_reason_nor_does_what_is_equal(make, verdict):
    class Holds(Decoder):
        def __call__(self, x):
            label(self.place, seen=make())
            return self.linear(x)

    model = Holds()
    label(model.place, seen=make())
    found = call(model, numbers((2, 4)), nesting="scan")
    assert (found.outcome.misfit, found.outcome.verdict) == (None, verdict)
