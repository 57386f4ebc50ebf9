"""What command line and ini file say: as it was typed, where it came from, and read into settings. Pytest alone is imported."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.setting_values import SettingError
from pytest_nnxcheck.core.settings import OPTIONS

VALUES = tuple(name for name, option in OPTIONS.items() if not option.file)
INI_VALUES = tuple(name for name in VALUES if OPTIONS[name].everywhere)


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
