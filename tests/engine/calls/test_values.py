"""A test body sees true values under a nesting that was only traced: asked for in any way, also where it swallows the exception."""

from __future__ import annotations

import itertools
import sys

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import nnx_wrap
from flax import nnx
from healthy import assign, numbers
from hypothesis import strategies as st

from pytest_nnxcheck import register_transform
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.engine import observe
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.runner import conclude, hypothesis_test
from pytest_nnxcheck.runner.run import Run
from pytest_nnxcheck.values import uncomputed

STYLES = {"styles": "argument", "transforms": "jit,scan,vmap,remat,while_loop"}


class Counts(nnx.Module):
    """A layer that counts its calls: 3 for each of them."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.count = nnx.BatchStat(jnp.zeros((), jnp.float32))

    def __call__(self, x):
        assign(self.count, self.count[...] + 3)
        return nnx.relu(self.linear(x)) + 1


def run(body, **settings):
    """Run a body as a marked test is run: the run, and what it raised."""
    chosen = merge(parse_given({**STYLES, **settings}, str))

    @hypothesis.settings(database=None, derandomize=True)
    def test():
        body()

    made = Run(chosen)
    built = hypothesis_test.build(test, made, ())
    try:
        built()
    except BaseException as error:
        return made, conclude.conclude(error, made)
    return made, None


@pytest.fixture
def expected():
    return np.asarray(Counts()(numbers((2, 4))))


READS = {
    "float": lambda y: [[float(item) for item in row] for row in y],
    "device_get": jax.device_get,
    "branch": lambda y: np.asarray(y) if y.sum() > 0 else np.zeros((2, 4)),
    "jit": lambda y: np.asarray(jax.jit(lambda y: y * 1)(y)),
    "block_until_ready": lambda y: np.asarray(jax.block_until_ready(y)),
}


def run_of_a_body_that(read):
    """The run, and what each execution of the body has read; the run knows that values are needed."""
    seen = []

    def body():
        seen.append(read(nnx_wrap(Counts())(numbers((2, 4)))))

    made, error = run(body, sweep="singles", max_examples=0)
    assert error is None
    assert made.executor.values_needed
    return made, seen


@pytest.mark.slow
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_every_read_gives_the_true_value_under_every_nesting(read, expected):
    made, seen = run_of_a_body_that(read)
    assert len(seen) >= len(made.outcomes) == 6
    for values in seen:
        np.testing.assert_allclose(values, expected, rtol=1e-5)


SWALLOWS = {"try": lambda y: _tried(lambda: float(y.sum())), "raises": lambda y: _raised(lambda: float(y.sum()))}


def _tried(read):
    try:
        return float(read())
    except Exception:
        return -1.0


def _raised(read):
    with pytest.raises(RuntimeError):
        raise RuntimeError(read())
    return read()


@pytest.mark.slow
@pytest.mark.parametrize("read", SWALLOWS.values(), ids=SWALLOWS)
def test_a_body_that_swallows_the_exception_sees_true_values(read, expected):
    made, seen = run_of_a_body_that(read)
    # The first traced nesting ran twice: what it saw first is not what counts.
    assert seen.count(-1.0) <= 1
    assert [value for value in seen if value != -1.0] == pytest.approx(
        [expected.sum()] * (len(made.outcomes)), rel=1e-5
    )


@pytest.mark.slow
def test_types_and_shapes_ask_for_no_values():
    def body():
        model = Counts()
        y = nnx_wrap(model)(numbers((2, 4)))
        assert y.shape == (2, 4)
        assert y.dtype == jnp.float32
        assert isinstance(y, jax.Array)
        assert jax.tree.map(jnp.shape, {"y": y}) == {"y": (2, 4)}
        assert model.count.shape == ()
        # What no nesting changes is the user's own array.
        assert float(model.linear.kernel[...].sum()) != 0

    made, error = run(body)
    assert error is None
    assert not made.executor.values_needed


@pytest.mark.slow
def test_state_after_the_call_is_what_the_nesting_left():
    counts = {}

    def body():
        model = Counts()
        nnx_wrap(model)(numbers((2, 4)))
        counts.setdefault(float(model.count[...]), 0)
        counts[float(model.count[...])] += 1

    made, error = run(body, sweep="singles", max_examples=0)
    assert error is None
    # One call, and two steps of scan and while_loop.
    assert counts == {3.0: len(made.outcomes) - 2, 6.0: 2}


@pytest.mark.slow
def test_what_one_call_gives_another_takes():
    seen = []

    def body():
        model = Counts()
        wrapped = nnx_wrap(model)
        y = wrapped(wrapped(numbers((2, 4))))
        assert y.shape == (2, 4)
        seen.append((float(model.count[...]), np.asarray(y)))

    _, error = run(body, transforms="jit,remat,eval_shape", sweep="singles", max_examples=0)
    assert error is None
    assert {count for count, _ in seen} == {6.0}
    for _, value in seen:
        np.testing.assert_allclose(value, seen[0][1], rtol=1e-5)


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("shortcuts", ["on", "off"])
def test_a_transform_that_drops_an_update_fails_the_assertion(shortcuts):
    @register_transform("drops")
    def drops(f):
        return lambda state, *inputs: f(nnx.clone(state), *inputs)

    def body():
        model = Counts()
        nnx_wrap(model)(numbers((2, 4)))
        assert float(model.count[...]) >= 3

    made, error = run(
        body, transforms="jit,drops", styles="argument", sweep="singles", max_examples=0, shortcuts=shortcuts
    )
    assert isinstance(error, AssertionError)
    assert {str(o.nesting): o.verdict for o in made.outcomes.values()} == {
        "un-nested": "held",
        "jit": "held",
        "drops": "failed",
    }


def test_a_body_that_draws_by_itself_has_values_from_the_beginning():
    drawn = []

    @hypothesis.settings(database=None, derandomize=True, max_examples=4, deadline=None)
    @hypothesis.given(st.data())
    def test(data):
        scale = data.draw(st.floats(1, 2, width=32))
        drawn.append(scale)
        y = nnx_wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))(jnp.full((2, 4), scale))
        assert float(abs(y).sum()) > 0

    settings = merge(parse_given({**STYLES, "max_examples": 4, "transforms": "remat,vmap,jit"}, str))
    made = Run(settings)
    hypothesis_test.build(test, made, ())()
    assert made.executor.values_needed
    assert len(drawn) == 4


class Keeps:
    """A plain object that keeps an average, as trainers do."""

    def __init__(self):
        self.average = jnp.zeros(4)

    def update(self, x):
        self.average = self.average * 0.9 + x.mean(0) * 0.1
        return x * 2


@pytest.mark.parametrize("shortcuts", ["on", "off"])
@pytest.mark.parametrize("operations", [1, observe.FEW + 1])
def test_the_un_nested_call_is_traced_too_where_no_value_is_read(shortcuts, operations):
    """But for one of a few operations."""
    eager = itertools.count()

    def model(linear, x):
        if not isinstance(x, jax.core.Tracer):
            next(eager)
        for number in range(operations):
            x = x[None] + number  # of a type of its own each time
        return linear(x)

    few = {"transforms": "jit", "styles": "argument", "sweep": "singles", "max_examples": 0, "shortcuts": shortcuts}
    made, error = run(lambda: nnx_wrap(model)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), numbers((2, 4))), **few)
    assert error is None
    assert [str(nesting) for nesting in made.outcomes] == ["un-nested", "jit"]
    assert next(eager) == (shortcuts == "off" or operations == 1)


@pytest.mark.slow
def test_what_the_un_nested_call_puts_into_a_plain_object_is_there_also_where_it_is_only_looked_at():
    seen = []

    def body():
        keeps = Keeps()
        nnx_wrap(keeps.update)(numbers((2, 4)))
        # No exception tells that a value is asked for: the array is the user's own, and not the one handed out.
        seen.append(bool(keeps.average.any()))

    run(body, transforms="jit", styles="argument", sweep="singles", max_examples=0)
    assert seen[0]


@pytest.mark.slow
def test_a_callback_runs_under_every_nesting():
    # A list would be put back after every nesting, as all that the call's code holds.
    calls = itertools.count()

    def with_callback(model, x):
        jax.debug.callback(lambda value: next(calls), x.sum())
        return model(x)

    made, error = run(lambda: nnx_wrap(with_callback)(Counts(), numbers((2, 4))), sweep="singles", max_examples=0)
    jax.effects_barrier()
    assert error is None
    assert next(calls) >= len(made.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["jax_debug_nans", "jax_debug_infs"])
def test_no_trace_tells_where_jax_checks_values(option, monkeypatch):
    jax.config.update(option, True)
    try:
        assert not any(_tells(nesting) for nesting in ("scan", "remat"))
    finally:
        jax.config.update(option, False)
    assert all(_tells(nesting) for nesting in ("scan", "remat"))


@pytest.mark.parametrize(
    "settings",
    [{"invariants": "tracers,parity"}, {"transforms": "scan,remat"}, {"nesting": "scan"}, {"shortcuts": "off"}],
)
def test_no_trace_tells_where_the_settings_ask_for_a_run(settings):
    assert not _tells("scan", **settings)


def _tells(layers, **settings):
    from pytest_nnxcheck.core.nesting import Nesting
    from pytest_nnxcheck.subject.profile import profile
    from pytest_nnxcheck.subject.subject import bind

    subject = bind(Counts(), (numbers((2, 4)),), {})
    chosen = merge(parse_given(settings, str))
    return observe.tells(Call(subject, Nesting.parse(layers), chosen, profile=profile(subject)))


@pytest.mark.parametrize(
    "wanted", [jnp.ones((2, 3), jnp.bfloat16), jnp.asarray(1.0), jax.random.split(jax.random.key(0), 3)]
)
def test_a_stand_in_has_the_type_and_no_value(wanted):
    made = uncomputed.stand_in(wanted.aval)
    assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
    assert made.is_deleted()
    if not jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        assert made.aval == wanted.aval
        with pytest.raises(RuntimeError) as caught:
            np.asarray(made)
        assert uncomputed.is_read(caught.value)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="older Pythons have no sys.monitoring")
def test_reads_are_watched_for_beside_a_debugger_and_not_as_one():
    """pytest-timeout stops no test while a debugger has its id."""
    debuggers = []

    def body():
        nnx_wrap(Counts())(numbers((2, 4)))
        debuggers.append(sys.monitoring.get_tool(sys.monitoring.DEBUGGER_ID))

    _, error = run(body, sweep="singles", max_examples=0)
    assert error is None
    assert {*debuggers} == {None}


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="newer Pythons have sys.monitoring for several tools")
def test_where_somebody_else_traces_values_are_computed_from_the_beginning():
    seen = []

    def body():
        try:
            seen.append(float(nnx_wrap(Counts())(numbers((2, 4))).sum()))
        except RuntimeError:
            seen.append(None)

    sys.settrace(lambda *_: None)
    try:
        _, error = run(body, sweep="singles", max_examples=0)
    finally:
        sys.settrace(None)
    assert error is None
    assert None not in seen


def test_the_watch_leaves_no_trace():
    before = sys.gettrace()
    run(lambda: nnx_wrap(Counts())(numbers((2, 4))), sweep="singles", max_examples=0)
    assert sys.gettrace() is before
    if sys.version_info >= (3, 12):
        assert all(sys.monitoring.get_tool(number) != "pytest-nnxcheck" for number in range(6))
