"""A plugin of the child's pytest: what its one test came to, and the CPU seconds of set-up, call and teardown, as facts.

Start-up is not in the seconds: what the tools import late is imported, and jax has its backend, before the test starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tasks
from benchmarks.children import FACTS

FOUND: dict[str, Any] = {"outcome": "none", "message": "", "shown": []}


def pytest_collection() -> None:
    """Import everything."""
    tasks.import_all()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """The clock of the test."""
    with tasks.clock(FOUND):
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how the test ended; a failure stays one."""
    FOUND["shown"] = dict(report.user_properties).get("shown", FOUND["shown"])
    if report.failed or FOUND["outcome"] == "none":
        FOUND["outcome"] = report.outcome
        FOUND["message"] = report.longreprtext
    elif report.when == "call":
        FOUND["outcome"] = report.outcome


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the facts; a test that failed is a result and no error."""
    if exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and session.testscollected == 1:
        Path(os.environ[FACTS]).write_text(json.dumps(FOUND))
        session.exitstatus = pytest.ExitCode.OK
