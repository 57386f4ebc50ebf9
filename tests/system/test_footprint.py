"""The process stays as large as it was: what jax keeps of earlier tests goes, where it has become much, and nothing of the user's."""

import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pytest_nnxcheck.runner import footprint
from pytest_nnxcheck.runner.footprint import Footprint

linux = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="the system does not say how large a process is"
)


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
