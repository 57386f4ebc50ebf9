"""Ask the invariants of a check about a call that ran."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.core.catalogue import InvariantRow, rows_of, severity
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import NestedCall, Observation
from pytest_nnxcheck.core.notes import Note
from pytest_nnxcheck.core.outcome import Breach, Finding, Violation
from pytest_nnxcheck.core.text import first_line, near
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.invariants import donation
from pytest_nnxcheck.subject.profile import UNKNOWN
from pytest_nnxcheck.values.effects import read

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict of all invariants on a nesting."""

    violations: tuple[Violation, ...] = ()
    """The broken invariants, the most serious first."""
    notes: tuple[Note, ...] = ()
    """Notes that are no violations."""
    error: CheckError | None = None
    """The error of an invariant of the user's own that could not judge; the first of several."""
    of_call: tuple[Note, ...] = ()
    """Notes on the call, reported once for all its nestings."""
    asserted: tuple[str, ...] = ()
    """The invariants that the run could have broken."""


def judged(ran: Ran, invariants: Iterable[str]) -> Judgement:
    """Judge a run by the invariants of these names, in the order of their rows. The notes begin with those on donation, asserted or not."""
    violations: list[Violation] = []
    notes: list[Note] = [*donation.notes(ran.observation)]
    errors: list[CheckError] = []
    asserted: list[str] = []
    for row in rows_of(invariants):
        if not can_judge(row, ran.observation, broken=bool(violations)):
            continue
        built_in = importlib.import_module(f"pytest_nnxcheck.invariants.{row.name}") if row.function is None else None
        if asserts(row, built_in, ran):
            asserted.append(row.name)
        if built_in is not None:
            said = [*built_in.judge(ran)]
        else:
            try:
                said = [*judge_own(ran, row)]
            except CheckError as error:
                errors.append(error.with_traceback(None))  # its frames hold arrays
                continue
        notes += [each for each in said if not isinstance(each, Finding)]
        if findings := tuple(each for each in said if isinstance(each, Finding)):
            violations.append(Violation(row.name, findings=findings))
    return Judgement(
        violations=tuple(sorted(violations, key=lambda violation: severity(violation.invariant))),
        notes=tuple(note for note in notes if not is_of_call(note)),
        error=errors[0] if errors else None,
        of_call=tuple(dict.fromkeys(note for note in notes if is_of_call(note))),
        asserted=tuple(asserted),
    )


def is_of_call(note: Note) -> bool:
    """True if a note is on the call, whatever its nesting."""
    return bool(getattr(note, "of_call", False))


def asserts(row: InvariantRow, built_in: ModuleType | None, ran: Ran) -> bool:
    """True if a run could have broken an invariant: it has arrays or makes some, and what the invariant is about, a compiled program or other values."""
    subject, program = ran.call.subject, ran.profile.program
    has_arrays = subject.input_names or graph.raw_leaves(subject.state) or graph.attributes(subject.state)
    if not (has_arrays or ran.profile is UNKNOWN or program.equations or program.captured):
        return False
    of_its_own = getattr(built_in, "asserts", None)
    if of_its_own is not None:
        return bool(of_its_own(ran))
    compares = row.values and built_in is not None
    compiled = ran.observation.memory is not None or (row.targeted and ran.observation.refused)
    return not ((row.compiled and not compiled) or (compares and ran.reference is None))


def can_judge(row: InvariantRow, observation: Observation, *, broken: bool) -> bool:
    """True if an invariant can judge the run.

    Values are compared where the call ended, left no tracers, and broke nothing else; an invariant of the user's own is asked where it ended
    and left none, whatever else broke.
    """
    if row.runs and observation.abstract:
        return False
    if row.function is not None:
        return observation.settled and (observation.memory is not None or not row.compiled)
    return observation.settled and not broken if row.values else True


# --- an invariant of the user's own: its function takes the call, and gives breaches

EXAMPLE = "write yield Breach(summary='what is broken')"


def judge_own(ran: Ran, row: InvariantRow) -> list[Breach]:
    """Ask an invariant of the user's own. Raises `CheckError` where that raises, or gives anything but breaches."""
    assert row.function is not None
    who = f"the invariant {row.name!r} ({near(row.place)})"
    try:
        given = row.function(nested_call(ran))
        breaches: list[Any] = [*given]
    except Exception as error:
        raise CheckError(f"{who} raised {first_line(error)} under {ran.observation.nesting}") from error
    if not all(map(is_breach, breaches)) or isinstance(given, str):
        raise CheckError(f"{who} gave {given!r:.120}, where breaches are expected: {EXAMPLE}")
    return breaches


def nested_call(ran: Ran) -> NestedCall:
    """The call as an invariant of the user's own sees it. Raises what the user's objects raise where they are read."""
    subject, observation = ran.call.subject, ran.observation
    before, after = read(subject, subject.state), read(subject, observation.state)
    outputs: dict[str, Any] = {}
    for name, array in zip(observation.output_names, observation.output, strict=False):
        label = f"output{name}"  # all arrays of a module that is returned have one name
        outputs[label if label not in outputs else f"{label} #{len(outputs)}"] = array
    return NestedCall(
        nesting=observation.nesting,
        before={path: leaf.value for path, leaf in before.leaves.items()},
        after={path: leaf.value for path, leaf in after.leaves.items()},
        kinds={path: leaf.kind for path, leaf in after.leaves.items()},
        outputs=outputs,
        memory=observation.memory,
        compiled=observation.compiled,
        abstract=observation.abstract,
    )


def is_breach(value: Any) -> bool:
    """True if a value is a breach, of text alone."""
    if not isinstance(value, Breach):
        return False
    texts: list[object] = [value.path, value.summary, value.hint]
    rows: Any = value.details
    for row in rows if isinstance(rows, list | tuple) else [()]:
        texts += row if isinstance(row, list | tuple) and len(row) == 2 else [None]
    return all(isinstance(text, str) for text in texts)
