"""The arguments of a test, and the terminal: every touch of a name of pytest that is not public."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
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


def parameters(item: Any) -> Mapping[str, Any]:
    """The values of ``parametrize`` by name.

    ``item.callspec`` is what other plugins read, and no page documents. Empty where a test has none. Tried on pytest 8.0 and 9.2.
    """
    callspec = getattr(item, "callspec", None)
    return dict(getattr(callspec, "params", {}))


def arguments(pluginmanager: pytest.PytestPluginManager) -> tuple[str, ...]:
    """The arguments that the run was started with, while its options are still being added.

    ``Config.invocation_params`` is public; that the config is a plugin of that name, no page documents. Tried on pytest 8.0 and 9.2.
    """
    config = pluginmanager.get_plugin("pytestconfig")
    return tuple(map(str, config.invocation_params.args)) if config is not None else ()


def write_uncaptured(config: pytest.Config, line: str) -> None:
    """Write a line on the terminal in the middle of a test, below the output of pytest. A stream that is gone does not take the run with it.

    No public way: the plugins of pytest write there past the capture of output like this. ``capsys.disabled()`` is the public half of it.
    Tried on pytest 8.0 and 9.2.
    """
    reporter = config.pluginmanager.getplugin("terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    past_capture = capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext()
    with contextlib.suppress(OSError, ValueError), past_capture:
        reporter.ensure_newline()
        reporter.write_line(line)
        reporter.flush()


def tell_junit(pluginmanager: Any, nodeid: str, why: str, properties: list[tuple[str, str | int]]) -> None:
    """Have JUnit's XML name a test that was interrupted, as one that is skipped: pytest reports nothing of it.

    No public way: a report that all plugins get would change what the terminal counts, and what ``--lf`` runs again. Nothing happens where pytest
    has renamed its plugin. Tried on pytest 8.0 and 9.2.
    """
    import pytest

    file = nodeid.partition("::")[0]
    for plugin in [each for each in pluginmanager.get_plugins() if type(each).__name__ == "LogXML"]:
        for when, outcome, text in (("call", "skipped", (file, 0, why)), ("teardown", "passed", None)):
            place, more = (file, 0, nodeid.rpartition("::")[2]), {"user_properties": properties}
            plugin.pytest_runtest_logreport(pytest.TestReport(nodeid, place, {}, outcome, text, when, **more))  # type: ignore[arg-type]


# --- the text of a failure


OUR_CLASS = re.compile(r"\Apytest_nnxcheck\.\w+: (?=nnx )")
"""The class of one of our exceptions before a message that has its own first words."""
_MARGIN = "E       "
"""The text that pytest writes before each line of an exception; it is longer where the line that raised is indented further."""


def tell(longrepr: Any, in_short: str) -> None:
    """Take the class of our exceptions off the message, and the indent of the line that raised; the short summary says ``in_short``, if that is something.

    No public way: the hook ``pytest_exception_interact`` comes too late, and a ``__str__`` cannot tell one reader from the other. Tried on
    pytest 8.0 and 9.2.
    """
    crash = getattr(longrepr, "reprcrash", None)
    if crash is not None:
        head, newline, rest = OUR_CLASS.sub("", crash.message).partition("\n")
        crash.message = (in_short or head) + newline + rest
    for entry in _entries(longrepr):
        margin = next((match[0] for line in entry.lines if (match := re.match(r"E  +", line))), "")
        for number, line in enumerate(entry.lines):
            if margin and line.startswith("E"):
                entry.lines[number] = min(margin, _MARGIN, key=len) + OUR_CLASS.sub("", line[len(margin) :])


def _entries(longrepr: Any) -> Iterator[Any]:
    for part in getattr(longrepr, "chain", None) or [(getattr(longrepr, "reprtraceback", None),)]:
        yield from (entry for entry in getattr(part[0], "reprentries", ()) if isinstance(entry.lines, list))
