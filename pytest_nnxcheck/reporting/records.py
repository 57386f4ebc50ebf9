"""The one record of a test and its nestings. Terminal, JSON, HTML, Markdown, JUnit, GitHub's summary and the baseline are views of it.

It crosses from a worker of xdist to the controller as the JSON that a report holds, and an earlier report is read back into it. A key that has its
default may be missing there. `docs/report.md` describes the keys, `docs/report.schema.json` checks them. Nothing here imports pytest, hypothesis, jax
or flax.
"""

from __future__ import annotations

import functools
import json
import math
import typing
from collections import abc
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar

from pytest_nnxcheck.core.facts import Leak, Lost, Stamp
from pytest_nnxcheck.core.ledger import Ledger
from pytest_nnxcheck.core.memory_picture import Picture
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import Verdict, Violation
from pytest_nnxcheck.core.peak import Buffer, Captured, PeakLine, Split
from pytest_nnxcheck.core.text import Row, Unreadable

VERSION = 2
"""The version of the schema: it grows when a key changes its meaning or goes away, not when one is added."""

NAME = "pytest-nnxcheck report"

MOST = 2**63
"""No number of bytes is as large: a slip in a file is found when it is read."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), 127) if chr(code) not in "\t\n"}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file."""

    file: str
    line: int
    """Counted from 1."""


@dataclass(frozen=True, slots=True)
class ExpectedRecord:
    """An expected failure of a test."""

    key: str
    reason: str
    table: str = ""
    """Its table, where it is in a file."""
    covered: int = 0
    """The nestings that it is about, and that ran."""
    happened: int = 0
    """The nestings among them that failed as it says."""


@dataclass(frozen=True, slots=True)
class Head:
    """The part of a record on the test as a whole."""

    nodeid: str
    outcome: Literal["", "passed", "failed", "skipped", "error", "interrupted", "xfailed", "xpassed"] = ""
    verdict: Verdict | Literal[""] = ""
    summary: str = ""
    counts: Mapping[str, int] = field(default_factory=dict)
    not_run: int = 0
    peak: int | None = None
    """The worst peak, with its budget and its nesting."""
    budget: int | None = None
    peak_nesting: str = ""
    budgets: tuple[str, ...] = ()
    """The smallest values of ``memory_budget``, rounded, with which the test passes: a multiple, and bytes; none where it does not pass."""
    holds: str = ""
    """The ledger of the plain jit with the worst peak, in words."""
    modes: Mapping[str, Verdict] = field(default_factory=dict)
    shown: str = ""
    message: str = ""
    place: Place | None = None
    failed_at: Place | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    options: str = ""
    expected_failures: tuple[ExpectedRecord, ...] = ()
    targets: tuple[OnTarget, ...] = ()
    """The worst program on each target."""
    not_asserted: Mapping[str, str] = field(default_factory=dict)
    """The invariants that no nesting could have broken, each with the reason."""
    without_arrays: tuple[str, ...] = ()
    """The subjects that are called with no module and no array."""
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    un_nested_peak: tuple[Row, ...] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """True if pytest counts nothing against the test."""
        return self.outcome not in {"failed", "error", "interrupted"}


@dataclass(frozen=True, slots=True)
class BufferRecord(Buffer):
    """One buffer; of a baseline, several that look alike."""

    count: int = 1


@dataclass(frozen=True, slots=True)
class NestingRecord:
    """The part of a record on one nesting."""

    nodeid: str
    nesting: str
    mode: str = ""
    layers: tuple[str, ...] = ()
    word: str = ""
    story: tuple[Row, ...] = ()
    program_text: str = ""
    replay: str = ""
    drawn: bool = False
    """True if hypothesis drew it: another edition of the test draws others."""
    verdict: Verdict = "held"
    violations: tuple[Violation, ...] = ()
    asserted: tuple[str, ...] = ()
    reason: str = ""
    peak: int | None = None
    budget: int | None = None
    notes: tuple[str, ...] = ()
    expected_failures: tuple[str, ...] = ()
    unfit: bool = False
    program: str = ""
    explained: tuple[Row, ...] = ()
    seconds: float = 0.0
    split: Split | None = None
    expected_peak: int | None = None
    un_nested: Split | None = None
    buffers: tuple[BufferRecord, ...] = ()
    places: tuple[PeakLine, ...] = ()
    captured: tuple[Captured, ...] = ()
    leaks: tuple[Leak, ...] = ()
    moves: tuple[Lost, ...] = ()
    reusable: tuple[str, ...] = ()
    targets: tuple[OnTarget, ...] = ()
    ledger: Ledger = ()
    picture: Picture | None = None

    @property
    def is_about_tracers(self) -> bool:
        """True if the nesting broke by leaked tracers alone: how much memory it takes explains nothing then."""
        return {violation.invariant for violation in self.violations} == {"tracers"}


@dataclass(frozen=True, slots=True)
class Record:
    """All about one test."""

    head: Head
    nestings: tuple[NestingRecord, ...] = ()
    """Its nestings in the order in which they ran; none where no report is written."""
    measured: tuple[NestingRecord, ...] = ()
    """The figures to compare with those of other runs: the first of each nesting that held; none where the run has no baseline."""
    repeats: bool = False
    """True if the drawn nestings are the same ones in every run."""
    stamp: Stamp | None = None

    @property
    def shown(self) -> NestingRecord | None:
        """The nesting that a failing test is about: the smallest one."""
        name = self.head.shown
        return next((nesting for nesting in self.nestings if nesting.nesting == name), None) if name else None

    @property
    def is_about_tracers(self) -> bool:
        """True if the test fails for leaked tracers alone."""
        return self.shown is not None and self.shown.is_about_tracers

    @property
    def broken(self) -> str:
        """The problem of a failing test, in a few words: invariants, or the first line of its message."""
        names = ["interrupted"] * (self.head.outcome == "interrupted")
        names += [violation.invariant for violation in self.shown.violations] if self.shown else []
        first = (self.head.message or self.head.outcome).partition("\n")[0].partition("  ")[0]
        return ", ".join(names) or (first if len(first) <= 120 else f"{first[:117]}...")

    @property
    def worst(self) -> NestingRecord | None:
        """The nesting with the worst peak."""
        same = (self.head.peak_nesting, self.head.peak)
        return next(
            (each for each in self.nestings if (each.nesting, each.peak) == same and each.peak is not None), None
        )

    @property
    def shares(self) -> dict[str, float]:
        """The part of each memory bound that a test takes: of its budget, and of the limit of each target."""
        head = self.head
        found = {"the budget": head.peak / head.budget} if head.peak is not None and head.budget else {}
        for on in head.targets:
            if not on.left_out and on.limit:
                found[on.target] = on.peak / on.limit if on.peak is not None else 0.0 if on.fits else math.inf
        return found


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The part of a report on the run as a whole."""

    started: str = ""
    seconds: float = 0.0
    exit_status: int = 0
    python: str = ""
    platform: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    project: str = ""
    commit: str = ""
    stamp: Stamp | None = None
    """The versions and devices under which all tests were measured; none where they differ."""


@dataclass(frozen=True, slots=True)
class Document:
    """A whole run."""

    run: RunRecord
    records: tuple[Record, ...]
    """In the order of the tests' names."""
    old_form: bool = False
    """True if it was read from a baseline of 0.1.0."""

    @property
    def nestings(self) -> tuple[NestingRecord, ...]:
        """The nestings of all tests."""
        return tuple(nesting for record in self.records for nesting in record.nestings)


def document(run: RunRecord, records: Iterable[Record]) -> Document:
    """The records of a run, in the order of the tests' names."""
    return Document(run, tuple(sorted(records, key=lambda record: record.head.nodeid)))


def render(document: Document) -> str:
    """The text of a ``.json`` report: one list of tests and one of nestings."""
    parts = {"run": document.run, "tests": [record.head for record in document.records], "nestings": document.nestings}
    return (
        json.dumps({"schema": NAME, "version": VERSION, **plain(parts)}, indent=1, ensure_ascii=False, allow_nan=False)
        + "\n"
    )


def plain(value: Any, *, whole: bool = True) -> Any:
    """Dataclasses as dicts, tuples as lists, text that every encoding, page and terminal takes; unless ``whole``, no field that has its default."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode().translate(_CONTROLS)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such number
    if is_dataclass(value) and not isinstance(value, type):
        known = [member for member in fields(value) if member.metadata.get("record", True)]
        parts = {member.name: getattr(value, member.name) for member in known}
        empty = {} if whole else {member.name: {} if member.default is MISSING else member.default for member in known}
        return {name: plain(part, whole=whole) for name, part in parts.items() if whole or part != empty[name]}
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(part, whole=whole) for key, part in value.items()}
    return [plain(part, whole=whole) for part in value] if isinstance(value, list | tuple) else value


# --- reading ---------------------------------------------------------------------------------------------------------------


_KINDS = {int: "a whole number", str: "a text", bool: "true or false"}
_hints = functools.cache(typing.get_type_hints)


def made(kind: type[_T], value: object) -> _T:
    """Make a dataclass of plain JSON; keys that this version does not know are of a later one. Raises `Unreadable` that names the key."""
    found: _T = _made(kind, value, "")
    return found


def _made(kind: Any, value: Any, name: str) -> Any:
    """A value of this type, whose key has this name."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        # One type, or null; of a word in several lists, one list.
        others = [part for part in parts if part is not type(None)]
        words = [word for part in others for word in typing.get_args(part)]
        return (
            value
            if value in (words if typing.get_origin(others[0]) is Literal else [None])
            else _made(others[0], value, name)
        )
    match value:
        case dict() if is_dataclass(kind):
            return _made_of(kind, value, name)
        case dict() if origin is abc.Mapping:
            return {key: _made(parts[1], part, f"{name}.{key}") for key, part in value.items()}
        case list() if origin is tuple and (parts[-1] is ... or len(parts) == len(value)):
            kinds = parts[:1] * len(value) if parts[-1] is ... else parts
            return tuple(_made(*each, name) for each in zip(kinds, value, strict=True))
        case int() | float() if kind is float and not isinstance(value, bool):
            return float(value)
    if (origin is Literal and value in parts) or (type(value) is kind and (kind is not int or abs(value) < MOST)):
        return value
    names = {tuple: "a list", Literal: f"one of {', '.join(map(repr, parts))}"}
    raise Unreadable(f"{name} is {shortly(value)}, not {_KINDS.get(kind) or names.get(origin, 'an object')}")


def _made_of(kind: Any, content: Mapping[str, Any], name: str) -> Any:
    """A dataclass of an object of JSON; what has a default may be missing."""
    needed = [each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING]
    if missing := [each for each in needed if each not in content]:
        raise Unreadable(f"{name or 'the object'} has no {', '.join(missing)}: {shortly(content)}")
    hints, known = _hints(kind), [each.name for each in fields(kind) if each.name in content]
    return kind(**{each: _made(hints[each], content[each], f"{name}.{each}".lstrip(".")) for each in known})


def shortly(value: object) -> str:
    """The begin of a value as JSON, which any terminal can show."""
    return f"{json.dumps(value, default=str):.60}"
