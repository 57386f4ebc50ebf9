"""The programs to paste of a test of pytest: what pytest knows of its arguments, and the folder in pytest's cache."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from pytest_nnxcheck.core import settings
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.plugin import pytest_internals
from pytest_nnxcheck.reporting import report
from pytest_nnxcheck.reproducer import calls_of_test
from pytest_nnxcheck.reproducer.calls_of_test import Origin, Usage
from pytest_nnxcheck.reproducer.files import Programs, own_transforms


def of_item(item: Any, options: str, chosen: Settings) -> Programs:
    """The programs of a marked test: in the cache of pytest, or in a folder of its own where that is switched off."""
    config = item.config

    def usage_of(body: Any) -> Usage:
        given, positions = pytest_internals.parameters(item)
        return calls_of_test.of_test(
            body,
            Origin(pytest_internals.fixture_functions(item), given, positions),
            own_transforms(chosen),
        )

    def replay(nesting: Nesting) -> str:
        return report.replay(report.Report((), settings.Settings(), (), item.nodeid, options), nesting)

    return Programs(item.nodeid, usage_of, replay, functools.partial(folder_of, config), config.invocation_params.dir)


def folder_of(config: Any) -> Path:
    """The folder of all programs: public API of pytest's cache, or a temporary folder that outlives the run."""
    cache = getattr(config, "cache", None)
    return _temporary() if cache is None else Path(cache.mkdir("nnxcheck"))


@functools.cache
def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="nnxcheck-"))
