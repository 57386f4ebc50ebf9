"""The process stays as large as it was: what jax keeps of earlier tests goes, where it has become much, and nothing of the user's."""

import contextlib
import functools
import gc
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pytest_nnxcheck.runner import footprint
from pytest_nnxcheck.runner.footprint import GROWTH, LEAST, Footprint

linux = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the system does not say how large a process is"
)
MB = 2**20


@pytest.fixture
def sized(monkeypatch):
    """Say how large the process is from now on, and see what is done about it."""
    done = []
    monkeypatch.setattr(jax, "clear_caches", lambda: done.append("caches"))
    monkeypatch.setattr(footprint, "trim", lambda: done.append("pages"))

    def sized(size):
        monkeypatch.setattr(footprint, "resident", lambda: size)
        return done

    return sized


@pytest.mark.parametrize(
    "before, after, dropped",
    [
        (100 * MB, 100 * MB + LEAST, True),
        (100 * MB, 100 * MB + LEAST - 1, False),
        (4096 * MB, int(4096 * MB * GROWTH), True),
        (4096 * MB, int(4096 * MB * GROWTH) - 1, False),
        (4096 * MB, 10 * MB, False),
        (0, 4096 * MB, False),  # the size at the beginning is not known
    ],
)
def test_where_something_is_dropped(before, after, dropped, sized):
    process = Footprint()
    sized(before)
    process.begin()
    done = sized(after)
    process.size = before
    assert process.end() is dropped
    assert done == ["caches", "pages"] * dropped


def test_what_remains_is_what_the_next_tests_are_measured_by(sized):
    process = Footprint()
    sized(100 * MB)
    process.begin()
    sized(900 * MB)
    process.begin()
    assert process.size == 100 * MB
    assert process.end()
    done = sized(950 * MB)
    done.clear()
    assert (process.end(), done) == (False, [])


def test_what_only_the_collector_finds_goes_too(sized):
    process, node = Footprint(), type("Node", (), {})()
    node.itself, gone = node, weakref.ref(node)
    sized(100 * MB)
    process.begin()
    sized(900 * MB)
    with footprint.held_back():
        del node
        assert gone() is not None
        process.end()
        assert gone() is None


@linux
def test_the_size_is_that_of_the_system():
    status = Path("/proc/self/status").read_text()
    (told,) = [int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")]
    assert footprint.resident() == pytest.approx(told, rel=0.05)


def test_a_users_caches_stay(monkeypatch):
    @functools.lru_cache
    def built():
        return object()

    known, jitted, array = built(), jax.jit(lambda x: x + 1), jnp.arange(3)
    compiled = jitted.lower(array).compile()
    process = Footprint()
    process.size = 1
    monkeypatch.setattr(footprint, "LEAST", 0)
    monkeypatch.setattr(footprint, "GROWTH", 0)
    assert process.end()
    assert built() is known
    assert jitted(array).tolist() == compiled(array).tolist() == [1, 2, 3]


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_held_back_and_is_as_it_was_afterwards(on):
    (gc.enable if on else gc.disable)()
    try:
        with contextlib.suppress(KeyError), footprint.held_back():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is on
    finally:
        gc.enable()


GROWS = """
import jax, jax.numpy as jnp
from pytest_nnxcheck.runner import footprint
from pytest_nnxcheck.runner.footprint import held_back
from pytest_nnxcheck.runner.footprint import Footprint, resident

footprint.LEAST = 24 * 2**20
footprint.GROWTH = 1.0

def programs(start, stop):
    for width in range(start, stop):
        jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x.T) @ jnp.sin(x))(jnp.ones((width, width))))

programs(4, 12)
process = Footprint()
process.begin()
before, grown, width = process.size, 0, 12
while grown < footprint.LEAST:
    programs(width, width + 8)
    width, grown = width + 8, resident() - before
assert process.end()
print(before, before + grown, process.size)
"""


@linux
def test_what_jax_kept_is_given_back_to_the_system():
    command = [sys.executable, "-c", textwrap.dedent(GROWS)]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    before, grown, after = map(int, ran.stdout.split())
    assert after - before < (grown - before) / 2


def test_a_check_and_every_marked_test_begins_and_ends(run_inner, pytester):
    conftest = "from pytest_nnxcheck.runner.footprint import Footprint\n" + "".join(
        f"Footprint.{name} = lambda self: print('{name}', file=open('seen', 'a'))\n" for name in ("begin", "end")
    )
    call = "from pytest_nnxcheck import check\ndef test_c(): check(Model(), 1)\n"
    source = f"@marked\ndef test_a(nnx_wrap):\n    nnx_wrap(Model())(1)\n\ndef test_b(): pass\n{call}"
    run_inner(source, conftest=conftest, subprocess=True).assert_outcomes(passed=3)
    assert (pytester.path / "seen").read_text().split() == ["begin", "end"] * 2
