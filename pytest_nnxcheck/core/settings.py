"""The one table of settings: names, defaults, help, parsing and precedence.

The marker's signature, the ``--nnx-*`` options, the ``nnx_*`` ini names and the table of docs/settings.md all come from the
fields of `Settings`. Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.catalogue import FURTHER, INVARIANTS, OPTIONAL_INVARIANTS, STYLES, TRANSFORMS, layer_names
from pytest_nnxcheck.core.expected_failures import Entry
from pytest_nnxcheck.core.nesting import MODES, Nesting, NestingError, one_of
from pytest_nnxcheck.core.setting_values import (
    Budget,
    SettingError,
    _choice,
    _donated,
    _expected,
    _nesting,
    _optional,
    _switch,
    _whole,
    _words,
)

MARKER = "nnx_invariants"

SWEEPS = ("pairs", "chains", "short", "singles", "probes")
"""What always runs first, the most first: each has what those behind it have."""

EFFORTS: dict[str, dict[str, Any]] = {
    "quick": {"sweep": "short", "max_examples": 0},
    "default": {"sweep": "chains", "max_examples": 3},
    "thorough": {"sweep": "pairs", "max_examples": 20},
}
"""What an effort stands for."""


class Option(NamedTuple):
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
    """The table of docs/settings.md."""
    rows = ["| setting | default | command line | ini | meaning |", "|---|---|---|---|---|"]
    for name, option in OPTIONS.items():
        ini = f"`nnx_{name}`" if option.everywhere else "-"
        line = f"`{flag(name)} {option.metavar}".rstrip() + "`"
        rows.append(f"| `{name}` | `{show(getattr(DEFAULTS, name))}` | {line} | {ini} | {option.help} |")
    return "\n".join(rows) + "\n"


def flag(name: str) -> str:
    """The command line option of a setting."""
    return f"--nnx-{name.replace('_', '-')}"
