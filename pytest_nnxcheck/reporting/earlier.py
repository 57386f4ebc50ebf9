"""An earlier report, read back: that of a run, the peaks of one that a suite commits, and what users wrote before there was one form for all.

Nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pytest_nnxcheck import atomic_file
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.text import Unreadable
from pytest_nnxcheck.reporting.records import (
    NAME,
    VERSION,
    Document,
    Head,
    NestingRecord,
    Record,
    RunRecord,
    made,
    shortly,
)

_T = TypeVar("_T", Head, NestingRecord)
FIRST_FORM = "pytest-nnxcheck memory baseline"
"""The key at the start of a baseline of 0.1.0, which has one object of JSON a line."""


def read(path: Path, shown: str, advice: str, *, toml: bool = False) -> Document | None:
    """The report in a file, or expected failures in ``toml``; `None` where there is no such file.

    Raises `SettingError` that calls the file ``shown`` and ends with the ``advice``.
    """
    try:
        text = atomic_file.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingError(f"cannot read {shown}: {atomic_file.reason(error)}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"{shown} is no text file: {error}: {advice}") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line[:7] in {mark * 7 for mark in "<>=|"}:
            raise SettingError(f"{shown}:{number}: a merge conflict, {line[:20]!r}: take either side, or {advice}")
    try:
        return _document(_of_toml(text)) if toml and not text.lstrip().startswith("{") else parse(text)
    except Unreadable as error:
        raise SettingError(f"{shown}{error}: {advice}") from None


def parse(text: str) -> Document:
    """Read the JSON of a report, or a baseline of 0.1.0. Raises `Unreadable` that starts with the place in the text."""
    first, _, rest = text.partition("\n")
    if first.startswith(f'{{"{FIRST_FORM}"'):
        return replace(_document(_of_first_form(_json(first, 1), rest.splitlines())), old_form=True)
    content = _json(text, 1) if text.lstrip().startswith("{") else {}
    if content.get("schema") != NAME:
        raise Unreadable(f":1: this is no report of pytest-nnxcheck, it starts with {first[:40]!r}")
    if content.get("version") not in range(1, VERSION + 1):
        what = f"this is version {shortly(content.get('version'))} of the report"
        raise Unreadable(f":1: {what}, which a later pytest-nnxcheck wrote; this one reads {VERSION}")
    return _document(content)


def _json(text: str, line: int) -> dict[str, Any]:
    """The object of JSON that starts in this line."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        place = f":{line + error.lineno - 1}: "
        raise Unreadable(f"{place}it is not JSON ({error.msg}, column {error.colno})") from None
    # Numbers of thousands of digits, and brackets nested too deeply.
    except (ValueError, RecursionError):
        raise Unreadable(f":{line}: it is JSON that nobody can read: too many brackets or digits") from None
    if not isinstance(content, dict):
        raise Unreadable(f":{line}: {shortly(content)} is not an object of JSON")
    return content


def _document(content: Mapping[str, Any]) -> Document:
    """The report that JSON holds, in its order: of two entries of a test the earlier one counts."""
    heads = {head.nodeid: head for head in _each(content, "tests", Head)}
    nestings: dict[str, dict[str, NestingRecord]] = {nodeid: {} for nodeid in heads}
    for nesting in _each(content, "nestings", NestingRecord):
        if nesting.nesting in nestings.setdefault(nesting.nodeid, {}):
            raise Unreadable(f" has {nesting.nodeid!r} under {nesting.nesting!r} twice")
        nestings[nesting.nodeid][nesting.nesting] = nesting
    records = (Record(heads.get(nodeid, Head(nodeid)), (*of.values(),)) for nodeid, of in nestings.items())
    try:
        return Document(made(RunRecord, content.get("run", {})), tuple(records))
    except Unreadable as error:
        raise Unreadable(f", in its run: {error}") from None


def _each(content: Mapping[str, Any], key: str, kind: type[_T]) -> Iterator[_T]:
    """The dataclasses in a list of JSON."""
    listed = content.get(key, [])
    for each in listed if isinstance(listed, list) else [listed]:
        try:
            yield made(kind, each)
        except Unreadable as error:
            known = each if isinstance(each, dict) else {}
            where = " under ".join(str(known[name]) for name in ("nodeid", "nesting") if name in known)
            raise Unreadable(f", {where or key}: {error}") from None


# --- what users wrote before ---------------------------------------------------------------------------------------------


def _of_first_form(head: dict[str, Any], lines: list[str]) -> dict[str, Any]:
    """A baseline of 0.1.0 as a report."""
    if head.pop(FIRST_FORM) != 2:
        raise Unreadable(":1: this is a baseline of a version before 0.1.0")
    entries = [_json(line, number) for number, line in enumerate(lines, 2)]
    for entry in entries:
        entry |= {"nodeid": entry.pop("test", None), "buffers": [*map(_of_label, entry.get("buffers", []))]}
    return {"run": {"stamp": head}, "nestings": entries}


def _of_label(buffer: Any) -> Any:
    """A buffer, whose label was ``temporary float32[8,128] dynamic_update_slice, copy of model.kernel``."""
    label, _, name = str(buffer.pop("label", "")).partition(", copy of ") if isinstance(buffer, dict) else ("", "", "")
    words = dict(zip(("kind", "shape", "operation"), [*label.split(" ", 2), "", ""], strict=False))
    return {**buffer, **words, "name": name} if isinstance(buffer, dict) else buffer


def _of_toml(text: str) -> dict[str, Any]:
    """A file of expected failures as a report: a table for each test, with a reason for each key."""
    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        raise Unreadable(f" is no TOML file: {error}") from None
    except RecursionError:
        raise Unreadable(" is no TOML file of tables and texts: its brackets are nested too deeply") from None
    for pattern, table in tables.items():
        if not isinstance(table, dict):
            example = '["tests/test_model.py::test_block"]'
            raise Unreadable(f": {pattern!r} is outside of a table: write the test above it, as {example}")
        if any(isinstance(reason, dict) for reason in table.values()):
            raise Unreadable(f": table {pattern!r} holds tables: put the node id in quotes, as a whole")
        if wrong := [key for key, reason in table.items() if not isinstance(reason, str)]:
            reason = shortly(table[wrong[0]])
            raise Unreadable(f", table {pattern!r}: expected failure {wrong[0]!r} has the reason {reason}, not a text")
    return {
        "tests": [
            {"nodeid": pattern, "expected_failures": [{"key": key, "reason": reason} for key, reason in table.items()]}
            for pattern, table in tables.items()
        ]
    }
