"""An invariant of the user's own: its function takes the call, and gives breaches."""

from __future__ import annotations

from typing import Any

from pytest_nnxcheck.core.catalogue import InvariantRow
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.outcome import Breach
from pytest_nnxcheck.core.text import first_line, near
from pytest_nnxcheck.invariants.case import Case, Judgement

__tracebackhide__ = True  # pytest shows the frames of the user, not these

EXAMPLE = "write yield Breach(summary='what is broken')"


def judge(case: Case, row: InvariantRow) -> Judgement:
    """Ask an invariant of the user's own to judge a case; an error where it gives anything but breaches."""
    if row.function is None:
        return Judgement()
    who = f"the invariant {row.name!r} ({near(row.place)})"
    if isinstance(case.nested_call, Exception):
        return raised(who, case.nested_call, case)
    try:
        given = row.function(case.nested_call)
        breaches: list[Any] = [*given]
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return raised(who, error, case)
    if not all(map(is_breach, breaches)) or isinstance(given, str):
        return Judgement(error=CheckError(f"{who} gave {given!r:.120}, where breaches are expected: {EXAMPLE}"))
    return Judgement.of(row.name, breaches)


def raised(who: str, error: Exception, case: Case) -> Judgement:
    """The judgement of an invariant that ended with an exception of the user's code."""
    told = CheckError(f"{who} raised {first_line(error)} under {case.nesting}")
    told.__cause__ = error
    return Judgement(error=told)


def is_breach(value: Any) -> bool:
    """True if a value is a breach, of text alone."""
    if not isinstance(value, Breach):
        return False
    texts: list[object] = [value.path, value.summary, value.hint]
    rows: Any = value.details
    for row in rows if isinstance(rows, list | tuple) else [()]:
        texts += row if isinstance(row, list | tuple) and len(row) == 2 else [None]
    return all(isinstance(text, str) for text in texts)
