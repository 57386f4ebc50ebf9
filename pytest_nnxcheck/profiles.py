"""Named sets of settings, as ``[tool.pytest-nnxcheck.profiles.nightly]`` of a pyproject.toml has them. No pytest in it."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.settings import TABLE, names, refuse_misplaced
from pytest_nnxcheck.core.text import Unreadable, one_of

_TABLE = "pytest-nnxcheck.profiles"


class Profile(NamedTuple):
    """One set of settings."""

    values: Mapping[str, Any]
    """The values as the file has them."""
    origins: Mapping[str, str]
    """The place where each value is written, in words."""


class _File(NamedTuple):
    """A file that may have profiles."""

    path: Path
    text: str
    tables: Mapping[str, Mapping[str, Any]]
    """The values of each profile, by its name."""


_NONE = _File(Path(), "", {})


def find(name: str, paths: Iterable[Path]) -> Profile:
    """The profile of that name, in the first file that has profiles. Raises `SettingError`."""
    path, text, tables = next((found for path in paths if (found := _read(path)).tables), _NONE)
    if not tables:
        raise SettingError(f"there is no profile {name!r}: write a table [tool.{_TABLE}.{name}] in pyproject.toml")
    try:
        values = tables[one_of("profile", name, tables)]
    except Unreadable as error:
        raise SettingError(f"{error} ({path.name})") from None
    lines = _lines(text, f"{_TABLE}.{name}")
    origins = {each: f"profile {name} ({path.name}{lines.get(each, '')})" for each in values}
    valid = [each for each in names(place="ini file") if each != "profile"]
    for setting, value in values.items():
        refuse_misplaced(setting, value, valid, origins[setting])
    return Profile(values, origins)


def _lines(text: str, table: str) -> dict[str, str]:
    """The line of each name in a table, as ``:12``."""
    found, inside = dict[str, str](), False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("["):
            inside = line.strip("[] ").endswith(table)
        elif inside:
            found.setdefault(re.split("[=:]", line)[0].strip(" '\""), f":{number}")
    return found


def _read(path: Path) -> _File:
    """Read the profiles in a file. Raises `SettingError`."""
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".toml":
            found = _of_toml(tomllib.loads(text), ["tool"] * (path.name == "pyproject.toml") + _TABLE.split("."))
        else:
            parser = configparser.RawConfigParser(strict=False)
            parser.read_string(text)
            found = {
                section.removeprefix(f"{_TABLE}."): {key: _of_ini(key, value) for key, value in parser[section].items()}
                for section in parser.sections()
                if section.startswith(f"{_TABLE}.")
            }
    except OSError:
        return _NONE
    except (ValueError, configparser.Error) as error:
        raise SettingError(f"{path.name}: its profiles cannot be read: {error}") from None
    for name, values in found.items():
        if not isinstance(values, dict):
            raise SettingError(f"{path.name}: profile {name} is no table, write [tool.{_TABLE}.{name}]")
    return _File(path, text, found)


def _of_toml(document: Any, keys: Iterable[str]) -> dict[str, Any]:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def _of_ini(name: str, value: str) -> Any:
    """The text of an ini file; a list is split as pytest splits one."""
    return shlex.split(value) if name in TABLE and TABLE[name].kind.ini_type == "list" else value
