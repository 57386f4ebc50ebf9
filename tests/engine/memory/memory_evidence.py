"""What a call tells of its memory."""

from __future__ import annotations

import dataclasses
import json

from pytest_nnxcheck.core.text import format_bytes

KiB, MiB = 1024, 1024 * 1024
shown = format_bytes
"""Bytes as messages write them."""


def rows(found, label):
    return [row for violation in found.outcome.violations for name, row in violation.details if name == label]


def told(found):
    """The evidence of a call, which must be plain data."""
    known = found.outcome.evidence
    assert json.loads(json.dumps(dataclasses.asdict(known)))["split"]["temporaries"] == known.split.temporaries
    return known
