"""Progress on long runs, in plain lines: with -v one for each nesting, without one now and then for a test that takes long."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.plugin import gathered, options
from pytest_nnxcheck.plugin.pytest_internals import write_uncaptured

if TYPE_CHECKING:
    import pytest

    from pytest_nnxcheck.core.outcome import Outcome
    from pytest_nnxcheck.runner.run import Run

TERMINAL, LOG, OFTEN = 10.0, 60.0, 10.0
"""Seconds before a test shows anything, on a terminal and in a log, and between two lines of it: a person waits for ten, a log need not grow."""

NOT_CHECKED = "not checked"
"""The word in place of the verdict where the test made no call."""


def attach(item: pytest.Item, run: Run) -> None:
    """Show how far the run of a test is: not with -q, and not in a worker of xdist."""
    config = item.config
    reporter = config.pluginmanager.getplugin("terminalreporter")
    is_quiet = config.get_verbosity() < 0 and not options.is_verbose(config)
    if reporter is None or is_quiet or gathered.is_worker(config):
        return
    unattended = any(map(os.environ.get, ("CI", "BUILD_NUMBER"))) or os.environ.get("TERM") == "dumb"
    patience = TERMINAL if reporter.isatty and not unattended else LOG
    run.listeners.append(Progress(item, run.settings, patience=patience).listen)


class Progress:
    """The lines of one test."""

    def __init__(self, item: pytest.Item, settings: Settings, *, patience: float) -> None:
        self.item = item
        self.count = Count(settings)
        self.of_nestings = options.is_verbose(item.config)
        """True if each nesting has a line, as with -v."""
        self.due = time.perf_counter() + patience
        self.said: dict[Nesting, object] = {}

    def listen(self, event: object) -> None:
        """Say what is under way where the last line is old; with -v, what came of each nesting."""
        from pytest_nnxcheck.core.outcome import NestingFinished, NestingRuledOut, NestingStarted

        if isinstance(event, NestingStarted):
            self.count.begin(event.nesting, sweeping=not event.drawn)
            now = time.perf_counter()
            if not self.of_nestings and now >= self.due:
                self.due = now + OFTEN
                write_uncaptured(self.item.config, f"{self.item.name}  {event.nesting}  {self.count}")
        elif isinstance(event, NestingFinished):
            self.count.end(event.seconds)
            self.say(event.nesting, event.outcome, event.seconds)
        elif isinstance(event, NestingRuledOut):
            self.say(event.outcome.nesting, event.outcome, 0)

    def say(self, nesting: Nesting, outcome: Outcome | None, seconds: float) -> None:
        """With -v, the line of a nesting: one, but where arguments of the user's own change its verdict."""
        verdict = outcome and (outcome.verdict, outcome.unfit)
        if self.of_nestings and self.said.get(nesting, 0) != verdict:
            self.said[nesting] = verdict
            write_uncaptured(self.item.config, ended(nesting, outcome, seconds))


def ended(nesting: Nesting, outcome: Outcome | None, seconds: float) -> str:
    """``passed   44.7 KiB   0.31 s   jit > scan > remat``: what may be of any length comes last."""
    from pytest_nnxcheck.reporting import report

    longest = max(map(len, (*report.VERDICTS.values(), NOT_CHECKED)))
    peak = format_bytes(outcome.peak) if outcome and outcome.peak is not None else ""
    word = report.word(outcome) if outcome else NOT_CHECKED
    return f"  {word:<{longest}} {peak:>10} {seconds:>8.2f} s   {nesting}"


class Count:
    """The number of nestings that are done, and the time that the rest will take: a nesting that was ruled out unrun is done as well."""

    def __init__(self, settings: Settings) -> None:
        from pytest_nnxcheck.runner import strategies

        self.places, self.total = strategies.planned(settings)
        self.done = 0
        self.ran = 0
        self.seconds = 0.0

    def begin(self, nesting: Nesting, *, sweeping: bool) -> None:
        self.done = max(self.done, self.places.get(nesting, 0) if sweeping else len(self.places))

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
