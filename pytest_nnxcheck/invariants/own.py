"""An invariant of the user's own: its function takes the call, and gives breaches."""

from __future__ import annotations

from typing import Any

from pytest_nnxcheck.core.catalogue import InvariantRow
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import NestedCall
from pytest_nnxcheck.core.outcome import Breach
from pytest_nnxcheck.core.text import first_line, near
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.values.effects import read

__tracebackhide__ = True  # pytest shows the frames of the user, not these

EXAMPLE = "write yield Breach(summary='what is broken')"


def judge(ran: Ran, row: InvariantRow) -> list[Breach]:
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
