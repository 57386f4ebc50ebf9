"""Where compiled programs are kept between runs: one folder in the cache of pytest, which grows to a bound and no further.

At load this imports pytest and the standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path

import pytest

NAME = "nnxcheck_compiles"
BOUND = 512 * 2**20
"""Bytes of the folder after a run: a test of a small model needs 0.1 to 4 MB."""
_folder = pytest.StashKey[Path | None]()


def folder_of(config: pytest.Config) -> Path | None:
    """The folder of a run, by the public API of pytest's cache; `None` where it is switched off, or cannot be written."""
    if _folder not in config.stash:
        config.stash[_folder] = folder = _made(config)
        if folder is not None:
            config.add_cleanup(functools.partial(prune, folder))
    return config.stash[_folder]


def _made(config: pytest.Config) -> Path | None:
    cache = getattr(config, "cache", None)
    if cache is None or config.getoption("nnx_no_cache"):
        return None
    try:
        return Path(cache.mkdir(NAME))
    except OSError:
        return None


def prune(folder: Path, bound: int | None = None) -> None:
    """Remove what was not used for longest, until the folder is within its bound. Another process may do so at the same time."""
    entries = []
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        entries = [(entry.stat(), Path(entry.path)) for entry in found if entry.is_file()]
    total = sum(stat.st_size for stat, _ in entries)
    # A file system that keeps no times of access has those of writing.
    for stat, path in sorted(entries, key=lambda entry: max(entry[0].st_atime, entry[0].st_mtime)):
        if total <= (BOUND if bound is None else bound):
            return
        total -= stat.st_size
        with contextlib.suppress(OSError):
            path.unlink()
