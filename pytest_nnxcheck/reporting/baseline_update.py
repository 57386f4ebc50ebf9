"""What a new baseline is made of: the entries of the old one, and what the tests of a run measured.

Pure functions over plain data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pytest_nnxcheck.core.evidence import Stamp
from pytest_nnxcheck.reporting.baseline_file import Baseline, Entry, Key, quoted


@dataclass(frozen=True, slots=True)
class Result:
    """What one test, which ran to its end, measured: all of its nestings, or the one that was ``replayed``."""

    stamp: Stamp
    entries: Mapping[str, Entry]
    replayed: bool = False


class Refused(Exception):
    """No new baseline can be made of the run; the text says why."""


def renewed(
    known: Baseline | None,
    results: Mapping[str, Result],
    *,
    gone: Collection[Key] = (),
    seen: Collection[str] = (),
    new_only: bool = False,
) -> Baseline:
    """The baseline after a run. Raises `Refused`.

    ``gone`` are entries whose test is no more, ``seen`` the tests that the run came to, whatever became of them. What the run did not
    measure stays as it was.
    """
    stamp = _stamp(known, results)
    entries = dict(known.entries) if known else {}
    if known is not None and (differences := known.stamp.differences(stamp)):
        _refuse_mixture(known, results, {*gone}, {*seen}, differences, new_only=new_only)
        entries = {}
    if new_only:
        for test, result in results.items():
            for nesting, entry in result.entries.items():
                entries.setdefault((test, nesting), entry)
        return Baseline(stamp, entries)
    again = {test for test, result in results.items() if not result.replayed}
    entries = {key: entry for key, entry in entries.items() if key not in gone and key[0] not in again}
    for test, result in results.items():
        for nesting, entry in result.entries.items():
            before = entries.get((test, nesting))
            # A replay does not know which nestings a draw would come to.
            drawn = entry.drawn if not result.replayed else before is None or before.drawn
            entries[test, nesting] = replace(entry, drawn=drawn)
    return Baseline(stamp, entries)


def _stamp(known: Baseline | None, results: Mapping[str, Result]) -> Stamp:
    stamps = list(dict.fromkeys(result.stamp for result in results.values()))
    if stamps[1:]:
        raise Refused(f"its processes are not of the same versions and devices: {stamps[0].differences(stamps[1])}")
    if stamps:
        return stamps[0]
    if known is None:
        raise Refused("no test that uses nnx_wrap passed")
    return known.stamp


def _refuse_mixture(
    known: Baseline,
    results: Mapping[str, Result],
    gone: set[Key],
    seen: set[str],
    differences: str,
    *,
    new_only: bool,
) -> None:
    """All entries of a file are of one stamp."""
    if new_only:
        raise Refused(f"its entries are of another stamp, {differences}: write all anew with --nnx-baseline-update")
    again = {test for test in seen if test not in results or not results[test].replayed}
    left = {test for test, _ in known.entries.keys() - gone if test not in again}
    if left:
        raise Refused(
            f"its stamp would change, {differences}, and {len(left)} test{'s' * (len(left) != 1)} in it did not run ({quoted(min(left))}"
            f"{', ...' * (len(left) > 1)}): run all of them"
        )


def changes(before: Baseline | None, after: Baseline) -> str:
    """``40 entries: 3 new, 2 changed, 1 removed``."""
    old, new = before.entries if before else {}, after.entries
    counts = {
        "new": len(new.keys() - old.keys()),
        "changed": sum(old[key] != new[key] for key in old.keys() & new.keys()),
        "removed": len(old.keys() - new.keys()),
    }
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{len(new)} entr{'y' if len(new) == 1 else 'ies'}: {told or 'nothing changed'}"
