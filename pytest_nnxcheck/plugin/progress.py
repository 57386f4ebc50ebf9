"""Progress on long runs: with a terminal, one line that is rewritten; with -v, a line a nesting; in a log, lines of a long test.

PYTEST_DONT_REWRITE: nothing here is an assertion for pytest to rewrite.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

import pytest

from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.plugin import worker_data

if TYPE_CHECKING:
    from pytest_nnxcheck.core.outcome import Outcome
    from pytest_nnxcheck.runner.run import Run

PATIENCE = 1.0
"""Seconds before a test shows anything: a short one shows nothing."""
LONG, OFTEN = 60.0, 10.0
"""In a log: seconds before a test shows anything, and between two lines of it."""

_UP, _ERASE = "\x1b[A", "\r\x1b[K"
_terminal = pytest.StashKey["Terminal | None"]()


# --- what is said --------------------------------------------------------------------------------------------------------


def planned(settings: Settings) -> tuple[dict[Nesting, int], int]:
    """The place of every nesting that always runs, in their order, and how many nestings there are with the drawn ones."""
    from pytest_nnxcheck.core import modes
    from pytest_nnxcheck.runner import strategies

    if settings.nesting is not None:
        every = [nesting for mode in modes.chosen(settings) for nesting in modes.in_mode([settings.nesting], mode)]
        return {nesting: number for number, nesting in enumerate(every)}, len(every)
    sweep = (Nesting(), *strategies.sweep(settings))
    every = list(dict.fromkeys(nesting for mode in modes.chosen(settings) for nesting in modes.in_mode(sweep, mode)))
    drawn = settings.max_examples if strategies.draws_any(settings) else 0
    return {nesting: number for number, nesting in enumerate(every)}, len(every) + drawn


class Count:
    """How many nestings are done, and how long the rest will take: what was ruled out unrun is done as well."""

    def __init__(self, settings: Settings) -> None:
        self.places, self.total = planned(settings)
        self.done = 0
        self.ran = 0
        self.seconds = 0.0

    def begin(self, nesting: Nesting, *, sweeping: bool) -> None:
        if sweeping:
            self.done = max(self.done, self.places.get(nesting, 0))
        elif self.done < len(self.places):
            self.done = len(self.places)

    def end(self, seconds: float) -> None:
        self.done += 1
        self.ran += 1
        # The first one starts jax, and traces the call for all of them.
        self.seconds += seconds if self.ran > 1 else 0.0

    def __str__(self) -> str:
        """``12 of 86, about 40 s left``; once it takes longer than planned, since hypothesis shrinks, only what is done."""
        if self.done >= self.total:
            return f"{self.done} done"
        if self.ran < 3:
            return f"{self.done} of {self.total}"
        mean = self.seconds / (self.ran - 1)
        return f"{self.done} of {self.total}, about {rounded((self.total - self.done) * mean)} left"


def rounded(seconds: float) -> str:
    """``8 s``, ``40 s``, ``3 min``, ``2 h``: no more digits than an estimate has."""
    if seconds < 10:
        return f"{max(round(seconds), 1)} s"
    if seconds < 95:
        return f"{round(seconds / 5) * 5} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 95 else f"{round(seconds / 3600)} h"


def under_way(name: str, nesting: Nesting, count: Count, columns: int) -> str:
    """``test_block  jit > scan > remat  12 of 86, about 40 s left``, of which a narrow terminal leaves the end."""
    tail = f"{nesting}  {count}"
    head = fit(name, columns - width(tail) - 3)
    return fit(f"{head}  {tail}" if head else tail, columns - 1)


def ended(nesting: Nesting, outcome: Outcome | None, seconds: float) -> str:
    """``jit > scan > remat   held   44.7 KiB   0.31 s``."""
    from pytest_nnxcheck.reporting import tally

    verdict = tally.word(outcome) if outcome else "not checked"
    peak = format_bytes(outcome.peak) if outcome and outcome.peak is not None else ""
    return f"  {nesting!s:<38} {verdict:<17} {peak:>10} {seconds:>7.2f} s"


def fit(text: str, columns: int) -> str:
    """As much of the text as has room, nothing in it that moves the cursor."""
    clean = "".join(each if each.isprintable() else "?" for each in text)
    if width(clean) <= columns:
        return clean
    while clean and width(clean) > columns - 2:
        clean = clean[:-1]
    return f"{clean}.." if clean else ""


def width(text: str) -> int:
    """The columns of a text in a terminal."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else not unicodedata.combining(each) for each in text)


# --- the terminal --------------------------------------------------------------------------------------------------------


class Terminal:
    """The terminal that pytest writes to, under whatever captures the output of a test.

    ``quiet_tests`` says that what a test prints does not get to it: then the cursor is where pytest left it. A ``log`` is none: a pipe, a
    file, or a terminal that nobody attends, where nothing is rewritten.
    """

    def __init__(self, stream: IO[str], column: Callable[[], int], *, quiet_tests: bool, log: bool = False) -> None:
        self.stream, self.column, self.quiet_tests, self.log = stream, column, quiet_tests, log

    @property
    def columns(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except OSError:
            return 80

    def write(self, text: str) -> None:
        # A terminal that is gone must not take the run with it.
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(text)
            self.stream.flush()


def find_terminal(config: pytest.Config) -> None:
    """Look for a terminal, while nothing captures the output: none in a worker of xdist, and with -q."""
    reporter = config.pluginmanager.getplugin("terminalreporter")
    unattended = any(os.environ.get(name) for name in ("CI", "BUILD_NUMBER")) or os.environ.get("TERM") == "dumb"
    config.stash[_terminal] = None
    if reporter is None or worker_data.is_worker(config) or config.get_verbosity() < 0:
        return
    try:
        # A descriptor of our own: that of stdout is somebody else's file while a test runs.
        stream = open(os.dup(sys.stdout.fileno()), "w", encoding=sys.stdout.encoding, errors="replace")  # noqa: PTH123, SIM115
    except (OSError, ValueError):
        return
    config.add_cleanup(stream.close)
    writer = config.get_terminal_writer()
    captured = config.getoption("capture", "no") in {"fd", "sys"}
    config.stash[_terminal] = Terminal(
        stream,
        lambda: int(writer.width_of_current_line),
        quiet_tests=captured,
        log=unattended or not sys.stdout.isatty(),
    )


# --- a test --------------------------------------------------------------------------------------------------------------


class Progress:
    """The line of one test: a listener to its run. It is first shown by a timer, since the first nesting may be the long one."""

    def __init__(self, terminal: Terminal, name: str, settings: Settings, *, lines: bool) -> None:
        self.terminal, self.name, self.lines = terminal, name, lines
        self.count = Count(settings)
        self.column = terminal.column()
        self.nesting: Nesting | None = None
        self.started = 0.0
        self.below = self.shown = self.closed = False
        self.lock = threading.Lock()
        self.timer = threading.Timer(PATIENCE, self.first)
        self.timer.daemon = True
        self.patient = True

    def begin(self, run: Run, nesting: Nesting) -> None:
        """Say what is under way."""
        if self.closed:
            return  # what explains a failure runs nestings too
        with self.lock:
            self.count.begin(nesting, sweeping=run.sweeping)
            self.nesting, self.started = nesting, time.perf_counter()
            if not self.patient:
                self._show()
        if not self.timer.ident:
            self.timer.start()

    def end(self, run: Run, nesting: Nesting) -> None:
        """Count it, and with -v say what came of it."""
        if self.closed:
            return
        seconds = time.perf_counter() - self.started
        with self.lock:
            self.count.end(seconds)
            self.nesting = None
            if self.lines:
                self._line(ended(nesting, run.outcomes.get(nesting), seconds))

    def first(self) -> None:
        """The test is a long one."""
        with self.lock:
            self.patient = False
            if not self.closed:
                self._show()

    def _show(self) -> None:
        if self.nesting is None:
            return
        text = under_way(self.name, self.nesting, self.count, self.terminal.columns)
        self._below()
        self.terminal.write(f"{_ERASE}{text}")
        self.shown = True

    def _line(self, text: str) -> None:
        self._below()
        self.terminal.write(f"{_ERASE if self.shown else ''}{text}\n")
        self.shown = False

    def _below(self) -> None:
        """The lines of pytest itself stay as they are: ours are below."""
        if not self.below:
            self.terminal.write("\n")
            self.below = True

    def close(self) -> None:
        """Leave the terminal as it was; below the lines of -v, and of what a test itself has printed."""
        self.timer.cancel()
        with self.lock:
            self.closed = True
            if self.shown:
                self.terminal.write(_ERASE)
            if not self.below or self.lines:
                return
            if self.terminal.quiet_tests and self.terminal.column() == self.column:
                right = self.column % self.terminal.columns
                self.terminal.write(f"{_UP}\x1b[{right}C" if right else _UP)


class Log:
    """The lines of one test where nothing can be rewritten: one a nesting with -v, one every ten seconds for a test of over a minute without."""

    def __init__(self, terminal: Terminal, name: str, settings: Settings, *, lines: bool) -> None:
        self.terminal, self.name, self.lines = terminal, name, lines
        self.count = Count(settings)
        self.started = time.perf_counter()
        self.due = self.started + LONG
        self.nesting_started = 0.0
        self.below = self.closed = False

    def begin(self, run: Run, nesting: Nesting) -> None:
        """Say what is under way, where the last line is old."""
        if self.closed:
            return
        self.count.begin(nesting, sweeping=run.sweeping)
        self.nesting_started = now = time.perf_counter()
        if not self.lines and now >= self.due:
            self.due = now + OFTEN
            self._line(f"{self.name}  {nesting}  {self.count}")

    def end(self, run: Run, nesting: Nesting) -> None:
        """Count it, and with -v say what came of it."""
        if self.closed:
            return
        seconds = time.perf_counter() - self.nesting_started
        self.count.end(seconds)
        if self.lines:
            self._line(ended(nesting, run.outcomes.get(nesting), seconds))

    def _line(self, text: str) -> None:
        start = "" if self.below else "\n"  # the line of pytest itself stays as it is
        self.terminal.write(f"{start}{text}\n")
        self.below = True

    def close(self) -> None:
        """What explains a failure runs nestings too."""
        self.closed = True


@contextlib.contextmanager
def shown(item: pytest.Item, run: Run) -> Iterator[Any]:
    """Show how far the run of a test is, where there is a terminal to show it."""
    terminal = item.config.stash.get(_terminal, None)
    if terminal is None:
        yield
        return
    kind = Log if terminal.log else Progress
    progress = kind(terminal, item.name, run.settings, lines=item.config.get_verbosity() > 0)
    run.listeners.append(progress)
    try:
        yield
    finally:
        progress.close()
