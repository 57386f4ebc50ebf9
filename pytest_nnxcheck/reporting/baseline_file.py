"""The file of the memory baseline, read and written: JSON Lines, one for the peak of each test and nesting.

Nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pytest_nnxcheck import atomic_file
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.facts import Evidence, Stamp
from pytest_nnxcheck.core.peak import Buffer, Split
from pytest_nnxcheck.reporting.memory_breakdown import listed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_T = TypeVar("_T", bound="DataclassInstance")
HEAD = "pytest-nnxcheck memory baseline"
FORMAT = 2

FEW = 3
"""Kinds of buffers that an entry names, the largest: a line has to be short enough to be read in a review."""

MOST = 2**63
"""No number of bytes is as large: a typing error in the file is found when it is read."""

_OPTIONAL = {"optional": True}
"""Marks a field that is written only where it says something."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that are live at the peak and look alike."""

    bytes: int
    """The size of each one."""
    label: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class TargetPeak:
    """The peak of the same program on a target: bytes a device."""

    target: str
    peak: int
    wheel: str
    """The compiler that counted the bytes, ``libtpu 0.0.50.1``."""

    @property
    def chip(self) -> str:
        """``v5e`` of ``v5e:2x4``."""
        return self.target.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Entry:
    """The peak of one nesting of one test: bytes a device."""

    peak: int
    split: Split | None = None
    buffers: tuple[Buffers, ...] = ()
    """The largest ones that are no arguments."""
    drawn: bool = False
    """True if hypothesis drew the nesting: another edition of the test draws others."""
    targets: tuple[TargetPeak, ...] = field(default=(), metadata=_OPTIONAL)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The content of a file."""

    stamp: Stamp
    """The versions and devices under which all entries were measured."""
    tests: dict[str, dict[str, Entry]] = field(default_factory=dict)
    """The entries by node id, and by nesting as text."""


def entry_of(peak: int, evidence: Evidence | None, *, drawn: bool) -> Entry:
    """The entry of one nesting."""
    evidence = evidence or Evidence()
    targets = (TargetPeak(on.target, on.peak, on.wheel) for on in evidence.targets if on.peak is not None and on.wheel)
    # Of two calls in one nesting the evidence may be that of the one with the smaller peak.
    split = evidence.split if evidence.split and evidence.split.peak == peak else None
    return Entry(peak, split, alike(evidence.buffers)[:FEW] if split else (), drawn, tuple(targets))


def alike(buffers: Iterable[Buffer]) -> tuple[Buffers, ...]:
    """The buffers, those that look alike as one, the largest first."""
    counts = Counter((buffer.bytes, label(buffer)) for buffer in buffers)
    kinds = sorted(counts, key=lambda kind: (-kind[0], kind[1]))
    return tuple(Buffers(*kind, counts[kind]) for kind in kinds)


def label(buffer: Buffer) -> str:
    """``temporary float32[8,128,128] dynamic_update_slice, copy of model.kernel``."""
    words = " ".join(word for word in (buffer.kind, buffer.shape, buffer.operation) if word)
    return f"{words}, copy of {listed(buffer.name, buffer.joined)}" if buffer.name else words


# --- writing -------------------------------------------------------------------------------------------------------------


def format_baseline(baseline: Baseline) -> str:
    """The text of the file."""
    lines = [_json({HEAD: FORMAT, **asdict(baseline.stamp)})]
    for test, entries in sorted(baseline.tests.items()):
        lines += [format_line(test, nesting, entries[nesting]) for nesting in sorted(entries)]
    return "\n".join(lines) + "\n"


def format_line(test: str, nesting: str, entry: Entry) -> str:
    """``{"test": "tests/test_a.py::test_b", "nesting": "jit > scan", "peak": 96, ...}``."""
    content = {name: value for name, value in asdict(entry).items() if value or name != "targets"}
    return _json({"test": test, "nesting": nesting, **content})


def _json(value: object) -> str:
    """Readable JSON, in which characters that a terminal cannot show are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


# --- reading -------------------------------------------------------------------------------------------------------------

_WITH_UPDATE = "write it anew with --nnx-baseline-update, from a run of all tests"
_ANOTHER = f"name another file, or delete this one and {_WITH_UPDATE}"
_ANEW = f"take back what changed the file, or delete it and {_WITH_UPDATE}"


class _BadLine(ValueError):
    """Raised for a line that cannot be read; the text says what is wrong, and what to do."""


def read(path: Path, shown: str) -> Baseline | None:
    """The baseline in a file, which errors call ``shown``; None where there is no such file. Raises `SettingError`."""
    try:
        text = atomic_file.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingError(f"cannot read {shown}: {atomic_file.reason(error)}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"{shown} is no text file: {error}, {_ANOTHER}") from None
    return parse(text, shown)


def parse(text: str, shown: str) -> Baseline:
    """Read the text of a file. Raises `SettingError` that starts with file and line."""
    first, *lines = text.removesuffix("\n").split("\n")
    number, places = 1, dict[tuple[str, str], int]()
    try:
        baseline = Baseline(_stamp(first))
        for number, line in enumerate(lines, 2):
            test, nesting, entry = parse_line(line)
            _refuse_second(test, nesting, places.setdefault((test, nesting), number), number)
            baseline.tests.setdefault(test, {})[nesting] = entry
    except _BadLine as error:
        raise SettingError(f"{shown}:{number}: {error}") from None
    return baseline


def _stamp(line: str) -> Stamp:
    """Read the first line. Raises `_BadLine`."""
    _refuse_conflict(line)
    try:
        head = _object(line)
    except _BadLine:
        head = {}
    if HEAD not in head:
        start = f"it starts with {line[:40]!r}" if line else "it starts with an empty line"
        raise _BadLine(f"this is no baseline of pytest-nnxcheck, {start}: {_ANOTHER}")
    if (format_ := head.pop(HEAD)) != FORMAT:
        raise _BadLine(
            f"this is format {format_!r:.20} of the baseline, and this version of pytest-nnxcheck reads {FORMAT}:"
            f" install the version that wrote the file, or delete it and {_WITH_UPDATE}"
        )
    return _made(Stamp, head)


def parse_line(line: str) -> tuple[str, str, Entry]:
    """Read the test, the nesting and the entry of a line. Raises `ValueError`."""
    _refuse_conflict(line)
    content = _object(line)
    test, nesting = (str(_value(name, "str", content.pop(name, None))) for name in ("test", "nesting"))
    entry = _made(Entry, content)
    if entry.split is not None and entry.split.peak != entry.peak:
        raise _BadLine(f"the parts of the peak add up to {entry.split.peak} B, and {entry.peak} B is written: {_ANEW}")
    return test, nesting, entry


def _refuse_conflict(line: str) -> None:
    if line[:7] in {mark * 7 for mark in "<>=|"}:
        raise _BadLine(
            f"a merge conflict, {line[:20]!r}: take either side, then write the file anew from the merged"
            " code with --nnx-baseline-update"
        )


def _refuse_second(test: str, nesting: str, first: int, number: int) -> None:
    if first != number:
        raise _BadLine(f"a second entry for {test!r} under {nesting!r}, the first is in line {first}: {_ANEW}")


def _object(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadLine(f"the line is not JSON ({error.msg}, column {error.colno}): {_ANEW}") from None
    # Numbers of thousands of digits, and brackets nested too deeply.
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"the line is not JSON that can be read ({error}): {_ANEW}") from None
    if not isinstance(content, dict):
        raise _BadLine(f"{line[:40]!r} is not an object of JSON: {_ANEW}")
    return content


_KINDS = {"int": "a whole number", "str": "a text", "bool": "true or false"}


def _made(cls: type[_T], content: object) -> _T:
    """Make a dataclass of an object of JSON that has its names, and values of the annotated types. Raises `_BadLine`."""
    kinds = {member.name: str(member.type) for member in fields(cls)}
    needed = [member.name for member in fields(cls) if member.metadata != _OPTIONAL]
    if not isinstance(content, dict) or not {*needed} <= content.keys() <= kinds.keys():
        there = [*content] if isinstance(content, dict) else content
        raise _BadLine(f"this line needs {', '.join(needed)}, and has {_json(there):.60}: {_ANEW}")
    return cls(**{name: _value(name, kinds[name], value) for name, value in content.items()})


def _value(name: str, kind: str, value: Any) -> Any:
    match kind:
        case "int" if type(value) is int and 0 <= value < MOST:  # `True` is an int as well
            return value
        case "str" if isinstance(value, str) and value:
            return value
        case "bool" if isinstance(value, bool):
            return value
        case "Split | None":
            return None if value is None else _made(Split, value)
        case "tuple[Buffers, ...]" if isinstance(value, list):
            return tuple(_made(Buffers, part) for part in value)
        case "tuple[TargetPeak, ...]" if isinstance(value, list):
            return tuple(_made(TargetPeak, part) for part in value)
    raise _BadLine(f"{name} is {_json(value):.60}, not {_KINDS.get(kind, 'a list')}: {_ANEW}")
