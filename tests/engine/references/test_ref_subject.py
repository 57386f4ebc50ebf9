"""A subject whose state is in references (`jax.Ref`): it is copied, written, compared and put back as one of arrays is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import Example, slow, text
from flax import nnx
from healthy import numbers, rngs
from references import call, in_refs, needs_refs

from pytest_nnxcheck import CheckError
from pytest_nnxcheck.compat.arrays import value_of
from pytest_nnxcheck.engine.example import Memo
from pytest_nnxcheck.walk import openers
from pytest_nnxcheck.walk.walk import walk

pytestmark = needs_refs
X = numbers((2, 4))


class Averages(nnx.Module):
    """Reads its weights, writes statistics."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.linear(x))


class Statistics(Averages):
    """Writes the count of a random stream as well. Flax 0.12.8 lets nobody write that from inside of a closure."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


@pytest.mark.parametrize(
    "nesting",
    [
        "jit > scan[functional]",
        *slow("jit", "tree: jit > vmap", "tree: jit > remat", "graph_no_updates: jit > remat"),
        *slow("jit > vmap[functional] > scan[functional]"),
    ],
)
def test_a_healthy_model_holds_and_takes_its_values_back(nesting):
    model, plain = in_refs(Statistics(rngs())), Statistics(rngs())
    before = model.norm.mean.get_raw_value()
    found = call(model, X, nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    assert (
        call(plain, X, nesting=nesting.replace("[jax_closure]", "").replace("[closure]", "")).outcome.verdict == "held"
    )
    assert model.norm.mean.get_raw_value() is before
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=1e-5)
    assert model.dropout.rngs.count[...] == plain.dropout.rngs.count[...] > 0


@pytest.mark.parametrize(
    "nesting", ["jit > while_loop[jax_closure]", *slow("jit > eval_shape > scan[jax_closure]", "scan[closure]")]
)
def test_a_model_that_is_captured_holds_and_takes_its_values_back(nesting):
    model, plain = in_refs(Averages(rngs())), Averages(rngs())
    found = call(model, X, nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    for _ in range(2):
        plain(X)
    np.testing.assert_allclose(model.norm.mean[...], plain.norm.mean[...], rtol=1e-5)


def test_a_nesting_runs_on_copies_that_keep_their_kind():
    ref = jax.new_ref(jnp.zeros(4), kind="no_grad_no_remat")
    kinds = []

    def add(total, x):
        kinds.append(total.aval.kind)
        total[...] += x.sum(0)
        return total[...] * 2

    found = call(add, ref, X, nesting="jit > remat[jax_closure]")
    assert found.outcome.verdict == "held", text(found)
    np.testing.assert_allclose(ref[...], X.sum(0), rtol=1e-6)
    assert {*kinds} == {"no_grad_no_remat"}


def test_a_bare_reference_is_state_under_its_own_name():
    def total_of(total, x):
        return nnx.remat(lambda total, x: total[...] + x)(total, x)

    assert call(total_of, jax.new_ref(X), X, nesting="jit > while_loop[functional]").outcome.verdict == "held"
    carried = call(total_of, jax.new_ref(X), X, nesting="jit > scan").outcome
    assert carried.unfit
    assert carried.reason.endswith("jax takes no reference in a carry, such as total")


def add(total, x):
    total[...] += x.sum()
    return x * 2


@pytest.mark.parametrize(
    "nesting",
    ["remat", "jit > cond", "jit > switch", "vmap", "graph_no_updates: jit > vmap > vmap", "tree: jit > vmap"],
)
def test_a_bare_reference_is_written_where_a_write_to_one_in_a_variable_is_lost(nesting):
    """Flax hands a reference among the arguments of a transform on as it is; see `test_ref_invariants` for Variables."""
    total = jax.new_ref(jnp.zeros(()))
    found = call(add, total, X, nesting=nesting, transforms="jit,remat,cond,vmap,switch")
    assert (found.outcome.verdict, found.outcome.notes) == ("held", ()), text(found)
    np.testing.assert_allclose(total[...], X.sum(), rtol=1e-5)


def test_what_jax_has_no_rule_for_with_a_bare_reference_is_left_out_and_what_raises_for_an_array_too_fails():
    def wrong(total, x):
        raise ValueError("not for anything")

    for subject, verdict in ((add, "rejected"), (wrong, "failed")):
        outcome = call(
            subject, jax.new_ref(jnp.zeros(())), X, nesting="tree: shard_map[closure]", transforms="jit,shard_map"
        ).outcome
        assert outcome.verdict == verdict, outcome.reason
        assert outcome.reason.startswith("not supported in references: ") == (subject is add)


def test_one_reference_is_passed_twice_but_is_in_no_two_places():
    def adds_to_both(total, other, x):
        total[...] += 1
        other[...] += 1
        return x

    total = jax.new_ref(jnp.zeros(()))
    assert call(adds_to_both, total, total, X, nesting="jit > remat").outcome.verdict == "held"
    assert total[...] == 2
    model = in_refs(Averages(rngs()))
    held = model.norm.mean.get_raw_value()
    words = " are one mutable array of jax .*: put one Variable into both places$"
    with pytest.raises(CheckError, match=r"^model.norm.mean and total" + words):
        call(lambda model, total, x: model(x), model, held, X, nesting="jit")
    model.norm.var = nnx.BatchStat.from_metadata(held, model.norm.mean.get_metadata())
    with pytest.raises(CheckError, match=r"^model.norm.mean and model.norm.var" + words):
        call(model, X, nesting="un-nested")
    assert model.norm.var.get_raw_value() is held


@pytest.mark.parametrize("total, x", [("abstract", "real"), ("real", "abstract")])
def test_a_bare_reference_beside_abstract_arrays_is_refused(total, x):
    ref = jax.new_ref(jnp.zeros(())) if total == "real" else jax.ShapeDtypeStruct((), jnp.float32, is_ref=True)
    given = X if x == "real" else jax.ShapeDtypeStruct(X.shape, X.dtype)
    with pytest.raises(CheckError, match=r"^total.* is a mutable array of jax .* with ref=True$"):
        call(add, ref, given, nesting="jit")


COUNT = jax.new_ref(jnp.zeros(())) if hasattr(jax, "new_ref") else None


def counts(model, x):
    COUNT[...] += 1
    return model(x)


@pytest.mark.parametrize(
    "nesting, steps", [("un-nested", 1), ("eval_shape", 1), ("jit", 1), ("jit > scan", 2), ("remat", 1)]
)
def test_a_reference_in_a_global_is_written_by_the_test_and_put_back_after_it(nesting, steps):
    with Example() as example:
        found = call(counts, nnx.Linear(4, 4, rngs=rngs()), X, nesting=nesting, example=example)
        assert found.outcome.verdict == "held", text(found)
        assert COUNT[...] == steps
    assert COUNT[...] == 0


def multiplies(x):
    COUNT[...] += 1
    return x * COUNT[...]


def test_a_second_call_starts_from_what_the_nesting_made_of_a_reference_in_a_global():
    memo = Memo()
    for nesting in ("jit > scan > scan", "jit", "jit > jit"):
        with Example(memo) as example:
            for _ in range(2):
                found = call(multiplies, X, nesting=nesting, example=example)
                assert found.outcome.verdict == "held", text(found)


def test_a_walk_copies_a_reference_once_and_what_looks_for_changes_copies_none(monkeypatch):
    copies = []
    monkeypatch.setattr(openers, "value_of", lambda ref: copies.append(ref) or value_of(ref))
    ref, array = jax.new_ref(jnp.zeros(())), jnp.zeros(())
    earlier = walk([("ref", ref), ("array", array)])
    ref[...] = 1.0
    later = earlier.extended([("copy", jax.new_ref(jnp.zeros(())))])
    assert (later.places.restore(), later.tracers) == ((), [])
    assert ref[...] == 0
    assert [copy is ref for copy in copies] == [True]


@pytest.mark.slow
def test_two_references_that_one_program_captures_are_told_apart():
    """One compiled program holds the reference that it writes: a program of the same text writes another."""
    with Example() as example:
        for _ in range(2):
            model = in_refs(Averages(rngs()))
            # Where values are compared, a difference makes it compile the program anew.
            found = call(model, X, nesting="jit[jax_closure]", example=example, invariants="tracers")
            assert found.outcome.verdict == "held", text(found)
            assert model.norm.mean[...].any()


def test_a_reference_outside_of_a_variable_is_refused():
    class Bare(nnx.Module):
        def __init__(self, ref):
            self.last = ref

        def __call__(self, x):
            return x

    with pytest.raises(
        Exception,
        match=r"^model.last is a mutable array of jax \(jax.Ref\), which is not supported: keep .* with ref=True$",
    ):
        call(Bare(jax.new_ref(X)), X, nesting="jit")
    assert call(Bare(nnx.Variable(X, ref=True)), X, nesting="jit").outcome.verdict == "held"


@pytest.mark.slow
def test_an_abstract_model_in_references_is_compiled_and_keeps_its_buffers():
    try:
        model = nnx.eval_shape(lambda: in_refs(Statistics(rngs())))
    except TypeError:
        pytest.skip("this flax has no abstract references")
    for nesting in ("jit[functional]", "tree: jit > remat"):
        found = call(model, jax.ShapeDtypeStruct(X.shape, X.dtype), nesting=nesting)
        assert found.outcome.verdict == "held", text(found)
        donated = {move.before.path: move for move in found.outcome.evidence.moves}
        assert donated == {}
        assert found.outcome.evidence.split.aliased > 0
    refused = call(model, jax.ShapeDtypeStruct(X.shape, X.dtype), nesting="jit").outcome
    assert refused.reason.startswith("not supported in references: TypeError")


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["un-nested", "jit[functional]"])
def test_real_references_beside_an_abstract_input_stay_as_they_are(nesting):
    for model in (in_refs(Averages(rngs())), Averages(rngs())):
        found = call(model, jax.ShapeDtypeStruct(X.shape, X.dtype), nesting=nesting, invariants="tracers,memory")
        assert found.outcome.verdict == "held", text(found)
        assert not model.norm.mean[...].any()
