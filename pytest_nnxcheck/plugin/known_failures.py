"""The file of a suite's expected failures: it is read, and at the end of the run a warning names the entries that matched nothing.

Registered as a plugin of pytest where a run has such a file. Like `hooks`, this imports pytest and light modules only.
"""

from __future__ import annotations

import itertools
import tomllib
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from pytest_nnxcheck import atomic_file
from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.errors import PUBLIC, SettingError
from pytest_nnxcheck.core.expected_failures import ExpectedFailure
from pytest_nnxcheck.core.settings import CHECK_ID, MARKER
from pytest_nnxcheck.core.text import Unreadable
from pytest_nnxcheck.plugin import worker_data
from pytest_nnxcheck.plugin.options import Given
from pytest_nnxcheck.plugin.selection import Selection
from pytest_nnxcheck.plugin.worker_data import Part, WorkerData
from pytest_nnxcheck.reporting.report import Report


class ExpectedFailuresWarning(pytest.PytestWarning):
    """A table or an entry in the file of expected failures matches nothing."""

    __module__ = PUBLIC


@dataclass(frozen=True, slots=True)
class Table:
    """The expected failures of the tests whose node id matches a pattern."""

    pattern: str
    entries: tuple[ExpectedFailure, ...]
    line: int = 1
    """The line where the table starts in the file."""

    def matches(self, nodeid: str) -> bool:
        """True if the table is for this test: its node id, with or without its parameters, or a pattern for it."""
        return self.pattern in {nodeid, nodeid.partition("[")[0]} or fnmatchcase(nodeid, self.pattern)


def read(path: Path, shown: str) -> tuple[Table, ...]:
    """The tables of a file, which errors and entries call ``shown``. Raises `SettingError`."""
    try:
        text = atomic_file.read(path)
        tables = tomllib.loads(text)
    except OSError as error:
        raise SettingError(f"cannot read {shown}: {atomic_file.reason(error)}") from None
    except ValueError as error:
        raise SettingError(f"{shown} is no TOML file: {error}") from None
    except RecursionError:
        raise SettingError(f"{shown} is no TOML file of tables and texts: its brackets are nested too deeply") from None
    return tuple(_table(pattern, entries, shown, text.splitlines()) for pattern, entries in tables.items())


def _table(pattern: str, entries: object, shown: str, lines: list[str]) -> Table:
    if not isinstance(entries, Mapping):
        example = '["tests/test_model.py::test_block"]'
        raise SettingError(f"{shown}: {pattern!r} is outside of a table, write the test above it, as {example}")
    if any(isinstance(reason, Mapping) for reason in entries.values()):
        raise SettingError(f"{shown}: table {pattern!r} holds tables, put the node id in quotes, as a whole")
    origin = f"{shown}, table {pattern!r}"
    try:
        parsed = expected_failures.parse(entries)
    except Unreadable as error:
        raise SettingError(f"{origin}: {error}") from None
    # tomllib says no lines. The name of another table may begin with this pattern.
    names = (f'"{pattern}"', f"'{pattern}'", f"{pattern} ", f"{pattern}]")
    headers = ((number, line.lstrip()) for number, line in enumerate(lines, 1))
    starts = (number for number, line in headers if line.startswith("[") and line.lstrip("[ ").startswith(names))
    return Table(pattern, tuple(replace(entry, origin=origin, table=pattern) for entry in parsed), next(starts, 1))


def register(config: pytest.Config, file: Given) -> Suite:
    """Register the file that the run names. Raises `SettingError` that names option and file."""
    try:
        suite = Suite(file.folder / file.value, file.value, worker_data.of(config))
    except SettingError as error:
        raise SettingError(f"{file.origin}: {error}") from None
    config.pluginmanager.register(suite, "nnxcheck_suite")
    return suite


class Suite:
    """The tables of a run, the entries of them that matched, and the hooks that warn of entries that matched nothing."""

    def __init__(self, path: Path, shown: str, data: WorkerData) -> None:
        self.path = path
        self.shown = shown
        self.tables = read(path, shown)
        self.data = data
        data.add("expected failures", Part(self.to_wire, self.absorb))
        self.ran: set[str] = set()
        """The tests that ran to their end, by node id."""
        self.used: set[tuple[str, str]] = set()
        """Table and key of the entries that were about a nesting that ran."""
        self.errors: list[str] = []
        """The warnings of a run in which warnings are errors."""

    def entries(self, item: pytest.Item) -> tuple[ExpectedFailure, ...]:
        """The entries for a test; where two tables have the same key, the earlier one wins."""
        nodeid = worker_data.nodeid(item)
        tables = [table for table in self.tables if table.matches(nodeid)]
        return expected_failures.add_up(*(table.entries for table in reversed(tables)))

    def finished(self, item: pytest.Item, report: Report) -> None:
        """Note which entries a test that ran to its end was about."""
        settings = report.settings
        if settings.nesting is not None:
            return
        self.ran.add(worker_data.nodeid(item))
        for entry in settings.expected_failures:
            if entry.table and expected_failures.covered(entry, report.outcomes, settings.invariants):
                self.used.add((entry.table, entry.key))

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Warn of entries that matched nothing, in the process that gathers what all processes saw."""
        if worker_data.is_worker(session.config) or not self.data.saw_all(session.exitstatus):
            return
        for table, text in self.complaints(Selection.of(session.config), self.data.collection.tests):
            self._warn(table, text)
        if self.errors and session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _warn(self, table: Table, text: str) -> None:
        """Warn at the line of the table; where warnings are errors, the run fails, and no traceback of ours is shown."""
        try:
            warnings.warn_explicit(ExpectedFailuresWarning(text), None, str(self.path), table.line)
        except ExpectedFailuresWarning:
            self.errors.append(f"{self.shown}:{table.line}: {text}")

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the warnings that are errors."""
        if self.errors:
            terminalreporter.section("nnx expected failures", red=True)
            for line in self.errors:
                terminalreporter.write_line(f"ERROR {line}", red=True)

    def to_wire(self) -> dict[str, Any]:
        """The observations of this process, in plain types."""
        return {"ran": sorted(self.ran), "used": [list(pair) for pair in sorted(self.used)]}

    def absorb(self, wire: Mapping[str, Any]) -> None:
        """Add the observations of another process."""
        self.ran.update(wire["ran"])
        self.used.update((table, key) for table, key in wire["used"])

    def complaints(self, selection: Selection, tests: Collection[str]) -> Iterator[tuple[Table, str]]:
        """Tables and entries that matched nothing, though the run looked at all tests that the table may be for."""
        for table in self.tables:
            if not covers(selection, table):
                continue
            asked = {*filter(table.matches, tests)}
            if not asked:
                yield table, f"table {table.pattern!r} of expected failures matches no test marked {MARKER}"
            elif asked <= self.ran:
                for entry in table.entries:
                    if (table.pattern, entry.key) not in self.used:
                        yield table, f"expected failure {entry} of table {table.pattern!r} matches no nesting that ran"


def covers(selection: Selection, table: Table) -> bool:
    """True if the run looked at every test that a table may be for; at those of a file that is not there it did."""
    file = Path(table.pattern.partition("::")[0])
    # The file or folder before the first part that is wild.
    place = Path(*itertools.takewhile(lambda part: not set("*?[") & set(part), file.parts))
    missing = place == file and str(file) != CHECK_ID and not (selection.root / place).exists()
    return missing or selection.covers(str(place))
