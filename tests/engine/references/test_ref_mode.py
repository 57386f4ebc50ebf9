"""The mode `ref`: the same unchanged test with the Variables of its models in references."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from checking import FEW, full, slow, text
from flax import nnx
from healthy import FLAX, HEALTHY, numbers, rngs
from references import ALL, call, needs_refs

from pytest_nnxcheck import Nesting, check

pytestmark = needs_refs
X = numbers((2, 4))
RAISES = {"gru_rnn": "TypeError: scan body function carry", "shared_weights": "ValueError: Duplicate Param"}
"""The models that raise in references un-nested already, and the first words of what they raise."""
NAMES = ("shared_weights",)
LONG = ("batch_norm_train", "dropout", "gru_rnn")


@pytest.mark.parametrize("name", [*NAMES, *slow(*LONG), *full(*sorted({*HEALTHY} - {*NAMES, *LONG}))])
def test_a_healthy_model_holds_wherever_jax_has_a_rule(name):
    case = HEALTHY[name]()
    settings = {**FEW, "styles": "argument,functional,jax_closure", **case.settings, "invariants": ALL}
    report = check(case.subject, *case.args, modes="ref", **settings)
    if name in RAISES:
        assert report.modes == {"ref": "rejected"}
        assert report.outcomes[0].reason.startswith(RAISES[name])
        return
    assert report.modes == {"ref": "held"}
    verdicts = {str(outcome.nesting): outcome.verdict for outcome in report.outcomes}
    assert {*verdicts.values()} == {"held", "rejected"}
    left_out = {nesting for nesting, verdict in verdicts.items() if verdict == "rejected"}
    # Flax 0.12.8 lets nobody write the count of a captured random stream.
    refused = {nesting for nesting in verdicts if "closure" in nesting and name == "dropout" and FLAX < (0, 12, 12)}
    assert left_out <= {"ref: scan", "ref: while_loop", "ref: vmap[jax_closure]"} | refused
    reasons = " ".join(report.notes)
    assert "jax takes no reference in a carry" in reasons


class Scaled(nnx.Module):
    """Counts, and scales by what it is told to."""

    def __init__(self, scale):
        self.weight = nnx.Param(jnp.ones(4))
        self.count = nnx.Variable(jnp.zeros(()))
        self.scale = scale

    def __call__(self, x):
        self.count[...] += 1
        return self.scale(self.weight, x)


def by_value(weight, x):
    return x * weight[...].T


def by_attribute(weight, x):
    return x * weight.T


def of_anything(weight, x):
    raise ValueError("not for anything")


def test_a_model_that_takes_its_variables_for_arrays_is_rejected_with_the_words_of_jax():
    for nesting in ("ref: un-nested", "ref: jit"):
        outcome = call(Scaled(by_attribute), X, nesting=nesting).outcome
        assert (outcome.verdict, outcome.by_mode) == ("rejected", True)
        assert re.search(r"'(Ref' object has no attribute 'T|TransformedRef)'", outcome.reason)
        assert call(Scaled(by_value), X, nesting=nesting).outcome.verdict == "held"


def test_what_raises_without_references_too_is_the_users_own():
    for nesting in ("ref: un-nested", "ref: jit", "ref: remat"):
        assert call(Scaled(of_anything), X, nesting=nesting).outcome.reason == "ValueError: not for anything"
        assert call(Scaled(of_anything), X, nesting=nesting).outcome.verdict == "failed"


def test_what_jax_has_no_rule_for_in_references_alone_is_left_out_with_its_words():
    loss = call(Scaled(by_value), X, nesting="ref: jit > grad", transforms="jit,grad").outcome
    assert (loss.verdict, loss.unfit) == ("rejected", True)
    assert (
        call(Scaled(by_value), X, nesting="tree: jit > grad[functional]", transforms="jit,grad").outcome.verdict
        == "held"
    )
    by_parameters = call(Scaled(by_value), X, nesting="ref: jit > grad[functional]", transforms="jit,grad").outcome
    assert by_parameters.unfit
    assert "Ref" in by_parameters.reason
    mapped = call(Scaled(by_value), X, nesting="ref: jit > vmap[jax_closure]").outcome
    assert mapped.unfit
    assert mapped.reason.startswith("not supported in references: ")


class Mixed(nnx.Module):
    """Writes a reference, and an array beside it."""

    def __init__(self, *, ref=False):
        self.total = nnx.Variable(jnp.zeros(()), ref=True)
        self.count = nnx.Variable(jnp.zeros(()), ref=ref)

    def __call__(self, x):
        self.total[...] += x.sum()
        self.count[...] += 1
        return x


def test_what_flax_refuses_of_an_array_beside_a_reference_is_no_fault_of_references():
    refused = call(Mixed(), X, nesting="tree: jit > eval_shape[jax_closure]").outcome
    assert (refused.verdict, refused.unfit) == ("rejected", False)
    assert not refused.reason.startswith("not supported in references")
    assert call(Mixed(ref=True), X, nesting="tree: jit > eval_shape[jax_closure]").outcome.verdict == "held"


def test_a_note_names_the_arrays_that_references_keep_from_being_donated():
    told = [(fact.kind, fact.names) for fact in call(Mixed(), X, nesting="jit").facts.notes]
    assert told == [("beside references", ("model.count",))]
    assert call(Mixed(ref=True), X, nesting="jit").facts.notes == ()


class Sums(nnx.Module):
    """Captured by a loop of jax, which takes a module in references alone."""

    def __init__(self):
        self.total = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        def body(carry, row):
            self.total[...] += row.sum()
            return carry, row

        return jax.lax.scan(body, 0, x)[1]


@pytest.mark.parametrize("nesting", ["un-nested", "jit", "jit > remat", "scan[functional]", "jit > vmap"])
def test_a_model_that_works_in_references_alone_holds(nesting):
    found = call(Sums(), X, nesting=f"ref: {nesting}", invariants=("tracers", "memory", "donation"))
    assert found.outcome.verdict == "held", text(found)
    assert call(Sums(), X, nesting="tree: jit").outcome.verdict == "failed"


def test_a_note_says_that_nothing_is_in_references():
    linear = nnx.Linear(4, 4, rngs=rngs())
    captured = call(lambda x: linear(x) + 1, X, nesting="ref: jit")
    assert [fact.kind for fact in captured.facts.notes] == ["nothing in references"]
    assert call(linear, X, nesting="ref: jit").facts.notes == ()


@pytest.mark.parametrize("nesting", ["jit > vmap", "jit > vmap > vmap", "jit > vmap[functional] > scan[functional]"])
def test_vmap_maps_new_references_of_what_is_written(nesting):
    model = Scaled(by_value)
    found = call(model, X, nesting=f"ref: {nesting}")
    assert found.outcome.verdict == "held", text(found)
    assert model.count[...] == 1 + ("scan" in nesting)
    assert isinstance(model.count.get_raw_value(), jax.Array)


def test_a_nesting_of_the_mode_is_written_and_read():
    nesting = Nesting.parse("ref: jit > scan[closure]")
    assert (str(nesting), nesting.mode) == ("ref: jit > scan[closure]", "ref")
    report = check(nnx.Linear(4, 4, rngs=rngs()), X, nesting="ref: jit")
    assert [str(outcome.nesting) for outcome in report.outcomes] == ["ref: jit"]


def reads_again(model, x):
    weight = model.weight.get_raw_value()
    model.weight[...] = model.weight[...] * 3
    return x * weight[...]


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "jit[jax_closure]"])
def test_code_that_reads_a_reference_after_its_write_differs_from_arrays_and_not_by_rounding(nesting):
    found = call(reads_again, Scaled(by_value), X, nesting=f"ref: {nesting}", invariants=("parity",)).outcome
    assert (found.verdict, found.notes) == ("violated", ()), found
