"""``--nnx-watch``: what a fixture left, tests that fail, skip or are expected to, and donations that jax could not use."""

from __future__ import annotations

import pytest

BEFORE = """
@pytest.fixture
def model():
    model = Net()
    poison(model)
    return model

def test_innocent(model):
    assert model.box

SHARED = Net()

@pytest.fixture
def torn_down():
    yield
    poison(SHARED)

def test_first(torn_down):
    use(SHARED)

def test_second():
    use(SHARED)

def test_third():
    use(SHARED)
"""


@pytest.mark.slow
def test_what_a_fixture_left_is_told_with_the_test_and_not_as_its_doing(watch):
    result, failed = watch(BEFORE)
    assert failed == ["test_suite.py::test_innocent", "test_suite.py::test_second"]
    result.stdout.fnmatch_lines(
        ["*there before the call of the test: a fixture, a teardown,", "*an import or an earlier test left it"]
    )


RAISES = """
MODEL = Net()

def test_fails():
    poison(MODEL)
    raise ValueError("its own")

def test_after():
    use(MODEL)

OTHER = Net()

@pytest.mark.xfail(strict=True)
def test_expected():
    poison(OTHER)
    raise ValueError("known")

THIRD = Net()

def test_skips():
    poison(THIRD)
    pytest.skip("half way")

def test_raises():
    # Its local variables are in its traceback: on every Python, nothing has to be monitored for them.
    own = Net()
    poison(own)
    raise ValueError("of another")
"""


@pytest.mark.slow
def test_a_test_that_fails_keeps_its_own_error_and_is_blamed_all_the_same(watch):
    result, failed = watch(RAISES)
    assert failed == ["test_suite.py::test_fails", "test_suite.py::test_raises"]
    result.stdout.fnmatch_lines(["E       ValueError: its own", "*nnx watch: tracers in MODEL.box.last"])
    for name, leaf in {"expected": "", "fails": "", "raises": "own.box.last", "skips": ""}.items():
        result.stdout.fnmatch_lines([f"test_suite.py::test_{name}  tracers in {leaf}*"])
    result.assert_outcomes(passed=1, failed=2, xfailed=1, skipped=1)


DONATES = """
import warnings

def total(state):
    return jax.tree.map(lambda array: array.sum(), state)

def test_for_nothing():
    model = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
    jax.jit(total, donate_argnums=0)(nnx.state(model))

def test_used():
    model = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
    jax.jit(lambda state: jax.tree.map(lambda array: array * 2, state), donate_argnums=0)(nnx.state(model))

def test_expected():
    with pytest.warns(UserWarning, match="donated"):
        jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones((5, 5)))

@pytest.mark.filterwarnings("ignore:Some donated")
def test_ignored():
    jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones((6, 5)))

def test_temporary():
    # What pytest keeps of an assertion is no name of the user's.
    assert jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones((7, 5))).shape == (1, 5)
"""


def test_donated_leaves_that_jax_could_not_use_fail_the_test(watch):
    result, failed = watch(DONATES, "-Wdefault")
    assert failed == ["test_suite.py::test_for_nothing", "test_suite.py::test_temporary"]
    result.stdout.fnmatch_lines(["  donated     float32?7,5?   no local variable holds it"])
    result.stdout.fnmatch_lines(
        [
            "nnx watch: donated for nothing: model.bias, model.kernel",
            "  donated     float32?3?   model.bias",
            "  donated     float32?2,3?   model.kernel",
            "              to the program called at test_suite.py:36",
            "              (test_for_nothing), which has no output of that type for",
            "              the buffer",
            "  hint        return the new value of every donated array*",
            "*UserWarning: Some donated buffers were not usable*",
            "5 tests watched: 2 donated for nothing*",
        ]
    )


WIDENS = """
def lower(dtype):
    return lambda state: jax.tree.map(lambda array: (array * jnp.float32(0.5)).astype(dtype), state)

def test_widens():
    model = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
    jax.jit(lower(jnp.float32), donate_argnums=0)(nnx.state(model))

def test_keeps():
    model = nnx.Linear(2, 3, param_dtype=jnp.bfloat16, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
    jax.jit(lower(jnp.bfloat16), donate_argnums=0)(nnx.state(model))

@pytest.fixture
def widened():
    model = nnx.Linear(3, 2, param_dtype=jnp.bfloat16, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
    return jax.jit(lower(jnp.float32), donate_argnums=0)(nnx.state(model))

def test_has_what_a_fixture_widened(widened):
    assert widened

@pytest.mark.filterwarnings("ignore:Some donated")
def test_quantizes():
    model = nnx.Linear(2, 3, kernel_init=nnx.initializers.ones_init(), rngs=nnx.Rngs(0))
    jax.jit(lower(jnp.int8), donate_argnums=0)(nnx.state(model))
"""


def test_a_step_that_widens_its_state_is_told_to_cast_it_back_also_where_jax_says_nothing(watch):
    result, failed = watch(WIDENS, "-Wdefault")
    assert failed == ["test_suite.py::test_widens"]
    result.stdout.fnmatch_lines(
        [
            "nnx watch: donated for nothing: model.bias, model.kernel",
            "  donated     bfloat16?3?   model.bias",
            "  donated     bfloat16?2,3?   model.kernel",
            "              to the program called at test_suite.py:34 (test_widens),",
            "              which has no output of that type for the buffer",
            "  hint        cast the new value back to bfloat16 before it is stored or",
            "              returned",
        ]
    )
