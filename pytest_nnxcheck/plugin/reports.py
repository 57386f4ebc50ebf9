"""The reports of a run: gathered from tests, and from workers of xdist, and written once, at the end, by one process.

Registered as a plugin of pytest where a run is asked for a report, or is a step of GitHub Actions. Like `hooks`, this imports
pytest and light rooms only. PYTEST_DONT_REWRITE: nothing here is an assertion for pytest to rewrite.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck.core.setting_values import SettingError
from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.plugin import options
from pytest_nnxcheck.reporting import html_page, markdown, records, step_summary
from pytest_nnxcheck.reporting.records import Place, Records

if TYPE_CHECKING:
    from pytest_nnxcheck.runner.run import Run

NAME = "nnxcheck_publish"
TITLE = "nnx report"
_WIRE = "nnx_records"
_PACKAGES = ("pytest-nnxcheck", "jax", "jaxlib", "flax", "hypothesis", "pytest")
FORMATS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    ".json": records.to_json,
    ".html": html_page.render,
    ".md": markdown.render,
}


@dataclass(frozen=True, slots=True)
class Target:
    """A file to write: where it is, as it was typed, and who asked for it."""

    path: Path
    shown: str
    origin: str

    def write(self, document: Mapping[str, Any]) -> None:
        """Put the whole report in place at once. Raises `OSError`."""
        text = FORMATS[self.path.suffix.lower()](document)
        with _beside(self.path) as new:
            new.write_text(text, encoding="utf-8")
            new.replace(self.path)

    def prepare(self) -> None:
        """Make the folder, and see whether a file can be written there. Raises `SettingError`."""
        try:
            if self.path.is_dir():
                raise IsADirectoryError(None, "it is a folder")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _beside(self.path) as new:
                new.write_bytes(b"")
        except (OSError, ValueError) as error:
            advice = "write the name of a file in a folder that can be written"
            raise SettingError(f"{self.origin}: cannot write {self.shown}: {_reason(error)}; {advice}") from None


@contextlib.contextmanager
def _beside(path: Path) -> Generator[Path, None, None]:
    """A new file in the same folder, which is gone afterwards; its name is short, for the report's own may be as long as it can be."""
    new = path.parent / f".nnx-{os.getpid()}-{time.monotonic_ns()}"
    try:
        yield new
    finally:
        new.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def targets(config: pytest.Config) -> tuple[Target, ...]:
    """The files that command line or ini file ask for. Raises `SettingError` that names the source."""
    given = options.given(config, "report")
    if given is None:
        return ()
    # Through links: what is replaced is the file, not the link to it.
    return tuple(Target(Path(os.path.realpath(given.folder / each)), each, given.origin) for each in given.value)


def register(config: pytest.Config, unreported: dict[str, Run]) -> None:
    """Register a publisher where there is something to publish. Raises `SettingError`."""
    asked, summary = targets(config), step_summary.file_of(os.environ)
    if not asked and summary is None:
        return
    is_worker = hasattr(config, "workerinput")
    for target in asked if not is_worker else ():
        target.prepare()
    config.pluginmanager.register(Publisher(config, asked, summary, unreported, is_worker=is_worker), NAME)


class Publisher:
    """The records of the tests that have ended, and the hooks that gather, write and tell them."""

    def __init__(
        self,
        config: pytest.Config,
        asked: tuple[Target, ...],
        summary: Path | None,
        unreported: dict[str, Run],
        *,
        is_worker: bool,
    ) -> None:
        self.root = config.rootpath
        self.folder = config.invocation_params.dir
        self.targets = asked
        self.summary = summary
        self.unreported = unreported
        self.is_worker = is_worker
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
        ended = report.when == "call" or (report.when == "setup" and not report.passed)
        if ended and item.get_closest_marker(MARKER) is not None:
            setattr(report, _WIRE, self._told_or_why_not(item, call))
        return report

    def _told_or_why_not(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Records:
        try:
            return self._records(item, call)
        except Exception as error:  # noqa: BLE001 - a fault of ours must not take the run with it
            test = records.empty_test(item.nodeid)
            test["message"] = records.plain(f"nnx report: cannot tell of this test: {type(error).__name__}: {error}")
            return {"test": test, "nestings": []}

    def _records(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Records:
        found = self._of_run(item.nodeid)
        test = found["test"]
        path, line, _ = item.reportinfo()
        test["place"] = self._place(os.fspath(path), line or 0)
        if call.excinfo is not None:
            test["message"] = records.plain(_told(call.excinfo.value))
            test["failed_at"] = self._call_line(call.excinfo, item) or test["place"]
        test["seconds"] = call.duration
        return found

    def _of_run(self, nodeid: str) -> Records:
        run = self.unreported.get(nodeid)
        if run is None:
            return {"test": records.empty_test(nodeid), "nestings": []}
        return records.of_report(run.report(), self.folder)

    def _place(self, path: str, line: int) -> Place:
        """A place in a file, from a line counted from 0."""
        file = Path(path)
        inside = file.is_relative_to(self.root)
        return {"file": records.plain((file.relative_to(self.root) if inside else file).as_posix()), "line": line + 1}

    def _call_line(self, excinfo: pytest.ExceptionInfo[BaseException], item: pytest.Item) -> Place | None:
        """The innermost line of the test's own file that the exception came through: its call of what nnx_wrap returned."""
        lines = [entry.lineno for entry in excinfo.traceback if os.fspath(entry.path) == os.fspath(item.path)]
        return self._place(os.fspath(item.path), lines[-1]) if lines else None

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Gather what a test of this process, or of a worker, gives."""
        if self.is_worker:
            return
        found: Records | None = getattr(report, _WIRE, None)
        if found is not None:
            found["test"]["outcome"] = _outcome(report)
            self.tests[report.nodeid] = found
        elif report.when == "teardown" and report.failed and report.nodeid in self.tests:
            self._add_error(self.tests[report.nodeid], report)
        elif report.when not in {"setup", "call", "teardown"}:  # a worker of xdist crashed in it
            crashed: Records = {"test": records.empty_test(report.nodeid), "nestings": []}
            known = self.tests.setdefault(report.nodeid, crashed)
            if known["test"]["outcome"] != "interrupted":  # which is a crash too, to xdist
                self._add_error(known, report)

    def _add_error(self, found: Records, report: pytest.TestReport) -> None:
        test = found["test"]
        test["outcome"] = "error"
        test["message"] = "\n".join(filter(None, [test["message"], records.plain(report.longreprtext)]))

    # Innermost: after all that may fail the run yet, before the terminal's summary.
    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Write; a worker hands over the test that was interrupted instead."""
        result = yield
        self._finish(session)
        return result

    def _finish(self, session: pytest.Session) -> None:
        stopped = [self._of_run(nodeid) for nodeid in self.unreported]
        for found in stopped:
            found["test"]["outcome"] = "interrupted"
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_WIRE] = stopped
            return
        self._absorb(stopped)
        if not session.config.getoption("collectonly"):
            self._publish(session)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over the test that was interrupted in a worker; one that crashed says nothing."""
        self._absorb(getattr(node, "workeroutput", {}).get(_WIRE, []))

    def _absorb(self, stopped: list[Records]) -> None:
        for found in stopped:
            known = self.tests.get(found["test"]["nodeid"])
            if known is None or not known["nestings"]:
                self.tests[found["test"]["nodeid"]] = found

    def _publish(self, session: pytest.Session) -> None:
        document = records.document(self._head(session), self.tests.values())
        for target in self.targets:
            try:
                target.write(document)
                self.written.append(target.shown)
            except OSError as error:
                self.problems.append(f"{target.origin}: cannot write {target.shown}: {_reason(error)}")
            except Exception as error:  # noqa: BLE001 - a fault of ours must not take the other reports, and the summary, with it
                self.problems.append(f"{target.origin}: cannot make {target.shown}: {type(error).__name__}: {error}")
        if self.problems and session.exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.summary is not None and document["tests"]:
            self._fill_summary(self.summary, document)

    def _fill_summary(self, summary: Path, document: Mapping[str, Any]) -> None:
        """Nobody asked for it: where it cannot be written, that is said, and the run does not fail."""
        try:
            step_summary.append(summary, document)
        except OSError as error:
            self.problems.append(f"cannot write the summary of the step: {_reason(error)}")

    def _head(self, session: pytest.Session) -> dict[str, Any]:
        now = datetime.now(UTC)
        return {
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": (now - self.started).total_seconds(),
            "exit_status": int(session.exitstatus),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "packages": {name: _version(name) for name in _PACKAGES},
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


def _told(error: BaseException) -> str:
    """The exception as the terminal shows it, the notes with it."""
    text = "".join(traceback.format_exception_only(error)).rstrip()
    head, colon, rest = text.partition(": ")
    ours = colon and head.startswith("pytest_nnxcheck.") and rest.startswith("nnx ")
    return rest if ours or isinstance(error, pytest.fail.Exception | pytest.skip.Exception) else text


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xpassed" if report.passed else "xfailed"
    return "error" if report.when == "setup" and report.failed else str(report.outcome)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
