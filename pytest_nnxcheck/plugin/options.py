"""What command line and ini file say: as it was typed, where it came from, and read. Settings come from the table of `core.settings`.

The options of a whole run (what its results are compared with, where they go, what it keeps) are in the table `OUTLETS`, from which the ``--nnx-*`` options,
the ``nnx_*`` ini names and a table of docs/settings.md come; no marker may give them.
PYTEST_DONT_REWRITE: nothing here is an assertion for pytest to rewrite.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.setting_values import SettingError
from pytest_nnxcheck.core.settings import OPTIONS, flag

if TYPE_CHECKING:
    from fractions import Fraction

VALUES = tuple(name for name, option in OPTIONS.items() if not option.file)
INI_VALUES = tuple(name for name in VALUES if OPTIONS[name].everywhere)
REPORTS = (".json", ".html", ".md")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%", re.ASCII)


def ini_type(kind: str) -> Any:
    """The ini type that also takes the native value of a TOML file, where this pytest has one."""
    if kind == "list":
        return "args"
    if pytest.version_tuple >= (9, 2):
        return str | int
    return "int" if kind == "number" and pytest.version_tuple >= (8, 4) else "string"


def from_command_line(typed: Mapping[str, str]) -> dict[str, Any]:
    return table.parse_given(typed, option_origin)


def option_origin(name: str) -> str:
    return f"option {table.flag(name)}"


def typed(options: argparse.Namespace, names: Iterable[str] = OPTIONS) -> dict[str, str]:
    """The options as they were typed."""
    values = {name: getattr(options, f"nnx_{name}", None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def from_ini(config: pytest.Config, names: Iterable[str] = INI_VALUES) -> dict[str, Any]:
    values = {name: ini(config, name) for name in names}
    return table.parse_given({n: v for n, v in values.items() if v is not None}, lambda name: ini_origin(config, name))


def ini(config: pytest.Config, name: str) -> Any:
    try:
        return config.getini(f"nnx_{name}")
    except (ValueError, TypeError, pytest.UsageError) as error:
        raise SettingError(f"{ini_origin(config, name)}: {error}") from None


def ini_origin(config: pytest.Config, name: str) -> str:
    return f"ini option nnx_{name}" + (f" ({config.inipath.name})" if config.inipath else "")


# --- options of a whole run ----------------------------------------------------------------------------------------------


def as_typed(_name: str, value: object) -> object:
    return value


class Outlet(NamedTuple):
    """How one option is read and shown; one without a ``metavar`` is a flag, which no ini file has.

    ``default`` is written as one types it; a ``repeated`` option adds up, and its value is a tuple.
    """

    help: str
    metavar: str = ""
    parse: Callable[[str, object], Any] = as_typed
    default: str = ""
    repeated: bool = False


class Given(NamedTuple):
    """What command line or ini file say: the value, where it came from, and the folder that a path in it starts from."""

    value: Any
    origin: str
    folder: Path


def percentage(name: str, value: object) -> Fraction:
    """Read ``5%`` as the part 1/20. Raises `SettingError`."""
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise SettingError(f"{name}={value!r} is not a percentage, write '5%' or '0.5%', or '0%' to allow nothing")
    from fractions import Fraction  # late: most runs compare nothing

    return Fraction(match[1]) / 100


def file_path(name: str, value: object) -> str:
    """Read the path of a file, as it was typed. Raises `SettingError`."""
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise SettingError(f"{name}={value!r} is not a path, write the name of a file")
    return value


def report_path(name: str, value: object) -> str:
    """Read the path of a report, whose suffix says in which form it is written. Raises `SettingError`."""
    path = file_path(name, value)
    if Path(path).suffix.lower() not in REPORTS:
        shown = ", ".join(repr(path + suffix) for suffix in REPORTS)
        raise SettingError(f"{name}={value!r} ends in none of {', '.join(REPORTS)}, write {shown}")
    return path


OUTLETS: dict[str, Outlet] = {
    "baseline": Outlet(
        "file of the peak memory of every nesting, which this run is compared with",
        metavar="PATH",
        parse=file_path,
    ),
    "memory_tolerance": Outlet(
        "how much a peak may grow over the baseline before the test fails; 0% allows nothing",
        metavar="PERCENT",
        parse=percentage,
        default="5%",
    ),
    "baseline_update": Outlet("write the baseline anew from this run, if every test of it passed"),
    "baseline_update_new_only": Outlet("add to the baseline what is not in it, and compare the rest"),
    "baseline_any_stamp": Outlet("compare with a baseline that other versions, or another device, have left"),
    "report": Outlet(
        "file of the verdict, peak and cause of every nesting: .json, .html (a page to look at) or .md (for a pull request)",
        metavar="PATH",
        parse=report_path,
        repeated=True,
    ),
    "no_cache": Outlet("compile every program anew, and keep none in the cache of pytest for the next run"),
}


def add_options(parser: pytest.Parser, group: pytest.OptionGroup) -> None:
    """Add the options and ini names of the table."""
    for name, outlet in OUTLETS.items():
        dest, text = f"nnx_{name}", outlet.help.replace("%", "%%")  # argparse formats it
        if not outlet.metavar:
            group.addoption(flag(name), dest=dest, action="store_true", default=False, help=text)
            continue
        action = "append" if outlet.repeated else "store"
        # The default is None, or an ini value would never be read.
        group.addoption(flag(name), dest=dest, action=action, default=None, metavar=outlet.metavar, help=text)
        parser.addini(dest, outlet.help, type=ini_type("list" if outlet.repeated else "text"), default=None)


def asked(config: pytest.Config, name: str) -> bool:
    """Whether a flag was typed."""
    return bool(config.getoption(f"nnx_{name}"))


def given(config: pytest.Config, name: str) -> Given | None:
    """What the command line says, or else the ini file; None where neither does. Raises `SettingError` that names the source."""
    typed, origin, folder = config.getoption(f"nnx_{name}"), option_origin(name), config.invocation_params.dir
    if not typed and not isinstance(typed, str):
        typed, origin, folder = ini(config, name), ini_origin(config, name), config.rootpath
    if typed is None or typed == []:
        return None
    outlet = OUTLETS[name]
    try:
        if not outlet.repeated:
            return Given(outlet.parse(name, typed), origin, folder)
        return Given(tuple(outlet.parse(name, each) for each in typed), origin, folder)
    except SettingError as error:
        raise SettingError(f"{origin}: {error}") from None


def read(config: pytest.Config) -> list[str]:
    """The names of what is given. Raises `SettingError` for the first that cannot be read."""
    return [
        name for name, outlet in OUTLETS.items() if (given(config, name) if outlet.metavar else asked(config, name))
    ]


def value(config: pytest.Config, name: str) -> Any:
    """What is given, or the default. Raises `SettingError`."""
    found = given(config, name)
    return OUTLETS[name].parse(name, OUTLETS[name].default) if found is None else found.value


def outlets_table_markdown() -> str:
    """The table of docs/settings.md."""
    rows = ["| command line | ini | default | meaning |", "|---|---|---|---|"]
    for name, outlet in OUTLETS.items():
        ini = f"`nnx_{name}`" if outlet.metavar else "-"
        line = f"{flag(name)} {outlet.metavar}".rstrip()
        default = f"`{outlet.default}`" if outlet.default else "-"
        more = "; may be repeated" if outlet.repeated else ""
        rows.append(f"| `{line}` | {ini} | {default} | {outlet.help}{more} |")
    return "\n".join(rows) + "\n"
