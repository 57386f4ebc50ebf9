"""The programs to paste, the compiled programs, and the inputs of calls that a run keeps in the cache of pytest; the folder of compiled programs grows to a bound and no further.

At load this imports pytest and light modules only; the modules that make programs come with the first marked test.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_nnxcheck.core import settings
from pytest_nnxcheck.plugin import options, pytest_internals

if TYPE_CHECKING:
    from pytest_nnxcheck.paste.program import Programs
    from pytest_nnxcheck.paste.usage import Usage

COMPILES = "nnxcheck_compiles"
BOUND = 512 * 2**20
"""Bytes of the folder after a run: a test of a small model needs 0.1 to 4 MB."""
_programs = pytest.StashKey[Path]()
_folder = pytest.StashKey[Path | None]()


# --- programs to paste ---------------------------------------------------------------------------------------------------


def programs_of(item: Any, argument: str, typed: str) -> Programs:
    """The programs to paste of a marked test: in the cache of pytest, or in a folder of its own where that is switched off."""
    from pytest_nnxcheck.paste import program, usage
    from pytest_nnxcheck.reporting.report import Report

    config = item.config

    def usage_of(body: Any) -> Usage:
        if (written := getattr(item, "nnx_usage", None)) is not None:
            return cast("Usage", written)
        lists = [mark.args[:2] for mark in item.iter_markers("parametrize") if len(mark.args) > 1]
        origin = usage.Origin(pytest_internals.fixture_functions(item), pytest_internals.parameters(item), lists)
        return usage.of_test(body, origin)

    test = Report((), settings.Settings(), test_id=item.nodeid, argument=argument, options=typed)
    path, line, _ = item.reportinfo()
    folder, place = functools.partial(folder_of_programs, config), (str(path), (line or 0) + 1)
    return program.Programs(test, usage_of, folder, config.invocation_params.dir, place)


def folder_of_programs(config: Any) -> Path:
    """The folder of all programs: public API of pytest's cache, or a temporary folder, which outlives the run where a program is in it."""
    cache = getattr(config, "cache", None)
    return _temporary(config) if cache is None else Path(cache.mkdir("nnxcheck"))


def _temporary(config: pytest.Config) -> Path:
    if _programs not in config.stash:
        config.stash[_programs] = folder = Path(tempfile.mkdtemp(prefix="nnxcheck-"))
        config.add_cleanup(functools.partial(_remove_empty, folder))
    return config.stash[_programs]


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # where a program is in it
        folder.rmdir()


# --- compiled programs ---------------------------------------------------------------------------------------------------


def folder_of_compiles(config: pytest.Config) -> Path | None:
    """The folder of a run, by the public API of pytest's cache; `None` where it is switched off, or cannot be written."""
    if _folder not in config.stash:
        config.stash[_folder] = folder = _made(config)
        if folder is not None:
            config.add_cleanup(functools.partial(prune, folder))
    return config.stash[_folder]


def _made(config: pytest.Config) -> Path | None:
    cache = getattr(config, "cache", None)
    if cache is None or options.asked(config, "no_cache"):
        return None
    try:
        return Path(cache.mkdir(COMPILES))
    except OSError:
        return None


def prune(folder: Path, bound: int | None = None) -> None:
    """Remove the files that were not used for longest, until the folder is within its bound. Another process may do so at the same time."""
    entries = []
    with contextlib.suppress(OSError), os.scandir(folder) as scan:
        entries = [(entry.stat(), Path(entry.path)) for entry in scan if entry.is_file()]
    total = sum(stat.st_size for stat, _ in entries)
    # A file system that keeps no times of access has those of writing.
    for stat, path in sorted(entries, key=lambda entry: max(entry[0].st_atime, entry[0].st_mtime)):
        if total <= (BOUND if bound is None else bound):
            return
        total -= stat.st_size
        with contextlib.suppress(OSError):
            path.unlink()


# --- the calls of a suite ------------------------------------------------------------------------------------------------

_INPUTS = "nnxcheck/inputs"
_FAILED = "cache/lastfailed"
"""The entry in which pytest keeps what failed, by node id, as its documentation shows it."""


def keep_inputs(config: pytest.Config, inputs: dict[str, str]) -> None:
    """Keep the inputs of calls, ``f32[8,64], train=False`` by ``package.models:Block``, beside those of earlier runs."""
    store = getattr(config, "cache", None)
    if store is not None:
        store.set(_INPUTS, {**inputs_of_calls(config), **inputs})


def inputs_of_calls(config: pytest.Config) -> dict[str, str]:
    """The inputs of the calls that earlier runs saw."""
    store = getattr(config, "cache", None)
    return {} if store is None else dict(store.get(_INPUTS, None) or {})


def also_failed(config: pytest.Config, tests: list[str]) -> None:
    """Let ``--lf`` run these tests as well: a call that failed has to be made again."""
    store = getattr(config, "cache", None)
    if store is not None and tests:
        store.set(_FAILED, {**(store.get(_FAILED, None) or {}), **dict.fromkeys(tests, True)})
