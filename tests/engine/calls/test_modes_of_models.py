"""Real models in the modes of flax: which a model survives, and what flax itself rejects."""

from __future__ import annotations

import bugs
import jax
import jax.numpy as jnp
import optax
import pytest
from checking import FEW, has_modes
from counts import Counts
from flax import nnx
from healthy import HEALTHY
from wild_training import optimizer_of, step_on_squares

from pytest_nnxcheck import CheckError, Nesting, assert_invariants, check
from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.core.facts import ArrayType, Leaf, Move, Observation
from pytest_nnxcheck.core.notes import texts
from pytest_nnxcheck.invariants import donation

ONES = jnp.ones((2, 4))


def reason(report, text):
    return next(outcome.reason for outcome in report.outcomes if str(outcome.nesting) == text)


@pytest.mark.slow
@has_modes
def test_a_training_step_survives_all_modes():
    modes = "graph,graph_no_updates,tree"
    report = check(
        step_on_squares,
        *optimizer_of(nnx.Linear(4, 4, rngs=nnx.Rngs(0))),
        ONES,
        modes=modes,
        transforms="jit,scan",
        **FEW,
    )
    assert report.modes == dict.fromkeys(("graph", "graph_no_updates", "tree"), "held")


@pytest.mark.slow
@has_modes
def test_an_attribute_that_changes_goes_into_a_carry_in_graph_mode_only():
    settings = {"transforms": "jit,scan,vmap", "modes": "graph,graph_no_updates,tree", **FEW}
    report = check(Counts(plain=True, width=4), ONES, **settings)
    left_out = {str(outcome.nesting) for outcome in report.outcomes if outcome.verdict == "rejected"}
    assert left_out == {"graph_no_updates: scan", "tree: scan"}
    assert "compares the modules before and after a step" in reason(report, "tree: scan")
    assert check(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ONES, **settings).ok


@pytest.mark.slow
@has_modes
def test_shared_weights_are_rejected_in_tree_mode_and_nothing_more_is_run_there():
    case = HEALTHY["shared_weights"]()
    report = check(case.subject, *case.args, modes="graph,tree", **FEW)
    assert report.modes == {"graph": "held", "tree": "rejected"}
    assert not report.ok
    told = reason(report, "tree: jit")
    assert told.startswith("ValueError: Duplicate Param (args[0].decoder.kernel, args[0].encoder.kernel): ")
    assert [str(o.nesting) for o in report.outcomes if o.nesting.mode == "tree"] == ["tree: un-nested", "tree: jit"]
    assert report.notes == (f"no nesting takes the call in the tree mode (tree: jit: {told})",)
    with pytest.raises(
        CheckError, match=r"^nnx mode not supported by flax: tree\n  modes +graph passed   7 passed\n +tree not supp"
    ):
        assert_invariants(case.subject, *case.args, modes="graph,tree", **FEW)


@has_modes
def test_what_the_checks_read_of_a_model_is_read_in_graph_mode():
    case = HEALTHY["shared_weights"]()
    report = check(case.subject, *case.args, nesting="tree: un-nested", invariants="tracers,parity")
    assert report.ok, str(report)


@pytest.mark.slow
@has_modes
def test_a_violation_in_one_mode_is_none_in_another():
    """google/flax#4871: of a scan over rematerialized layers graph mode copies all parameters with every call."""
    modes = "graph,graph_no_updates,tree"
    subject = (bugs.call_twice, bugs.ScanOverRemat(nnx.Rngs(0)), *bugs.inputs_scan_over_remat())
    settings = {"transforms": "jit", **FEW}
    report = check(*subject, modes=modes, **settings)
    assert report.modes == {"graph": "violated", "graph_no_updates": "held", "tree": "held"}
    assert report.violations[0].invariant == "memory"
    # The expected peak is that of the un-nested jit in the same mode.
    alone = check(*subject, modes="tree", **settings)
    assert [outcome.budget for outcome in report.outcomes if outcome.nesting.mode == "tree"] == [
        None,
        alone.outcomes[1].budget,
    ]


def computed(model, x):
    return model.kernel[...] * 2, model(x)


def returned(model, x):
    return model(x), model.kernel[...]


@pytest.mark.slow
@has_modes
@pytest.mark.parametrize("mode", ["graph", "graph_no_updates", "tree"])
@pytest.mark.parametrize("subject", [computed, returned], ids=["computed", "returned"])
def test_an_output_in_the_buffer_of_a_leaf_is_a_copy_where_it_is_that_leaf(subject, mode):
    """Without graph updates the state comes back after the output, which takes the donated kernel: one of the two is new either way."""
    model = nnx.Linear(128, 128, rngs=nnx.Rngs(0))
    report = check(subject, model, jnp.ones((128, 128)), modes=mode, transforms="jit", **FEW)
    is_copied = subject is returned
    assert report.verdict == ("violated" if is_copied else "held"), str(report)
    assert [violation.invariant for violation in report.violations] == ["memory"] * is_copied


@has_modes
def test_the_current_mode_may_be_tree_mode_and_what_it_refuses_is_the_users_own_failure():
    with nnx.set_graph_mode(False):
        linear = check(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), ONES, transforms="jit,vmap", **FEW)
        case = HEALTHY["shared_weights"]()
        shared = check(case.subject, *case.args, transforms="jit", **FEW)
    assert linear.ok
    assert linear.modes == {"current": "held"}
    assert shared.modes == {"current": "failed"}


class Square(nnx.Module):
    """A kernel of the shape of the output, which takes its buffer where flax returns the output before the state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 4, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x)


class Narrowed(Square):
    """Its kernel comes back in another type: that buffer is lost, if no output has its type."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.linear.kernel.set_value(self.linear.kernel[...].astype(jnp.bfloat16))
        return y


class NarrowedForNothing(Narrowed):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x).sum()


@has_modes
@pytest.mark.parametrize("mode", ["graph_no_updates", "tree"])
def test_a_donated_buffer_that_an_output_took_is_not_lost(mode):
    settings = {"nesting": f"{mode}: jit"}
    (held,) = check(Square(nnx.Rngs(0)), jnp.ones((4, 4)), **settings).outcomes
    assert held.verdict == "held"
    assert held.notes == ("model.linear.kernel came back in a new buffer: an output of the call took a donated one",)
    (held,) = check(Narrowed(nnx.Rngs(0)), jnp.ones((4, 4)), **settings).outcomes
    assert held.verdict == "held"
    assert held.notes == (
        "model.linear.kernel   float32[4,4]   its dtype changed: it became bfloat16[4,4], in a new buffer: an output of the call took its own",
    )
    (lost,) = check(NarrowedForNothing(nnx.Rngs(0)), jnp.ones((4, 4)), **settings).outcomes
    assert [violation.invariant for violation in lost.violations] == ["donation"]


@has_modes
def test_copies_are_named_in_the_order_of_the_pytree():
    """The fields of a namedtuple keep their order in tree mode, and are sorted in graph mode."""
    model = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    steps = optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation()
    optimizer = nnx.Optimizer(model, steps, wrt=nnx.Param)
    in_order = {}
    for mode in ("graph", "tree"):
        with flax_modes.flax_mode(mode):
            in_order[mode] = [path[1] for path in graph.flattened_paths(optimizer) if path[0] == "opt_state"]
    fields = ["mini_step", "gradient_step", "inner_opt_state", "acc_grads"]
    assert [name for name in dict.fromkeys(in_order["tree"]) if name in fields] == fields
    assert [name for name in dict.fromkeys(in_order["graph"]) if name in fields] == sorted(fields)


def test_one_output_excuses_one_leaf():
    def leaf(path, *pointers):
        return Leaf(path, ArrayType("float32", (4,)), None, pointers)

    moves = tuple(Move(leaf(name, number), leaf(name, number + 10)) for number, name in enumerate("abc"))
    one, everything = (
        Observation(Nesting(), None, moves=moves, reused=frozenset(reused))
        for reused in ({0, 10, 11, 12}, {10, 11, 12})
    )
    said = ("a came back in a new buffer: an output of the call took a donated one",)
    assert (texts(donation.notes(one)), texts(donation.notes(everything))) == (said, ())
    assert [lost.path for lost in donation.lost_leaves(one)] == ["b", "c"]
