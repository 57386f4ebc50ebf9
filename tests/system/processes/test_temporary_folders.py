"""Where pytest keeps no cache, programs to paste go into a temporary folder, which stays where a program is in it, and only there."""

import os
import signal
import subprocess
import sys
import time

import pytest

SUITE = """
import time
import jax, jax.numpy as jnp, pytest
from flax import nnx

KEPT = []
marked = pytest.mark.nnx_invariants(effort="quick", styles="argument", transforms="jit")

@marked
def test_holds(nnx_wrap):
    nnx_wrap(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))(jnp.ones((1, 2)))

@marked
def test_breaks(nnx_wrap):
    def leaks(model, x):
        KEPT.append(x)
        return model(x)
    nnx_wrap(leaks)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))

@marked
def test_waits(nnx_wrap):
    def waits(model, x):
        open("waiting", "w").close()
        time.sleep(100)
    nnx_wrap(waits)(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), jnp.ones((1, 2)))
"""


PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
sys.exit(pytest.main())
"""


@pytest.fixture
def start(pytester, inner_args, monkeypatch):
    """A run without a cache of pytest, whose temporary folder is the test's own."""
    folder = pytester.mkdir("tmp")
    monkeypatch.setenv("TMPDIR", str(folder))
    pytester.makepyfile(test_inner=SUITE)

    def started(*args):
        command = [sys.executable, "-c", PYTEST, *inner_args, "-p", "no:cacheprovider", "-p", "no:randomly", *args]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)

    def left():
        return sorted(path.relative_to(folder).parts[1:] for path in folder.glob("nnxcheck-*/**/*"))

    return started, left, lambda: sorted(path.name for path in folder.glob("nnxcheck-*"))


def test_nothing_stays_of_tests_that_hold(start):
    started, _, folders = start
    assert started("-k", "holds").wait(120) == 0
    assert folders() == []


def test_a_program_that_shows_something_stays(start):
    started, left, folders = start
    assert started("-k", "holds or breaks", "-n", "2").wait(120) == 1
    assert len(folders()) == 1
    ((test,), (same, program)) = left()
    assert test == same
    assert test.startswith("test_inner.py-test_breaks-")
    assert program.startswith("jit-")


@pytest.mark.parametrize("args", [[], pytest.param(["-n", "2"], marks=pytest.mark.full)], ids=["", "-n 2"])
def test_nothing_stays_of_a_run_that_was_interrupted(start, args, pytester):
    started, _, folders = start
    run = started("-k", "holds or waits", *args)
    while not (pytester.path / "waiting").exists():
        assert run.poll() is None, "it ended before it waited"
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(60) == 2
    assert folders() == []
