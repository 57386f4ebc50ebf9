"""The reports of a run, written once, at the end, by the process that gathers the records.

Registered as a plugin of pytest where a run is asked for a report, or is a step of GitHub Actions. Like `hooks`, this imports
pytest and light modules only.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import tomllib
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_nnxcheck import atomic_file, wheels
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.setting_values import REPORTS
from pytest_nnxcheck.plugin import gathered, options
from pytest_nnxcheck.reporting import markdown, records

TITLE = "nnx report"
_PACKAGES = ("pytest-nnxcheck", "jax", "jaxlib", "flax", "hypothesis", "pytest")


class ReportFile(NamedTuple):
    """A file to write."""

    path: Path
    shown: str
    """The path as it was typed."""
    origin: str
    """The option that asked for it, in words."""


def register(config: pytest.Config) -> None:
    """Register a publisher where there is something to publish. Raises `SettingError` that names the source."""
    given, summary = options.given(config, "report"), markdown.step_summary(os.environ)
    if given is None and summary is None:
        return
    asked = [ReportFile(given.folder / path, path, given.origin) for path in given.value] if given else []
    gathered.of(config).whole = True
    if gathered.is_worker(config):
        return
    for target in asked:
        if why := atomic_file.unwritable(target.path, make_folders=True):
            advice = "write the name of a file in a folder that can be written"
            raise SettingError(f"{target.origin}: cannot write {target.shown}: {why}; {advice}")
    config.pluginmanager.register(Publisher(asked, summary), "nnxcheck_publish")


class Publisher:
    """The hooks that write the reports at the end."""

    def __init__(self, asked: list[ReportFile], summary: Path | None) -> None:
        self.targets, self.summary = asked, summary
        self.started = datetime.now(UTC)
        self.written: list[str] = []
        self.problems: list[str] = []

    # Innermost: after all that may fail the run yet, before the terminal's summary.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Write every report as a whole."""
        result = yield
        if session.config.getoption("collectonly"):
            return result
        document = self._document(session)
        for target in self.targets:
            try:
                page = importlib.import_module(f"pytest_nnxcheck.reporting.{REPORTS[target.path.suffix.lower()]}")
                atomic_file.write(target.path, page.render(document))
                self.written.append(target.shown)
            except OSError as error:
                self.problems.append(f"{target.origin}: cannot write {target.shown}: {atomic_file.reason(error)}")
            except Exception as error:  # noqa: BLE001 - a fault of ours must not take the other reports, and the summary, with it
                self.problems.append(f"{target.origin}: cannot make {target.shown}: {type(error).__name__}: {error}")
        if self.problems and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.summary is not None and document.records:
            # Nobody asked for it: where it cannot be written, a line says so, and the run does not fail.
            try:
                markdown.append(self.summary, document)
            except OSError as error:
                self.problems.append(f"cannot write the summary of the step: {atomic_file.reason(error)}")
        return result

    def _document(self, session: pytest.Session) -> records.Document:
        tests, root = gathered.of(session.config).tests.values(), session.config.rootpath
        stamps = {record.stamp for record in tests if record.stamp is not None}
        run = records.RunRecord(
            self.started.isoformat(timespec="seconds"),
            (datetime.now(UTC) - self.started).total_seconds(),
            int(session.exitstatus),
            platform.python_version(),
            platform.platform(),
            {name: wheels.version(name) or "not installed" for name in _PACKAGES},
            _project(root),
            _commit(root),
            stamps.pop() if len(stamps) == 1 else None,
        )
        return records.document(records.made(records.RunRecord, records.plain(run)), tests)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say where the reports are, and which could not be written."""
        for shown in self.written:
            terminalreporter.write_sep("-", f"{TITLE}: {records.plain(shown)}")
        if self.problems:
            terminalreporter.section(TITLE, red=True)
        for line in self.problems:
            terminalreporter.write_line(f"ERROR {records.plain(line)}", red=True)


def _project(root: Path) -> str:
    """The name of the project in its ``pyproject.toml``, or that of its folder."""
    try:
        name = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["name"]
    except (OSError, ValueError, LookupError, TypeError):
        name = ""
    return name if name and isinstance(name, str) else root.name


def _commit(root: Path) -> str:
    """The commit that GitHub Actions names, or that git has checked out in this folder; empty without both."""
    if named := os.environ.get("GITHUB_SHA"):
        return named
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "rev-parse", "--verify", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()  # noqa: S603 - arguments of our own
    except (OSError, ValueError, subprocess.SubprocessError):
        return ""  # no git, no commit yet, or a folder that git does not trust
