"""Parity: what a nesting returns and leaves is what the same calls return and leave without it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from checking import broken, call, text
from flax import nnx
from healthy import FLAX, HEALTHY, WIDTH, assign, node_dict, numbers

from pytest_nnxcheck import ParityLost, assert_invariants, check
from pytest_nnxcheck.engine import reference
from pytest_nnxcheck.engine.reference import evaluate, identity, recalled
from pytest_nnxcheck.invariants.parity import compare
from pytest_nnxcheck.subject.bind import bind
from pytest_nnxcheck.subject.state_facts import read
from pytest_nnxcheck.transforms import compose, loops, wrappers
from pytest_nnxcheck.transforms.layer import first, functional, rebuild, split, stack

X = numbers((3, 8))
XS = numbers((2, 3, 8))
TREE = FLAX >= (0, 12)


def norm():
    return nnx.BatchNorm(8, use_running_average=False, rngs=nnx.Rngs(0))


def parity(subject, *args, nesting="un-nested", **settings):
    return call(subject, *args, nesting=nesting, invariants="parity", **settings)


class Counter(nnx.Variable):
    """Counts calls."""


class Counts(nnx.Module):
    """Counts its calls in a Variable, or in a plain Python attribute."""

    def __init__(self, *, plain):
        self.linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.plain = plain
        self.calls = 0
        self.counter = Counter(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        if self.plain:
            self.calls += 1
        else:
            assign(self.counter, self.counter[...] + 1)
        return self.linear(x)


class Loss(nnx.Module):
    """Returns constants beside a value, as a layer without a loss of its own does."""

    def __call__(self, x):
        return x + 1, jnp.zeros(()), jnp.array(0, jnp.int8), jnp.array(True), 1.5


@pytest.mark.parametrize("nesting", ["remat", "remat[functional]", "jit > remat", "remat > scan", "un-nested"])
def test_constants_are_arrays_under_every_nesting(nesting):
    """`jax.checkpoint` of jax 0.11 hands them out as numbers of its own."""
    checked = parity(Loss(), X, nesting=nesting)
    assert checked.outcome.verdict == "held"
    types = [(type(leaf), str(leaf.dtype)) for leaf in checked.output]
    assert types == [(type(X), kind) for kind in ("float32", "float32", "int8", "bool", "float32")]


class Names(nnx.Module):
    """Returns a name that says whether the call is traced."""

    def __call__(self, x):
        return x, "traced" if isinstance(x, jax.core.Tracer) else "eager", "same"


def test_a_leaf_that_is_no_array_is_named():
    message = text(parity(Names(), X, nesting="jit"))
    assert "output[1] differs from that of the un-nested call" in message
    assert "output[1]   'eager' expected, 'traced' after" in message
    assert "output[2]" not in message


# --- layers around the user's module


def broadcast_scan(f, plan):
    """A layer as some write it: the state is broadcast, and what the body changes is dropped."""

    def layer(state, *inputs):
        return nnx.scan(lambda state, inputs: f(state, *inputs), in_axes=(None, 0), out_axes=0)(state, inputs)

    return layer


def test_a_broadcast_scan_drops_the_updates_of_batch_norm_and_a_carry_keeps_them(monkeypatch):
    assert parity(norm(), X, nesting="scan").outcome.verdict == "held"
    monkeypatch.setattr(loops, "scan_argument", broadcast_scan)
    found = parity(norm(), X, nesting="jit > scan")
    assert broken(found) == ["parity"]
    assert "model.mean kept its old value: the update was dropped" in text(found)
    assert "dropped model.mean   BatchStat float32[8]   largest difference 0." in text(found)
    assert re.search(r" allowed\): -?0\.0\d+ expected, 0 after, 8 of 8 elements", text(found))
    assert "a layer that broadcasts the state (None) drops its updates" in text(found)
    assert "in_axes=(nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None}), 0)" in text(found)
    assert parity(HEALTHY["batch_norm_eval"]().subject, X, nesting="jit > scan").outcome.verdict == "held"


def test_a_count_that_is_dropped_is_compared_bit_by_bit(monkeypatch):
    monkeypatch.setattr(loops, "scan_argument", broadcast_scan)
    found = parity(Counts(plain=False), X, nesting="scan")
    assert "model.counter kept its old value" in text(found)
    assert "Counter int32[]   2 expected, 0 after, 1 of 1 elements" in text(found)
    assert "nnx.StateAxes({Counter: nnx.Carry" in text(found)


def dropping(name):
    """Layers whose author forgot the way back; the mutations that parity must find."""

    def jit(f, plan):
        def layer(state, *inputs):
            graphdef, changed, rest = split(state, plan)
            return plan.jit(jax.jit, functional(f, graphdef, plan))(changed, rest, *inputs)[1]

        return layer

    def vmap(f, plan):
        def layer(state, *inputs):
            graphdef, changed, rest = split(state, plan)
            pure = functional(f, graphdef, plan)
            changed, out = jax.vmap(pure, in_axes=(0, None, *(0 for _ in inputs)))(stack(changed), rest, *inputs)
            return out

        return layer

    def while_loop(f, plan):
        return f

    def scan(f, plan):
        def layer(state, *inputs):
            graphdef, changed, rest = split(state, plan)
            pure = functional(f, graphdef, plan)
            outs = jax.lax.scan(
                lambda carry, inputs: (None, pure(rebuild(changed), rebuild(rest), *inputs)), None, inputs
            )[1]
            nnx.update(state, first(outs[0]))
            return outs[1]

        return layer

    return {"jit": jit, "vmap": vmap, "while_loop": while_loop, "scan": scan}[name]


@pytest.mark.parametrize("name", ["jit", "vmap", "while_loop", "scan"])
@pytest.mark.parametrize("around", ["", pytest.param("remat > ", marks=pytest.mark.slow)])
def test_a_layer_that_forgets_an_update_is_found(name, around, monkeypatch):
    nesting = f"{around}{name}[functional]"
    assert parity(norm(), X, nesting=nesting).outcome.verdict == "held"
    monkeypatch.setattr(compose.home(f"{name}_functional"), f"{name}_functional", dropping(name))
    found = parity(norm(), X, nesting=nesting)
    assert broken(found) == ["parity"], text(found)
    assert "model.mean" in text(found)


def test_an_output_that_differs_is_named_with_its_place_in_what_the_call_returns(monkeypatch):
    def jit(f, plan):
        def layer(state, *inputs):
            first, *rest = nnx.jit(f)(state, *inputs)
            return (first.at[1, 2].add(1.0), *rest)

        return layer

    monkeypatch.setattr(wrappers, "jit_argument", jit)
    found = parity(lambda model, x: {"y": [model(x)]}, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), X, nesting="jit")
    assert "output['y'][0] differs from that of the un-nested call" in text(found)
    assert "float32[3,8]   largest difference 1 (" in text(found)
    assert " allowed): " in text(found)
    assert " expected, " in text(found)
    assert " after, 1 of 24 elements" in text(found)


def test_the_second_step_of_a_scan_counts_too(monkeypatch):
    def scan(f, plan):
        def layer(state, *inputs):
            return tuple(leaf.at[1].set(leaf[0]) for leaf in right(f, plan)(state, *inputs))

        return layer

    right = loops.scan_functional
    monkeypatch.setattr(loops, "scan_functional", scan)
    assert (
        broken(parity(norm(), X, nesting="scan[functional]")) == []
    )  # BatchNorm's output does not depend on its state
    drop = HEALTHY["dropout"]()
    assert "output differs" in text(parity(drop.subject, *drop.args, nesting="scan[functional]"))


# --- Python attributes


@pytest.mark.parametrize("nesting", ["jit", "remat", "eval_shape", "vmap[functional] > jit", "call_first"])
def test_a_count_in_a_variable_holds(nesting):
    assert parity(Counts(plain=False), X, nesting=nesting).outcome.verdict == "held"


@pytest.mark.parametrize("nesting", ["un-nested", "jit", "remat", "eval_shape"])
def test_a_python_attribute_that_a_layer_hands_back_holds(nesting):
    assert parity(Counts(plain=True), X, nesting=nesting).outcome.verdict == "held"


def test_a_python_attribute_that_a_layer_drops_is_named():
    found = parity(Counts(plain=True), X, nesting="jit[functional]")
    assert "model.calls: 1 expected, 0 after" in text(found)
    assert "keep the value in an nnx.Variable: model.calls is a plain Python attribute" in text(found)


@pytest.mark.skipif(not TREE, reason="flax 0.10 refuses a carry whose attributes change")
def test_a_loop_changes_a_python_attribute_once():
    found = parity(Counts(plain=True), X, nesting="scan")
    assert "model.calls: 2 expected, 1 after" in text(found)


@pytest.mark.skipif(not TREE, reason="tree mode came with flax 0.12")
@pytest.mark.parametrize("switch", [{"graph": False}, {"graph_updates": False}])
def test_tree_mode_drops_a_python_attribute(switch):
    def run(model, x):
        return nnx.jit(lambda model, x: model(x), **switch)(model, x)

    found = parity(run, Counts(plain=True), X)
    assert broken(found) == ["parity"]
    assert f"model.calls is updated in the body of nnx.jit at {__file__}:" in text(found)
    assert "which carries no Python attribute out: the update is dropped" in text(found)
    assert "keep the value in an nnx.Variable" in text(found)
    assert parity(run, Counts(plain=False), X).outcome.verdict == "held"
    assert parity(nnx.jit(lambda m, x: m(x)), Counts(plain=True), X).outcome.verdict == "held"


@pytest.mark.skipif(not TREE, reason="tree mode came with flax 0.12")
def test_a_layer_in_tree_mode_drops_a_python_attribute(monkeypatch):
    monkeypatch.setattr(wrappers, "jit_argument", lambda f, plan: nnx.jit(f, graph=False))
    assert "model.calls: 1 expected, 0 after" in text(parity(Counts(plain=True), X, nesting="jit"))
    assert parity(Counts(plain=False), X, nesting="jit").outcome.verdict == "held"


@pytest.mark.skipif(not TREE, reason="tree mode came with flax 0.12")
def test_a_nesting_in_tree_mode_drops_what_the_same_in_graph_mode_keeps():
    few = {"invariants": "parity", "transforms": "jit", "styles": "argument", "sweep": "singles", "max_examples": 0}
    found = check(Counts(plain=True), X, modes="graph,tree", **few)
    assert [str(outcome.nesting) for outcome in found.broken] == ["tree: jit"]
    assert "model.calls: 1 expected, 0 after" in str(found)
    assert check(Counts(plain=False), X, modes="graph,tree", **few).ok


def test_parity_may_be_an_expected_failure():
    known = {"parity": "the statistics are frozen on purpose"}
    few = {"invariants": "parity", "styles": "argument", "transforms": "jit", "sweep": "singles", "max_examples": 0}
    assert not check(broadcasts, norm(), XS, **few).ok
    assert check(broadcasts, norm(), XS, expected_failures=known, **few).ok


# --- drops inside the user's own call


def broadcasts(model, xs):
    return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)


@nnx.jit
def jitted_broadcasts(model, xs):
    return broadcasts(model, xs)


def carries(model, xs):
    axes = nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None})  # what the hint says
    return nnx.scan(lambda model, x: model(x), in_axes=(axes, 0), out_axes=0)(model, xs)


def carries_all(model, xs):
    axes = (nnx.Carry, 0)
    return nnx.scan(lambda model, x: (model, model(x)), in_axes=axes, out_axes=axes)(model, xs)[1]


def differentiates(model, xs):
    return nnx.grad(lambda model, xs: broadcasts(model, xs).sum())(model, xs)


@pytest.mark.parametrize("run", [broadcasts, jitted_broadcasts, differentiates])
def test_a_broadcast_scan_inside_the_call_drops_updates(run):
    run(norm(), XS)  # traced before: a body that is not traced again must still be seen
    found = parity(run, norm(), XS)
    line = broadcasts.__code__.co_firstlineno + 1
    assert broken(found) == ["parity"]
    head = f"model.mean is updated in the body of nnx.scan at {__file__}:{line}, which broadcasts it (in_axes None)"
    assert f"{head}: the update is dropped" in text(found)
    assert "in_axes=(nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None}), 0)" in text(found)
    assert f"dropped model.var   BatchStat in the body of nnx.scan at {__file__}:{line}" in text(found)


@pytest.mark.parametrize("run", [carries, carries_all])
def test_with_what_the_hint_says_the_call_holds(run):
    found = parity(run, norm(), XS)
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.notes == ()


def test_the_path_of_a_drop_is_that_of_the_whole_model():
    class Model(nnx.Module):
        def __init__(self):
            self.blocks = node_dict({"bn": norm()})

        def __call__(self, xs):
            return broadcasts(self.blocks["bn"], xs)

    assert ".mean is updated in the body" in text(found := parity(Model(), XS))
    assert "dropped model.blocks" in text(found)


def test_a_drop_is_named_among_modules_of_one_type():
    class Model(nnx.Module):
        def __init__(self):
            self.one, self.two = norm(), norm()

        def __call__(self, xs):
            return broadcasts(self.two, xs)

    assert "model.two.mean is updated in the body of nnx.scan" in text(found := parity(Model(), XS))
    assert "model.one" not in text(found)


def test_a_broadcast_of_state_that_does_not_change_holds():
    assert parity(broadcasts, nnx.LayerNorm(8, rngs=nnx.Rngs(0)), XS).outcome.verdict == "held"


def test_a_copy_of_the_users_own_that_is_updated_is_no_drop():
    def run(model, x):
        return nnx.jit(lambda model, x: model(x))(nnx.clone(model), x)

    assert parity(run, norm(), X).outcome.verdict == "held"


def test_state_that_the_call_hands_back_by_itself_is_no_drop():
    def run(model, xs):
        def body(model, x):
            return model(x), (model.mean[...], model.var[...])

        ys, (means, variances) = nnx.scan(body, in_axes=(None, 0), out_axes=0)(model, xs)
        assign(model.mean, means[-1])
        assign(model.var, variances[-1])
        return ys

    found = parity(run, norm(), XS)
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
@pytest.mark.parametrize(
    "transform, place, hint",
    [
        (jax.jit(lambda m, x: m(x)), "", "write nnx.jit(f)(model, x) instead of jax.jit"),
        (lambda m, x: jax.lax.scan(lambda m, x: (m, m(x)), m, x[None])[1], "jax.lax.scan", "use nnx.scan"),
        (lambda m, x: jax.grad(lambda m: m(x).sum())(m), "jax.grad", "use nnx.grad"),
        (lambda m, x: jax.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x[None]), "jax.vmap", ""),
    ],
)
def test_a_transform_of_jax_updates_a_copy(transform, place, hint):
    found = parity(transform, norm(), X)
    assert broken(found) == ["parity"]
    told = f"m.mean is updated in the body of {place} at {__file__}:" if place else "m.mean kept its old value"
    assert told in text(found)
    assert hint in text(found)
    assert parity(transform, HEALTHY["batch_norm_eval"]().subject, X).outcome.verdict == "held"


@pytest.mark.skipif(not TREE, reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_a_module_that_a_transform_of_jax_returns_is_no_drop():
    def returned(model, x):
        return jax.jit(lambda model, x: (model, model(x)))(model, x)

    def updated(model, xs):
        new, ys = jax.lax.scan(lambda model, x: (model, model(x)), model, xs)
        nnx.update(model, nnx.state(new))
        return ys

    assert parity(returned, norm(), X).outcome.verdict == "held"
    assert parity(updated, norm(), XS).outcome.verdict == "held"


def test_a_call_that_cannot_run_without_jit_says_so():
    def run(model, x):
        if jax.config.jax_disable_jit:
            raise RuntimeError("needs jit")
        return model(x)

    found = parity(run, norm(), X)
    assert found.outcome.verdict == "held"
    assert "parity inside the call not asserted: with jax.disable_jit it raises RuntimeError: needs jit" in text(found)


def test_a_loop_of_too_many_steps_says_so(monkeypatch):
    monkeypatch.setattr("pytest_nnxcheck.engine.dropped_updates.MOST_EVENTS", 500)
    found = parity(lambda model, xs: jax.lax.map(lambda x: x * 2.0, xs), norm(), numbers((200, 8)))
    assert found.outcome.verdict == "held"
    assert "parity inside the call not asserted: with jax.disable_jit it raises TooLong: more than 500" in text(found)


# --- random numbers


def splits(model, rngs, x):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0, 0))
    def noise(rngs, x):
        return x + jax.random.normal(rngs.params(), x.shape)

    return noise(rngs, model(x))


NESTINGS = [
    "un-nested",
    "jit > vmap > scan",
    "call_first",
    *(
        pytest.param(nesting, marks=pytest.mark.full)
        for nesting in ("vmap", "vmap[functional]", "scan[functional]", "while_loop > jit")
    ),
]


@pytest.mark.parametrize("nesting", NESTINGS)
def test_random_numbers_give_no_false_alarm(nesting):
    drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    found = [
        parity(drop, X, nesting=nesting),
        parity(drop_with, nnx.Dropout(0.5), nnx.Rngs(3), X, nesting=nesting),
        parity(splits, nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Rngs(3), X, nesting=nesting),
    ]
    assert [each.outcome.verdict for each in found] == ["held"] * 3, "\n".join(map(text, found))
    assert [each.outcome.notes for each in found] == [()] * 3


def drop_with(model, rngs, x):
    return model(x, rngs=rngs)


def test_keys_whose_draws_differ_in_a_batch_are_excepted_and_said_so():
    class Noise(nnx.Module):
        def __init__(self):
            self.key = nnx.Variable(jax.random.key(0, impl="rbg"))
            self.counter = Counter(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            key, new = jax.random.split(self.key[...])
            assign(self.key, new)
            assign(self.counter, self.counter[...] + 1)
            return x + jax.random.normal(key, x.shape)

    found = parity(Noise(), X, nesting="jit > vmap")
    assert found.outcome.verdict == "held", text(found)
    assert "parity of outputs not asserted under vmap: model.key is key<rbg>[], whose draws are others" in text(found)
    assert parity(Noise(), X, nesting="jit > scan").outcome.notes == ()


# --- comparing


def test_bits_of_integers_flags_and_keys_and_a_tolerance_for_floats():
    one = jnp.ones(3)

    def differs(want, have, old=None):
        return compare("x", want, have, old, None, "") is not None

    assert not differs(one, one * (1 + 1e-6))
    assert differs(one, one * (1 + 1e-3))
    assert not differs(jnp.array([jnp.nan, jnp.inf]), jnp.array([jnp.nan, jnp.inf]))
    assert differs(jnp.array([jnp.nan, 1.0]), jnp.array([1.0, jnp.nan]))
    assert differs(jnp.array([jnp.inf]), jnp.array([-jnp.inf]))
    assert differs(jnp.arange(3), jnp.arange(3).at[1].set(0))
    assert differs(jnp.array([True]), jnp.array([False]))
    assert differs(one, one.astype(jnp.bfloat16))
    assert differs(jax.random.key(0), jax.random.key(1))
    assert not differs(jax.random.key(0), jax.random.key(0))
    assert not differs(one.astype(jnp.bfloat16), one.astype(jnp.bfloat16) * 1.008)
    assert differs(one.astype(jnp.bfloat16), one.astype(jnp.bfloat16) * 1.1)
    assert differs(one + 1e-5, one, one), "a small step of an optimizer, dropped"
    assert compare("x", one + 1e-5, one, one, None, "").label == "dropped"
    assert compare("x", one + 1e-5, one * 2, one, None, "").label == "differs"


class Noise(nnx.Module):
    """Makes a whole step of what is nothing but rounding, as Adam does of a gradient that is zero in theory."""

    def __init__(self):
        self.bias = nnx.Param(jnp.zeros(WIDTH))

    def __call__(self, x):
        slope = jnp.sin(x * 1e7).sum(0)
        assign(self.bias, self.bias[...] - 0.1 * slope / (jnp.abs(slope) + 1e-12))
        return x


def rounds(f, plan):
    """A layer that computes in another order: all that comes in is one rounding away."""
    return lambda state, *inputs: f(state, *(leaf * (1 + 1.2e-7) for leaf in inputs))


def test_what_rounding_alone_decides_is_no_alarm(monkeypatch):
    monkeypatch.setattr(wrappers, "remat_argument", rounds)
    found = parity(Noise(), numbers((64, WIDTH)), nesting="remat")
    assert found.outcome.verdict == "held", text(found)
    monkeypatch.setattr("pytest_nnxcheck.invariants.parity.NOISE", 0)
    assert "model.bias differs" in text(parity(Noise(), numbers((64, WIDTH)), nesting="remat"))


# --- the reference


def test_the_reference_leaves_the_users_objects_alone():
    log = []

    class Logs(nnx.Module):
        def __init__(self):
            self.counter = Counter(jnp.zeros((), jnp.int32))

        def __call__(self, x):
            log.append(1)
            assign(self.counter, self.counter[...] + 1)
            return x

    model = Logs()
    before = model.counter[...]
    found = evaluate(bind(model, (X,), {}), ("scan", "while_loop"))
    assert found.after.leaves["model.counter"].value == 4
    assert log == []
    assert model.counter[...] is before


def test_a_reference_is_evaluated_once_for_equal_calls_and_anew_for_others(monkeypatch):
    made = []
    monkeypatch.setattr(reference, "evaluate", lambda subject, meaning: made.append(meaning) or len(made))
    model, table = norm(), {}

    def ask(function, scale=1.0, meaning=("scan",), number=1):
        return recalled(table, bind(function, (model, X * scale), {}), meaning, number)

    def scaled(by):
        return lambda model, x: model(x) * by

    assert ask(scaled(2.0)) == ask(scaled(2.0)) == 1
    assert ask(scaled(3.0)) == 2, "what the code captured"
    assert ask(scaled(2.0), scale=2.0) == 3, "the inputs"
    assert ask(scaled(2.0), meaning=()) == 4
    assert ask(scaled(2.0), number=2) == 5, "the second call of an example"
    assign(model.mean, model.mean[...] + 1)
    assert ask(scaled(2.0)) == 6, "the state"


def test_a_call_that_captured_what_cannot_be_told_has_no_identity():
    box = {"scale": 2.0}
    assert identity(bind(lambda model, x: model(x) * box["scale"], (norm(), X), {})) is None
    assert identity(bind(lambda model, x: model(x), (norm(), X), {})) is not None


def test_bare_arrays_and_attributes_are_among_the_facts():
    model = Counts(plain=True)
    found = read(bind(model, (X,), {}), model)
    assert set(found.leaves) == {"model.linear.kernel", "model.linear.bias", "model.counter"}
    assert found.attributes["model.calls"] == ("int", "0")
    assert found.attributes["model.linear.in_features"] == ("int", "8")
    assert not any("_pytree" in path or "_object" in path for path in found.attributes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_the_call_adds_is_not_asserted_under_a_functional_layer_which_hands_out_what_was_there():
    class Sows(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return x

    assert parity(Sows(), X, nesting="jit").outcome.verdict == "held"
    found = parity(Sows(), X, nesting="jit[functional]")
    assert found.outcome.verdict == "held"
    assert "parity of model.seen[0] not asserted: the call adds it, and a functional layer hands out" in text(found)


def test_an_abstract_subject_is_not_asserted():
    model = nnx.eval_shape(norm)
    for nesting in ("un-nested", "jit"):
        found = parity(model, X, nesting=nesting)
        assert found.outcome.verdict == "held"
        assert "parity not asserted: the state or the inputs are abstract" in text(found)


# --- what the user sees


def test_parity_is_asserted_only_where_it_is_named():
    assert (
        "parity"
        not in check(broadcasts, norm(), XS, sweep="probes", max_examples=0, styles="argument").settings.invariants
    )
    assert call(broadcasts, norm(), XS).outcome.verdict == "held"


def test_a_report_names_the_un_nested_call():
    report = check(broadcasts, norm(), XS, invariants="parity", sweep="probes", max_examples=0, styles="argument")
    assert str(report).startswith("nnx invariant broken: parity")
    with pytest.raises(ParityLost, match="is updated in the body of nnx.scan"):
        assert_invariants(
            broadcasts, norm(), XS, invariants="parity", sweep="probes", max_examples=0, styles="argument"
        )


def test_on_the_command_line(pytester, inner_args):
    pytester.makepyfile(
        """
        import jax.numpy as jnp
        import pytest
        from flax import nnx

        @pytest.mark.nnx_invariants(sweep="probes", max_examples=0, styles="argument")
        def test_broadcast(nnx_wrap):
            def run(model, xs):
                return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)

            nnx_wrap(run)(nnx.BatchNorm(4, use_running_average=False, rngs=nnx.Rngs(0)), jnp.ones((2, 3, 4)))
        """
    )
    pytester.runpytest_inprocess(*inner_args).assert_outcomes(passed=1)
    result = pytester.runpytest_inprocess(*inner_args, "--nnx-invariants", "parity")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E * nnx invariant broken: parity*",
            "E * nesting * un-nested *",
            "E * parity * model.mean is updated in the body of nnx.scan at *test_on_the_command_line.py:*",
            "E * dropped * model.mean   BatchStat in the body of nnx.scan at *",
            "E * hint * carry it: in_axes=(nnx.StateAxes({nnx.BatchStat: nnx.Carry, ...: None}), 0)*",
        ]
    )
