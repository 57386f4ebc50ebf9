"""What the forward part of a program saves for the backward part, by line, and guarded writes: the facts of a jaxpr behind advice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import line
from flax import nnx
from healthy import assign
from wasteful import block, blocks_in_a_loop, blocks_in_a_scan, loop_for_all, loop_for_each

from pytest_nnxcheck import check
from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.core.peak import FLOOR
from pytest_nnxcheck.jaxprs.guarded import guarded
from pytest_nnxcheck.jaxprs.saved import saved
from pytest_nnxcheck.jaxprs.waste import names_nothing

X = jnp.ones((64, 32))
SIZE = X.nbytes


def jaxpr_of(call, *args):
    return staging.open_jaxpr(jax.make_jaxpr(call)(*args))


def lines_of(call, *args):
    """The lines that save something large, each with its bytes and whether it runs several times."""
    return {
        fact.line: (fact.bytes, fact.repeated) for fact in saved(jaxpr_of(jax.grad(call), *args)) if fact.bytes >= SIZE
    }


def once(x):
    return jnp.sin(x).sum()


def in_a_loop(x):
    for _ in range(3):
        x = jnp.sin(x)
    return x.sum()


def in_a_comprehension(x):
    return sum([jnp.sin(x + k).sum() for k in range(3)])


def once_in_a_comprehension(x):
    return sum(jnp.tanh(jax.nn.gelu(y)).sum() for y in [x])


def called_from_two_lines(x):
    def layer(x):
        return jnp.sin(x)

    y = layer(x)
    return layer(y).sum()


def jit_of_a_library_on_two_lines(x):
    x = jax.nn.silu(x)
    return (x + jax.nn.silu(x)).sum()


def loop_in_a_library(x):
    return nnx.Sequential(jnp.sin, jnp.sin, jnp.sin)(x).sum()


def layers_in_a_loop_in_a_library(x):
    return nnx.Sequential(*[lambda x: jnp.sin(x)] * 3)(x).sum()  # noqa: PLW0108 - a line of the user's


@jax.custom_vjp
def activation(x):
    return jnp.tanh(x)


def saves_two(x):
    return jnp.tanh(x), (jnp.sin(x), jnp.cos(x))


activation.defvjp(saves_two, lambda saved, g: (g * saved[0] * saved[1],))


def rule_in_a_loop(x):
    for _ in range(3):
        x = activation(x)
    return x.sum()


def rule_once(x):
    return activation(x).sum()


def gradients_in_a_loop(x):
    return sum(jax.grad(once)(x + k) for k in range(3))


def test_the_values_of_a_line_are_one_fact_that_says_whether_it_runs_several_times():
    assert lines_of(once, X) == {line(once, "jnp.sin"): (SIZE, False)}
    assert lines_of(in_a_loop, X) == {line(in_a_loop, "jnp.sin"): (3 * SIZE, True)}
    assert lines_of(in_a_comprehension, X) == {line(in_a_comprehension, "jnp.sin"): (3 * SIZE, True)}
    ((_, repeated),) = lines_of(once_in_a_comprehension, X).values()
    assert not repeated
    assert lines_of(called_from_two_lines, X) == {line(called_from_two_lines, "jnp.sin"): (2 * SIZE, True)}
    assert lines_of(jax.jit(once), X) == lines_of(once, X)
    assert not any(fact.repeated for fact in saved(jaxpr_of(gradients_in_a_loop, X))), (
        "each has a backward part of its own"
    )


def layers_in_a_loop(x, w):
    for k in range(4):
        x = x @ w + k
    return x.sum()


def activations_in_a_loop(x, w):
    for k in range(4):
        x = jnp.cos(jnp.sin(x @ w + k))
    return x.sum()


def jits_of_a_library_in_a_loop(x, w):
    for k in range(4):
        x = jax.nn.silu(x @ w + k)
    return x.sum()


def operands_in_a_loop(x, w):
    for _ in range(4):
        y = x @ w
        x = jnp.sin(y)
    return x.sum()


@pytest.mark.parametrize(
    "call, text, size, kept",
    [
        (layers_in_a_loop, "x @ w", 3, 3),  # what goes into the second layer, and so on
        (activations_in_a_loop, "x @ w", 11, 3),  # that, and what the cosine and the sine need
        (jits_of_a_library_in_a_loop, "jax.nn.silu", 15, 3),
        (operands_in_a_loop, "jnp.sin", 7, 4),  # y
    ],
)
def test_a_remat_of_a_line_saves_what_goes_into_each_of_its_runs(call, text, size, kept, monkeypatch):
    monkeypatch.setattr("pytest_nnxcheck.jaxprs.saved.FLOOR", SIZE)
    facts = saved(jaxpr_of(jax.grad(call, 1), X, jnp.eye(32)))
    (fact,) = [fact for fact in facts if fact.line == line(call, text)]
    assert (fact.bytes, fact.kept) == (size * SIZE, kept * SIZE)


def test_the_rule_of_a_derivative_runs_as_often_as_its_function_is_called():
    saves = line(saves_two, "return")
    assert lines_of(rule_once, X) == {saves: (2 * SIZE, False)}
    assert lines_of(rule_in_a_loop, X) == {saves: (6 * SIZE, True)}


def test_what_a_library_jits_is_of_the_line_that_calls_it():
    lines = lines_of(jit_of_a_library_on_two_lines, X)
    assert set(lines) == {line(jit_of_a_library_on_two_lines, text) for text in ("x = ", "return")}
    assert not any(repeated for _, repeated in lines.values())


def test_a_loop_in_a_library_runs_what_the_user_wrote_several_times_and_not_the_line_that_calls_it():
    calls = line(loop_in_a_library, "nnx.Sequential")
    assert lines_of(loop_in_a_library, X) == {calls: (3 * SIZE, False)}
    inside = line(layers_in_a_loop_in_a_library, "lambda")
    assert lines_of(layers_in_a_loop_in_a_library, X) == {inside: (3 * SIZE, True)}


def test_a_scan_saves_for_all_its_steps_on_its_line_and_its_carry_is_kept():
    def scanned(x):
        return jax.lax.scan(lambda x, _: (jnp.sin(jnp.cos(x)), None), x, length=5)[0].sum()

    (fact,) = [fact for fact in saved(jaxpr_of(jax.grad(scanned), X)) if fact.scanned]
    assert (fact.line, fact.repeated, fact.largest) == (line(scanned, "jax.lax.scan"), True, 0)
    assert fact.types == ("float32[5,64,32]",)
    of_remat = saved(jaxpr_of(jax.grad(lambda x: blocks_in_a_scan(0.8, x)), X))
    assert all(fact.bytes == fact.kept for fact in of_remat if fact.scanned), "remat saves what it carries"


def test_what_only_remats_read_is_kept():
    def layers(x):
        for _ in range(3):
            x = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))(x)
        return x.sum()

    facts = [fact for fact in saved(jaxpr_of(jax.grad(layers), X)) if not fact.largest and fact.bytes >= SIZE]
    assert facts
    assert all(fact.bytes == fact.kept for fact in facts)


def test_what_remats_compute_again_is_apart_with_the_bytes_of_one_of_them():
    line_of_steps = line(block, "length=16")
    for run, count in ((blocks_in_a_loop, 8), (blocks_in_a_scan, 1)):
        facts = [fact for fact in saved(jaxpr_of(jax.grad(run), 0.8, X)) if fact.largest and fact.line == line_of_steps]
        assert [(fact.bytes, fact.largest) for fact in facts] == [(count * 16 * SIZE, 16 * SIZE)]


def test_a_program_without_a_derivative_saves_nothing():
    assert saved(jaxpr_of(in_a_loop, X)) == saved(jaxpr_of(lambda x: blocks_in_a_scan(0.8, x), X)) == ()


# --- guarded writes

ROW, DUE = jnp.ones(32), jnp.array(True)
FORMS = {
    "where": (1, lambda x, row, due: jnp.where(due, x.at[3].set(row), x)),
    "where, the other way round": (1, lambda x, row, due: jnp.where(due, x, x.at[3].add(row))),
    "branch": (1, lambda x, row, due: jax.lax.cond(due, lambda x: x.at[3].set(row), lambda x: x, x)),
    "in a jit": (1, lambda x, row, due: jnp.where(due, jax.jit(lambda x: x.at[3].set(row))(x), x)),
    "in a scan": (1, lambda x, row, due: jax.lax.scan(lambda x, k: (jnp.where(due, x.at[k].set(row), x), None), x, jnp.arange(4))[0]),
    "a loop of writes": (1, lambda x, row, due: jnp.where(due, jax.lax.fori_loop(0, 4, lambda k, x: x.at[k].set(row), x), x)),
    "masked": (0, lambda x, row, due: x.at[3].set(jnp.where(due, row, x[3]))),
    "either row": (0, lambda x, row, due: jnp.where(due, x.at[3].set(row), x.at[4].set(row))),
    "made anew": (0, lambda x, row, due: jnp.where(due, jnp.tanh(x), x)),
    "another array": (0, lambda x, row, due: jnp.where(due, x.at[3].set(row), x * 2)),
    "written whatever is chosen": (0, lambda x, row, due: jax.lax.fori_loop(0, 4, lambda k, x: x.at[k].set(row), x)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_choice_between_an_array_and_the_same_with_a_part_written_is_guarded(form):
    count, call = FORMS[form]
    facts = guarded(jaxpr_of(call, X, ROW, DUE))
    assert [(fact.type, fact.array, fact.mapped_loop) for fact in facts] == [("float32[64,32]", 0, False)] * count
    assert all(fact.line.startswith(line(FORMS_ARE_HERE, "def").rpartition(":")[0]) for fact in facts)


def FORMS_ARE_HERE():
    """The file of the lines."""


def test_a_loop_guards_all_that_it_carries_where_its_condition_has_an_axis():
    args = jnp.eye(64), jnp.ones((4, 64)), jnp.arange(4)
    (fact,) = guarded(jaxpr_of(loop_for_each, *args))
    assert (fact.type, fact.mapped_loop) == ("float32[4,256,64]", True)
    assert fact.line == line(loop_for_each, "jax.lax.while_loop")
    assert guarded(jaxpr_of(loop_for_all, *args)) == ()


def test_a_loop_guards_what_it_writes_again():
    def one(keys, length):
        def body(carry):
            return carry[0] + 1, carry[1].at[carry[0]].set(2.0)

        return jax.lax.while_loop(lambda carry: carry[0] < length, body, (0, keys.at[0].set(1.0)))[1]

    (fact,) = guarded(jaxpr_of(jax.vmap(one), jnp.ones((4, 8, 8)), jnp.arange(4)))
    assert (fact.array, fact.mapped_loop) == (0, True)


class Guards(nnx.Module):
    """Writes a row of its cache in one of the ways that XLA makes in place."""

    def __init__(self, write):
        self.cache, self.write = nnx.Cache(jnp.ones((512, 64))), write

    def __call__(self, row, due):
        assign(self.cache, self.write(self.cache[...], row, due))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["where", "branch", "in a scan"])
def test_a_guarded_write_that_xla_makes_in_place_is_no_advice(form):
    report = check(Guards(FORMS[form][1]), jnp.ones(64), DUE, nesting="jit", memory_advice="fail")
    assert report.ok, str(report)
    assert report.outcomes[0].evidence.split.temporaries < FLOOR, "in place"


# --- policies


POLICIES = jax.checkpoint_policies


def recursive():
    def policy(primitive, *avals, **params):
        return bool(params.get("again")) and policy(primitive)

    return policy


calls_itself = recursive()


@pytest.mark.parametrize(
    "policy, names",
    [
        (POLICIES.save_only_these_names("hidden"), ()),
        (POLICIES.save_only_these_names("hidden", "attention"), ()),
        (POLICIES.save_only_these_names("attention"), ("'attention'",)),
        (POLICIES.save_any_names_but_these("attention"), ()),
        (POLICIES.save_from_both_policies(POLICIES.dots_saveable, POLICIES.save_only_these_names("attention")), ()),
        (POLICIES.save_from_both_policies(calls_itself, POLICIES.save_only_these_names("attention")), ("'attention'",)),
        (POLICIES.save_and_offload_only_these_names(names_which_can_be_saved=[], names_which_can_be_offloaded=["attention"], offload_src="device", offload_dst="pinned_host"), ("'attention'",)),
        (POLICIES.nothing_saveable, ()),
        (POLICIES.dots_with_no_batch_dims_saveable, ()),
        (None, ()),
    ],
)  # fmt: skip
def test_a_policy_changes_nothing_where_no_value_has_its_names(policy, names):
    def layer(x):
        return jnp.sin(jax.ad_checkpoint.checkpoint_name(jnp.sin(x), "hidden")) @ x.T

    for call in (
        jax.checkpoint(layer, policy=policy),
        jax.grad(lambda x: jax.checkpoint(layer, policy=policy)(x).sum()),
    ):
        assert {fact.names for fact in names_nothing(jaxpr_of(call, X))} == ({names} if names else set())
