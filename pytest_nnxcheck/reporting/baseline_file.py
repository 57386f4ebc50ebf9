"""The file of the memory baseline: JSON Lines, the stamp first, then the peak of every test and nesting, a line each, to be read in a review.

Pure data, parsed and written: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import json
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
"""Kinds of buffers that an entry names: the largest."""
MOST = 2**63
"""No number of bytes is as large."""

_OPTIONAL = {"optional": True}
"""Of a field that is written only where it says something."""

Key = tuple[str, str]
"""The node id of a test, and a nesting as text."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that are live at the peak and are alike: how many, the bytes of each, and what they are."""

    bytes: int
    label: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class OnTarget:
    """The peak of the same program on a target: bytes a device, and the compiler that counted them, ``libtpu 0.0.50.1``."""

    target: str
    peak: int
    wheel: str

    @property
    def chip(self) -> str:
        """``v5e`` of ``v5e:2x4``."""
        return self.target.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Entry:
    """The peak of one nesting of one test: bytes a device, its split, and its largest buffers that are no arguments.

    ``drawn`` says that hypothesis drew the nesting: another edition of the test draws others.
    """

    peak: int
    split: Split | None = None
    buffers: tuple[Buffers, ...] = ()
    drawn: bool = False
    targets: tuple[OnTarget, ...] = field(default=(), metadata=_OPTIONAL)


@dataclass(frozen=True, slots=True)
class Baseline:
    """The entries of a file, and the stamp under which all of them were measured."""

    stamp: Stamp
    entries: dict[Key, Entry] = field(default_factory=dict)

    def by_test(self) -> dict[str, dict[str, Entry]]:
        """The entries of each test, by nesting."""
        tests: dict[str, dict[str, Entry]] = {}
        for (test, nesting), entry in self.entries.items():
            tests.setdefault(test, {})[nesting] = entry
        return tests


def entry_of(peak: int, evidence: Evidence | None, *, drawn: bool) -> Entry:
    """What is kept of one nesting."""
    split = evidence.split if evidence is not None and evidence.split and evidence.split.peak == peak else None
    there = evidence.targets if evidence is not None else ()
    targets = (OnTarget(on.target, on.peak, on.wheel) for on in there if on.peak is not None and on.wheel)
    return Entry(peak, split, alike(evidence.buffers)[:FEW] if split and evidence else (), drawn, tuple(targets))


def alike(buffers: Iterable[Buffer]) -> tuple[Buffers, ...]:
    """The buffers, those that are alike taken together, the largest first."""
    counts: dict[tuple[int, str], int] = {}
    for buffer in buffers:
        key = (buffer.bytes, label(buffer))
        counts[key] = counts.get(key, 0) + 1
    kinds = (Buffers(size, text, count) for (size, text), count in counts.items())
    return tuple(sorted(kinds, key=lambda kind: (-kind.bytes, kind.label)))


def label(buffer: Buffer) -> str:
    """``temporary float32[8,128,128] dynamic_update_slice, copy of model.kernel``."""
    words = " ".join(word for word in (buffer.kind, buffer.shape, buffer.operation) if word)
    return f"{words}, copy of {listed(buffer.name, buffer.joined)}" if buffer.name else words


# --- writing -------------------------------------------------------------------------------------------------------------


def format_baseline(baseline: Baseline) -> str:
    """The text of the file."""
    lines = [_json({HEAD: FORMAT, **asdict(baseline.stamp)})]
    lines += [format_line(key, baseline.entries[key]) for key in sorted(baseline.entries)]
    return "\n".join(lines) + "\n"


def format_line(key: Key, entry: Entry) -> str:
    """``{"test": "tests/test_a.py::test_b", "nesting": "jit > scan", "peak": 96, ...}``."""
    content = {name: value for name, value in asdict(entry).items() if value or name != "targets"}
    return _json({"test": key[0], "nesting": key[1], **content})


def _json(value: object) -> str:
    """As it reads best; what a terminal, or a reviewer, could not show is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


# --- reading -------------------------------------------------------------------------------------------------------------


def read(path: Path, shown: str) -> Baseline | None:
    """The baseline in a file, which errors call ``shown``; None where there is no such file. Raises `SettingError`."""
    try:
        text = atomic_file.read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingError(f"cannot read {shown}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"{shown} is no text file: {error}, {_ANOTHER}") from None
    return parse(text, shown)


_WITH_UPDATE = "write it anew with --nnx-baseline-update, from a run of all tests"
_ANOTHER = f"name another file, or delete this one and {_WITH_UPDATE}"
_ANEW = f"take back what changed the file, or delete it and {_WITH_UPDATE}"


class _BadLine(ValueError):
    """What is wrong with a line, and what to do."""


def parse(text: str, shown: str) -> Baseline:
    """Read the text of a file. Raises `SettingError` that starts with file and line."""
    lines = text.removesuffix("\n").split("\n")
    _refuse_conflicts(lines, shown)
    entries: dict[Key, Entry] = {}
    places: dict[Key, int] = {}
    number = 1
    try:
        stamp = _stamp(lines[0])
        for number, line in enumerate(lines[1:], 2):
            key, entry = parse_line(line)
            _refuse_second(key, places.setdefault(key, number), number)
            entries[key] = entry
    except _BadLine as error:
        raise SettingError(f"{shown}:{number}: {error}") from None
    return Baseline(stamp, entries)


def _refuse_conflicts(lines: list[str], shown: str) -> None:
    for number, line in enumerate(lines, 1):
        if line[:7] in {mark * 7 for mark in "<>=|"}:
            raise SettingError(
                f"{shown}:{number}: a merge conflict, {line[:20]!r}: take either side, then write the file anew from the merged"
                " code with --nnx-baseline-update"
            )


def _refuse_second(key: Key, first: int, number: int) -> None:
    if first != number:
        raise _BadLine(f"a second entry for {key[0]!r} under {key[1]!r}, the first is in line {first}: {_ANEW}")


def _stamp(line: str) -> Stamp:
    """What the first line says. Raises `_BadLine`."""
    if line.startswith(f"# {HEAD}, format 1"):
        raise _BadLine(f"this is format 1 of the baseline, which is read no more: delete the file and {_WITH_UPDATE}")
    try:
        head = _object(line)
    except _BadLine:
        head = {}
    if HEAD not in head:
        start = f"it starts with {line[:40]!r}" if line else "it starts with an empty line"
        raise _BadLine(f"this is no baseline of pytest-nnxcheck, {start}: {_ANOTHER}")
    if head[HEAD] != FORMAT:
        raise _BadLine(
            f"this is format {head[HEAD]!r:.20} of the baseline, and this version of pytest-nnxcheck reads {FORMAT}:"
            f" install the version that wrote the file, or delete it and {_WITH_UPDATE}"
        )
    del head[HEAD]
    return _made(Stamp, head)


@dataclass(frozen=True, slots=True)
class _Name:
    test: str
    nesting: str


def parse_line(line: str) -> tuple[Key, Entry]:
    """Read one entry. Raises `ValueError`."""
    content = _object(line)
    name = _made(_Name, {name: content.pop(name, None) for name in ("test", "nesting")})
    entry = _made(Entry, content)
    if entry.split is not None and entry.split.peak != entry.peak:
        raise _BadLine(f"the parts of the peak add up to {entry.split.peak} B, and {entry.peak} B is written: {_ANEW}")
    return (name.test, name.nesting), entry


def _object(line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadLine(f"the line is not JSON ({error.msg}, column {error.colno}): {_ANEW}") from None
    except (ValueError, RecursionError) as error:
        raise _BadLine(f"the line is not JSON that can be read ({error}): {_ANEW}") from None
    if not isinstance(content, dict):
        raise _BadLine(f"{line[:40]!r} is not an object of JSON: {_ANEW}")
    return content


_KINDS = {"int": "a whole number", "str": "a text", "bool": "true or false"}


def _made(cls: type[_T], content: object) -> _T:
    """A dataclass of what JSON holds: its names, and values of their annotated types. Raises `_BadLine`."""
    kinds = {member.name: str(member.type) for member in fields(cls)}
    needed = [member.name for member in fields(cls) if member.metadata != _OPTIONAL]
    if not isinstance(content, dict) or not {*needed} <= content.keys() <= kinds.keys():
        there = [*content] if isinstance(content, dict) else content
        raise _BadLine(f"here belong {', '.join(needed)}, and there is {_json(there):.60}: {_ANEW}")
    return cls(**{name: _value(name, kinds[name], value) for name, value in content.items()})


def _value(name: str, kind: str, value: Any) -> Any:
    match kind:
        case "int" if type(value) is int and 0 <= value < MOST:
            return value
        case "str" if isinstance(value, str) and value:
            return value
        case "bool" if isinstance(value, bool):
            return value
        case "Split | None":
            return None if value is None else _made(Split, value)
        case "tuple[Buffers, ...]" if isinstance(value, list):
            return tuple(_made(Buffers, part) for part in value)
        case "tuple[OnTarget, ...]" if isinstance(value, list):
            return tuple(_made(OnTarget, part) for part in value)
    raise _BadLine(f"{name} is {_json(value):.60}, not {_KINDS.get(kind, 'a list')}: {_ANEW}")
