"""The folder of compiled programs: where it is, what a second run takes from it, and that it grows to a bound and no further."""

import json
import os
import textwrap

import pytest
from compile_folders import WORKS, entries, works

from pytest_nnxcheck.plugin import cache

pytestmark = pytest.mark.usefixtures("no_folder_of_the_user")


def fill(folder, sizes):
    folder.mkdir(exist_ok=True)
    for age, (name, size) in enumerate(sizes.items()):
        (folder / name).write_bytes(bytes(size))
        os.utime(folder / name, (1e9 + age, 1e9 + age))


def test_the_oldest_entries_go(tmp_path):
    fill(tmp_path, {"a": 40, "b": 30, "c": 20, "d": 10})
    os.utime(tmp_path / "a", (2e9, 1e9))  # written first, used last
    cache.prune(tmp_path, 60)
    assert entries(tmp_path) == ["a", "d"]
    cache.prune(tmp_path, 60)
    assert entries(tmp_path) == ["a", "d"]


def test_a_folder_that_is_gone_is_no_error(tmp_path):
    cache.prune(tmp_path / "none", 0)


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


@pytest.mark.slow
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


@pytest.fixture
def configured(pytester, inner_args):
    """The config of a run, which ends with the test."""
    return lambda *args: pytester.parseconfigure(*inner_args, *args)


@pytest.mark.slow
def test_where_the_folder_is(configured, pytester):
    folder = cache.folder_of_compiles(configured())
    assert folder == pytester.path / ".pytest_cache" / "d" / cache.COMPILES
    assert folder.is_dir()


@pytest.mark.parametrize("args", [["--nnx-no-cache"], ["-p", "no:cacheprovider"]])
def test_where_there_is_none(args, configured, pytester):
    assert cache.folder_of_compiles(configured(*args)) is None
    assert not (pytester.path / ".pytest_cache" / "d" / cache.COMPILES).exists()


def test_a_folder_that_cannot_be_made_is_none(configured, pytester):
    blocked = pytester.path / ".pytest_cache" / "d" / cache.COMPILES
    blocked.parent.mkdir(parents=True)
    blocked.write_text("")
    assert cache.folder_of_compiles(configured()) is None


def test_a_run_ends_within_the_bound(configured, monkeypatch):
    monkeypatch.setattr(cache, "BOUND", 50)
    config = configured()
    folder = cache.folder_of_compiles(config)
    assert cache.folder_of_compiles(config) == folder
    fill(folder, {"old": 40, "new": 40})
    config._ensure_unconfigure()
    assert entries(folder) == ["new"]
