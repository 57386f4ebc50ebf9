"""Values that are followed through a program: the outputs that hold one, by moves alone, and those that are made of it."""

import jax
import jax.numpy as jnp
import pytest

from pytest_nnxcheck.jaxprs.followed import Followed, follow

X = jnp.ones((3, 4))


def named(value):
    return follow(value + 1, "new")


def through_a_scan(x):
    """The value of a step is carried to the last one, by way of another carry."""

    def step(carry, row):
        return (carry[1], named(row)), None

    (before_last, last), _ = jax.lax.scan(step, (x[0], x[0]), x)
    return before_last, last


def through_a_while_loop(x):
    return jax.lax.while_loop(lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, named(carry[1])), (0, x))[1]


def unnamed_before_its_name(x):
    """The value comes out from before the equation that names it."""
    value = x + 1
    follow(value, "new")
    return value


def of_a_derivative(x):
    return jax.grad(lambda x: ((y := named(x)).sum(), y), has_aux=True)(x)[1]


HELD = {
    "itself": named,
    "before its name": unnamed_before_its_name,
    "converted": lambda x: named(x).astype(jnp.float16),
    "reshaped": lambda x: named(x).reshape(-1).T[::-1],
    "sliced": lambda x: named(x)[1:],
    "stacked": lambda x: jnp.stack([x, named(x)]),
    "written into another": lambda x: x.at[0].set(named(x[0])),
    "updated in a slice": lambda x: jax.lax.dynamic_update_slice(x, named(x[:1]), (0, 0)),
    "selected": lambda x: jnp.where(x > 0, named(x), x),
    "left by a selection": lambda x: jnp.where(x > 0, x, named(x)),
    "in a jit": jax.jit(named),
    "in a jit in a remat": jax.checkpoint(jax.jit(named)),
    "in a branch": lambda x: jax.lax.cond(x.sum() > 0, named, lambda x: x, x),
    "stacked by a scan": lambda x: jax.lax.scan(lambda carry, row: (carry, named(row)), 0, x)[1],
    "carried by a scan": lambda x: through_a_scan(x)[1],
    "carried on by a scan": lambda x: through_a_scan(x)[0],
    "carried by a while loop": through_a_while_loop,
    "mapped": jax.vmap(named),
    "the mean over rows": lambda x: jax.vmap(named)(x).mean(0),
    "the mean by name": jax.vmap(lambda x: jax.lax.pmean(named(x), "i"), axis_name="i", out_axes=None),
    "beside a derivative": of_a_derivative,
}
MADE = {
    "a product": lambda x: named(x) * 2,
    "a sum with another": lambda x: named(x) + x,
    "a matrix product": lambda x: named(x) @ x.T,
    "half of it": lambda x: named(x) / 2,
    "written by addition": lambda x: x.at[0].add(named(x[0])),
    "in a jit": jax.jit(lambda x: named(x) * 2),
    "the sum in a scan": lambda x: jax.lax.scan(lambda total, row: (total + named(row), None), x[0], x)[0],
    "of the step before": lambda x: jax.lax.scan(lambda carry, row: (named(row), carry * 2), x[0], x)[1],
    "a branch": lambda x: jax.lax.cond(named(x).sum() > 0, lambda x: x, lambda x: x + 1, x),
}
OTHERS = {
    "an input": lambda x: (named(x), x)[1],
    "what it is made of": lambda x: (follow(jnp.stack([x + 1, x + 2]), "new"), x + 1)[1],
    "the same computed again": lambda x: (named(x), x + 1)[1],
    "another carry": lambda x: jax.lax.scan(lambda carry, row: ((carry[0], named(row)), None), (x[0], x[0]), x)[0][0],
}


def followed(function):
    """Whether the output holds the value, and whether it is made of it."""
    jaxpr = jax.make_jaxpr(lambda x: follow(function(x), "out"))(X).jaxpr
    found = Followed.of(jaxpr)
    (output,) = found.outputs
    assert found.values["new"]
    return "new" in output, "new" in found.made_of["out"]


@pytest.mark.parametrize("name", HELD)
def test_moves_keep_a_value(name):
    assert followed(HELD[name])[0]


@pytest.mark.parametrize("name", MADE)
def test_what_is_computed_of_it_is_made_of_it_and_does_not_hold_it(name):
    assert followed(MADE[name]) == (False, True)


@pytest.mark.parametrize("name", OTHERS)
def test_other_values_have_nothing_of_it(name):
    assert followed(OTHERS[name]) == (False, False)


def test_numbers_of_python_and_names_of_the_user_stay():
    assert follow({"count": 3, "flag": True}, "new") == {"count": 3, "flag": True}
    jaxpr = jax.make_jaxpr(lambda x: jax.ad_checkpoint.checkpoint_name(x, "new"))(X).jaxpr
    assert Followed.of(jaxpr).values == {}
