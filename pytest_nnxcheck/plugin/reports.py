"""The reports of a run: gathered from tests, and from workers of xdist, and written once, at the end, by one process.

Registered as a plugin of pytest where a run is asked for a report, or is a step of GitHub Actions. Like `hooks`, this imports
pytest and light modules only.
"""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
import tomllib
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck import atomic_file, wheels
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.setting_values import REPORTS
from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.plugin import options, worker_data
from pytest_nnxcheck.plugin.marker import has_ended
from pytest_nnxcheck.plugin.pytest_internals import OUR_CLASS
from pytest_nnxcheck.plugin.worker_data import Part
from pytest_nnxcheck.reporting import records
from pytest_nnxcheck.reporting.pages import markdown
from pytest_nnxcheck.reporting.records import Records

if TYPE_CHECKING:
    from pytest_nnxcheck.runner.run import Run

TITLE = "nnx report"
_WIRE = "nnx_records"
_PACKAGES = ("pytest-nnxcheck", "jax", "jaxlib", "flax", "hypothesis", "pytest")


@dataclass(frozen=True, slots=True)
class ReportFile:
    """A file to write."""

    path: Path
    shown: str
    """The path as it was typed."""
    origin: str
    """The option that asked for it, in words."""

    def write(self, document: Mapping[str, Any]) -> None:
        """Put the whole report in place at once. Raises `OSError`."""
        page = importlib.import_module(f"pytest_nnxcheck.reporting.{REPORTS[self.path.suffix.lower()]}")
        atomic_file.write(self.path, page.render(document))


def register(config: pytest.Config, unreported: dict[str, Run]) -> None:
    """Register a publisher where there is something to publish. Raises `SettingError` that names the source."""
    given, summary = options.given(config, "report"), markdown.step_summary(os.environ)
    if given is None and summary is None:
        return
    asked = tuple(ReportFile(given.folder / path, path, given.origin) for path in given.value) if given else ()
    if not worker_data.is_worker(config):
        for target in asked:
            if why := atomic_file.unwritable(target.path, make_folders=True):
                advice = "write the name of a file in a folder that can be written"
                raise SettingError(f"{target.origin}: cannot write {target.shown}: {why}; {advice}")
    publisher = Publisher(config, asked, summary, unreported)
    worker_data.of(config).add("interrupted tests", Part(publisher.interrupted, publisher.absorb))
    config.pluginmanager.register(publisher, "nnxcheck_publish")


class Publisher:
    """The hooks that gather the records of tests, and write them at the end."""

    def __init__(
        self,
        config: pytest.Config,
        asked: tuple[ReportFile, ...],
        summary: Path | None,
        unreported: dict[str, Run],
    ) -> None:
        self.root, self.folder = config.rootpath, config.invocation_params.dir
        self.targets, self.summary = asked, summary
        self.unreported = unreported
        """The runs of tests of this process that have not ended, by node id."""
        self.is_worker = worker_data.is_worker(config)
        self.started = datetime.now(UTC)
        self.tests: dict[str, Records] = {}
        self.written: list[str] = []
        self.problems: list[str] = []

    # Innermost: the plugin's own hook forgets the run.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the records of a marked test into its report, which goes to the controller of xdist as it is."""
        report = yield
        not_called = report.when == "setup" and not report.passed and item.get_closest_marker(MARKER) is not None
        if not_called or has_ended(item, report):
            setattr(report, _WIRE, self._records(item, call))
        return report

    def _records(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Records:
        try:
            record = self._of_run(item.nodeid)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not take the run with it
            record = records.unknown(item.nodeid)
            why = f"nnx report: cannot record this test: {type(error).__name__}: {error}"
            record["test"]["message"] = records.plain(why)
            return record
        test = record["test"]
        path, line, _ = item.reportinfo()
        test["place"] = self._place(os.fspath(path), line or 0)
        if call.excinfo is not None:
            test["message"] = records.plain(_text_of(call.excinfo.value))
            test["failed_at"] = self._call_line(call.excinfo, item) or test["place"]
        test["seconds"] = call.duration
        return record

    def _of_run(self, nodeid: str) -> Records:
        run = self.unreported.get(nodeid)
        return records.unknown(nodeid) if run is None else records.of_report(run.report(), self.folder)

    def _place(self, path: str, line: int) -> records.Record:
        """A line of a file, handed in counted from 0: relative to pytest's root directory where it lies below, and counted from 1."""
        file = Path(path)
        inside = file.is_relative_to(self.root)
        return {"file": records.plain((file.relative_to(self.root) if inside else file).as_posix()), "line": line + 1}

    def _call_line(self, excinfo: pytest.ExceptionInfo[BaseException], item: pytest.Item) -> records.Record | None:
        """The innermost line of the test's own file that the exception came through: its call of the object that nnx_wrap returned."""
        lines = [entry.lineno for entry in excinfo.traceback if os.fspath(entry.path) == os.fspath(item.path)]
        return self._place(os.fspath(item.path), lines[-1]) if lines else None

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather the records of a test of this process, or of a worker."""
        if self.is_worker:
            return
        record: Records | None = getattr(report, _WIRE, None)
        if record is not None:
            record["test"]["outcome"] = _outcome(report)
            self.tests[report.nodeid] = record
        elif report.when == "teardown" and report.failed and report.nodeid in self.tests:
            self._add_error(self.tests[report.nodeid], report)
        elif worker_data.is_crash(report):
            record = self.tests.setdefault(report.nodeid, records.unknown(report.nodeid))
            if record["test"]["outcome"] != "interrupted":  # which is a crash too, to xdist
                self._add_error(record, report)

    def _add_error(self, record: Records, report: pytest.TestReport) -> None:
        test = record["test"]
        test["outcome"] = "error"
        test["message"] = "\n".join(filter(None, [test["message"], records.plain(report.longreprtext)]))

    # Innermost: after all that may fail the run yet, before the terminal's summary.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Write, where the records of all processes are."""
        result = yield
        if not self.is_worker:
            self.absorb(self.interrupted())
            if not session.config.getoption("collectonly"):
                self._publish(session)
        return result

    def interrupted(self) -> list[Records]:
        """The records of the test that was interrupted in this process."""
        stopped = [self._of_run(nodeid) for nodeid in self.unreported]
        for record in stopped:
            record["test"]["outcome"] = "interrupted"
        return stopped

    def absorb(self, stopped: list[Records]) -> None:
        """Take over the test that was interrupted, in whichever process."""
        for record in stopped:
            earlier = self.tests.get(record["test"]["nodeid"])
            if earlier is None or not earlier["nestings"]:
                self.tests[record["test"]["nodeid"]] = record

    def _publish(self, session: pytest.Session) -> None:
        document = records.document(self._head(session), self.tests.values())
        for target in self.targets:
            try:
                target.write(document)
                self.written.append(target.shown)
            except OSError as error:
                self.problems.append(f"{target.origin}: cannot write {target.shown}: {atomic_file.reason(error)}")
            except Exception as error:  # noqa: BLE001 - a fault of ours must not take the other reports, and the summary, with it
                self.problems.append(f"{target.origin}: cannot make {target.shown}: {type(error).__name__}: {error}")
        if self.problems and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.summary is not None and document["tests"]:
            # Nobody asked for it: where it cannot be written, a line says so, and the run does not fail.
            try:
                markdown.append(self.summary, document)
            except OSError as error:
                self.problems.append(f"cannot write the summary of the step: {atomic_file.reason(error)}")

    def _head(self, session: pytest.Session) -> dict[str, Any]:
        now = datetime.now(UTC)
        return {
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": (now - self.started).total_seconds(),
            "exit_status": int(session.exitstatus),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: wheels.version(name) or "not installed" for name in _PACKAGES},
            "project": _project(session.config.rootpath),
            "commit": _commit(session.config.rootpath),
        }

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


def _text_of(error: BaseException) -> str:
    """The exception as the terminal shows it, with its notes."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    if isinstance(error, pytest.fail.Exception | pytest.skip.Exception):
        return text.partition(": ")[2]
    return OUR_CLASS.sub("", text)


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    return "error" if report.when == "setup" and report.failed else str(report.outcome)
