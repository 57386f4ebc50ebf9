"""Watch mode and what XLA compiles: peaks and second copies of state in programs of tests, and silence on healthy ones."""

from __future__ import annotations

import gc
import weakref

import bugs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import wild_training
from checking import some
from flax import nnx
from healthy import FLAX, HEALTHY, numbers, rngs
from rewritten_leaves import CHANGES, REREADS, Codebook, KeyCache, Rereads

from pytest_nnxcheck.watch import programs as watched
from pytest_nnxcheck.watch.programs import WatchedPrograms

KIB = 1024
pytestmark = pytest.mark.usefixtures("aliased_bytes", "optimized")


def heard(act, budget=None):
    programs = WatchedPrograms(budget)
    with programs.of():
        act()
    assert programs.unread == ""
    assert programs.heard
    return programs.take()


def test_a_peak_over_the_budget_is_told_with_its_line():
    x = jnp.ones((64, 64))

    def call():
        jax.jit(lambda x: x @ x.T)(x)  # 16 KiB in, 16 KiB out

    assert heard(call, 40 * KIB) == ()
    (program,) = heard(call, 30 * KIB)
    assert program.name.startswith("jit_")
    assert (program.memory.arguments, program.memory.outputs, program.budget) == (16 * KIB, 16 * KIB, 30 * KIB)
    assert "test_programs.py:" in program.line


def test_donated_bytes_count_once():
    x = jnp.ones((64, 64))
    assert heard(lambda: jax.jit(lambda x: x + 1, donate_argnums=0)(x), 20 * KIB) == ()


def test_a_program_out_of_the_persistent_cache_is_heard_of_as_any_other(tmp_path):
    if jax.__version_info__ < (0, 6, 2):
        pytest.skip("jax before 0.6.2 tells no aliased bytes of a loaded program: nothing is judged there")
    from pytest_nnxcheck.compat.compile_cache import DIRECTORY, OPTIONS, _set

    def call():
        jax.jit(lambda x: x @ x.T + 1)(jnp.ones((64, 64)))

    with _set({**OPTIONS, DIRECTORY: str(tmp_path)}):
        first = heard(call, 30 * KIB)
        jax.clear_caches()
        assert heard(call, 30 * KIB) == first != ()


def test_nothing_is_heard_after_the_end_and_nothing_kept_alive():
    from jax._src import monitoring

    before = monitoring.get_event_duration_listeners()
    programs = WatchedPrograms(1)
    with programs.of(), programs.of(fixture="inner"):
        step = jax.jit(lambda x: x + 2)
        step(jnp.ones(3))
    assert monitoring.get_event_duration_listeners() == before
    count = programs.heard
    jax.jit(lambda x: x + 3)(jnp.ones(3))
    assert programs.heard == count
    taken = programs.take()
    alive = weakref.ref(step)
    del step
    gc.collect()
    assert (alive(), len(taken) >= 1, programs.take()) == (None, True, ())


@pytest.mark.slow
@pytest.mark.parametrize("jitted", [nnx.jit, jax.jit])
def test_a_second_copy_of_the_parameters_is_told(jitted):
    model = bugs.ScanOverRemat(rngs())
    (x,) = bugs.inputs_scan_over_remat()
    (program,) = heard(lambda: jitted(bugs.call_twice)(model, x)) if jitted is nnx.jit else heard_functional(model, x)
    (leaf,) = program.leaves  # of the model, or of its state where flax keeps Variables in one
    assert leaf in ("model.layers.kernel", "state['layers']['kernel']")
    assert program.copied >= program.state == 8 * 128 * 128 * 4
    assert "test_programs.py:" in program.line


def heard_functional(model, x):
    graphdef, state = nnx.split(model)
    return heard(lambda: jax.jit(lambda state, x: bugs.call_twice(nnx.merge(graphdef, state), x))(state, x))


@pytest.mark.slow
@pytest.mark.parametrize("how", bugs.cures())
def test_its_cures_have_none(how):
    model = bugs.ScanOverRemat(rngs(), how)
    (x,) = bugs.inputs_scan_over_remat()
    assert heard(lambda: nnx.jit(bugs.call_twice)(model, x)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("how", bugs.cures())
def test_what_a_backward_pass_saves_is_not_told(how):
    model = bugs.ScanOverRemat(rngs(), how)
    (x,) = bugs.inputs_scan_over_remat()
    assert heard(lambda: nnx.jit(nnx.grad(lambda model, x: bugs.call_twice(model, x).sum()))(model, x)) == ()


WIDE = (256, 256)


def handed_back(rows):
    """Holds what it is called with a second time: a scan stacks its rows anew, and both stacks are used."""
    body = jax.checkpoint(lambda row: (row, row.sum()))
    total, (again, _) = jax.lax.scan(lambda total, row: (total + jnp.tanh(row).sum(), body(row)), 0.0, rows)
    return total + (again @ rows).sum() + jnp.tanh(again).sum()


@pytest.mark.slow
def test_a_kernel_that_is_copied_is_told_and_a_batch_is_not():
    model = nnx.Linear(*WIDE, rngs=rngs())
    graphdef, state = nnx.split(model)
    total = jax.jit(lambda state, x: handed_back(nnx.merge(graphdef, state).kernel[...]) + x.sum())
    (program,) = heard(lambda: total(state, numbers((8, 256))))
    assert program.leaves[0].strip("'][").endswith("kernel")
    assert program.copied == pytest.approx(256 * KIB, rel=0.01)
    assert heard(lambda: jax.jit(handed_back)(numbers(WIDE))) == ()


LEFT_OUT = {"loss_scaling"} if FLAX < (0, 10, 7) else set()
"""It has a bare Variable among its arguments, which the jit of older flax takes apart."""
TAKEN = sorted({*HEALTHY, *wild_training.TRAINING} - LEFT_OUT)
STEPS = {"accumulated_gradients", "bfloat16_parameters", "ema_weights"}
"""Training steps that hold more than their parameters: sums of gradients, wider copies, averages."""


def carried():
    """A loop that changes a model which is thrown away: its first values are copied into the buffers of the loop."""
    model = nnx.Linear(*WIDE, rngs=rngs())
    graphdef = nnx.split(model)[0]

    @jax.jit
    def simulated(state, x):
        def step(_, state):
            return jax.tree.map(lambda leaf: leaf * 0.9 + 1e-3, state)

        return nnx.merge(graphdef, jax.lax.fori_loop(0, 5, step, state))(x).sum()

    return (lambda model, x: simulated(nnx.split(model)[1], x)), model, numbers((8, 256))


def cached():
    """A cache that is written in a loop, and not returned."""

    class Cache(nnx.Module):
        def __init__(self):
            self.rows = nnx.Variable(jnp.zeros((512, 128)))

    model = Cache()

    def decode(model, x):
        def step(i, rows):
            return jax.lax.dynamic_update_slice(rows, x + rows[i - 1][None], (i, 0))

        return jax.lax.fori_loop(1, 512, step, model.rows[...])[-1].sum()

    return nnx.jit(decode), model, numbers((1, 128))


@pytest.mark.slow
@pytest.mark.parametrize("make", [carried, cached])
def test_a_model_that_is_used_as_models_are_is_not_told(make):
    function, model, *args = make()
    assert heard(lambda: function(model, *args)) == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", some(TAKEN, {"batch_norm_train", "scan_over_layers", *STEPS}))
def test_a_healthy_model_is_not_told(monkeypatch, name):
    monkeypatch.setattr(watched, "FLOOR", 1)  # these models are small
    case = (HEALTHY | wild_training.TRAINING)[name]()
    subject, args = case.subject, case.args
    if isinstance(subject, nnx.Module):
        assert heard(lambda: nnx.jit(lambda subject, *args: subject(*args))(subject, *args)) == ()
    else:
        assert heard(lambda: nnx.jit(subject)(*args)) == ()


def donated_step(model, *inputs):
    nnx.jit(lambda model, *inputs: model(*inputs), donate_argnums=0)(model, *inputs or (jnp.ones(256),))


@pytest.mark.parametrize("name", CHANGES)
def test_a_copy_that_donation_alone_asks_for_is_not_told(name):
    assert heard(lambda: donated_step(Codebook(CHANGES[name]))) == ()


@pytest.mark.parametrize("reread", REREADS)
def test_an_old_value_that_the_call_needs_beside_the_new_one_is_not_told(reread):
    assert heard(lambda: donated_step(Rereads(CHANGES["shift"], reread))) == ()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_cache_that_is_decoded_into_is_not_told(dtype):
    assert heard(lambda: donated_step(KeyCache(dtype), jnp.ones((2, 1, 64)), jnp.int32(3))) == ()


def test_a_cache_that_tells_no_aliased_bytes_is_not_believed(monkeypatch):
    from pytest_nnxcheck.compat.compile_cache import DIRECTORY, _set

    monkeypatch.setattr(jax, "__version_info__", (0, 5, 3))
    programs = WatchedPrograms(1)
    with _set({DIRECTORY: "/somewhere"}), programs.of():
        programs._hear(None, None)
    assert "without their aliased bytes" in programs.unread
    assert programs.take() == ()


def test_what_cannot_be_read_ends_no_test():
    programs = WatchedPrograms(1)
    with programs.of():
        programs._hear(object(), None)
    assert programs.unread.startswith("AttributeError: ")


@pytest.mark.slow
@pytest.mark.parametrize("jit", [nnx.jit, jax.jit])
def test_a_static_argument_is_none_of_the_program(jit):
    """A number or a flag among them may be one of the program: which is told by their count."""

    def step(state, x, flag, scale):
        y = bugs.call_twice(nnx.merge(graphdef, state), x)
        return y * scale if flag else y

    graphdef, state = nnx.split(bugs.ScanOverRemat(rngs()))
    (x,) = bugs.inputs_scan_over_remat()
    (program,) = heard(lambda: jit(step, static_argnums=(2,))(state, x, True, jnp.float32(2.0)))
    assert program.copied > 500 * KIB
    (program,) = heard(lambda: jit(step, static_argnums=(2, 3))(state, x, True, np.dtype("float32").itemsize))
    assert program.copied > 500 * KIB


def test_a_dtype_among_the_arguments_is_no_array():
    """An initializer of jax is called with one."""
    assert heard(lambda: nnx.Linear(256, 512, rngs=rngs())) == ()
