"""Named sets of settings, as ``[tool.pytest-nnxcheck.profiles.nightly]`` of a pyproject.toml has them. No pytest in it."""

from __future__ import annotations

import configparser
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.settings import TABLE, flag, names
from pytest_nnxcheck.core.text import Unreadable, one_of

_TABLE = "pytest-nnxcheck.profiles"


@dataclass(frozen=True, slots=True)
class Profile:
    """One set of settings."""

    name: str
    values: Mapping[str, Any]
    """As the file has them."""
    file: str
    text: str
    table: str

    def origin(self, setting: str) -> str:
        """Where a setting is written, in words."""
        lines = self.text.splitlines()
        head = next((number for number, line in enumerate(lines, 1) if line.strip() == f"[{self.table}]"), 0)
        key = re.compile(rf"\s*['\"]?{re.escape(setting)}['\"]?\s*[=:]")
        found = [number for number, line in enumerate(lines, 1) if number > head and key.match(line)] if head else []
        return f"profile {self.name} ({self.file}{f':{found[0]}' if found else ''})"


def find(name: str, paths: Iterable[Path]) -> Profile:
    """The profile of that name, in the first file that has profiles. Raises `SettingError`."""
    for path in paths:
        if not (tables := _tables(path)):
            continue
        try:
            one_of("profile", name, tables)
        except Unreadable as error:
            raise SettingError(f"{error} ({path.name})") from None
        text, prefix = path.read_text("utf-8"), "tool." * (path.name == "pyproject.toml")
        profile = Profile(name, tables[name], path.name, text, f"{prefix}{_TABLE}.{name}")
        _refuse_unknown(profile)
        return profile
    raise SettingError(f"there is no profile {name!r}: write a table [tool.{_TABLE}.{name}] in pyproject.toml")


def _refuse_unknown(profile: Profile) -> None:
    """Raises `SettingError` for a name that no profile can give."""
    valid = [name for name in names(place="ini file") if name != "profile"]
    for setting in profile.values:
        if setting in TABLE and setting not in valid:
            raise SettingError(f"{profile.origin(setting)}: {setting} is for the command line, {flag(setting)}")
        try:
            one_of("setting", setting, valid)
        except Unreadable as error:
            raise SettingError(f"{profile.origin(setting)}: {error}") from None


def _tables(path: Path) -> dict[str, Mapping[str, Any]]:
    """The profiles in a file, by name. Raises `SettingError`."""
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
        return {}
    except (ValueError, configparser.Error) as error:
        raise SettingError(f"{path.name}: its profiles cannot be read: {error}") from None
    for name, values in found.items():
        if not isinstance(values, dict):
            raise SettingError(f"{path.name}: profile {name} is no table, write [tool.{_TABLE}.{name}]")
    return found


def _of_toml(document: Any, keys: Iterable[str]) -> dict[str, Any]:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, dict) else {}


def _of_ini(name: str, value: str) -> Any:
    """The text of an ini file; a list is split as pytest splits one."""
    return shlex.split(value) if name in TABLE and TABLE[name].kind.ini_type == "list" else value
