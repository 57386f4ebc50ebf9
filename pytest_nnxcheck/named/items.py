"""The checks by name as tests of pytest: each is collected as a marked test function, whose source is generated."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from types import ModuleType

import pytest

from pytest_nnxcheck.core.errors import CheckError, InvariantViolation
from pytest_nnxcheck.core.settings import CHECK_ID, MARKER, flag
from pytest_nnxcheck.named.command_line import Named, read_all

Prepare = Callable[[pytest.Function, type[Exception]], None]
"""Reads the settings of an item. Raises the given error for settings that cannot be read."""


def register(config: pytest.Config, typed: Sequence[tuple[str, str]], prepare: Prepare) -> None:
    """Collect the checks that a command line names, where it names some. Raises `SettingError`."""
    ids = {arg: match[1] for arg in config.args if (match := re.search(rf"(?:^|[/\\]){CHECK_ID}::(.+)", arg))}
    if not typed and not ids:
        return
    checks = read_all(typed, ids.values())
    # Where no file is named, the files that pytest would find alone are not run.
    named = config.args_source is config.ArgsSource.ARGS
    config.args[:] = [arg for arg in config.args if named and arg not in ids]
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:  # as with ``python -m pytest``
        sys.path.insert(0, folder)
        config.add_cleanup(lambda: sys.path.remove(folder))
    config.pluginmanager.register(Collection(checks, prepare), "nnxcheck_named")


class Collection:
    """Adds the checks to what a session collects."""

    def __init__(self, checks: Sequence[Named], prepare: Prepare) -> None:
        self.checks, self.prepare = checks, prepare

    # Outermost, and first in the list: behind a file with a failure ``--lf`` leaves them out.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Put the checks before the files."""
        report = yield
        if isinstance(collector, pytest.Session) and report.passed:
            # In the folder whose conftest.py counts.
            folder = collector.config.invocation_params.dir
            node = NamedModule.from_parent(collector, path=folder, name=CHECK_ID, nodeid=CHECK_ID)
            node.obj, node.collection = ModuleType(CHECK_ID), self
            report.result = [node, *(report.result or ())]
        return report


class NamedModule(pytest.Module):
    """The collector of the checks. A module, since fixtures of that scope need one."""

    collection: Collection

    def collect(self) -> Iterable[pytest.Item]:
        """Make a test of each check. Raises `CollectError`, or what the user's module raises as it is imported."""
        __tracebackhide__ = True
        from pytest_nnxcheck.named import generated

        items, problems = list[pytest.Item](), list[str]()
        for named in self.collection.checks:
            try:
                test, place = generated.test_of(named)
            except CheckError as error:
                problems.append(str(error))
                continue
            except Exception as error:
                error.__traceback__ = generated.users_part(error.__traceback__)
                if error.__traceback__ is None:  # no line of the module ran, as with a syntax error
                    problems.append("".join(traceback.format_exception_only(error)).rstrip())
                    continue
                raise
            # Where pytest looks for the function of an item.
            setattr(self.obj, named.label, getattr(pytest.mark, MARKER)(test))
            item: NamedItem = NamedItem.from_parent(self, name=named.label)
            item.named, item.place = named, place
            self.collection.prepare(item, self.CollectError)
            items.append(item)
        if problems:
            raise self.CollectError("\n".join(problems))
        return items


class NamedItem(pytest.Function):
    """The test of one check."""

    named: Named
    place: tuple[str, int]
    """The file and the line of the named class or function; lines are counted from 0."""

    @property
    def nnx_typed(self) -> tuple[str, list[str]]:
        """The argument of pytest that selects it, and the options that belong to that."""
        return f"{flag('check')}={self.named.name}", self.named.options

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """The file and line of the named class or function. Not the end of the id: pytest would write its dots as colons."""
        return (*self.place, f"{CHECK_ID} {self.name}")

    def runtest(self) -> None:
        """Run the test. An exception that the call raises without any nesting gets a note with the arguments."""
        __tracebackhide__ = True
        try:
            super().runtest()
        except (CheckError, InvariantViolation):
            raise
        except Exception as error:
            nested = any(note.lstrip().startswith("nesting ") for note in getattr(error, "__notes__", ()))
            if self.named.inputs and not nested:
                error.add_note(f"{CHECK_ID}: the call got {self.named.spelled}, from option {flag('inputs')}")
            raise

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> object:  # type: ignore[override]
        """One line for a check that cannot be made."""
        return str(excinfo.value) if type(excinfo.value) is CheckError else super().repr_failure(excinfo)
