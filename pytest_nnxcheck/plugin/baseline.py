"""The files that a suite commits: its memory baseline and its expected failures. Hooks compare every test, and at the end say what is stale, and write.

Registered as plugins of pytest where a run names such a file. Like `hooks`, this imports pytest and light modules only. What is compared and written is
decided by pure functions in `reporting`. Tests are compared where they run, and only the controller of xdist writes.
"""

from __future__ import annotations

import itertools
import os
import shlex
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from pytest_nnxcheck import atomic_file
from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.errors import PUBLIC, SettingError
from pytest_nnxcheck.core.settings import CALL_ID, CHECK_ID, MARKER, TABLE, flag
from pytest_nnxcheck.core.text import Unreadable, counted
from pytest_nnxcheck.plugin import gathered, options
from pytest_nnxcheck.plugin.gathered import Gathered, Running
from pytest_nnxcheck.reporting import baseline, earlier
from pytest_nnxcheck.reporting.baseline import ANY_STAMP, NEW_ONLY, UPDATE, Baseline, Request
from pytest_nnxcheck.reporting.records import Head, Record

# --- the memory baseline -------------------------------------------------------------------------------------------------


def register(config: pytest.Config) -> BaselineHooks | None:
    """Register the hooks, if the run has a baseline. Raises `SettingError` that says which option or file is wrong."""
    tolerance = options.value(config, "memory_tolerance")
    given = options.given(config, "baseline")
    asked = [flag(name) for name, row in TABLE.items() if row.of == "baseline" and options.asked(config, name)]
    if given is None:
        if asked:
            raise SettingError(
                f"option {asked[0]} needs a file: add {flag('baseline')} PATH, or nnx_baseline to the ini file"
            )
        return None
    if {UPDATE, NEW_ONLY} <= {*asked}:
        raise SettingError(
            f"options {UPDATE} and {NEW_ONLY}: the first replaces every entry, the second keeps them all: give one of them"
        )
    request = Request(
        given.value,
        tolerance,
        "all" if UPDATE in asked else "new" if NEW_ONLY in asked else "",
        any_stamp=ANY_STAMP in asked,
        replayed=options.given(config, "nesting") is not None,
    )
    try:
        stored = baseline.read(given.folder / given.value, given.value)
    except SettingError as error:
        raise SettingError(f"{given.origin}: {error}") from None
    hooks = BaselineHooks(request, given, stored)
    config.pluginmanager.register(hooks, "nnxcheck_baseline")
    return hooks


class BaselineHooks:
    """The baseline in the file, and the lines to write at the end."""

    def __init__(self, request: Request, given: options.Given, stored: Baseline | None) -> None:
        self.request, self.path, self.origin, self.stored = request, given.folder / given.value, given.origin, stored
        self.failures = 0
        self.lines: list[tuple[str, bool]] = []
        """The lines, each with True if it is bad news."""

    @pytest.hookimpl
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Stop a run that could not be compared or written; ``pytest --help`` and a collection need no file."""
        if session.config.option.collectonly or gathered.is_worker(session.config):
            return
        shown, update = self.request.shown, self.request.update
        if self.stored is None and not update:
            raise pytest.UsageError(
                f"{self.origin}: there is no file {shown}: write it with {UPDATE}, from a run of all tests"
            )
        if update and (reason := atomic_file.unwritable(self.path)):
            raise pytest.UsageError(f"{self.origin}: cannot write {shown}: {reason}")

    def finished(self, item: pytest.Item, running: Running) -> str:
        """Compare a test that is all right in itself with the baseline: the text of its failure, or nothing."""
        run, test = running.run, gathered.nodeid(item)
        figures = baseline.measured(test, running.first.values(), whole=run.remember)
        running.measured = tuple(map(baseline.kept, figures))
        record = Record(Head(test), measured=figures, repeats=run.repeats, stamp=gathered.stamp())
        compared = baseline.compare(record, self.stored, self.request)
        if not compared.grew or self.stored is None:
            return ""
        checked = run.report()
        typed = options.typed(item.config.option, ("baseline", "memory_tolerance"))
        words = [checked.options, *(f"{flag(name)} {shlex.quote(value)}" for name, value in typed.items())]
        checked = replace(checked, options=" ".join(filter(None, words)))
        now = {each.nesting: each for each in figures}
        return baseline.message(compared, self.stored.tests[test], now, self.request, checked)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the failures of all tests, wherever they ran."""
        self.failures += report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Say what is stale, and write, where the records of all processes are."""
        if session.config.option.collectonly or gathered.is_worker(session.config):
            return
        records = gathered.of(session.config).tests.values()
        compared = baseline.summary(self.request, self.stored, records)
        self.lines = [*((line, False) for line in compared), *self._ended(session, records)]
        if any(red for _, red in self.lines) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _ended(self, session: pytest.Session, records: Collection[Record]) -> Iterator[tuple[str, bool]]:
        """The lines on stale entries, and on the file: written, or why not."""
        shown, update, stale, gone = self.request.shown, self.request.update, list[str](), list[str]()
        found, status = gathered.of(session.config), session.exitstatus
        # Only a run of whole files, to its end and under all nestings, knows that something in them is no more.
        if self.stored is not None and found.saw_all(status) and not is_narrowed(session.config):
            selected, skipped = Selection.of(session.config), tuple(found.skipped)
            whole = [test for test in self.stored.tests if selected.covers(test.partition("::")[0])]
            gone = [test for test in whole if test not in found.collected and not test.startswith(skipped)]
            # Where nothing was compared, nothing is known of nestings.
            stamps = [record.stamp for record in records if record.stamp is not None]
            if update != "all" and not any(map(self.stored.stamp.differences, stamps)):
                stale = [f"  {baseline.on_one_line(test)}: there is no such test" for test in gone]
                for record in (each for each in records if each.head.nodeid in whole and baseline.has_passed(each)):
                    if names := baseline.compare(record, self.stored, self.request).stale:
                        test = baseline.on_one_line(record.head.nodeid)
                        stale.append(f"  {test}: did not run under {', '.join(names)}")
        if stale:
            yield f"ERROR {shown} has stale entries, {UPDATE} removes them:", True
            yield from ((line, True) for line in stale)
        if update:
            refusal = self._refusal(found, status, stale=bool(stale))
            sentence, is_written = (refusal, False) if refusal else self._write(records, gone)
            yield f"{shown} is {'written, ' if is_written else 'not written: '}{sentence}", not is_written

    def _refusal(self, found: Gathered, status: int, *, stale: bool) -> str:
        """Why a run must not leave a baseline, whatever it measured; empty if it may."""
        if found.broken:
            return "not every test could be collected"
        if found.interrupted or status == pytest.ExitCode.INTERRUPTED:
            return "the run was interrupted"
        if self.failures:
            return f"{counted(self.failures, 'test')} failed"
        if status:
            return f"the run failed (exit status {int(status)})"
        return f"it has stale entries, which only {UPDATE} removes" if stale else ""

    def _write(self, records: Collection[Record], gone: list[str]) -> tuple[str, bool]:
        """Put the new baseline in its place, on top of the present content of the file. Returns the changes, or why there are none."""
        try:
            before = baseline.read(self.path, self.request.shown)
            after = baseline.renewed(before, records, self.request, gone)
            if before != after or after.old_form:
                atomic_file.write(self.path, baseline.render(after))
        except (baseline.Refused, SettingError) as error:
            return str(error), False
        except OSError as error:
            return f"{atomic_file.reason(error)}; the file is unchanged", False
        form = "; it had the form of 0.1.0, and is a report now" if after.old_form else ""
        return baseline.changes(before, after) + form, True

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the comparisons, the changes of the file, and its problems."""
        if self.lines:
            terminalreporter.write_sep("=", "nnx memory baseline", red=any(red for _, red in self.lines))
            for line, red in self.lines:
                terminalreporter.write_line(line, red=red)


# --- expected failures ---------------------------------------------------------------------------------------------------


class ExpectedFailuresWarning(pytest.PytestWarning):
    """A table or an entry in the file of expected failures matches nothing."""

    __module__ = PUBLIC


@dataclass(frozen=True, slots=True)
class Table:
    """The expected failures of the tests whose node id matches a pattern."""

    pattern: str
    entries: tuple[expected_failures.ExpectedFailure, ...]
    line: int = 1
    """The line where the table starts in the file."""

    def matches(self, nodeid: str) -> bool:
        """True if the table is for this test: its node id, with or without its parameters, or a pattern for it."""
        return self.pattern in {nodeid, nodeid.partition("[")[0]} or fnmatchcase(nodeid, self.pattern)


def read(path: Path, shown: str) -> tuple[Table, ...]:
    """The tables of a TOML file, or the tests of a report, which errors and entries call ``shown``. Raises `SettingError`."""
    found = earlier.read(path, shown, "write why it fails beside each key, such as memory = 'jax#926'", toml=True)
    if found is None:
        raise SettingError(f"cannot read {shown}: there is no such file")
    tables, lines = [], path.read_text(encoding="utf-8").splitlines()
    for head in (record.head for record in found.records):
        origin = f"{shown}, table {head.nodeid!r}"
        try:
            parsed = expected_failures.parse({each.key: each.reason for each in head.expected_failures})
        except Unreadable as error:
            raise SettingError(f"{origin}: {error}") from None
        # Neither reader says lines. The name of another table may begin with this pattern.
        names = tuple(f"{start}{head.nodeid}{end}" for start, end in (('"', '"'), ("'", "'"), ("", " "), ("", "]")))
        numbered = ((number, line.lstrip(" [{").removeprefix('"nodeid": ')) for number, line in enumerate(lines, 1))
        start = next((number for number, line in numbered if line.startswith(names)), 1)
        entries = tuple(replace(entry, origin=origin, table=head.nodeid) for entry in parsed)
        tables.append(Table(head.nodeid, entries, start))
    return tuple(tables)


def register_suite(config: pytest.Config, file: options.Given) -> Suite:
    """Register the file that the run names. Raises `SettingError` that names option and file."""
    try:
        suite = Suite(file.folder / file.value, file.value)
    except SettingError as error:
        raise SettingError(f"{file.origin}: {error}") from None
    config.pluginmanager.register(suite, "nnxcheck_suite")
    return suite


class Suite:
    """The tables of a run, and the hooks that warn of entries that matched nothing."""

    def __init__(self, path: Path, shown: str) -> None:
        self.path = path
        self.shown = shown
        self.tables = read(path, shown)
        self.errors: list[str] = []
        """The warnings of a run in which warnings are errors."""

    def entries(self, item: pytest.Item) -> tuple[expected_failures.ExpectedFailure, ...]:
        """The entries for a test; where two tables have the same key, the earlier one wins."""
        nodeid = gathered.nodeid(item)
        tables = [table for table in self.tables if table.matches(nodeid)]
        return expected_failures.add_up(*(table.entries for table in reversed(tables)))

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Warn of entries that matched nothing, in the process that gathers what all processes saw."""
        found = gathered.of(session.config)
        if gathered.is_worker(session.config) or not found.saw_all(session.exitstatus):
            return
        replayed = options.given(session.config, "nesting") is not None
        passed = () if replayed else [each for each in found.tests.values() if baseline.has_passed(each)]
        for table, text in self.complaints(Selection.of(session.config), found.collected, passed):
            # At the line of the table; where warnings are errors, the run fails, and no traceback of ours is shown.
            try:
                warnings.warn_explicit(ExpectedFailuresWarning(text), None, str(self.path), table.line)
            except ExpectedFailuresWarning:
                self.errors.append(f"{self.shown}:{table.line}: {text}")
        if self.errors and session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def complaints(
        self, selection: Selection, tests: Collection[str], passed: Collection[Record]
    ) -> Iterator[tuple[Table, str]]:
        """Tables and entries that matched nothing, though the run looked at all tests that the table may be for."""
        ran = {record.head.nodeid for record in passed}
        used = {(each.table, each.key) for record in passed for each in record.head.expected_failures if each.covered}
        for table in self.tables:
            if not covers(selection, table):
                continue
            asked = {*filter(table.matches, tests)}
            if not asked:
                yield table, f"table {table.pattern!r} of expected failures matches no test marked {MARKER}"
            elif asked <= ran:
                for entry in table.entries:
                    if (table.pattern, entry.key) not in used:
                        yield table, f"expected failure {entry} of table {table.pattern!r} matches no nesting that ran"

    @pytest.hookimpl
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Show the warnings that are errors."""
        if self.errors:
            terminalreporter.section("nnx expected failures", red=True)
            for line in self.errors:
                terminalreporter.write_line(f"ERROR {line}", red=True)


def covers(selection: Selection, table: Table) -> bool:
    """True if the run looked at every test that a table may be for; at those of a file that is not there it did."""
    file = Path(table.pattern.partition("::")[0])
    # The file or folder before the first part that is wild.
    place = Path(*itertools.takewhile(lambda part: not set("*?[") & set(part), file.parts))
    missing = place == file and str(file) not in (CHECK_ID, CALL_ID) and not (selection.root / place).exists()
    return missing or selection.covers(str(place))


# --- the part of the suite that a run collects: a test counts as gone only if its whole file or folder was collected --------


@dataclass(frozen=True, slots=True)
class Selection:
    """The files and folders that a run was asked to collect as a whole."""

    root: Path
    paths: tuple[Path, ...]
    everything: bool = False
    """True if these are all files that pytest finds without a name on the command line."""

    @classmethod
    def of(cls, config: pytest.Config) -> Selection:
        # testmon is pytest-testmon's: it leaves out files whose tests depend on nothing that has changed.
        cut = any(config.getoption(name, None) for name in ("lf", "ignore", "ignore_glob", "testmon"))
        folder = config.invocation_params.dir
        names = () if cut else tuple(folder / arg for arg in config.args if "::" not in arg)
        paths = tuple(Path(os.path.abspath(name)) for name in names)  # noqa: PTH100 - pytest's root follows no links either
        return cls(config.rootpath, paths, bool(paths) and config.args_source is config.ArgsSource.TESTPATHS)

    def covers(self, place: str) -> bool:
        """True if the run collected everything in a file or folder, whose path starts from the root.

        Never true for the checks by name, and for the calls of a suite: another command line may name others, and make others.
        """
        if place in (CHECK_ID, CALL_ID):
            return False
        return self.everything or any((self.root / place).is_relative_to(path) for path in self.paths)


def is_narrowed(config: pytest.Config) -> bool:
    """True if the command line leaves out tests, by name or mark, or nestings. Options that are always in the ini file do not count."""
    usual = config.getini("addopts")
    parts = [
        *(config.getoption(name, "") for name in ("keyword", "markexpr")),
        *(config.getoption("deselect", None) or []),
    ]
    if any(part and not any(arg.endswith(part) for arg in usual) for part in parts):
        return True
    words = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *map(str, config.invocation_params.args)]
    given = {word.partition("=")[0] for word in words}
    ini_names = {name.partition("=")[0].strip() for name in config.getoption("override_ini", None) or []}
    chosen = options.profile(config) if flag("profile") in given or "nnx_profile" in ini_names else None
    # A profile that names the baseline always goes with it.
    of_profile = () if chosen is None or "baseline" in chosen.values else chosen.values
    names = {*given, *ini_names, *(f"nnx_{name}" for name in of_profile)}
    return any({flag(name), f"nnx_{name}"} & names for name, row in TABLE.items() if row.narrows)
