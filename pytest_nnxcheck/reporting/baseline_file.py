"""The file of the memory baseline: the peak of every test and nesting, one line each, to be read in a review.

Pure data, parsed and written: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path

from pytest_nnxcheck.core.evidence import Evidence, Held, Split, Stamp
from pytest_nnxcheck.core.setting_values import SettingError

HEAD = "# pytest-nnxcheck memory baseline, format "
FORMAT = 1
FEW = 3
"""Kinds of buffers that an entry names: the largest."""

DRAWN = " (drawn)"
_CONFLICT = re.compile(r"([<>=|])\1{6}(\s|$)")
_NUMBER = r"\d{1,19}"
_SPLIT = re.compile(
    rf"({_NUMBER}) B(?: = ({_NUMBER}) arguments \+ ({_NUMBER}) outputs \+ ({_NUMBER}) temporaries"
    rf" \+ ({_NUMBER}) constants - ({_NUMBER}) aliased)?",
    re.ASCII,
)
_BUFFERS = re.compile(rf"(?:({_NUMBER}) x )?({_NUMBER}) B (.+)", re.ASCII | re.DOTALL)
_STAMP = re.compile(r"# ([a-z]+): (.+)", re.DOTALL)

Key = tuple[str, str]
"""The node id of a test, and a nesting as text."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """Buffers that are live at the peak and are alike: how many, the bytes of each, and what they are."""

    bytes: int
    label: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """The peak of one nesting of one test: bytes a device, its split, and its largest buffers that are no arguments.

    ``drawn`` says that hypothesis drew the nesting: another edition of the test draws others.
    """

    peak: int
    split: Split | None = None
    buffers: tuple[Buffers, ...] = ()
    drawn: bool = False


@dataclass(frozen=True, slots=True)
class Baseline:
    """The entries of a file, and the stamp under which all of them were measured."""

    stamp: Stamp
    entries: dict[Key, Entry] = field(default_factory=dict)

    def by_test(self) -> dict[str, dict[str, Entry]]:
        """The entries of each test, by nesting."""
        found: dict[str, dict[str, Entry]] = {}
        for (test, nesting), each in self.entries.items():
            found.setdefault(test, {})[nesting] = each
        return found


def entry(peak: int, evidence: Evidence | None, *, drawn: bool) -> Entry:
    """What is kept of one nesting."""
    split = evidence.split if evidence is not None and evidence.split and evidence.split.peak == peak else None
    return Entry(peak, split, alike(evidence.buffers)[:FEW] if split and evidence else (), drawn)


def alike(buffers: Iterable[Held]) -> tuple[Buffers, ...]:
    """The buffers, those that are alike taken together, the largest first."""
    counted: dict[tuple[int, str], int] = {}
    for buffer in buffers:
        key = (buffer.bytes, label(buffer))
        counted[key] = counted.get(key, 0) + 1
    made = (Buffers(size, text, count) for (size, text), count in counted.items())
    return tuple(sorted(made, key=lambda each: (-each.bytes, each.label)))


def label(buffer: Held) -> str:
    """``temporary float32[8,128,128] dynamic_update_slice, copy of model.kernel``."""
    words = " ".join(word for word in (buffer.kind, buffer.shape, buffer.operation) if word)
    return f"{words}, copy of {buffer.name}" if buffer.name else words


# --- writing -------------------------------------------------------------------------------------------------------------


def format_baseline(baseline: Baseline) -> str:
    """The text of the file."""
    stamp = [f"# {each.name}: {quoted(getattr(baseline.stamp, each.name))}" for each in fields(Stamp)]
    lines = [format_line(key, each) for key, each in sorted(baseline.entries.items(), key=lambda pair: pair[0])]
    return "\n".join([f"{HEAD}{FORMAT}", *stamp, *lines]) + "\n"


def format_line(key: Key, entry: Entry) -> str:
    """``tests/test_a.py::test_b | jit > scan | 96 B = 32 arguments + ... | 2 x 16 B temporary float32[4] dot``."""
    test, nesting = key
    parts = [quoted(test), quoted(nesting) + (DRAWN if entry.drawn else ""), f"{entry.peak} B"]
    if entry.split is not None:
        s = entry.split
        parts[-1] += (
            f" = {s.arguments} arguments + {s.outputs} outputs + {s.temporaries} temporaries"
            f" + {s.constants} constants - {s.aliased} aliased"
        )
    if entry.buffers:
        parts.append("; ".join(show_buffers(each, quoted(each.label)) for each in entry.buffers))
    return " | ".join(parts)


def show_buffers(buffers: Buffers, text: str) -> str:
    """``2 x 16 B temporary float32[4] dot``."""
    return (f"{buffers.count} x " if buffers.count != 1 else "") + f"{buffers.bytes} B {text}"


def quoted(text: str) -> str:
    """The text as it is, where nothing in it can be taken for something else; otherwise in quotes, with escapes."""
    plain = text and text.isprintable() and text == text.strip() and not set(text) & {"|", ";"}
    if plain and text[0] not in '"#' and not text.endswith(DRAWN.strip()) and not _CONFLICT.match(text):
        return text
    return json.dumps(text).replace("|", "\\u007c").replace(";", "\\u003b")


# --- reading -------------------------------------------------------------------------------------------------------------


class _Bad(ValueError):
    """What is wrong with a line."""


def read(path: Path, shown: str) -> Baseline | None:
    """The baseline in a file, which errors call ``shown``; None where there is no such file. Raises `SettingError`."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SettingError(f"cannot read {shown}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise SettingError(f"{shown} is no text file: {error}, {_ANOTHER}") from None
    return parse(text.replace("\r\n", "\n"), shown)


_ANOTHER = "name another file, or delete this one and write it anew with --nnx-baseline-update"


def parse(text: str, shown: str) -> Baseline:
    """Read the text of a file. Raises `SettingError` that starts with file and line."""
    lines = text.split("\n")
    _refuse_conflicts(lines, shown)
    _refuse_foreign(lines[0], shown)
    header = len(fields(Stamp)) + 1
    number = 1
    try:
        stamp = {}
        for number, each in enumerate(fields(Stamp), 2):
            stamp[each.name] = _stamped(lines[number - 1] if number <= len(lines) else "", each.name)
        entries: dict[Key, Entry] = {}
        places: dict[Key, int] = {}
        for number, line in enumerate(lines[header:-1], header + 1):
            key, found = parse_line(line)
            if key in places:
                raise _Bad(f"a second entry for {quoted(key[0])} under {key[1]}, the first is in line {places[key]}")
            entries[key], places[key] = found, number
        number = len(lines)
        if lines[-1]:
            raise _Bad("the file ends in the middle of a line, so something is missing")
    except ValueError as error:
        raise SettingError(f"{shown}:{number}: {error}: {_ANEW}") from None
    return Baseline(Stamp(**stamp), entries)


_ANEW = "take back what changed the file, or delete it and write it anew with --nnx-baseline-update"


def _refuse_conflicts(lines: list[str], shown: str) -> None:
    for number, line in enumerate(lines, 1):
        if _CONFLICT.match(line):
            raise SettingError(
                f"{shown}:{number}: a merge conflict, {line[:20]!r}: take either side, then write the file anew from the merged"
                " code with --nnx-baseline-update"
            )


def _refuse_foreign(first: str, shown: str) -> None:
    if not first.startswith(HEAD):
        what = f"it starts with {first[:40]!r}" if first else "it starts with an empty line"
        raise SettingError(f"{shown}:1: this is no baseline of pytest-nnxcheck, {what}: {_ANOTHER}")
    if first != f"{HEAD}{FORMAT}":
        raise SettingError(
            f"{shown}:1: this is format {first.removeprefix(HEAD)!r} of the baseline, and this version of pytest-nnxcheck reads"
            f" {FORMAT}: install the version that wrote the file, or delete it and write it anew with --nnx-baseline-update"
        )


def _stamped(line: str, name: str) -> str:
    match = _STAMP.fullmatch(line)
    if match is None or match[1] != name:
        raise _Bad(f"{line[:60]!r} is not the line '# {name}: ...' of the stamp")
    return unquoted(match[2])


def parse_line(line: str) -> tuple[Key, Entry]:
    """Read one entry. Raises `ValueError`."""
    parts = line.split(" | ")
    if len(parts) not in (3, 4):
        raise _Bad(f"{line[:60]!r} is not 'test | nesting | bytes | buffers'")
    test, nesting, split, *buffers = parts
    drawn = nesting.endswith(DRAWN)
    peak, known = _split(split)
    key = (unquoted(test), unquoted(nesting.removesuffix(DRAWN)))
    return key, Entry(peak, known, tuple(map(_alike, ";".join(buffers).split("; "))) if buffers else (), drawn)


def _split(text: str) -> tuple[int, Split | None]:
    match = _SPLIT.fullmatch(text)
    if match is None:
        raise _Bad(
            f"{text[:60]!r} is not '96 B = 32 arguments + 32 outputs + 64 temporaries + 0 constants - 32 aliased'"
        )
    if match[2] is None:
        return int(match[1]), None
    peak, arguments, outputs, temporaries, constants, aliased = map(int, match.groups())
    split = Split(arguments, outputs, temporaries, aliased, constants)
    if split.peak != peak:
        raise _Bad(f"the parts of the peak add up to {split.peak} B, and {peak} B is written")
    return peak, split


def _alike(text: str) -> Buffers:
    match = _BUFFERS.fullmatch(text)
    if match is None:
        raise _Bad(f"{text[:60]!r} is not '2 x 16 B temporary float32[4] dot'")
    return Buffers(int(match[2]), unquoted(match[3]), int(match[1] or 1))


def unquoted(text: str) -> str:
    """What was written by `quoted`. Raises `ValueError`."""
    if not text.startswith('"'):
        if not text:
            raise _Bad("a part of the line is empty")
        return text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, str):
        raise _Bad(f"{text[:60]!r} has quotes that do not close")
    return found


# --- the file ------------------------------------------------------------------------------------------------------------


def write(path: Path, baseline: Baseline) -> None:
    """Put the file in its place in one step: whoever reads it, and whatever stops us, it is the old one or the new one.

    Raises `OSError`, and leaves nothing behind then.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    beside = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(format_baseline(baseline).encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            beside.chmod(target.stat().st_mode & 0o777)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def unwritable(path: Path) -> str:
    """Why no file could be put in its place there; empty if it can. Tried out: permissions do not bind everybody."""
    target = Path(os.path.realpath(path))
    beside = target.with_name(f".{target.name[:100]}.{os.getpid()}.tmp")
    try:
        beside.open("wb").close()
        beside.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return "Is a directory" if target.is_dir() else ""
