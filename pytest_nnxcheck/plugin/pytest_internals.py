"""What pytest knows of a test's arguments, and its terminal: every touch of a name of pytest that is not public."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def fixture_functions(item: Any) -> Mapping[str, Callable[..., Any]]:
    """The functions of the fixtures that a test uses, by name, the overriding one of each.

    No public way: `pytest.FixtureDef` is public, and the hook ``pytest_fixture_setup`` hands one out, but not for a fixture of a
    wider scope that was set up for an earlier test. Empty where pytest has moved its table. Tried on pytest 8.0 and 9.2.
    """
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None) or {}
    return {
        name: of_name[-1].func
        for name, of_name in definitions.items()
        if of_name and callable(getattr(of_name[-1], "func", None))
    }


def parameters(item: Any) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    """The values of ``parametrize`` by name, and their positions in its list.

    ``item.callspec`` is what other plugins read, and no page documents. Empty where a test has none. Tried on pytest 8.0 and 9.2.
    """
    callspec = getattr(item, "callspec", None)
    return dict(getattr(callspec, "params", {})), dict(getattr(callspec, "indices", {}))


def arguments(pluginmanager: pytest.PytestPluginManager) -> tuple[str, ...]:
    """What the run was started with, while its options are still being added.

    ``Config.invocation_params`` is public; that the config is a plugin of that name, no page documents. Tried on pytest 8.0 and 9.2.
    """
    config = pluginmanager.get_plugin("pytestconfig")
    return tuple(map(str, config.invocation_params.args)) if config is not None else ()


def write_uncaptured(config: pytest.Config, line: str) -> None:
    """A line of the terminal in the middle of a test, below what pytest has written. A stream that is gone does not take the run with it.

    No public way: the plugins of pytest write there past the capture of output like this, of which ``capsys.disabled()`` is the
    public half. Tried on pytest 8.0 and 9.2.
    """
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    past_capture = capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext()
    with contextlib.suppress(OSError, ValueError), past_capture:
        reporter.ensure_newline()
        reporter.write_line(line)
        reporter.flush()
