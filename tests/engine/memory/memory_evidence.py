"""What a call tells of its memory, and how the tests write down a line of the user's."""

from __future__ import annotations

import dataclasses
import inspect
import json

from pytest_nnxcheck.core.text import near

KiB, MiB = 1024, 1024 * 1024


def line(function, fragment):
    """``path:line`` of the line of a function that holds this text."""
    lines, start = inspect.getsourcelines(function)
    (number,) = [start + number for number, each in enumerate(lines) if fragment in each]
    return near(f"{inspect.getsourcefile(function)}:{number}")


def rows(found, label):
    return [row for violation in found.outcome.violations for name, row in violation.details if name == label]


def told(found):
    """The evidence of a call, which must be plain data."""
    known = found.outcome.evidence
    assert json.loads(json.dumps(dataclasses.asdict(known)))["split"]["temporaries"] == known.split.temporaries
    return known
