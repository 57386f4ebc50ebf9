"""The ledger of a peak: each of its bytes under one head. It adds up to the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pytest_nnxcheck.core.peak import Buffer, Memory

HEADS = (
    "state",
    "optimizer state",
    "inputs",
    "outputs",
    "gradients",
    "saved for the backward pass",
    "copies of the state",
    "copies of inputs",
    "casts of the state",
    "casts of inputs",
    "constants",
    "other temporaries",
    "not explained",
    "in the same memory",
)
"""The heads, in the order in which a message has them."""

Ledger = tuple[tuple[str, int], ...]
"""Heads with their bytes, those that have any."""


def ledger(memory: Memory, heads: Mapping[str, str]) -> Ledger:
    """The bytes of a peak by head; ``heads`` says which arguments are state and which optimizer state, by name. All others are inputs.

    An output in the buffer of an argument is under that. What the buffers do not add up to is not explained: XLA packs them, with gaps between. If they
    add up to more, some are in the same memory: the compiler of a GPU does not say which.
    """
    sums = Counter[str]()
    for buffer in memory.buffers:
        sums[head(buffer, heads)] += buffer.bytes
    rest = memory.peak - sum(sums.values())
    sums["not explained" if rest > 0 else "in the same memory"] = rest
    return tuple((name, sums[name]) for name in HEADS if sums[name])


def head(buffer: Buffer, heads: Mapping[str, str]) -> str:
    """The head of one buffer."""
    owner = "the state" if heads.get(buffer.name) else "inputs"
    match buffer.kind, buffer.part:
        case "argument", _:
            return heads.get(buffer.name, "inputs")
        case "output", _:
            return "outputs"
        case "constant", _:
            return "constants"
        case _, "casts":
            return f"casts of {owner}"
        case _, "":
            return f"copies of {owner}" if buffer.name else "other temporaries"
    return buffer.part
