"""The folder of compiled programs: what a second run takes from it, and workers that write into it at the same time."""

import json
import textwrap

import pytest
from compile_folders import WORKS, entries, works

from pytest_nnxcheck.plugin import cache

pytestmark = pytest.mark.usefixtures("no_folder_of_the_user")


SUITE = """
    import jax, jax.numpy as jnp, pytest
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        def __call__(self, x):
            return jnp.tanh(self.a(x)) * 2

    @pytest.mark.parametrize("size", [3, 5])
    @pytest.mark.nnx_invariants(transforms=["jit"], styles=["argument"], max_examples=1)
    def test_net(nnx_wrap, size):
        y = nnx_wrap(Net())(jnp.ones((size, 8)))
        jax.jit(lambda y: of_the_body(y))(READ)

    def of_the_body(y):
        return y.sum()
"""
READS, READS_NOT = "y", "jnp.ones(y.shape)"
"""What the body hands to its own jit: the output of the call, whose value it reads then, or not."""


@pytest.fixture
def suite(pytester, inner_args, monkeypatch):
    """Run the suite in a fresh process: how it ended, the entries of the folder, and what was reported."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    folder = pytester.path / ".pytest_cache" / "d" / cache.COMPILES

    def run(*args, reads=READS_NOT, passed=2):
        pytester.makepyfile(test_net=textwrap.dedent(SUITE).replace("READ", reads))
        ran = pytester.runpytest_subprocess(
            *inner_args, "-p", "no:randomly", "-W", "error", "--nnx-effort=quick", "--nnx-report=report.json", *args
        )
        ran.assert_outcomes(passed=passed)
        told = json.loads((pytester.path / "report.json").read_text())
        return entries(folder), [untimed(nesting) for nesting in told["nestings"]]

    run.folder = folder
    return run


def untimed(nesting):
    return {name: value for name, value in nesting.items() if name != "seconds"}


def test_the_second_run_takes_what_the_first_one_left(suite):
    first, told = suite()
    assert first
    assert not any("of_the_body" in name or "lambda" in name for name in first)
    if WORKS:
        times = {name: (suite.folder / name).stat().st_mtime_ns for name in first}
        assert suite() == (first, told)
        assert {name: (suite.folder / name).stat().st_mtime_ns for name in first} == times
        assert suite("--nnx-no-cache", "--cache-clear") == ([], told)


@pytest.mark.full
def test_a_body_that_reads_values_gets_them_in_every_run(suite):
    first, second, third = [suite(reads=READS) for _ in range(3)]

    assert first[1] == second[1] == third[1]
    # From the second run on the programs themselves are kept: the first does not know yet that somebody reads their values.
    assert len(first[0]) <= len(second[0]) == len(third[0])


@works
@pytest.mark.full
def test_workers_write_at_the_same_time(suite):
    left, told = suite("-n", "2")
    assert left
    assert {nesting["verdict"] for nesting in told} == {"held"}
