"""Small pieces of text: sizes, lists of names, the nearest valid word, places in files, and an exception as one line."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = tuple[str, str]


class Unreadable(ValueError):
    """What a user wrote is no nesting, no expected failure or no value of a setting; the text says what to write instead."""


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


def some(names: Iterable[str], most: int = 3) -> str:
    """``a, b, c, ...``: the first of the names, each once."""
    unique = list(dict.fromkeys(names))
    return ", ".join([*unique[:most], *(["..."] if len(unique) > most else [])])


def counted(count: int, noun: str) -> str:
    """``1 nesting``, ``3 nestings``."""
    return f"{count} {noun}{'s' * (count != 1)}"


def one_of(kind: str, word: str, valid: Iterable[str]) -> str:
    """Return the word if it is valid. Raises `Unreadable` with the nearest valid word."""
    valid = tuple(valid)
    if word in valid:
        return word
    import difflib  # only where a word is wrong: every run of pytest loads this module

    near = difflib.get_close_matches(word, valid, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"write one of {', '.join(valid)}"
    raise Unreadable(f"unknown {kind} {word!r}, {hint}")


_LINK = r"\s*\(https?://[^\s()]+\)"
"""What flax puts at the end of its messages, longer than they are."""


_NODE = r"(from different trace level, got )\W*([\w.]+).*"
"""What flax refuses a graph node with: the repr of the node, values of its arrays included, of which the type says enough."""

_HEADING = r"\A(.*:)\n\s*\n\s*"
"""A first line that tells nothing alone: jax says below it, after an empty line, which types differ."""

_LONGEST_LINE = 160


def closed_line(text: str) -> str:
    """The first line; with those that follow, as far as they close the brackets that it opens: the repr of a module has many lines."""
    first, *others = text.splitlines() or [""]
    for other in others:
        if len(first) > _LONGEST_LINE or sum(map(first.count, "([{")) <= sum(map(first.count, ")]}")):
            break
        first += f" {other.strip()}"
    return first


def first_line(error: BaseException) -> str:
    """``ValueError: the first line of its text``, short enough for a table; with the one below it where it is a heading."""
    whole = str(error).strip()
    told = re.sub(_HEADING, r"\1 ", whole)
    text = re.sub(_NODE, r"\1\2", re.sub(_LINK, "", closed_line(told)))
    name = type(error).__name__
    if len(text) > (longest := _LONGEST_LINE * (1 + (told != whole))):
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


def near(place: str) -> str:
    """The place as it is told: relative where it lies below the working directory."""
    return place.removeprefix(f"{Path.cwd()}{os.sep}")
