"""The one table of settings: names, defaults, help, parsing and precedence.

The marker's signature, the ``--nnx-*`` options, the ``nnx_*`` ini names and the table of the README all come from the
fields of `Settings`. Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from typing import Any, Literal

from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.expected_failures import Entry, EntryError
from pytest_nnxcheck.core.nesting import FURTHER, MODES, STYLES, TRANSFORMS, Nesting, NestingError, layer_names, one_of
from pytest_nnxcheck.core.outcome import INVARIANTS, OPTIONAL_INVARIANTS, CheckError

MARKER = "nnx_invariants"
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


SWEEPS = ("pairs", "chains", "short", "singles", "probes")
"""What always runs first, the most first: each has what those behind it have."""

EFFORTS: dict[str, dict[str, Any]] = {
    "quick": {"sweep": "short", "max_examples": 0},
    "default": {"sweep": "chains", "max_examples": 3},
    "thorough": {"sweep": "pairs", "max_examples": 20},
}
"""What an effort stands for."""


@dataclass(frozen=True, slots=True)
class Option:
    """How one setting is read and shown; ``kind`` is what an ini file may hold natively.

    Of a ``file``, command line and ini file give the path, and `plugin.known_failures` reads it. A ``flag`` stands on the command line without a value, and
    means ``on``. What ``selects`` the nestings that are run says nothing of one that is replayed.
    """

    parse: Callable[[object], Any]
    metavar: str
    help: str
    kind: Literal["list", "number", "text"]
    everywhere: bool = True
    file: bool = False
    flag: bool = False
    selects: bool = False


def _option(default: Any, parse: Callable[[object], Any], metavar: str, text: str, kind: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(parse, metavar, text, kind, **more)})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to check, under which nestings, and within which bounds."""

    invariants: tuple[str, ...] = _option(
        INVARIANTS,
        _words("invariant", lambda: (*INVARIANTS, *OPTIONAL_INVARIANTS)),
        "LIST",
        f"what must hold: {', '.join(INVARIANTS)}; {', '.join(OPTIONAL_INVARIANTS)} only where it is named",
        "list",
    )
    transforms: tuple[str, ...] = _option(
        TRANSFORMS,
        _words("transform", layer_names),
        "LIST",
        f"transforms that nestings are made of: {', '.join(TRANSFORMS)}; only where they are named also"
        f" {', '.join(FURTHER)}, call_first, and those that register_transform was given",
        "list",
        selects=True,
    )
    styles: tuple[str, ...] = _option(
        STYLES,
        _words("style", lambda: STYLES),
        "LIST",
        f"how a layer gets the module: {', '.join(STYLES)}",
        "list",
        selects=True,
    )
    modes: tuple[str, ...] = _option(
        MODES[:1],
        _words("mode", lambda: MODES),
        "LIST",
        "modes of flax that every nesting runs in: current (the one that flax is set to), and from flax 0.12.7 on"
        f" {', '.join(MODES[1:])}",
        "list",
    )
    max_depth: int = _option(
        3,
        _whole("max_depth", 1),
        "N",
        "layers of the deepest nesting that is drawn, and of a chain inside its jit; 1 or more",
        "number",
        selects=True,
    )
    effort: str = _option(
        "default",
        _choice("effort", tuple(EFFORTS)),
        "HOW_MUCH",
        "how much is run, where sweep and max_examples do not say it: quick (every layer once, every transform under jit), default"
        " (every pair of layers under jit) or thorough (pairs without a jit as well, and 20 draws)",
        "text",
        selects=True,
    )
    max_examples: int = _option(
        EFFORTS["default"]["max_examples"],
        _whole("max_examples", 0),
        "N",
        "nestings that hypothesis draws after the sweep; 0 runs the sweep alone",
        "number",
        selects=True,
    )
    sweep: str = _option(
        EFFORTS["default"]["sweep"],
        _choice("sweep", SWEEPS),
        "HOW_MUCH",
        "what always runs first: pairs (chains, and every ordered pair of argument layers), chains (every single layer, and jits over"
        " chains in which all pairs of argument layers stand side by side), short (every single layer, and jits over chains in which each"
        " argument layer stands once), singles (every single layer) or probes (the un-nested call and one try of each closure style)",
        "text",
        selects=True,
    )
    shortcuts: str = _option(
        "on",
        _switch("shortcuts"),
        "ON_OR_OFF",
        "on traces a nesting without a jit outside, and runs it where the trace is not clean or the test reads values; off runs everything",
        "text",
        selects=True,
    )
    all: str = _option(
        "off",
        _switch("all"),
        "",
        "run all of the sweep, also after a nesting broke that the message will name",
        "text",
        flag=True,
        selects=True,
    )
    memory_budget: Budget | None = _option(  # noqa: RUF009 - it makes a field
        None,
        _optional(Budget.parse),
        "SIZE",
        "bound on the peak: bytes of one call (512MiB, 1.5GB; KB=1000, KiB=1024) or a multiple of the expected peak (2x);"
        " without one, the default rule",
        "text",
    )
    memory_advice: str = _option(
        "note",
        _choice("memory_advice", ("note", "fail")),
        "WHAT",
        "advice on what the un-nested call spends memory on: note (shown with -v and in reports) or fail",
        "text",
    )
    donate: str = _option(
        "state",
        _donated,
        "WHAT",
        "what the outermost jit donates: state, all (the inputs too), none, or state with the names of arguments"
        " (state,opt_state)",
        "text",
    )
    on_rejection: str = _option(
        "report",
        _choice("on_rejection", ("report", "fail")),
        "WHAT",
        "a nesting that flax refuses: report (shown, not failed) or fail",
        "text",
    )
    devices: int | None = _option(
        None,
        _optional(_whole("devices", 1)),
        "N",
        "devices that a test needs; command line and ini file also simulate so many CPU devices",
        "number",
    )
    on_too_few_devices: str = _option(
        "skip",
        _choice("on_too_few_devices", ("skip", "fail")),
        "WHAT",
        "a test that needs more devices than there are: skip or fail",
        "text",
    )
    expected_failures: tuple[Entry, ...] = _option(
        (),
        _expected,
        "PATH",
        "failures that are known and must happen: a mapping of invariants or nestings to reasons; on the command line"
        " and in the ini file, a TOML file of them",
        "text",
        file=True,
    )
    nesting: Nesting | None = _option(  # noqa: RUF009 - it makes a field
        None,
        _optional(_nesting),
        "NESTING",
        "run this nesting and no other: 'jit > scan[closure]'",
        "text",
        everywhere=False,
        selects=True,
    )


OPTIONS: dict[str, Option] = {entry.name: entry.metadata["option"] for entry in fields(Settings)}
DEFAULTS = Settings()


def parse_given(
    values: Mapping[str, object], origin: Callable[[str], str], valid: Iterable[str] = OPTIONS
) -> dict[str, Any]:
    """Read the settings that one source gives; ``origin(name)`` words the source for an error.

    Raises `SettingError` that starts with the origin.
    """
    parsed = {}
    for name, value in values.items():
        try:
            one_of("setting", name, valid)
            parsed[name] = OPTIONS[name].parse(value)
        except (NestingError, SettingError) as error:
            raise SettingError(f"{origin(name)}: {error}") from None
    return parsed


def lay_over(*sources: Mapping[str, Any]) -> dict[str, Any]:
    """One source of several, the weakest first. An effort takes back what weaker ones say of the sweep and the draws."""
    merged: dict[str, Any] = {}
    for source in sources:
        merged.update({**EFFORTS.get(source.get("effort", ""), {}), **source})
    return merged


def merge(*sources: Mapping[str, Any]) -> Settings:
    """Settings from parsed sources, the weakest first: a later one wins field by field, and expected failures add up."""
    merged = lay_over(*sources)
    entries = [source["expected_failures"] for source in sources if "expected_failures" in source]
    return Settings(**(merged | ({"expected_failures": expected_failures.add_up(*entries)} if entries else {})))


def marker_names() -> tuple[str, ...]:
    """The settings that a marker and an ini file may give."""
    return tuple(name for name, option in OPTIONS.items() if option.everywhere)


def show(value: object) -> str:
    """A setting's value as one writes it on the command line."""
    if value is None or value == ():
        return "none"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def marker_line() -> str:
    """The line of ``pytest --markers``."""
    arguments = ", ".join(f"{name}={getattr(DEFAULTS, name)!r}" for name in marker_names())
    return (
        f"{MARKER}(*, {arguments}): run the test under generated nestings of jax transforms and assert, for every"
        " module wrapped by the nnx_wrap fixture, that no tracer remains, that the peak of memory stays within its"
        " bound, and that donated buffers are kept."
    )


def settings_table_markdown() -> str:
    """The table of the README."""
    rows = ["| setting | default | command line | ini | meaning |", "|---|---|---|---|---|"]
    for name, option in OPTIONS.items():
        ini = f"`nnx_{name}`" if option.everywhere else "-"
        line = f"`{flag(name)} {option.metavar}".rstrip() + "`"
        rows.append(f"| `{name}` | `{show(getattr(DEFAULTS, name))}` | {line} | {ini} | {option.help} |")
    return "\n".join(rows) + "\n"


def flag(name: str) -> str:
    """The command line option of a setting."""
    return f"--nnx-{name.replace('_', '-')}"
