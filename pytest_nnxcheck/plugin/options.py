"""The command line and the ini file: the options of the table, as they were typed, and read with where they came from."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.settings import TABLE, flag
from pytest_nnxcheck.core.text import Unreadable, one_of

_PROFILES: pytest.StashKey[dict[str, SettingsProfile]] = pytest.StashKey()


class Given(NamedTuple):
    """A setting that the command line or the ini file gives."""

    value: Any
    origin: str
    """The place that it came from, in words."""
    folder: Path
    """The folder that a path in it starts from."""


def register(parser: pytest.Parser, arguments: Iterable[str] = ()) -> None:
    """Add the options and ini names of the table; ``arguments`` are those of the run."""
    group = parser.getgroup("nnxcheck", "NNX invariant checks; docs/settings.md says more on each option")
    for name in table.names("named"):
        more = {"metavar": TABLE[name].kind.metavar} if TABLE[name].kind.metavar else {"nargs": 0}
        group.addoption(flag(name), action=_InOrder, dest="nnx_named", default=(), help=TABLE[name].help, **more)
    for name in (*table.names("check"), *table.names("run")):
        row = TABLE[name]
        how: dict[str, Any] = {"action": "append" if row.kind.is_repeated else "store", "metavar": row.kind.metavar}
        if not row.kind.metavar:
            how = {"action": "store_const", "const": "on"}
        default = "" if row.default in (None, "off", ()) else f" (default: {table.show(row.default)})"
        text = (row.help + default).replace("%", "%%")  # argparse formats it
        # The default is None, or an ini value would never be read.
        if row.kind.words:
            # One that is none of them too: it is read, and refused, as any other value is.
            given = (argument.partition("=") for argument in arguments)
            others = {word for option, equals, word in given if equals and option == flag(name)} - {*row.kind.words}
            _add_words(group, name, (*row.kind.words, *others), text)
        else:
            group.addoption(flag(name), dest=f"nnx_{name}", default=None, help=text, **how)
        if "ini file" in row.places:
            parser.addini(f"nnx_{name}", row.help, type=_ini_type(row.kind.ini_type), default=None)


class _InOrder(argparse.Action):
    """Keeps options in one list, in the order in which they are typed: each belongs to the name before it."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [*getattr(namespace, self.dest), (option, values or "")])


def _add_words(group: pytest.OptionGroup, name: str, words: tuple[str, ...], text: str) -> None:
    """Add a flag that may have a word, each word as an option of its own; the help of the first says what each does."""
    # With a value, argparse would take the path of ``--nnx-watch tests`` for it.
    for number, word in enumerate(words):
        written = [f"{flag(name)}={word}"] if number else [flag(name), f"{flag(name)}={word}"]
        group.addoption(
            *written,
            dest=f"nnx_{name}",
            action="store_const",
            const=word,
            default=None,
            help=argparse.SUPPRESS if number else text,
        )


def _ini_type(kind: str) -> Any:
    """The ini type that also takes the native value of a TOML file, where this pytest has one."""
    if kind == "list":
        return "args"
    if pytest.version_tuple >= (9, 2):
        return str | int | bool
    return "int" if kind == "number" and pytest.version_tuple >= (8, 4) else "string"


def is_verbose(config: pytest.Config) -> bool:
    """True if somebody asked for ``-v``."""
    return verbosity(config) > 0


def verbosity(config: pytest.Config) -> int:
    """The number of ``-v``, also beside a ``-q`` of the ini file, which takes one from them."""
    return config.get_verbosity() + int(config.getoption("quiet", 0) or 0)


def typed(options: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The options as they were typed."""
    values = {name: getattr(options, f"nnx_{name}", None) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def named(config: pytest.Config) -> list[tuple[str, str]]:
    """The options that name what is checked, with their values, in the order in which they were typed."""
    return [*config.option.nnx_named]


def replay_options(options: argparse.Namespace, own: Iterable[str] = ()) -> str:
    """The typed options that say how a nesting is judged, as a replay repeats them, behind the test's ``own``."""
    names = ["profile", *(name for name in table.names("check") if not TABLE[name].selects_nestings)]
    pairs = typed(options, names).items()
    words = [part for name, text in pairs for part in (flag(name), text)[: 1 + bool(TABLE[name].kind.metavar)]]
    return shlex.join([*own, *words])


def as_typed(item: pytest.Item) -> tuple[str, list[str]]:
    """The argument that selects a test, and the options that belong to it, as one types them in the folder where the run was started.

    The id of a test starts from pytest's root. A check by name knows its own.
    """
    named: tuple[str, list[str]] | None = getattr(item, "nnx_typed", None)
    if named is not None:
        return named
    file, colons, name = item.nodeid.partition("::")
    with contextlib.suppress(ValueError):  # on another drive of Windows
        file = Path(os.path.relpath(item.config.rootpath / file, item.config.invocation_params.dir)).as_posix()
    return f"{file}{colons}{name}", []


def given(config: pytest.Config, name: str, options: argparse.Namespace | None = None) -> Given | None:
    """The setting on the command line, or else in the profile, or else in the ini file. Raises `SettingError` that names the source."""
    return on_command_line(config, name, options) or in_profile(config, name, options) or in_ini_file(config, name)


def on_command_line(config: pytest.Config, name: str, options: argparse.Namespace | None = None) -> Given | None:
    value = getattr(options or config.option, f"nnx_{name}", None)
    return _read(name, value, f"option {flag(name)}", config.invocation_params.dir)


def in_profile(config: pytest.Config, name: str, options: argparse.Namespace | None = None) -> Given | None:
    chosen = profile(config, options)
    if chosen is None or name not in chosen.values:
        return None
    value = chosen.values[name]
    if TABLE[name].kind.is_repeated and isinstance(value, str):
        value = [value]
    return _read(name, value, chosen.origins[name], config.rootpath)


def profile(config: pytest.Config, options: argparse.Namespace | None = None) -> SettingsProfile | None:
    """The profile that is asked for. Raises `SettingError`."""
    asked = on_command_line(config, "profile", options) or in_ini_file(config, "profile")
    if asked is None or not asked.value:
        return None
    known = config.stash.setdefault(_PROFILES, {})
    if asked.value not in known:
        files = dict.fromkeys(filter(None, [config.inipath, config.rootpath / "pyproject.toml"]))
        try:
            known[asked.value] = _find(asked.value, files)
        except SettingError as error:
            raise SettingError(f"{asked.origin}: {error}") from None
    return known[asked.value]


def in_ini_file(config: pytest.Config, name: str) -> Given | None:
    if "ini file" not in TABLE[name].places:
        return None
    origin = f"ini option nnx_{name}" + (f" ({config.inipath.name})" if config.inipath else "")
    try:
        value = config.getini(f"nnx_{name}")
    except (ValueError, TypeError, pytest.UsageError) as error:
        raise SettingError(f"{origin}: {error}") from None
    return _read(name, value, origin, config.rootpath)


def _read(name: str, value: Any, origin: str, folder: Path) -> Given | None:
    kind = TABLE[name].kind
    if value is None or (kind.is_repeated and not value):
        return None
    try:
        return Given(kind.read(name, value), origin, folder)
    except Unreadable as error:
        raise SettingError(f"{origin}: {error}") from None


def value(config: pytest.Config, name: str) -> Any:
    """The value that is given, or the default. Raises `SettingError`."""
    read = given(config, name)
    return TABLE[name].kind.read(name, TABLE[name].default) if read is None else read.value


def asked(config: pytest.Config, name: str) -> bool:
    """True if a flag is on."""
    return bool(value(config, name) == "on")


def of_a_check(config: pytest.Config) -> dict[str, Any]:
    """The settings of a check that ini file, profile and command line give, less what they give as a file. Raises `SettingError`."""
    names = [name for name in table.names("check") if not TABLE[name].kind.is_file]
    sources = [
        {name: read.value for name in names if (read := source(config, name)) is not None}
        for source in (in_ini_file, in_profile, on_command_line)
    ]
    return table.lay_over(*sources)


def of_a_run(config: pytest.Config) -> dict[str, Any]:
    """The options of a whole run that ini file and command line give. Raises `SettingError`."""
    return {name: read.value for name in table.names("run") if (read := given(config, name)) is not None}


# --- profiles: named sets of settings, as [tool.pytest-nnxcheck.profiles.nightly] of a pyproject.toml has them --------------

_TABLE = "pytest-nnxcheck.profiles"


class SettingsProfile(NamedTuple):
    """One set of settings."""

    values: Mapping[str, Any]
    """The values as the file has them."""
    origins: Mapping[str, str]
    """The place where each value is written, in words."""


def _find(name: str, paths: Iterable[Path]) -> SettingsProfile:
    """The profile of that name, in the first file that has profiles. Raises `SettingError`."""
    path, tables = next(((path, found) for path in paths if (found := _profiles_in(path))), (Path(), {}))
    if not tables:
        raise SettingError(f"there is no profile {name!r}: write a table [tool.{_TABLE}.{name}] in pyproject.toml")
    try:
        values = tables[one_of("profile", name, tables)]
    except Unreadable as error:
        raise SettingError(f"{error} ({path.name})") from None
    # Neither reader of the two formats says lines.
    lines, inside = dict[str, str](), False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.startswith("["):
            inside = line.strip("[] ").endswith(f"{_TABLE}.{name}")
        elif inside:
            lines.setdefault(re.split("[=:]", line)[0].strip(" '\""), f":{number}")
    origins = {each: f"profile {name} ({path.name}{lines.get(each, '')})" for each in values}
    valid = [each for each in table.names(place="ini file") if each != "profile"]
    for setting, value in values.items():
        table.refuse_misplaced(setting, value, valid, origins[setting])
    return SettingsProfile(values, origins)


def _profiles_in(path: Path) -> dict[str, dict[str, Any]]:
    """The values of each profile in a file, by its name. Raises `SettingError`."""
    import configparser  # late, both: most runs name no profile
    import tomllib

    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            found: Any = tomllib.loads(text)
            for key in [*["tool"] * (path.name == "pyproject.toml"), *_TABLE.split(".")]:
                found = found.get(key) if isinstance(found, dict) else None
            found = found if isinstance(found, dict) else {}
        else:
            parser = configparser.RawConfigParser(strict=False)
            parser.read_string(text)
            found = {
                section.removeprefix(f"{_TABLE}."): {key: _of_ini(key, value) for key, value in parser[section].items()}
                for section in parser.sections()
                if section.startswith(f"{_TABLE}.")
            }
    except OSError:
        return {}
    except (ValueError, configparser.Error) as error:
        raise SettingError(f"{path.name}: its profiles cannot be read: {error}") from None
    for name, values in found.items():
        if not isinstance(values, dict):
            raise SettingError(f"{path.name}: profile {name} is no table, write [tool.{_TABLE}.{name}]")
    return dict(found)


def _of_ini(name: str, value: str) -> Any:
    """The text of an ini file; a list is split as pytest splits one."""
    return shlex.split(value) if name in TABLE and TABLE[name].kind.ini_type == "list" else value
