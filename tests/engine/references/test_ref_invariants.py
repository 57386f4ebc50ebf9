"""What goes wrong with references, each with its cure: tracers beside them, replaced ones, copies, writes that are lost or made twice."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from checking import broken, slow, text
from flax import nnx
from healthy import FLAX
from references import call, in_refs, needs_refs

from pytest_nnxcheck.compat import flax_modes

pytestmark = needs_refs
X = jnp.ones((2, 4))
refused = pytest.mark.skipif(FLAX < (0, 12, 12), reason="flax 0.12.8 refuses to change a captured Variable so")


class Counts(nnx.Module):
    def __init__(self, method):
        self.method = method
        self.count = nnx.Variable(jnp.zeros((2, 4)), ref=True)
        self.last = nnx.Variable(jnp.zeros((2, 4)), ref=True)
        self.log = nnx.static([])

    def __call__(self, x):
        return self.method(self, x)


def in_a_list(model, x):
    model.count[...] += x
    model.log.append(x)
    return x


def in_a_reference(model, x):
    model.count[...] += x
    model.last[...] = x
    return x


def in_metadata(model, x):
    model.count[...] += x
    model.count.set_metadata("last", x)
    return x


def a_new_reference(model, x):
    model.log.append(jax.new_ref(x))
    return x


def by_update(model, x):
    state = nnx.state(model, lambda path, _: path[-1] == "count")
    nnx.update(model, jax.tree.map(lambda count: count[...] + x, state))
    return x


def by_variable(model, x):
    model.count = nnx.Variable(model.count[...] + x, ref=True)
    return x


def in_place(model, x):
    model.count[...] = model.count[...] + x
    return x


@pytest.mark.parametrize(
    "leaky, nesting, path, hint",
    [
        (in_a_list, "jit", "model.log[0]", "nnx.Variable that __init__ makes"),
        (in_a_list, "tree: jit > scan[functional]", "model.log[0]", "nnx.Variable that __init__ makes"),
        (a_new_reference, "jit", "model.log[0]", "nnx.Variable that __init__ makes"),
        pytest.param(
            in_metadata, "jit[jax_closure]", "model.count.last (metadata)", "nnx.Variable of its own", marks=refused
        ),
        pytest.param(
            by_update, "jit[jax_closure]", "model.count", "write into the reference that is there", marks=refused
        ),
    ],
)
def test_a_tracer_beside_a_reference_or_in_its_place_is_found(leaky, nesting, path, hint):
    found = call(Counts(leaky), X, nesting=nesting)
    assert broken(found) == ["tracers"]
    assert f"tracers remain in {path}" in text(found)
    assert hint in found.outcome.violations[0].hint
    healthy = in_place if leaky is by_update else in_a_reference
    assert call(Counts(healthy), X, nesting=nesting).outcome.verdict == "held"


@pytest.mark.parametrize("leaky", [by_update, by_variable])
@pytest.mark.parametrize("donate", ["state", "none"])
def test_a_reference_that_is_replaced_loses_its_buffer_whatever_is_donated(leaky, donate):
    found = call(Counts(leaky), X, nesting="jit", donate=donate)
    assert broken(found) == ["donation"]
    assert "model.count   float32[2,4]   replaced, and not written" in text(found)
    assert "variable[...] = value" in found.outcome.violations[0].hint
    assert call(Counts(in_place), X, nesting="jit", donate=donate).outcome.verdict == "held"


def grows(model, x):
    model.count = nnx.Variable(jnp.concatenate([model.count[...], x]), ref=True)
    return x


def changes_its_type(model, x):
    model.count = nnx.Variable(model.count[...].astype(jnp.bfloat16), ref=True)
    return x


def becomes_a_tree(model, x):
    model.count = nnx.Variable({"sum": model.count[...] + x})
    return x


@pytest.mark.parametrize("leaky", [grows, changes_its_type, becomes_a_tree])
def test_a_reference_that_is_replaced_by_a_value_of_another_type_is_found_as_well(leaky):
    """The user's Variable holds the new value then: its old reference cannot take that in."""
    model, plain = Counts(leaky), Counts(leaky)
    plain(X)
    assert call(model, X, nesting="un-nested").outcome.verdict == "held"
    assert jax.tree.map(jnp.shape, model.count.get_raw_value()) == jax.tree.map(jnp.shape, plain.count.get_raw_value())
    assert "donation" in broken(call(Counts(leaky), X, nesting="jit"))
    assert call(Counts(in_place), X, nesting="jit").outcome.verdict == "held"


def test_where_the_replaced_one_stays_behind_its_update_is_dropped():
    found = call(Counts(by_variable), X, nesting="tree: jit")
    assert broken(found) == ["parity"]
    assert "model.count kept its old value" in text(found)
    assert "variable[...] = value" in found.outcome.violations[0].hint
    assert call(Counts(in_place), X, nesting="tree: jit").outcome.verdict == "held"


class Stack(nnx.Module):
    def __init__(self, loop):
        self.loop = loop
        self.kernel = nnx.Param(jnp.ones((4, 128, 128)) / 128)

    def __call__(self, x):
        return self.loop(self.kernel, x)


def over_references(kernel, x):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[...]), None), x, kernel.get_raw_value())[0]


def by_index(kernel, x):
    return jax.lax.scan(lambda x, i: (x + jnp.tanh(x @ kernel[i]), None), x, jnp.arange(4))[0]


@pytest.mark.parametrize("nesting", ["jit", *slow("jit[functional] > while_loop[functional]")])
def test_a_scan_over_references_holds_them_twice(nesting):
    x = jnp.ones((2, 128))
    found = call(in_refs(Stack(over_references)), x, nesting=nesting)
    assert broken(found) == ["memory"]
    assert re.search(r"(0.99|1.00) extra copies of its state", text(found))
    assert "read them by their index in the loop" in found.outcome.violations[0].hint
    assert call(in_refs(Stack(by_index)), x, nesting=nesting).outcome.verdict == "held"


class Blocks(nnx.Module):
    """Blocks of arrays in `nnx.scan` over `nnx.remat`, which holds them once more; and one reference that a loop and a jit read."""

    def __init__(self, remat):
        self.remat = remat
        self.blocks = nnx.vmap(lambda key: nnx.Linear(160, 160, rngs=nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 8)
        )
        self.scale = nnx.Variable(jnp.ones(()), ref=True)
        self.log = nnx.Variable(jnp.zeros((8, 160)), ref=True)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @self.remat
        def loop(block, x):
            return jnp.tanh(block(x))

        x = loop(self.blocks, loop(self.blocks, x))
        self.log[jnp.int32(self.scale[...])] = x[0]
        scaled = jax.jit(lambda scale, x: jax.lax.fori_loop(0, 2, lambda _, x: x * scale[...], x))
        return scaled(self.scale.get_raw_value(), x)


@pytest.mark.slow
def test_a_copy_of_arrays_beside_a_reference_that_a_loop_reads_has_its_own_hint():
    x = jnp.ones((2, 160))
    found = call(Blocks(remat), x, nesting="jit")
    assert broken(found) == ["memory"]
    assert "nnx.remat(f, graph_updates=False)" in found.outcome.violations[0].hint
    assert call(Blocks(remat_without_updates), x, nesting="jit").outcome.verdict == "held"


# --- writes that are lost


class Inner(nnx.Module):
    """Applies a transform of flax to a module that writes."""

    def __init__(self, transform):
        self.transform = transform
        self.inner = Counts(in_place)

    def __call__(self, x):
        return self.transform(lambda model, x: model(x))(self.inner, x)


def remat(f):
    return nnx.remat(f)


def remat_without_updates(f):
    return nnx.remat(f, graph_updates=False)


def test_a_write_that_a_transform_of_graph_mode_loses_is_told_by_default_and_found_by_parity():
    found = call(Inner(remat), X, nesting="un-nested")
    assert broken(found) == ["parity"]
    assert "model.inner.count, a reference, kept its old value: a transform of flax wrote to a copy of it" in text(
        found
    )
    assert "graph_updates=False" in found.outcome.violations[0].hint
    told = call(Inner(remat), X, nesting="un-nested", invariants=("tracers", "memory", "donation"))
    assert told.outcome.verdict == "held"
    assert [(fact.kind, fact.names) for fact in told.facts.notes] == [("lost in copies", ("model.inner.count",))]
    for invariants in (("tracers",), ("parity",)):
        cured = call(Inner(remat_without_updates), X, nesting="un-nested", invariants=invariants)
        assert (cured.outcome.verdict, cured.outcome.notes, cured.facts.notes) == ("held", (), ())


def through_scan(f):
    return nnx.scan(f, in_axes=(0, 0), out_axes=0)


def through_a_gradient(f):
    return nnx.grad(lambda model, x: f(model, x).sum(), argnums=1)


@pytest.mark.parametrize("transform", [through_scan, through_a_gradient])
def test_other_transforms_of_graph_mode_lose_writes_too(transform):
    found = call(Inner(transform), X, nesting="un-nested")
    assert (broken(found), found.facts.notes[0].kind) == (["parity"], "lost in copies")


@pytest.mark.parametrize("layer", ["remat", "cond", "vmap"])
def test_a_layer_of_graph_mode_that_loses_a_write_is_named(layer):
    found = call(Counts(in_place), X, nesting=f"graph: jit > {layer}")
    assert broken(found) == ["parity"]
    assert "model.count, a reference, kept its old value" in text(found)
    still = call(Counts(in_place), X, nesting=f"graph: jit > {layer}", invariants=("tracers",)).outcome
    assert still.notes == (f"model.count did not move under graph: jit > {layer}: the un-nested call changes it",)
    assert call(Counts(in_place), X, nesting=f"graph_no_updates: jit > {layer}").outcome.verdict == "held"


def read_only(model, x):
    return x * model.count[...]


def there_and_back(model, x):
    model.count[...] = 1 - model.count[...]
    return x


def best_of(model, x):
    model.count[...] = jnp.maximum(model.count[...], 0 * x)
    return x


@pytest.mark.parametrize("method, steps", [(there_and_back, "scan"), (best_of, "remat"), (best_of, "scan")])
def test_a_reference_that_comes_back_to_its_value_without_the_nesting_too_is_not_told(method, steps):
    nesting = f"jit > {steps}[functional]"
    for invariants in (("tracers",), ("parity",)):
        assert call(Counts(method), X, nesting=nesting, invariants=invariants).outcome.notes == ()
    lost = call(Counts(by_variable), X, nesting=nesting, invariants=("tracers",)).outcome
    assert lost.notes == (f"model.count did not move under {nesting}: the un-nested call changes it",)


def jitted_step(model, x):
    return jax.jit(lambda model, x: model(x))(model, x)


def warm_up_and_step(model, x):
    model(x)
    return jitted_step(model, x)


def on_a_copy(model, x):
    """Of arrays `nnx.with_vars` makes no copy."""
    return nnx.with_vars(model, ref=False)(x)


def write_back_what_was_read(model, x):
    model.count[0] = model.count[0]
    return nnx.clone(model)(x)


@pytest.mark.parametrize("step", [jitted_step, warm_up_and_step, on_a_copy, write_back_what_was_read])
@pytest.mark.parametrize("method", [in_place, read_only])
def test_what_is_another_thing_in_arrays_is_no_difference(step, method):
    """A `jax.jit` drops the updates of arrays, say, so that the same call on arrays tells nothing."""
    for invariants in (("tracers",), ("parity",)):
        found = call(step, Counts(method), X, nesting="tree: un-nested", invariants=invariants)
        assert (found.outcome.verdict, found.outcome.notes, found.facts.notes) == ("held", (), ())


CALLS = jax.new_ref(jnp.zeros(())) if flax_modes.takes_refs() else None


def counts_its_calls(model, x):
    CALLS[...] += 1
    model.count[...] += CALLS[...]
    return x


@pytest.mark.parametrize("invariants", [("tracers",), ("parity",)])
def test_a_call_that_depends_on_how_often_it_was_made_is_no_difference(invariants):
    found = call(counts_its_calls, Counts(in_place), X, nesting="un-nested", invariants=invariants)
    assert (found.outcome.verdict, found.outcome.notes, found.facts.notes) == ("held", (), ())


# --- writes that are made twice


def gradient(checkpoint=lambda loss: loss, kind=None):
    """A gradient through code that reads a counter and moves it."""
    count = jax.new_ref(jnp.zeros(()), kind=kind)

    def step(count, w):
        def loss(w):
            n = count[...]
            count[...] = n + 1
            return (w * (n + 1)).sum()

        return jax.grad(checkpoint(loss))(w)

    return step, count


@pytest.mark.slow
def test_a_write_that_a_gradient_makes_twice_is_told():
    step, count = gradient(jax.checkpoint)
    found = call(step, count, X, nesting="jit")
    assert [fact.kind for fact in found.facts.notes] == ["written twice"]
    assert "test_ref_invariants.py" in found.facts.notes[0].names[0]
    assert count[...] == 2
    saved = functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.everything_saveable)
    for cure in (gradient(), gradient(jax.checkpoint, kind="no_grad_no_remat"), gradient(saved)):
        found = call(*cure, X, nesting="jit")
        assert (found.outcome.verdict, found.facts.notes) == ("held", ())
        assert cure[1][...] == 1


def test_a_value_that_is_written_once_more_as_it_was_is_not_told():
    """It depends on no reference."""
    last = jax.new_ref(jnp.zeros(()))

    def step(last, w):
        @jax.checkpoint
        def loss(w):
            last[...] = jax.lax.stop_gradient(w.sum())
            return (w * w).sum()

        return jax.grad(loss)(w)

    found = call(step, last, X, nesting="jit")
    assert (found.outcome.verdict, found.facts.notes) == ("held", ())
    assert last[...] == X.sum()


@pytest.mark.slow
def test_a_layer_of_ours_that_makes_it_twice_breaks_parity():
    class Mean(nnx.Module):
        def __init__(self):
            self.count = nnx.Variable(jnp.zeros(()), ref=True)

        def __call__(self, x):
            self.count[...] += 1
            return x * self.count[...]

    found = call(Mean(), X, nesting="jit > grad[jax_closure] > remat[jax_closure]", transforms="jit,grad,remat")
    assert broken(found) == ["parity"]
    assert "model.count differs from that of the un-nested call" in text(found)
    assert "no_grad_no_remat" in found.outcome.violations[0].hint
    for once in ("grad[jax_closure]", "remat[jax_closure] > grad[jax_closure]"):
        assert call(Mean(), X, nesting=f"jit > {once}", transforms="jit,grad,remat").outcome.verdict == "held"


def teaches_a_copy(model, x):
    copy = nnx.with_vars(model, ref=False)
    return nnx.remat(lambda model, x: x + model.weight[...].sum())(model, copy(x))


class Weighted(Counts):
    def __init__(self, call):
        super().__init__(call)
        self.weight = nnx.Param(jnp.ones(4), ref=True)


def test_a_write_to_a_copy_that_the_call_makes_itself_is_not_lost():
    found = call(teaches_a_copy, Weighted(in_place), X, nesting="un-nested", invariants=("parity",))
    assert (found.outcome.verdict, found.facts.notes) == ("held", ()), text(found)
