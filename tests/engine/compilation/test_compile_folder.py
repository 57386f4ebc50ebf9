"""The folder of compiled programs: where it is, and that it grows to a bound and no further."""

import os

import pytest
from compile_folders import entries

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


@pytest.fixture
def configured(pytester, inner_args):
    """The config of a run, which ends with the test."""
    return lambda *args: pytester.parseconfigure(*inner_args, *args)


@pytest.mark.slow
def test_a_run_ends_within_the_bound(configured, monkeypatch):
    monkeypatch.setattr(cache, "BOUND", 50)
    config = configured()
    folder = cache.folder_of_compiles(config)
    assert cache.folder_of_compiles(config) == folder
    fill(folder, {"old": 40, "new": 40})
    config._ensure_unconfigure()
    assert entries(folder) == ["new"]


def test_a_folder_that_is_gone_is_no_error(tmp_path):
    cache.prune(tmp_path / "none", 0)


@pytest.mark.slow
def test_where_the_folder_is(configured, pytester):
    folder = cache.folder_of_compiles(configured())
    assert folder == pytester.path / ".pytest_cache" / "d" / cache.COMPILES
    assert folder.is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("args", [["--nnx-no-cache"], ["-p", "no:cacheprovider"]])
def test_where_there_is_none(args, configured, pytester):
    assert cache.folder_of_compiles(configured(*args)) is None
    assert not (pytester.path / ".pytest_cache" / "d" / cache.COMPILES).exists()


@pytest.mark.slow
def test_a_folder_that_cannot_be_made_is_none(configured, pytester):
    blocked = pytester.path / ".pytest_cache" / "d" / cache.COMPILES
    blocked.parent.mkdir(parents=True)
    blocked.write_text("")
    assert cache.folder_of_compiles(configured()) is None
