"""The calls that a suite makes, as tests of their own: each is checked where it is made, and reported at the end of the run.

A worker of xdist checks the calls of its tests and hands the results over, as plain data; the process that reports makes one test of each call.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pytest

from pytest_nnxcheck.core.errors import InvariantViolation, SettingError
from pytest_nnxcheck.core.settings import CALL_ID, MARKER, flag
from pytest_nnxcheck.core.text import counted, row
from pytest_nnxcheck.plugin import cache, gathered, options
from pytest_nnxcheck.plugin.gathered import Finished, Running
from pytest_nnxcheck.plugin.marker import settings_of_call
from pytest_nnxcheck.watch.calls import Recorder, SuiteCall
from pytest_nnxcheck.watch.marked_test import marked_test

_WIRE = "nnxcheck_calls"
WORDS = {
    "passed": "passed",
    "failed": "failed",
    "eager": "eager",
    "makes Variables": "made Variables",
    "not checked": "not checked",
    "listed": "listed",
}
"""The verdicts of calls in the last line, in their order."""
ITEMS = ("failed", "passed", "eager", "makes Variables", "not checked")
"""The verdicts of calls that are tests, the first that a worker found first."""
Problem = Callable[[pytest.Item, Running], str]


@dataclass(slots=True)
class CallResult:
    """The result of one distinct call, in plain types."""

    name: str
    text: str
    """The call as one writes it."""
    target: str
    inputs: str
    """Its arguments as ``--nnx-inputs`` takes them, where it can."""
    digest: str
    verdict: str
    why: str = ""
    """Why it was not checked; the message of one that failed."""
    short: str = ""
    """The message in a few words."""
    place: tuple[str, int] = ("", 0)
    """The user's line that made it first, counted from 1."""
    keep: str = ""
    """A marked test of it, if it failed."""
    record: Any = None
    """The record of its check, as plain JSON."""
    properties: list[Any] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    """The tests that made it, in the order in which they ran."""


class CallItem(pytest.Item):
    """The test of one call."""

    result: CallResult
    message: str = ""

    @property
    def nnx_in_short(self) -> str:
        """The end of its line in the short summary of pytest."""
        return self.result.short

    def runtest(self) -> None:
        """Fail with what was found."""
        if self.message:
            raise pytest.fail.Exception(self.message, pytrace=False)

    def reportinfo(self) -> tuple[os.PathLike[str] | str, int | None, str]:
        """The line that made the call first."""
        path, line = self.result.place
        return path, line - 1, f"{CALL_ID} {self.name}"  # not the end of the id: pytest would write its dots as colons


class CallHooks:
    """The hooks that check calls, or list them, and report them at the end."""

    def __init__(self, config: pytest.Config, problem_of: Problem, *, checks: bool) -> None:
        self.config, self.problem_of, self.checks = config, problem_of, checks
        self.limit: int = options.value(config, "watch_seconds")
        self.spent = 0.0
        self.recorder = Recorder(self._found, all_shapes=options.value(config, "watch_shapes") == "all")
        self.results: dict[tuple[Any, ...] | str, CallResult] = {}
        """By the key of the call; of workers, by its name."""
        self.session: Any = None
        self.item: Any = None

    @pytest.hookimpl
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Keep the session, which is the parent of the calls."""
        self.session = session

    def of(self, item: pytest.Function, functions: tuple[Any, ...]) -> None:
        """Take the calls of another test."""
        self.item = item
        self.recorder.of(functions, item.instance)

    # --- where a call is made ---

    def _found(self, call: SuiteCall, is_first: bool) -> None:
        test = gathered.nodeid(self.item)
        if is_first:
            result = CallResult(call.name, call.text, call.target, ";".join(call.inputs), call.digest, "listed")
            result.place = call.caller.f_code.co_filename, call.caller.f_lineno
            if any(other.name == result.name for other in self.results.values()):
                result.name += f"-{call.digest}"
            if self.checks:
                # A callback of a monitor, or of a profiling hook, runs with both off: the check needs them.
                sys.call_tracing(self._check, (call, result))
            if result.verdict == "makes Variables":
                self.recorder.look_again()
            if result.verdict == "raises":  # as its test expects, or its test fails
                return
            result.keep = marked_test(call) if result.verdict == "failed" else ""
            self.results[call.key] = result
        if call.key in self.results and test not in self.results[call.key].tests:
            self.results[call.key].tests.append(test)

    def _check(self, call: SuiteCall, result: CallResult) -> None:
        began = time.perf_counter()
        hook = sys.getprofile()
        sys.setprofile(None)
        try:
            self._judge(call, result)
        except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
            raise
        except Exception as error:  # noqa: BLE001 - it would end the user's call
            result.verdict, result.why = "not checked", f"a fault of pytest-nnxcheck: {type(error).__name__}: {error}"
        finally:
            sys.setprofile(hook)
            self.spent += time.perf_counter() - began

    def _judge(self, call: SuiteCall, result: CallResult) -> None:
        if self.spent >= self.limit:
            result.verdict, result.why = "not checked", self._late()
            return
        from pytest_nnxcheck.reporting import records, report
        from pytest_nnxcheck.runner.run import Run
        from pytest_nnxcheck.watch.check import check

        item = self._item(result.name)
        item.result = result
        try:
            settings = settings_of_call(item)
        except SettingError as error:
            raise pytest.UsageError(str(error)) from None
        argument, own = options.as_typed(self.item)
        typed = options.replay_options(self.config.option, [*own, f"{flag('watch')}=calls"])
        folder = cache.folder_of_compiles(self.config)
        run = Run(settings, test_id=result.name, argument=argument, options=typed, compiles=folder)
        running = Running(run)
        run.listeners.append(running.listen)
        checked = check(call, run, self._may_go_on)
        run.forget()
        if checked.verdict == "eager":
            self.recorder.eager.add(call.code)
        problem = "" if checked.error is None else gathered.text_of(checked.error)
        if checked.verdict == "checked" and not problem:
            problem = self.problem_of(item, running)
        result.verdict = checked.verdict if checked.verdict != "checked" else "failed" if problem else "passed"
        result.why = problem or checked.why
        if isinstance(checked.error, InvariantViolation):
            result.short = report.in_short(checked.error.outcome)
        if checked.verdict == "checked":
            whole = gathered.of(self.config).whole
            result.record = records.plain(running.record(self.config.invocation_params.dir, whole=whole))
            result.properties = [list(pair) for pair in report.properties(report.head(run.report()))]

    def _may_go_on(self, is_worth_more: bool) -> str:
        """Calls that are jitted or change state come first: the others get half of the time."""
        return self._late() if self.spent >= self.limit / (1 if is_worth_more else 2) else ""

    def _late(self) -> str:
        return f"the {self.limit} s of {flag('watch_seconds')} are over"

    def _item(self, nodeid: str) -> CallItem:
        item: CallItem = CallItem.from_parent(self.session, name=nodeid.partition("::")[2], nodeid=nodeid)
        item.add_marker(MARKER)
        return item

    # --- the end of the run ---

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over the results of a worker: a call that another has checked too is one."""
        for wire in getattr(node, "workeroutput", {}).get(_WIRE, ()):
            result = CallResult(**wire)
            same = (
                each.name for each in self.results.values() if (each.text, each.digest) == (result.text, result.digest)
            )
            result.name = next(same, result.name)
            if result.name in self.results and self.results[result.name].digest != result.digest:
                result.name += f"-{result.digest}"
            other = self.results.setdefault(result.name, result)
            known = [each for verdict in (*ITEMS, "listed") for each in (other, result) if each.verdict == verdict]
            self.results[result.name] = replace(known[0], tests=[*dict.fromkeys([*other.tests, *result.tests])])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Run the tests of the calls behind all others."""
        done = yield
        if self.checks and not gathered.is_worker(self.config):
            items = [*self._items()]
            self.config.hook.pytest_collection_modifyitems(session=session, config=self.config, items=items)
            session.testscollected += len(items)
            for number, item in enumerate(items):
                following = items[number + 1] if number + 1 < len(items) else None
                self.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.shouldfail or session.shouldstop:
                    break
        return done

    def _settled(self) -> list[CallResult]:
        """The results, by name; without calls that make Variables where a later one of the same code was looked at."""
        later = {each.target for each in self.results.values() if each.verdict != "makes Variables"}
        settled = [
            each for each in self.results.values() if each.verdict != "makes Variables" or each.target not in later
        ]
        return sorted(settled, key=lambda each: each.name)

    def _items(self) -> Iterator[CallItem]:
        from pytest_nnxcheck.reporting import records

        found = gathered.of(self.config)
        for result in self._settled():
            if result.verdict not in ITEMS:
                continue
            item = self._item(result.name)
            item.result, item.message = result, self._message(result)
            # ``-k`` with the name of a test selects the calls that it made.
            item.extra_keyword_matches.update(word for test in result.tests for word in test.split("::"))
            item.user_properties += [tuple(pair) for pair in result.properties]
            if result.verdict in ITEMS[2:]:
                item.add_marker(pytest.mark.skip(reason=f"{WORDS[result.verdict]}: {result.why}"))
            if result.record is not None:
                found.running[item.nodeid] = Finished(records.made(records.Record, result.record))
            found.collected.add(item.nodeid)
            yield item

    def _message(self, result: CallResult) -> str:
        """The message of a call that failed, with who made it and how it is kept."""
        if result.verdict != "failed":
            return ""
        others = f", and {counted(len(result.tests) - 1, 'other')}" if len(result.tests) > 1 else ""
        path, line = result.place
        file = os.path.relpath(path, self.config.rootpath)
        at = f"line {line}" if result.tests[0].startswith(f"{file}::") else f"{file}:{line}"
        rows = [row("call", f"{result.text}, made by {result.tests[0]} at {at}{others}")]
        if options.verbosity(self.config) > 1:
            rows += ["  to keep it", *(f"    {text}" for text in result.keep.splitlines())]
        else:
            rows.append(row("to keep it", "the same run with -vv prints a marked test of this call"))
        return "\n".join([result.why, *rows])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, object, object]:
        """Hand the results of a worker over; else keep what later runs need, behind what pytest keeps."""
        if (output := getattr(self.config, "workeroutput", None)) is not None:
            output[_WIRE] = [asdict(result) for result in self.results.values()]
            return (yield)
        done = yield
        if self.results:
            cache.keep_inputs(self.config, {result.target: result.inputs for result in self.results.values()})
        cache.also_failed(self.config, [each.tests[0] for each in self.results.values() if each.verdict == "failed"])
        return done

    def lines(self, *, verbose: bool) -> Iterator[str]:
        """The lines on the calls at the end of a run."""
        settled = self._settled()
        counts = Counter(result.verdict for result in settled)
        shown = ("listed",) if not self.checks else ITEMS[2:] if verbose else ()
        for result in settled:
            if result.verdict in shown:
                path, line = result.place
                at = f"{os.path.relpath(path, self.config.rootpath)}:{line}"
                more = f"{WORDS[result.verdict]}: {result.why}" if result.why else f"made at {at}"
                yield f"{result.name}  {more}"
        yield from dict.fromkeys(self.recorder.faults)
        parts = [f"{counts[verdict]} {word}" for verdict, word in WORDS.items() if counts[verdict] and self.checks]
        late = any(result.why == self._late() for result in settled)
        end = f" in {self.limit} s" if late else ""
        yield f"{counted(len(settled), 'distinct call')}" + (f": {', '.join(parts)}{end}" if parts else "")
