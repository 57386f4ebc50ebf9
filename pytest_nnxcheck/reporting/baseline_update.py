"""What the end of a run makes of the baseline: which entries are stale, whether the file may be written, and what stands in it then.

Pure functions over plain data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from pytest_nnxcheck.core.facts import Stamp
from pytest_nnxcheck.core.text import counted
from pytest_nnxcheck.reporting.baseline_comparison import UPDATE, Result
from pytest_nnxcheck.reporting.baseline_file import Baseline, Entry, Key, OnTarget


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended, and how much of the suite it looked at.

    ``complete`` says that all its tests were collected, and ran until they passed or failed; ``tests`` are those that are there, selected or
    not, and ``skipped`` the files and classes of which nobody knows. Of ``whole_files`` all tests were to be collected. Where ``narrowed``, tests were
    left out by name or mark; with ``fewer_nestings`` or ``replayed`` the command line asked for other nestings than usual.
    """

    exit_status: int = 0
    failures: int = 0
    interrupted: bool = False
    broken: bool = False
    complete: bool = True
    tests: frozenset[str] = frozenset()
    skipped: frozenset[str] = frozenset()
    whole_files: frozenset[str] = frozenset()
    narrowed: bool = False
    fewer_nestings: bool = False
    replayed: bool = False


class Refused(Exception):
    """No new baseline can be made of the run; the text says why."""


def refusal(end: RunEnd, *, stale: bool) -> str:
    """Why a run must not leave a baseline, whatever it measured; empty if it may. ``stale`` entries are an error that it has told."""
    if end.broken:
        return "not every test could be collected"
    if end.interrupted:
        return "the run was interrupted"
    if end.failures:
        return f"{counted(end.failures, 'test')} failed"
    if end.exit_status:
        return f"the run failed (exit status {end.exit_status})"
    return f"it has stale entries, which only {UPDATE} removes" if stale else ""


def gone(baseline: Baseline, end: RunEnd) -> list[Key]:
    """The entries whose test is no more, as far as the run can tell."""
    if not end.complete or end.narrowed or end.replayed:
        return []
    return [
        (test, nesting)
        for test, nesting in baseline.entries
        if test not in end.tests and file_of(test) in end.whole_files and not test.startswith(tuple(end.skipped))
    ]


def file_of(test: str) -> str:
    """The file of a node id."""
    return test.partition("::")[0]


def stale_lines(removed: Collection[Key], results: Collection[Result], end: RunEnd) -> Iterator[str]:
    """What is stale, a line a test; where nothing was compared, nothing is known of it."""
    if any(result.differences for result in results):
        return
    for test in dict.fromkeys(test for test, _ in removed):
        yield f"{_shown(test)}: there is no such test"
    if end.narrowed or end.fewer_nestings:
        return
    for result in sorted(results, key=lambda result: result.test):
        if result.comparison.stale and not result.replayed:
            yield f"{_shown(result.test)}: did not run under {', '.join(result.comparison.stale)}"


def _shown(test: str) -> str:
    return test if test.isprintable() else ascii(test)


def renewed(
    baseline: Baseline | None, results: Collection[Result], removed: Collection[Key] = (), *, new_only: bool = False
) -> Baseline:
    """The baseline after a run. Raises `Refused`.

    ``results`` are of the tests that the run came to, whatever became of them, ``removed`` the entries whose test is no more. What the run
    did not measure stays as it was, as do the peaks of a test on chips for which the run has none.
    """
    passed = [result for result in results if result.stamp]
    stamp = _stamp(baseline, passed)
    entries = dict(baseline.entries) if baseline else {}
    if baseline is not None and (differences := baseline.stamp.differences(stamp)):
        if new_only:
            raise Refused(f"its entries are of another stamp, {differences}: write all anew with {UPDATE}")
        _refuse_rest({test for test, _ in entries.keys() - {*removed}}, results, differences)
        entries = {}
    if new_only:
        for result in passed:
            for nesting, entry in result.entries().items():
                there = entries.get((result.test, nesting), entry)
                entries[result.test, nesting] = with_targets(there, entry.targets)
        return Baseline(stamp, entries)
    known, again = dict(entries), {result.test for result in passed if not result.replayed}
    entries = {key: entries[key] for key in entries.keys() - {*removed} if key[0] not in again}
    for result in passed:
        measured = result.entries()
        chips = {on.chip for entry in measured.values() for on in entry.targets}
        for nesting, entry in measured.items():
            before = entries.get((result.test, nesting))
            # A replay does not know which nestings a draw would come to.
            drawn = entry.drawn if not result.replayed else before is None or before.drawn
            earlier = known.get((result.test, nesting), entry)
            others = (on for on in earlier.targets if on.chip not in chips)
            entries[result.test, nesting] = with_targets(replace(entry, drawn=drawn), others)
    return Baseline(stamp, entries)


def with_targets(entry: Entry, more: Iterable[OnTarget]) -> Entry:
    """The entry with the peaks on targets that it does not have."""
    there = {on.target: on for on in (*more, *entry.targets)}
    return replace(entry, targets=tuple(there[name] for name in sorted(there)))


def _stamp(baseline: Baseline | None, passed: Collection[Result]) -> Stamp:
    stamps = [Stamp(*stamp) for stamp in dict.fromkeys(result.stamp for result in passed)]
    if stamps[1:]:
        raise Refused(f"its processes are not of the same versions and devices: {stamps[0].differences(stamps[1])}")
    if stamps:
        return stamps[0]
    if baseline is None:
        raise Refused("no test that uses nnx_wrap passed")
    return baseline.stamp


def _refuse_rest(tests: set[str], results: Collection[Result], differences: str) -> None:
    """All entries of a file are of one stamp: those of a test that did not run, or was replayed, cannot stay."""
    rest = tests - {result.test for result in results if not result.replayed}
    if rest:
        raise Refused(
            f"its stamp would change, {differences}, and {counted(len(rest), 'test')} in it did not run"
            f" ({_shown(min(rest))}{', ...' * (len(rest) > 1)}): run all of them"
        )


def changes(before: Baseline | None, after: Baseline) -> str:
    """``40 entries: 3 new, 2 changed, 1 removed``."""
    old, new = before.entries if before else {}, after.entries
    counts = {
        "new": len(new.keys() - old.keys()),
        "changed": sum(old[key] != new[key] for key in old.keys() & new.keys()),
        "removed": len(old.keys() - new.keys()),
    }
    changes = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{len(new)} entr{'y' if len(new) == 1 else 'ies'}: {changes or 'nothing changed'}"
