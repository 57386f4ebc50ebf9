"""What the value of a setting may be, and how each kind is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.expected_failures import Entry, EntryError
from pytest_nnxcheck.core.nesting import Nesting, one_of

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}


_BUDGET = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>x|[KMGT]?i?B)?", re.ASCII)

_BUDGET_ADVICE = "write bytes such as '512MiB', '1.5GB' or 1048576, or a multiple of the expected peak such as '2x'"


class SettingError(CheckError, ValueError):
    """A setting that cannot be read; the text names the source, the value and what to write instead."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory bound on the peak: ``bytes`` a device, or ``factor``, a multiple of the expected peak.

    Exactly one of the two is set, and ``Budget.parse(str(budget)) == budget``.
    """

    bytes: int | None = None
    factor: float | None = None

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Read a whole number of bytes, a size such as ``512MiB`` (KB=1000, KiB=1024) or a multiple such as ``2x``.

        Raises `SettingError`.
        """
        if isinstance(value, cls):
            return value
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        match = _BUDGET.fullmatch(text.strip()) if isinstance(text, str) else None
        if match is None or match["unit"] == "iB":
            raise SettingError(f"memory_budget={value!r} is not a size, {_BUDGET_ADVICE}")
        budget = cls._of(Decimal(match["number"]), match["unit"] or "B")
        if not (budget.bytes or budget.factor) or budget.factor == float("inf"):
            raise SettingError(f"memory_budget={value!r} is out of range, {_BUDGET_ADVICE}")
        return budget

    @classmethod
    def _of(cls, number: Decimal, unit: Any) -> Budget:
        return cls(factor=float(number)) if unit == "x" else cls(bytes=int(number * UNITS[unit]))

    def __str__(self) -> str:
        if self.factor is not None:
            return f"{Decimal(repr(self.factor)).normalize():f}x"
        size = self.bytes or 0
        unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size and size % UNITS[unit] == 0), "B")
        return f"{size // UNITS[unit]}{unit}"


def _words(kind: str, known: Callable[[], tuple[str, ...]]) -> Callable[[object], tuple[str, ...]]:
    """A parser of ``'a,b'``, ``['a', 'b']`` or a single word, into the order of ``known()``, the words at that time."""

    def parse(value: object) -> tuple[str, ...]:
        valid = known()
        parts = [value] if isinstance(value, str) else value
        parts = list(parts) if isinstance(parts, Iterable) else [None]
        if not all(isinstance(part, str) for part in parts):
            raise SettingError(f"{kind}s={value!r} is not a list of words, write some of {', '.join(valid)}")
        words = [word for part in parts for word in re.split(r"[,\s]+", str(part)) if word]
        if not words:
            raise SettingError(f"{kind}s={value!r} is empty, write some of {', '.join(valid)}")
        chosen = {one_of(kind, word, valid) for word in words}
        # The order of the tuple is the order in which hypothesis shrinks: always the plainest first.
        return tuple(word for word in valid if word in chosen)

    return parse


def _choice(name: str, valid: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise SettingError(f"{name}={value!r} is not a word, write one of {', '.join(valid)}")
        return one_of(name, value.strip(), valid)

    return parse


def _donated(value: object) -> str:
    """``state``, ``all``, ``none``, or ``state`` with names of arguments: ``'state,opt_state'``, ``['state', 'cache']``."""
    parts = [value] if isinstance(value, str) else value
    words = re.split(r"[,\s]+", ",".join(map(str, parts)).strip(", ")) if isinstance(parts, Iterable) else []
    if len(words) < 2:
        return _choice("donate", ("state", "all", "none"))(words[0] if words else value)
    if "state" not in words or not all(map(str.isidentifier, words)) or {"all", "none"} & {*words}:
        raise SettingError(
            f"donate={value!r} is not 'state' with names of arguments, write 'state,opt_state' for example"
        )
    words.remove("state")  # once: an argument may have that name too
    return ",".join(["state", *dict.fromkeys(words)])


def _whole(name: str, minimum: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
        if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < minimum:
            raise SettingError(f"{name}={value!r} is not a whole number of at least {minimum}")
        return int(text)

    return parse


def _switch(name: str) -> Callable[[object], str]:
    """``on`` or ``off``, as a marker also writes it: `True` or `False`."""

    def parse(value: object) -> str:
        word = ("on" if value else "off") if isinstance(value, bool) else value
        return _choice(name, ("on", "off"))(word)

    return parse


def _nesting(value: object) -> Nesting:
    if isinstance(value, Nesting):
        return value
    if not isinstance(value, str):
        raise SettingError(f"nesting={value!r} is not a nesting, write layers such as 'jit > scan[closure]'")
    return Nesting.parse(value)


def _expected(value: object) -> tuple[Entry, ...]:
    try:
        return expected_failures.parse(value)
    except EntryError as error:
        raise SettingError(str(error)) from None


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else parse(value)
