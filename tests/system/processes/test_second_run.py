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
        jax.jit(lambda y: of_the_body(y))(y)

    def of_the_body(y):
        return y.sum()
"""


@pytest.fixture
def suite(pytester, inner_args, monkeypatch):
    """Run the suite in a fresh process: how it ended, the entries of the folder, and what was reported."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    pytester.makepyfile(test_net=textwrap.dedent(SUITE))
    folder = pytester.path / ".pytest_cache" / "d" / cache.COMPILES

    def run(*args, passed=2):
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
    assert bool(first) is WORKS
    assert not any("of_the_body" in name or "lambda" in name for name in first)
    if WORKS:
        times = {name: (suite.folder / name).stat().st_mtime_ns for name in first}
        assert suite() == (first, told)
        assert {name: (suite.folder / name).stat().st_mtime_ns for name in first} == times
        assert suite("--nnx-no-cache", "--cache-clear") == ([], told)


@works
@pytest.mark.full
def test_workers_write_at_the_same_time(suite):
    left, told = suite("-n", "2")
    assert left
    assert {nesting["verdict"] for nesting in told} == {"held"}
