"""Subjects as they are in the wild hold, or are rejected with a reason; none ends in an exception of the plugin's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import Example, call, text
from flax import nnx
from healthy import FLAX, WIDTH, assign, numbers, rngs
from probes import fori_loop_takes_new_variables
from wild import SHARE, SUBJECTS, run
from wild_cases import WILD, X
from wild_inputs import Batch
from wild_state import LazyCache, Sows
from wild_training import TRAINING, Trainer, batch_of

from pytest_nnxcheck import CheckError, Nesting, check
from pytest_nnxcheck.checks.check_call import check_call
from pytest_nnxcheck.core.settings import merge
from pytest_nnxcheck.engine.example import Memo

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

NESTINGS = [
    "jit > scan",
    "vmap > while_loop[functional]",
    "jit[functional] > vmap > remat",
    "eval_shape > while_loop",
    "remat > scan[functional]",
    "jit > call_first",
]
ASKED_OF_JIT = "tracers,memory,donation,recompilation,finite"
CHANGES_TYPES = {
    "growing_cache": "model.seen",
    "switched_to_evaluation_by_the_call": "model.dropout.deterministic",
    "weak_types": "model.scale",
}
"""Subjects that a second call traces again in truth: a leaf that grows, a flag that the first call sets, a scalar that loses its weak type."""
ADDS = {"a_cache_taken_away", "cache_at_the_first_call", "cache_made_by_the_call", "sow"}


def in_run(number, name):
    """One in so many in every run, those that the invariants have something to say of on the oldest and the newest row."""
    if number % SHARE == 0:
        return name
    return pytest.param(name, marks=pytest.mark.slow if name in {*CHANGES_TYPES, *ADDS} else pytest.mark.full)


@pytest.mark.parametrize("name", [in_run(number, name) for number, name in enumerate(SUBJECTS)])
def test_it_holds_or_is_rejected_with_a_reason(name):
    case, memo = WILD[name](), Memo()
    number = sorted(WILD).index(name)
    with Example(memo) as example:
        plain = run(case, "un-nested", example)
    assert plain.outcome.verdict == "held", (text(plain), plain.error)
    with Example(memo) as example:
        jitted = run(WILD[name](), "jit", example, invariants=ASKED_OF_JIT, memory_advice="fail")
    paths = [violation.findings[0].path for violation in jitted.outcome.violations]
    assert paths == ([CHANGES_TYPES[name]] if name in CHANGES_TYPES else []), text(jitted)
    noted = any("recompilation not asserted" in note for note in jitted.outcome.notes)
    assert noted == (name in ADDS), text(jitted)
    # The steps with gradients take the longest to compile.
    nesting = "scan" if name in TRAINING else NESTINGS[number % len(NESTINGS)]
    with Example(memo) as example:
        nested = run(case, nesting, example)
    assert nested.outcome.verdict in ("held", "rejected"), (nesting, text(nested), nested.error)
    assert nested.outcome.reason if nested.outcome.verdict == "rejected" else alike(nested.output, plain.output)


def alike(one, other):
    """The same structure, whatever the numbers: a later call may see another state."""
    first, second = [
        [
            (jax.tree_util.keystr(path), type(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(each, is_leaf=is_node)
        ]
        for each in (one, other)
    ]
    return type(one) is type(other) and first == second


def is_node(value):
    return isinstance(value, nnx.Module | nnx.Variable | nnx.GraphDef | Batch)


# --- what a call does to the user's objects


def held(subject, *args, example=None, nesting="jit", **kwargs):
    """The output of a call whose values are read."""
    example = example or Example(values_needed=True)
    found = check_call(subject, args, kwargs, nesting=Nesting.parse(nesting), settings=merge({}), example=example)
    assert found.outcome.verdict == "held", (text(found), found.error)
    return found.output


@pytest.mark.slow
@pytest.mark.parametrize("nesting", ["un-nested", "jit", "jit[functional] > remat"])
def test_a_trainer_sees_its_model_trained_and_its_calls_counted(nesting):
    trainer = Trainer()
    before = np.asarray(trainer.model.layers[0].kernel[...])
    loss = held(trainer.step, batch_of(), nesting=nesting)["loss"]
    assert isinstance(loss, jax.Array)
    assert trainer.calls > 0
    assert trainer.model is trainer.models["eval"]
    assert not np.array_equal(trainer.model.layers[0].kernel[...], before)


def test_added_variables_are_there_after_the_call_and_gone_after_the_example():
    for model, name in ((Sows(rngs()), "hidden"), (LazyCache(rngs()), "last")):
        for nesting in ("un-nested", "jit", "jit[functional]"):
            with Example() as example:
                y = held(model, numbers(X), example=example, nesting=nesting)
                # A functional layer hands out the state that was there before, as a user would write it.
                assert hasattr(model, name) == (nesting != "jit[functional]")
                assert y.shape == (3, 4)
            assert not hasattr(model, name)


@pytest.mark.slow
def test_the_note_on_added_state_names_the_variables():
    report = check(
        Sows(rngs()), numbers(X), sweep="singles", max_examples=0, styles="argument", transforms="jit,scan,vmap"
    )
    assert report.notes == ("the call adds model.hidden, which no loop can carry: argument scan, vmap left out",)
    replayed = call(LazyCache(rngs()), numbers(X), nesting="vmap").outcome
    assert replayed.verdict == "rejected"
    assert replayed.reason == "vmap carries the state, and the call adds model.last to it"


class Resets(nnx.Module):
    """Puts a new Variable in the place of the old one, where it could assign to it."""

    def __init__(self):
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.seen = nnx.BatchStat(self.seen[...] + x.sum())
        return x * 2


@pytest.mark.parametrize("layer", ["scan", "vmap", "while_loop", "fori_loop", "cond", "switch"])
def test_a_new_variable_in_place_of_another_is_left_out_where_flax_refuses_it(layer):
    found = call(Resets(), numbers(X), nesting=layer)
    outcome = found.outcome
    refuses = layer in ("while_loop", "cond", "switch") or (
        layer == "fori_loop" and not fori_loop_takes_new_variables()
    )
    assert outcome.verdict == ("rejected" if refuses else "held"), text(found)
    said = "the call puts another Variable in place of model.seen, where it could assign to its value"
    assert outcome.reason.endswith(said if refuses else "")
    assert outcome.unfit == refuses
    assert call(Resets(), numbers(X), nesting=f"{layer}[functional]").outcome.verdict == "held"


# --- what cannot be taken


@pytest.mark.slow
def test_an_iterator_is_refused_by_name():
    def epoch(model, batches):
        return sum(model(batch).mean() for batch in batches)

    model = nnx.Linear(WIDTH, 4, rngs=rngs())
    with pytest.raises(CheckError, match="batches is a generator, which can be read once"):
        check(epoch, model, (numbers(X) for _ in range(2)))
    assert check(epoch, model, [numbers(X) for _ in range(2)], nesting="jit").ok


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="flax has a place for plain arrays from 0.10.7 on")
def test_a_module_that_flax_cannot_split_is_refused():
    class Table(nnx.Module):
        def __init__(self):
            self.frequencies = jnp.arange(WIDTH)

        def __call__(self, x):
            return x * self.frequencies

    with pytest.raises(CheckError, match="flax cannot split model, so no transform can take it: .*at 'frequencies'"):
        check(Table(), numbers(X))


def test_arguments_that_jax_cannot_flatten_are_refused():
    case = WILD["dict_with_keys_of_several_types"]()
    with pytest.raises(CheckError, match="jax cannot flatten the arguments of .*forward"):
        check(case.subject, *case.args)


def test_a_carry_that_would_change_its_type_is_rejected_and_a_jit_is_not():
    class Promotes(nnx.Module):
        def __init__(self):
            self.total = nnx.Variable(jnp.zeros(WIDTH, jnp.bfloat16))

        def __call__(self, x):
            assign(self.total, self.total[...] + x.sum(0))
            return x

    for nesting in ("scan", "while_loop[functional]", "vmap > scan"):
        outcome = call(Promotes(), numbers(X), nesting=nesting).outcome
        assert outcome.verdict == "rejected"
        assert (
            "a carry keeps its types: the call makes model.total, which is bfloat16[8], a float32[8]" in outcome.reason
        )
    assert check(Promotes(), numbers(X), nesting="jit > vmap", donate="none").ok
    few = {"donate": "none", "styles": "argument", "sweep": "singles", "max_examples": 0}
    (note,) = check(Promotes(), numbers(X), **few).notes
    assert note == (
        "scan, while_loop left out: each carries the state, and a carry keeps its types: the call makes model.total, which is"
        " bfloat16[8], a float32[8]"
    )


class Transposed(nnx.Module):
    """Keeps its cache transposed after a call, which a second call cannot use; ``back`` puts it as it was."""

    def __init__(self, *, back):
        self.cache, self.back = nnx.Cache(jnp.ones((2 * WIDTH, WIDTH))), back

    def __call__(self, x):
        y = self.cache[...].T @ jnp.ones(2 * WIDTH) + x
        assign(self.cache, self.cache[...] if self.back else self.cache[...].T)
        return y


@pytest.mark.slow
def test_a_call_that_changes_the_types_of_its_state_is_not_made_twice():
    outcome = call(Transposed(back=False), numbers(X), nesting="jit > call_first").outcome
    assert outcome.verdict == "rejected"
    assert outcome.reason == (
        "call_first makes the call twice, and the first makes model.cache, which is float32[16,8], a float32[8,16]"
    )
    few = {"donate": "none", "styles": "argument", "sweep": "short", "max_examples": 0}
    assert f"jit > call_first left out: {outcome.reason}" in check(Transposed(back=False), numbers(X), **few).notes
    assert call(Transposed(back=True), numbers(X), nesting="jit > call_first").outcome.verdict == "held"
