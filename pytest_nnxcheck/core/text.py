"""Small pieces of text: sizes, lists of names, the nearest valid word, places in files, an exception as one line, and the rows of a message."""

from __future__ import annotations

import functools
import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

Row = tuple[str, str]


DTYPES = {
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{
        f"{letter}{bits}": f"{name}{bits}" for letter, name in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
    },
    "bf16": "bfloat16",
    "c64": "complex64",
    "bool": "bool",
}
"""The short name of a dtype, as jax prints it, and the long one, which may be written too."""


class Unreadable(ValueError):
    """The user's text is no nesting, no expected failure or no value of a setting; the message says what to write instead."""


def format_bytes(size: int, decimals: int = 1) -> str:
    """``1.5 MiB``; whole bytes below 1 KiB."""
    if size < 1024:
        return f"{size} B"
    value, unit = float(size), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        value /= 1024
        if value < 1023.95:
            break
    return f"{value:.{decimals}f} {unit}"


def told_apart(*sizes: int) -> list[str]:
    """The texts of sizes in bytes, with three decimals where one would make different ones equal."""
    texts = [*map(format_bytes, sizes)]
    return texts if len({*texts}) == len({*sizes}) else [format_bytes(size, decimals=3) for size in sizes]


def some(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c, ...``: the first names, each once."""
    unique = list(dict.fromkeys(names))
    return ", ".join([*unique[:most], *(["..."] if len(unique) > most else [])])


def at_line(line: str) -> str:
    """The user's line behind a sentence; nothing where there is none."""
    return f" ({line})" if line else ""


def counted(count: int, noun: str) -> str:
    """``1 nesting``, ``3 nestings``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def one_of(kind: str, word: str, valid: Iterable[str]) -> str:
    """Return the word if it is valid. Raises `Unreadable` with the nearest valid word."""
    valid = tuple(valid)
    if word in valid:
        return word
    hint = meant(word, valid) or f"write one of {', '.join(valid)}"
    raise Unreadable(f"unknown {kind} {word!r}, {hint}")


def meant(word: str, valid: Iterable[str]) -> str:
    """``did you mean 'jit'?``, with the nearest valid word; empty where none is near."""
    import difflib  # only where a word is wrong: every run of pytest loads this module

    near = difflib.get_close_matches(word, [*valid], n=1)
    return f"did you mean {near[0]!r}?" if near else ""


_LINK = r"\s*\(https?://[^\s()]+\)"
"""Flax ends its messages with a link, which is longer than they are."""

_NODE = r"(from different trace level, got )\W*([\w.]+).*"
"""Flax refuses a graph node in these words and ends with its repr, values of arrays included; its type says enough."""

_HEADING = r"\A(.*:)\n\s*\n\s*"
"""A first line that says nothing alone: jax writes below it, after an empty line, which types differ."""

_LONGEST_LINE = 160
"""Characters of an exception that still fit beside others in a table."""


def closed_line(text: str) -> str:
    """The first line, and those after it until its brackets are closed: the repr of a module has many lines."""
    first, *others = text.splitlines() or [""]
    for other in others:
        if len(first) > _LONGEST_LINE or sum(map(first.count, "([{")) <= sum(map(first.count, ")]}")):
            break
        first += f" {other.strip()}"
    return first


def first_line(error: BaseException) -> str:
    """``ValueError: the first line of its text``, short enough for a table; with the one below it where it is a heading."""
    whole = str(error).strip()
    joined = re.sub(_HEADING, r"\1 ", whole)
    text = re.sub(_NODE, r"\1\2", re.sub(_LINK, "", closed_line(joined)))
    name = type(error).__name__
    if len(text) > (longest := _LONGEST_LINE * (1 + (joined != whole))):
        start = text[:longest]
        text = f"{start.rpartition(' ')[0] or start} ..."
    return f"{name}: {text}" if text else name


def place_of(function: Any) -> str:
    """``file:line`` of a function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return (
            f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        )
    return f"{code.co_filename}:{code.co_firstlineno}"


_ROOTS: list[str] = []
"""The project's root, as it is and with its links resolved: paths are shown from it. Empty outside of pytest: the working directory."""


def tell_from(folder: Path) -> Callable[[], None]:
    """Show paths from this folder from now on, until the function that is returned is called."""
    before = [*_ROOTS]
    _ROOTS[:] = dict.fromkeys([str(folder), os.path.realpath(folder)])

    def end() -> None:
        _ROOTS[:] = before

    return end


def near(place: str) -> str:
    """The path that a message shows for a file, or for a place in one: from the project's root, or absolute where that is shorter."""
    return near_to(tuple(_ROOTS or [os.getcwd()]), place)  # noqa: PTH109 - `Path.cwd()` takes ten times as long, for each frame of each buffer


def beginning(code: CodeType) -> str:
    """The line where the code of a function begins, as a message shows it: ``path:line``."""
    return near(f"{code.co_filename}:{code.co_firstlineno}")


@functools.lru_cache(maxsize=4096)
def near_to(folders: tuple[str, ...], place: str) -> str:
    """`near`, from the folder that gives the shortest path."""
    if not os.path.isabs(place):  # noqa: PTH117 - it may be followed by a line and a function
        return place
    try:
        return min((place, *(os.path.relpath(place, folder) for folder in folders)), key=len)
    except ValueError:  # another drive of Windows
        return place


# --- the rows of a message, in two columns, which a terminal of 80 columns shows unbroken

WIDTH = 72
"""Columns of a message: pytest writes ``E`` and seven blanks before each line."""

LABEL = 14
"""Columns of the label, and of the blanks below it."""

WHOLE = ("test", "accept", "program", "replay")
"""Rows that people copy into a shell: one line each, however long, and blanks in a path stay."""

_TOGETHER = re.compile(r"(?<=\[)[^][]*(?=\])|\d (?=[KMGT]?i?B\b|%)| > ")
"""The texts in which no line breaks at a blank: a key of a path, a number with its unit, the kind of a tracer, a nesting."""

_BLANK = "\N{NO-BREAK SPACE}"


class _Lines(textwrap.TextWrapper):
    """A wrapper that breaks lines at blanks between words, not in ``model.log['a key']`` or ``1.5 MiB``."""

    def _split(self, text: str) -> list[str]:
        whole = _TOGETHER.sub(lambda match: match[0].replace(" ", _BLANK), text)
        return [chunk.replace(_BLANK, " ") for chunk in super()._split(whole)]


def fill(text: str, width: int, first: str, further: str) -> str:
    """Wrap a text to this width, with each word and path whole, behind the prefixes of the ``first`` and the ``further`` lines."""
    lines = _Lines(
        width=width,
        initial_indent=first,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.fill(text)


def row(label: str, text: str) -> str:
    """One row of a message: the label, and beside it the text, in as many lines as it needs."""
    before, further = f"  {label:<{LABEL - 3}} ", " " * LABEL
    if label in WHOLE:
        return before + text
    first, *others = text.splitlines() or [""]
    lines = [fill(first, WIDTH, before, further) or before.rstrip()]
    return "\n".join([*lines, *(fill(line, WIDTH, further, further) for line in others)])


def lay_out(head: str, test_id: str, rows: Iterable[Row]) -> str:
    """A message: its first line, the test, and its rows."""
    test = [("test", test_id)] if test_id else []
    return "\n".join([head, *(row(*each) for each in (*test, *rows))])
