"""Donated inputs in any container and place: what an output took over is kept, and what is lost is named; the claims are tried in jax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from checking import FEW, broken, call, full, hint, takes_over, text
from flax import nnx
from healthy import FLAX, assign, numbers, rngs

from pytest_nnxcheck import CheckError, check
from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.xla import pointers


class KeepsInDict(nnx.Module):
    """Keeps its output in a plain dict; the kernel is handed back as it was, or in another type that no buffer fits."""

    def __init__(self, dtype=jnp.float32):
        self.linear = nnx.Linear(4, 4, use_bias=False, rngs=rngs())
        self.kind = nnx.Param  # a class has what an array has: a shape to ask for, and none to give
        self.cache, self.dtype = nnx.data({}) if graph.has_data() else {}, dtype

    def __call__(self, x):
        y = self.linear(x)
        if self.dtype == jnp.bfloat16:
            assign(self.linear.kernel, self.linear.kernel[...].astype(self.dtype))
        else:
            self.cache["y"] = y
        return y.sum()


def takes_plain_arrays():
    model = KeepsInDict()
    try:
        nnx.jit(lambda model, x: model(x))(model, numbers((4, 4)))
    except ValueError:
        return False
    return not isinstance(model.cache["y"], jax.core.Tracer)


has_plain_arrays = pytest.mark.skipif(
    not takes_plain_arrays(), reason="this flax takes no module that keeps an array in a plain dict"
)

ROOTS = ["jit", "jit[functional]", "jit > vmap", "jit > scan[functional]", "jit > eval_shape", "jit[closure]"]
DONATED = {"donate": "state,cache"}


def linear():
    return nnx.Linear(4, 4, rngs=rngs())


def two():
    return [jnp.zeros((3, 4)), jnp.ones((3, 4))]


def decode(model, x, cache):
    """The state comes back after another output, as every language model's does."""
    return model(x).sum(0), [each + 1 for each in cache]


def decode_tuple(model, x, cache):
    return model(x).sum(0), tuple(each + 1 for each in cache)


def decode_swapped(model, x, cache):
    first, second = cache
    return [second + 1, {"old": (None, first * 2)}], model(x)


def lstm(model, x, cache):
    hidden, cell = cache
    cell = jnp.tanh(cell + model(x))
    hidden = jnp.tanh(cell) * hidden
    return hidden * 1.0, (hidden, cell)


def one_array(model, x, cache):
    return model(x), cache + 1


def forgets_one(model, x, cache):
    return model(x).sum(0), [cache[0] + cache[1]]


def narrows_one(model, x, cache):
    return model(x).sum(0), [cache[0] + 1, (cache[1] + 1).astype(jnp.bfloat16)]


def narrows_swapped(model, x, cache):
    """Names and types pair the wrong arrays here: only what goes into an output tells whose it is."""
    return [cache[1] + 1, (cache[0] + 1).astype(jnp.bfloat16)], model(x).sum(0)


def grows_one(model, x, cache):
    return model(x).sum(0), [jnp.concatenate([cache[0], x[:1]]), cache[1] + 1]


HEALTHY = {
    "list": (decode, two),
    "tuple": (decode_tuple, lambda: tuple(two())),
    "swapped": (decode_swapped, two),
    "LSTM": (lstm, lambda: (jnp.zeros((2, 4)), jnp.ones((2, 4)))),
    "one array": (one_array, lambda: jnp.zeros((5, 4))),
}
LEAKY = {
    "forgets one": (forgets_one, "cache[1]", "not returned"),
    "narrows one": (narrows_one, "cache[1]", "its dtype changed: an output is bfloat16[3,4]"),
    "narrows, swapped": (narrows_swapped, "cache[0]", "its dtype changed: an output is bfloat16[3,4]"),
    "grows one": (grows_one, "cache[0]", "its shape changed: an output is float32[4,4]"),
}


def by_turns(names):
    """Each subject under two of the roots in every run, each root around some; all of them in the full one."""
    return [
        pytest.param(name, root, marks=[] if (turn - place) % 3 == 0 else pytest.mark.full)
        for turn, name in enumerate(names)
        for place, root in enumerate(ROOTS)
    ]


def args(cache):
    return linear(), numbers((2, 4)), cache()


@pytest.mark.parametrize("name, nesting", by_turns(HEALTHY))
def test_a_donated_cache_that_comes_back_after_another_output_holds(name, nesting):
    subject, cache = HEALTHY[name]
    found = call(subject, *args(cache), nesting=nesting, **DONATED)
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.evidence.moves == ()


@pytest.mark.parametrize("name, nesting", by_turns(LEAKY))
def test_exactly_the_array_that_is_lost_is_named(name, nesting):
    subject, path, why = LEAKY[name]
    found = call(subject, *args(two), nesting=nesting, **DONATED)
    assert broken(found) == ["donation"], text(found)
    (violation,) = found.outcome.violations
    assert violation.summary.split("   ")[0] == path
    assert violation.summary.endswith(why)
    assert violation.details == ()  # one row for one leaf
    assert [move.path for move in found.outcome.evidence.moves] == [path]


def test_an_abstract_cache_is_told_apart_too():
    x, cache = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args(two)[1:])
    model = nnx.eval_shape(linear)
    assert call(decode, model, x, cache, nesting="jit", **DONATED).outcome.verdict == "held"
    found = call(narrows_swapped, model, x, cache, nesting="jit", **DONATED)
    assert [violation.summary.split("   ")[0] for violation in found.outcome.violations] == ["cache[0]"]


def test_an_argument_that_the_call_lacks_is_refused_with_those_that_it_has():
    with pytest.raises(
        CheckError,
        match="donate='state,caches': decode takes no array argument named .caches.; its array arguments are: x, cache",
    ):
        call(decode, *args(two), donate="state,caches")


# --- another type in the same buffer


def turned(model, x, cache):
    return model(x), [each.T + 1 for each in cache]


def numbered(model, x, cache):
    return model(x), [(each + 1).astype(jnp.int32) for each in cache]


def halved(model, x, cache):
    """No result has as many bytes as a donated array."""
    return model(x), [(each.T + 1).astype(jnp.bfloat16) for each in cache]


def written_in_place(model, x, cache):
    return model(x).sum(0), jax.lax.dynamic_update_slice(cache, x[:1], (3, 0))


def test_a_cache_that_grows_is_as_long_as_it_gets_from_the_start():
    found = call(grows_one, *args(two), nesting="jit", **DONATED)
    assert found.outcome.violations[0].hint == hint("grows")
    assert call(halved, *args(two), nesting="jit", **DONATED).outcome.violations[0].hint == ""
    cured = call(written_in_place, *args(lambda: jnp.zeros((5, 4))), nesting="jit", **DONATED)
    assert cured.outcome.verdict == "held", text(cured)


OLD = jax.ShapeDtypeStruct((3, 4), jnp.float32)
TURNED, NUMBERED = jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.ShapeDtypeStruct((3, 4), jnp.int32)


@pytest.mark.parametrize("nesting", ["jit", *full("jit[functional]", "jit > vmap")])
@pytest.mark.parametrize(
    "subject, new, why",
    [
        (turned, TURNED, "its shape changed: an output is float32[4,3]"),
        (numbered, NUMBERED, "its dtype changed: an output is int32[3,4]"),
    ],
)
def test_another_type_in_a_buffer_that_was_taken_over_is_a_note(subject, new, why, nesting):
    found = call(subject, *args(two), nesting=nesting, **DONATED)
    told = [*found.outcome.notes, *text(found).splitlines()]
    assert any(line.startswith("cache[0]") and why in line for line in told), told
    assert broken(found) == ([] if takes_over(OLD, new) else ["donation"])
    assert broken(call(halved, *args(two), nesting=nesting, **DONATED)) == ["donation"]


class Turning(nnx.Module):
    """A leaf of the state that comes back with its axes exchanged, or as half as many bytes."""

    def __init__(self, dtype):
        self.seen, self.dtype = nnx.BatchStat(jnp.zeros((3, 4))), dtype

    def __call__(self, x):
        assign(self.seen, (self.seen[...].T + x.sum()).astype(self.dtype))
        return x


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]"])
def test_a_leaf_of_the_state_as_well(nesting):
    found = call(Turning(jnp.float32), numbers((2,)), nesting=nesting)
    if takes_over(OLD, TURNED):
        assert found.outcome.verdict == "held", text(found)
        assert found.outcome.notes == (
            "model.seen   float32[3,4]   its shape changed: it became float32[4,3], in the same buffer",
        )
    else:
        assert broken(found) == ["donation"]
    leaky = call(Turning(jnp.bfloat16), numbers((2,)), nesting=nesting)
    (violation,) = leaky.outcome.violations
    assert violation.summary == "model.seen   float32[3,4]   its shape changed: it became bfloat16[4,3]"


# --- what else takes a buffer over, and what is judged first


@has_plain_arrays
@pytest.mark.parametrize("nesting", ["jit", "jit > remat"])
def test_an_array_in_a_plain_dict_may_take_the_buffer_of_a_parameter(nesting):
    """flax 0.10.7 returns it with the state, before the kernel, and it has its type."""
    found = call(KeepsInDict(), numbers((4, 4)), nesting=nesting)
    assert found.outcome.verdict == "held", text(found)
    assert found.outcome.notes == (
        "model.linear.kernel came back in a new buffer: an output of the call took a donated one",
    )
    halved = call(KeepsInDict(jnp.bfloat16), numbers((4, 4)), nesting=nesting)
    assert broken(halved) == ["donation"]
    assert halved.outcome.violations[0].summary.startswith(
        "model.linear.kernel   float32[4,4]   its dtype changed: it became bfloat16[4,4]"
    )


SEEN: list[jax.Array] = []


@pytest.mark.slow
class KeepsInTree(nnx.Module):
    """What it keeps of its layer comes first among the outputs: XLA gives it the buffers of the layer."""

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=rngs())
        self.kept = nnx.Variable({})

    def __call__(self, x):
        self.kept[...] = {"bias": self.linear.bias[...] + 1, "kernel": self.linear.kernel[...] * 2}
        return self.linear(x)


@pytest.mark.skipif(FLAX < (0, 12), reason="a Variable that holds a dict came with flax 0.12")
def test_arrays_in_a_tree_of_a_variable_may_take_the_buffers_of_parameters():
    found = call(KeepsInTree(), numbers((2, 4)), nesting="jit")
    assert found.outcome.verdict == "held", text(found)


@pytest.mark.slow
def test_where_tracers_remain_nothing_is_said_of_buffers():
    """A leak explains a lost buffer, and not the other way round."""

    def leaks(model, x):
        SEEN.append(model(x))
        return narrows(model, x)

    def narrows(model, x):
        assign(model.kernel, model.kernel[...].astype(jnp.bfloat16))
        return x

    assert broken(call(leaks, linear(), numbers((2, 4)), nesting="jit")) == ["tracers"]
    assert broken(call(narrows, linear(), numbers((2, 4)), nesting="jit")) == ["donation"]


# --- message and program


def averages(state, average):
    return jax.tree.map(lambda a: a + 1, state), jax.tree.map(lambda a: a * 2, average)


@pytest.mark.parametrize("copied", [False, True])
def test_an_argument_that_is_called_state_is_donated_where_arguments_are_named(copied):
    """Of a step that takes states alone, ``state`` names the argument; where it stands alone it means the state of modules."""
    state = nnx.state(nnx.Linear(4, 4, rngs=rngs()))
    average = jax.tree.map(jnp.copy, state) if copied else state
    found = call(averages, state, average, nesting="jit", donate="state,average")
    assert found.outcome.verdict == ("held" if copied else "violated"), text(found)
    assert copied or "state and average share all 2 buffers: XLA refuses to donate them twice" in text(found)
    assert call(averages, state, average, nesting="jit", donate="state").outcome.verdict == "held"


def test_an_array_that_found_no_memory_raises_and_does_not_abort_python():
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        pointers.pointers(jnp.zeros((10**11, 64)))


# --- conversions


class Quantizes(nnx.Module):
    """Keeps its kernel in another type from the first call on."""

    def __init__(self, dtype):
        self.kernel, self.dtype = nnx.Param(jnp.ones((64, 64), jnp.bfloat16)), dtype

    def __call__(self):
        self.kernel = nnx.Param(self.kernel[...].astype(self.dtype))


@pytest.mark.parametrize(
    "dtype, verdict",
    [
        *((dtype, "held") for dtype in (jnp.int8, jnp.int32, jnp.bool_, jnp.float8_e4m3fn)),
        *((dtype, "violated") for dtype in (jnp.float32, jnp.complex64)),
    ],
)
def test_a_conversion_that_no_promotion_makes_is_meant(dtype, verdict):
    found = call(Quantizes(dtype), nesting="jit")
    assert found.outcome.verdict == verdict, text(found)
    assert ("model.kernel is converted to a type that no promotion of types gives" in text(found)) == (
        verdict == "held"
    )


def test_floats_of_64_and_of_16_bits_may_be_a_promotion():
    jax.config.update("jax_enable_x64", True)
    try:
        for dtype, verdict in ((jnp.float64, "violated"), (jnp.bfloat16, "held")):
            found = call(Quantizes(dtype), nesting="jit")
            assert found.outcome.verdict == verdict, text(found)
            assert "no promotion of types" not in text(found)
    finally:
        jax.config.update("jax_enable_x64", False)


# --- a network and its clone


def targets(q, q_target, x):
    return ((q(x) - q_target(x)) ** 2).mean()


def network(shared):
    q = nnx.Linear(4, 4, rngs=rngs())
    target = nnx.clone(q)
    arrays = nnx.state(q) if shared else jax.tree.map(jnp.copy, nnx.state(q))
    nnx.update(target, arrays)  # before flax 0.11 a clone has arrays of its own
    return q, target


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
def test_a_network_and_its_clone_are_a_note_in_one_line(shared):
    report = check(targets, *network(shared), jnp.ones((2, 4)), transforms="jit,scan", **FEW)
    assert report.ok, str(report)
    assert ["q and q_target share all 2 buffers, as nnx.clone" in note for note in report.notes] == [True] * shared


class Steps:
    """A callable that keeps a kernel of before."""

    def __init__(self, model, copy):
        self.prev = copy(model.kernel[...])

    def __call__(self, model):
        assign(model.kernel, model.kernel[...] * 0.9)


class Trains:
    """An object that keeps the best parameters."""

    def __init__(self, copy):
        self.model = nnx.Linear(4, 4, rngs=rngs())
        self.best = pure(self.model, copy)

    def step(self):
        for leaf in (self.model.kernel, self.model.bias):
            assign(leaf, leaf[...] * 0.9)


def pure(model, copy):
    """A plain dict, as of `nnx.to_pure_dict`."""
    return {"kernel": copy(model.kernel[...]), "bias": copy(model.bias[...])}


def pulled_back(model, reference):
    """A step towards a reference, which begins as the model."""
    for name, leaf in (("kernel", model.kernel), ("bias", model.bias)):
        assign(leaf, 0.9 * leaf[...] + 0.1 * reference[name])


def in_a_list(model, reference):
    pulled_back(model, dict(zip(("kernel", "bias"), reference, strict=True)))


def steps(copy):
    model = nnx.Linear(4, 4, rngs=rngs())
    return Steps(model, copy), model


def with_reference(copy, step=pulled_back, keep=dict):
    model = nnx.Linear(4, 4, rngs=rngs())
    return step, model, keep(pure(model, copy))


SNAPSHOTS = {
    "a callable": (steps, "model.kernel and self.prev share a buffer"),
    "a trainer": (lambda copy: (Trains(copy).step,), "self.model and self.best share all 2 buffers"),
    "a reference": (with_reference, "model and reference share all 2 buffers"),
    "a list": (
        lambda copy: with_reference(copy, in_a_list, lambda held: list(held.values())),
        "model.kernel and reference[0] share a buffer, model.bias and reference[1] share a buffer",
    ),
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_that_the_call_is_handed_is_one_note_where_the_plugin_donates(name):
    make, note = SNAPSHOTS[name]
    for copy, notes in ((lambda array: array, [note]), (jnp.copy, [])):
        subject, *args = make(copy)
        report = check(subject, *args, transforms="jit", **FEW)
        assert report.ok, str(report)
        assert [each.partition(", as nnx.clone")[0] for each in report.notes] == notes


def test_two_leaves_of_one_module_in_an_array_are_a_note_too():
    pair = nnx.Linear(4, 4, rngs=rngs()), nnx.Linear(4, 4, rngs=rngs())
    model = nnx.Sequential(*pair)
    model.layers[1].kernel = nnx.Param(model.layers[0].kernel[...])
    report = check(model, jnp.ones((2, 4)), transforms="jit", **FEW)
    assert report.ok, str(report)
    assert ["model.layers[0].kernel and model.layers[1].kernel share a buffer" in note for note in report.notes] == [
        True
    ]
    assert broken(call(model, jnp.ones((2, 4)), nesting="jit", donate="all")) == ["donation"]


def test_they_fail_where_the_test_names_what_is_donated():
    arguments = (*network(shared=True), jnp.ones((2, 4)))
    assert broken(call(targets, *arguments, nesting="jit", donate="all")) == ["donation"]


def test_a_python_number_in_a_variable_owns_no_buffer():
    class Deep(nnx.Module):
        def __init__(self):
            self.depth, self.kernel = nnx.Variable(3), nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x):
            return x @ self.kernel[...] * self.depth

    found = call(Deep(), jnp.ones((2, 4)), nesting="jit")
    assert found.outcome.verdict == "held"
    assert "model.depth" not in text(found)
