"""A report as plain data: what JSON holds, what crosses from a worker of xdist to its controller, what pages are made of.

A test gives one head and one record for each nesting. `docs/report.md` describes the keys, `docs/report.schema.json` checks them.
Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypedDict

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.peak import OnTarget
from pytest_nnxcheck.reporting import memory_breakdown, tally
from pytest_nnxcheck.reporting.report import Report, replay, summary

VERSION = 2
"""The version of the schema: it grows when a key changes its meaning or goes away, not when one is added."""

NAME = "pytest-nnxcheck report"
BUDGET = "the budget"
"""The memory bound of a test that is no target."""

LONGEST_PROGRAM = 256 * 1024
"""Characters of a program to paste that a report takes in; a longer file is named by its path alone."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\t\n"}


Record = dict[str, Any]
"""An object of the report, with all keys that the document describes."""


class Records(TypedDict):
    """The records of one test: its head, and its nestings in the order in which they ran."""

    test: Record
    nestings: list[Record]


def of_report(report: Report, folder: Path | None = None) -> Records:
    """The records of a report; the paths of programs start from ``folder``. What pytest knows of the test is left empty."""
    records = unknown(report.test_id)
    records["nestings"] = [_of_outcome(report, outcome, folder) for outcome in report.outcomes]
    told = {
        "verdict": report.verdict if report.outcomes else "",
        "summary": summary(report),
        "counts": dict(tally.kinds(report.outcomes)),
        "not_run": report.not_run,
        "modes": report.modes,
        "shown": str(report.shown.nesting) if report.shown else "",
        "message": "" if report.ok or not report.outcomes else str(report),
        "settings": {name: _shown(getattr(report.settings, name)) for name in table.names("check")},
        "options": report.options,
        "notes": report.notes,
        "advice": report.advice,
        "un_nested_peak": report.un_nested,
        "seconds": sum(outcome.seconds for outcome in report.outcomes),
    }
    records["test"].update(plain(told))
    return records


def unknown(nodeid: str) -> Records:
    """The records of a test that is not known yet, as one that never ran."""
    test: Record = {
        "nodeid": plain(nodeid),
        "outcome": "",
        "verdict": "",
        "summary": "",
        "counts": {},
        "not_run": 0,
        "modes": {},
        "shown": "",
        "message": "",
        "place": None,
        "failed_at": None,
        "settings": {},
        "options": "",
        "notes": [],
        "advice": [],
        "un_nested_peak": [],
        "seconds": 0.0,
    }
    return {"test": test, "nestings": []}


def _of_outcome(report: Report, outcome: Outcome, folder: Path | None) -> Record:
    evidence = outcome.evidence or Evidence()
    told, measured = plain(outcome), plain(evidence)
    told["expected_failures"], measured["expected_peak"] = told.pop("expected"), measured.pop("expected")
    more = {
        "nodeid": report.test_id,
        "nesting": str(outcome.nesting),
        "mode": outcome.nesting.mode,
        "layers": [str(layer) for layer in outcome.nesting.layers],
        "word": tally.word(outcome),
        "story": memory_breakdown.rows(evidence),
        "program_text": _program(outcome.program, folder),
        "replay": replay(report, outcome.nesting),
    }
    return {**plain(more), **told, **measured}


def _program(shown: str, folder: Path | None) -> str:
    """The text of a program to paste; empty where there is none, or no file that can be read."""
    if not shown or folder is None:
        return ""
    try:
        text = (folder / shown).read_text(encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError):
        return ""
    return text if len(text) <= LONGEST_PROGRAM else ""


def _shown(value: object) -> str:
    if isinstance(value, tuple) and not all(isinstance(word, str) for word in value):
        return ", ".join(map(str, value))
    return table.show(value)


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, text that every encoding, page and terminal takes."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode().translate(_CONTROLS)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if is_dataclass(value) and not isinstance(value, type):
        return {
            member.name: plain(getattr(value, member.name))
            for member in fields(value)
            if member.metadata.get("record", True)
        }
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def document(run: Mapping[str, Any], tests: Iterable[Records]) -> dict[str, Any]:
    """A whole run: one list of tests and one of nestings, both in the order of the tests' names."""
    ordered = sorted(tests, key=lambda records: records["test"]["nodeid"])
    return {
        "schema": NAME,
        "version": VERSION,
        "run": plain(run),
        "tests": [records["test"] for records in ordered],
        "nestings": [nesting for records in ordered for nesting in records["nestings"]],
    }


def render(document: Mapping[str, Any]) -> str:
    """The text of a ``.json`` report."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def by_test(document: Mapping[str, Any]) -> list[Records]:
    """The tests of a whole run, each with its nestings."""
    records: dict[str, Records] = {test["nodeid"]: {"test": test, "nestings": []} for test in document["tests"]}
    for nesting in document["nestings"]:
        records[nesting["nodeid"]]["nestings"].append(nesting)
    return list(records.values())


def passed(test: Record) -> bool:
    """True if pytest counts nothing against the test."""
    return test["outcome"] not in {"failed", "error", "interrupted"}


def shown(record: Records) -> Record | None:
    """The nesting that a failing test is about: the smallest one."""
    name = record["test"]["shown"]
    return next((nesting for nesting in record["nestings"] if nesting["nesting"] == name), None) if name else None


def broken(record: Records) -> str:
    """The problem of a failing test, in a few words: invariants, or the first line of its message."""
    nesting = shown(record)
    names = [violation["invariant"] for violation in nesting["violations"]] if nesting else []
    first = (record["test"]["message"] or record["test"]["outcome"]).partition("\n")[0].partition("  ")[0]
    return ", ".join(names) or (first if len(first) <= 120 else f"{first[:117]}...")


def targets_of(nestings: Iterable[Record]) -> tuple[OnTarget, ...]:
    """The worst program on each target, among those of some nestings."""
    return tally.worst_of_targets(OnTarget.of_json(each) for nesting in nestings for each in nesting["targets"])


def worst_peak(record: Records) -> Record | None:
    """The nesting whose peak is the largest part of its budget, or just the largest."""
    measured = [nesting for nesting in record["nestings"] if nesting["peak"] is not None]
    return max(measured, key=lambda nesting: tally.height(nesting["peak"], nesting["budget"]), default=None)


def shares(record: Records) -> dict[str, float]:
    """The part of each memory bound that a test takes: of its budget, and of the limit of each target."""
    worst, found = worst_peak(record), {}
    if worst is not None and worst["budget"]:
        found[BUDGET] = worst["peak"] / worst["budget"]
    for on in targets_of(record["nestings"]):
        if not on.left_out and on.limit:
            found[on.target] = on.peak / on.limit if on.peak is not None else 0.0 if on.fits else math.inf
    return found
