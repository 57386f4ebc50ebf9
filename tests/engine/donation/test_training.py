"""Training steps: the healthy ones keep every buffer, and each way to lose one is named with its leaves. The claims are tried in jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from checking import call, hint, near, some, takes_over, text
from flax import nnx
from healthy import FLAX, rngs
from wild_training import TRAINING, Mlp, batch_of, functional_args, functional_step, loss_of, optimizer_of, step_of

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.notes import texts
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.observe import observe
from pytest_nnxcheck.subject.profile import profile
from pytest_nnxcheck.subject.subject import bind

ROOTS = ["jit", "jit[functional]"]
FEW_ROOTS = some(ROOTS, ["jit"])
ADAM = optax.adam(1e-3)
LAYERS = [f"layers[{index}].{name}" for index in range(2) for name in ("bias", "kernel")]
IN_STATES = [f"['layers'][{index}]['{name}']" for index in range(2) for name in ("bias", "kernel")]


def rows(found):
    """The rows of the donation's violation."""
    (violation,) = [each for each in found.outcome.violations if each.invariant == "donation"]
    return {violation.summary, *(row for _, row in violation.details)}, violation


def assert_healthy(subject, args, nesting, **settings):
    found = call(subject, *args, nesting=nesting, **settings)
    assert found.outcome.verdict == "held", (text(found), found.error)


# --- every leaf that is read keeps its pointer


@pytest.mark.slow
@pytest.mark.parametrize("nesting", FEW_ROOTS)
def test_every_leaf_of_a_training_step_keeps_its_pointer(nesting):
    case = TRAINING["mlp_and_adam"]()
    subject = bind(case.subject, case.args, {})
    call = Call(subject, Nesting.parse(nesting), profile=profile(subject))
    found = observe(call, call.nesting)
    assert found.error is None
    paths = {subject.path(path) for path, _ in graph.raw_leaves(subject.state)}
    unchanged = paths - {move.before.path for move in found.moves}
    # A functional step returns what it changes: not the key, into which dropout folds its count.
    assert unchanged == (
        {path for path in paths if ".key" in path and "rngs" in path} if nesting == ROOTS[1] else set()
    )
    assert all(move.before.pointers and move.after.pointers == move.before.pointers for move in found.moves)
    names = {move.before.path for move in found.moves}
    assert {"optimizer.step", "metrics.loss.total", "optimizer.opt_state[0].count"} <= names
    assert_healthy(case.subject, TRAINING["mlp_and_adam"]().args, nesting)


# --- a learning rate that promotes


def sgd(model, batch, learning_rate):
    gradients = nnx.grad(lambda model: loss_of(model, batch)[0])(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - learning_rate * g, params, gradients))


def sgd_cast_back(model, batch, learning_rate):
    gradients = nnx.grad(lambda model: loss_of(model, batch)[0])(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: (p - learning_rate * g).astype(p.dtype), params, gradients))


def bfloat16_args(learning_rate):
    return Mlp(rngs(), jnp.bfloat16), batch_of(), learning_rate


@pytest.mark.slow
@pytest.mark.parametrize("nesting", FEW_ROOTS)
def test_a_learning_rate_that_promotes_is_named_with_every_parameter(nesting):
    found = call(sgd, *bfloat16_args(jnp.asarray(0.1, jnp.float32)), nesting=nesting)
    lost, violation = rows(found)
    shapes = ["16", "8,16", "4", "16,4"]
    # Newer jax lets XLA give the new value of a kernel the buffer of another one, of as many bytes: that one is a note.
    noted = {note.removesuffix(", in a new buffer: an output of the call took its own") for note in found.outcome.notes}
    assert len(lost) >= 3
    assert lost | noted == {
        f"model.{leaf}   bfloat16[{shape}]   its dtype changed: it became float32[{shape}]"
        for leaf, shape in zip(LAYERS, shapes, strict=True)
    }
    line = sgd.__code__.co_firstlineno + 3
    wanted = (
        f"cast the new value back to bfloat16 before it is stored or returned: it changes at {near(__file__)}:{line}"
    )
    assert violation.hint.startswith(wanted)
    assert_healthy(sgd_cast_back, bfloat16_args(jnp.asarray(0.1, jnp.float32)), nesting)
    assert_healthy(sgd, bfloat16_args(0.1), nesting)


# --- an optimizer that holds a buffer of the model


def keeps_parameters(copy):
    """A running mean of the parameters that begins with them."""

    def update(updates, state, params=None):
        return updates, jax.tree.map(lambda mean, param: 0.9 * mean + 0.1 * param, state, params)

    return optax.GradientTransformation(lambda params: jax.tree.map(copy, params), update)


@pytest.mark.slow
@pytest.mark.parametrize("nesting", FEW_ROOTS)
def test_an_optimizer_that_holds_buffers_of_the_model_is_named_with_both_paths(nesting):
    def args(copy):
        return *optimizer_of(Mlp(rngs()), optax.chain(ADAM, keeps_parameters(copy))), batch_of()

    found = call(step_of(), *args(lambda leaf: leaf), nesting=nesting)
    shared, violation = rows(found)
    assert "model and optimizer.opt_state[1] share all 4 buffers: XLA refuses to donate them twice" in shared
    assert violation.hint == hint("shared")
    assert_healthy(step_of(), args(jnp.copy), nesting)
    model, optimizer, batch = args(lambda leaf: leaf)
    nnx.update(optimizer, jax.tree.map(jnp.copy, nnx.state(optimizer)))
    assert_healthy(step_of(), (model, optimizer, batch), nesting)


def test_a_model_that_is_only_read_may_share_its_buffers():
    def evaluate(model, best, batch):
        return loss_of(model, batch)[0], jax.tree.map(jnp.sum, best)

    model = Mlp(rngs())
    args = (model, nnx.state(model, nnx.Param), batch_of())
    assert_healthy(evaluate, args, "jit")


# --- a step that forgets the optimizer


def forgets(graphdef, params, opt_state, batch):
    params, _, loss = functional_step(ADAM)(graphdef, params, opt_state, batch)
    return params, loss


OPT_STATE = {f"opt_state[0].{name}{inside}" for name in ("mu", "nu") for inside in IN_STATES}
if not takes_over(jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)):
    OPT_STATE.add("opt_state[0].count")  # elsewhere the loss, which has as many bytes, takes its buffer


@pytest.mark.slow
@pytest.mark.parametrize("nesting", [*FEW_ROOTS, "jit > scan"])
def test_a_functional_step_that_does_not_return_the_optimizer_is_named_with_every_leaf(nesting):
    donate = "state,params,opt_state"
    lost, violation = rows(call(forgets, *functional_args(ADAM), nesting=nesting, donate=donate))
    assert {row.split("   ")[0] for row in lost} == OPT_STATE
    assert all(row.endswith("   not returned") for row in lost)
    assert violation.hint == hint("not returned")
    assert_healthy(functional_step(ADAM), functional_args(ADAM), nesting, donate=donate)


def clones(model, optimizer, batch):
    return step_of()(model, nnx.clone(optimizer), batch)


def jitted_clone(model, optimizer, batch):
    return nnx.jit(clones)(model, optimizer, batch)


@pytest.mark.slow
@pytest.mark.parametrize("step", [clones, jitted_clone])
def test_an_update_of_a_clone_is_made_on_purpose(step):
    assert_healthy(step, (*optimizer_of(Mlp(rngs())), batch_of()), "jit")


@pytest.mark.slow
def test_an_optimizer_that_is_only_read_or_returned_is_no_dropped_update():
    def returns_the_copy(model, optimizer, batch):
        copy = nnx.clone(optimizer)
        return step_of()(model, copy, batch), nnx.state(copy)

    def adapts_with_one_of_two(model, optimizer, inner, batch):
        adapted, copy = nnx.clone((model, inner))
        step_of()(adapted, copy, batch)
        return step_of()(model, optimizer, batch)

    def reports(model, optimizer, batch):
        return loss_of(model, batch)[0], optimizer.step[...] + 1, {"lr": 0.1 * 0.9 ** optimizer.step[...]}

    model, optimizer = optimizer_of(Mlp(rngs()))
    assert_healthy(returns_the_copy, (model, optimizer, batch_of()), "jit")
    assert_healthy(reports, (model, optimizer, batch_of()), "jit")
    if FLAX >= (0, 11):
        _, inner = optimizer_of(model)
        assert_healthy(adapts_with_one_of_two, (model, optimizer, inner, batch_of()), "jit")


def copies_the_model(model, optimizer, batch):
    return step_of()(nnx.clone(model), optimizer, batch)


def returns_the_trained_copy(model, optimizer, batch):
    copy = nnx.clone(model)
    return step_of()(copy, optimizer, batch), nnx.state(copy)


def reads_a_frozen_one(model, optimizer, teacher, batch):
    return step_of()(model, optimizer, batch) + jnp.sum(teacher(batch["x"]))


def evaluates_on_a_copy(model, optimizer, batch):
    copy = nnx.merge(*nnx.split(model))
    return loss_of(copy, batch)[0]


@pytest.mark.slow
@pytest.mark.skipif(FLAX < (0, 11), reason="the optimizer itself holds the model, and trains that")
@pytest.mark.parametrize("nesting", some(["un-nested", "jit", "scan[functional]"], ["jit"]))
def test_a_step_that_trains_a_copy_of_the_model_has_a_note(nesting):
    def notes(step, *further, wrt=nnx.Param):
        model, optimizer = optimizer_of(Mlp(rngs()), wrt=wrt)
        found = call(step, model, optimizer, *further, batch_of(), nesting=nesting)
        assert found.outcome.verdict == "held"
        return [note for note in texts(found.facts.notes) if "trains a copy" in note]

    paths = ", ".join(f"model.{leaf}" for leaf in LAYERS[:3])
    said = f"copies_the_model steps its optimizer, and leaves {paths}, ... as they are: it trains a copy of the model"
    assert notes(copies_the_model) == [said]
    assert notes(step_of()) == notes(returns_the_trained_copy) == notes(evaluates_on_a_copy) == []
    assert notes(reads_a_frozen_one, Mlp(rngs())) == []


# --- the names of arguments
