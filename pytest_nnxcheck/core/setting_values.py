"""The kinds of values that a setting may have, each with a parser."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.text import Unreadable, format_bytes, one_of

if TYPE_CHECKING:
    from fractions import Fraction

    from pytest_nnxcheck.core.expected_failures import ExpectedFailure
    from pytest_nnxcheck.core.nesting import Nesting

Parser = Callable[[str, object], Any]

REPORTS = {".json": "records", ".html": "html_page", ".md": "markdown"}
"""The suffixes of a report, each with the file of `reporting` whose ``render`` makes its text."""

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}

_BUDGET = r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>x|[KMGT]?i?B)?"
_PERCENT = r"(\d+(?:\.\d+)?)\s*%"
_SEPARATORS = r"[,\s]+"
"""Plain texts: `re` compiles them at their first use, since every suite pays for what the plugin does while it loads."""
MOST_DEVICES = 4096
"""XLA takes seconds to simulate a few hundred, and no test needs more: a larger number is a slip, and would hang."""
_TOO_LARGE = 2**80
"""Bytes that no machine has."""
_BUDGET_ADVICE = "write bytes such as '512MiB', '1.5GB' or 1048576, or a multiple of the expected peak such as '2x'"


class Kind(NamedTuple):
    """A kind of value."""

    parse: Parser
    """``parse(name, value)`` gives the value. Raises `Unreadable`."""
    metavar: str = ""
    """Its name in the help. Without one it is a flag, which has no value on the command line and means ``on``."""
    ini_type: Literal["list", "number", "text"] = "text"
    """The type that an ini file may hold natively."""
    is_file: bool = False
    """Command line and ini file give the path of a file that holds the value."""
    is_repeated: bool = False
    """It may be given several times; the value is a tuple."""
    words: tuple[str, ...] = ()
    """``--flag`` means the first of them, ``--flag=word`` another one. A separate word would be a path to pytest."""

    def read(self, name: str, value: Any) -> Any:
        """Parse the text of the command line or the ini file. Raises `Unreadable`."""
        parse = file_path if self.is_file else self.parse
        return tuple(parse(name, part) for part in value) if self.is_repeated else parse(name, value)


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory bound on the peak. Either ``bytes`` or ``factor`` is set; ``Budget.parse(str(budget)) == budget``."""

    bytes: int | None = None
    """Bytes a device."""
    factor: float | None = None
    """A multiple of the expected peak."""
    written: str = field(default="", compare=False, repr=False)
    """The bytes as the user wrote them, in powers of 1000; measured bytes are shown in powers of 1024."""

    @classmethod
    def parse(cls, value: object) -> Budget:
        """Read a whole number of bytes, a size such as ``512MiB`` (KB=1000, KiB=1024) or a multiple such as ``2x``.

        Raises `SettingError`.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, int) and abs(value) >= _TOO_LARGE:  # Python may not show it
            raise SettingError(f"memory_budget is out of range, {_BUDGET_ADVICE}")
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        match = re.fullmatch(_BUDGET, text.strip(), re.ASCII) if isinstance(text, str) else None
        if match is None or match["unit"] == "iB":
            raise SettingError(f"memory_budget={value!r} is not a size, {_BUDGET_ADVICE}")
        number, unit = Decimal(match["number"]), match["unit"] or "B"
        if unit == "x":
            budget = cls(factor=float(number))
        else:
            budget = cls(bytes=int(number * UNITS[unit]), written="" if UNITS[unit] % 1000 else match[0])
        if not (budget.bytes or budget.factor) or budget.factor == float("inf") or (budget.bytes or 0) >= _TOO_LARGE:
            raise SettingError(f"memory_budget={value!r} is out of range, {_BUDGET_ADVICE}")
        return budget

    def __str__(self) -> str:
        if self.factor is not None:
            return f"{Decimal(repr(self.factor)).normalize():f}x"
        size = self.bytes or 0
        unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if size and size % UNITS[unit] == 0), "B")
        return f"{size // UNITS[unit]}{unit}"


def least_bytes(peak: int) -> str:
    """The smallest size that a peak of so many bytes is within, in tenths of the unit that a message shows it in: ``1.7MiB``."""
    unit = format_bytes(peak).split()[1]
    return f"{max(peak, 1)}B" if unit == "B" else _in_tenths(-(-10 * peak // UNITS[unit]), unit)


def least_multiple(programs: Iterable[tuple[int, int]]) -> str:
    """The smallest multiple of the expected peak that programs are within, in tenths: ``2.5x``; each has a peak and an expected peak."""
    return _in_tenths(max(_tenths(peak, expected) for peak, expected in programs), "x")


def _tenths(peak: int, expected: int) -> int:
    count = max(-(-10 * peak // expected), 1)
    while count > 1 and round((count - 1) / 10 * expected) >= peak:  # the bound is rounded to whole bytes
        count -= 1
    return count


def _in_tenths(count: int, unit: str) -> str:
    return f"{count / 10:.1f}".removesuffix(".0") + unit


def words(valid: Callable[[], tuple[str, ...]]) -> Kind:
    """Words out of ``valid()``, in its order, written as ``'a,b'``, ``['a', 'b']`` or a single word."""

    def parse(name: str, value: object) -> tuple[str, ...]:
        there = valid()
        chosen = {one_of(name.removesuffix("s"), word, there) for word in _listed(name, value, ", ".join(there))}
        if not chosen:
            raise SettingError(f"{name}={value!r} is empty, write some of {', '.join(there)}")
        # The order of the tuple is the order in which hypothesis shrinks: always the plainest first.
        return tuple(word for word in there if word in chosen)

    return Kind(parse, "LIST", "list")


def _listed(name: str, value: object, known: str) -> list[str]:
    """Split a text, or a list of texts, into words. Raises `SettingError` that names the ``known`` words."""
    parts = [value] if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, Iterable) else [None]
    if not all(isinstance(part, str) for part in parts):
        raise SettingError(f"{name}={value!r} is not a list of words, write some of {known}")
    return [word for part in parts for word in _split(str(part))]


def _split(text: str) -> list[str]:
    return [word for word in re.split(_SEPARATORS, text) if word]


def targets(name: str, value: object) -> tuple[str, ...]:
    """Read ``'v5e,h100:8'``, or a list of such words, each once and in its shortest form."""
    from pytest_nnxcheck.core.chips import CHIPS, parse_target  # late: most runs name no target

    known = f"{', '.join(chip.name for chip in CHIPS)}, or a slice such as 'v5e:4x4'"
    return tuple(dict.fromkeys(str(parse_target(word)) for word in _listed(name, value, known)))


def choice(*valid: str) -> Kind:
    return Kind(lambda name, value: _choose(name, value, valid), "WHAT")


def _choose(name: str, value: object, valid: tuple[str, ...]) -> str:
    if not isinstance(value, str):
        raise SettingError(f"{name}={value!r} is not a word, write one of {', '.join(valid)}")
    return one_of(name, value.strip(), valid)


def switch(name: str, value: object) -> str:
    """Read ``on`` or ``off``, as a marker also writes it: `True` or `False`; of a ``true`` in a TOML file pytest makes the text ``True``."""
    word = {"true": "on", "false": "off"}.get(str(value).strip().lower(), value)
    return _choose(name, word, ("on", "off"))


def donated(name: str, value: object) -> str:
    """Read ``state``, ``all``, ``none``, or ``state`` with names of arguments: ``'state,opt_state'``, ``['state', 'cache']``."""
    parts = [value] if isinstance(value, str) else value
    names = _split(",".join(map(str, parts))) if isinstance(parts, Iterable) else []
    if len(names) < 2:
        try:
            return _choose(name, names[0] if names else value, ("state", "all", "none"))
        except Unreadable as error:
            if not names or not names[0].isidentifier():
                raise SettingError(f"{error} ('state,NAME' donates an argument too)") from None
            raise SettingError(f"{error} (an argument of that name is donated with 'state,{names[0]}')") from None
    if "state" not in names or not all(map(str.isidentifier, names)) or {"all", "none"} & {*names}:
        raise SettingError(
            f"{name}={value!r} is not 'state' with names of arguments, write 'state,opt_state' for example"
        )
    names.remove("state")  # once: an argument may have that name too
    return ",".join(["state", *dict.fromkeys(names)])


def whole_number(minimum: int, maximum: int | None = None) -> Kind:
    bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def parse(name: str, value: object) -> int:
        # Python neither reads nor shows a number of thousands of digits.
        too_long = isinstance(value, str) and re.fullmatch(r"\s*-?\d{10,}\s*", value)
        if too_long or (isinstance(value, int) and abs(value) >= 10**9):
            advice = "below a billion" if maximum is None else bounds
            raise SettingError(f"{name} is a number of too many digits, write a whole number {advice}")
        text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
        if not re.fullmatch(r"\d+", text, re.ASCII) or int(text) < minimum or int(text) > (maximum or int(text)):
            raise SettingError(f"{name}={value!r} is not a whole number {bounds}")
        return int(text)

    return Kind(parse, "N", "number")


def nesting(name: str, value: object) -> Nesting:
    from pytest_nnxcheck.core.nesting import (
        Nesting,  # late, like expected failures: most runs load the plugin and no more
    )

    if isinstance(value, Nesting):
        return value
    if not isinstance(value, str):
        raise SettingError(f"{name}={value!r} is not a nesting, write layers such as 'jit > scan[closure]'")
    return Nesting.parse(value)


def failures(_: str, value: object) -> tuple[ExpectedFailure, ...]:
    from pytest_nnxcheck.core import expected_failures

    return expected_failures.parse(value)


def percentage(name: str, value: object) -> Fraction:
    """Read ``5%`` as the part 1/20."""
    match = re.fullmatch(_PERCENT, value.strip(), re.ASCII) if isinstance(value, str) else None
    if match is None or len(match[1]) > 30:
        raise SettingError(f"{name}={value!r} is not a percentage, write '5%' or '0.5%', or '0%' to allow nothing")
    from fractions import Fraction  # late: most runs compare nothing

    return Fraction(match[1]) / 100


def file_path(name: str, value: object) -> str:
    """Read the path of a file, as it was typed."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise SettingError(f"{name}={value!r} is not a path, write the name of a file")
    return value


def report_path(name: str, value: object) -> str:
    """Read the path of a report, whose suffix says in which form it is written."""
    path = file_path(name, value)
    if Path(path).suffix.lower() not in REPORTS:
        examples = ", ".join(repr(_base(path) + suffix) for suffix in REPORTS)
        raise SettingError(f"{name}={value!r} ends in none of {', '.join(REPORTS)}, write {examples}")
    return path


def _base(path: str) -> str:
    """The path to put a suffix behind; a folder, and a suffix alone, get the name ``report``."""
    folder, file = os.path.split(path)
    if file in {".", ".."}:
        folder, file = path, ""
    return str(Path(folder, "report" if file.lower() in {"", *REPORTS} else file))


def optional(kind: Kind) -> Kind:
    return kind._replace(parse=lambda name, value: None if value is None else kind.parse(name, value))


TARGETS = Kind(targets, "LIST", "list")
SWITCH = Kind(switch, "ON_OR_OFF")
FLAG = Kind(switch)
BUDGET = Kind(lambda _, value: Budget.parse(value), "SIZE")
DONATED = Kind(donated, "WHAT")
FAILURES = Kind(failures, "PATH", is_file=True)
NESTING = Kind(nesting, "NESTING")
PATH = Kind(file_path, "PATH")
TEXT = Kind(lambda _, value: value)
PERCENTAGE = Kind(percentage, "PERCENT")
WATCH = choice("off", "fail", "report", "calls", "list")._replace(
    metavar="[=calls]", words=("fail", "report", "calls", "list", "off")
)
REPORT_PATHS = Kind(report_path, "PATH", "list", is_repeated=True)
