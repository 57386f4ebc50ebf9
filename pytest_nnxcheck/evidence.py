"""What the run of one nesting measured, as plain data: reports, baselines and explanations are made of it.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from dataclasses import dataclass

SHOWN = 10
"""Buffers, and leaves, that are kept of each nesting: the largest."""


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of a peak: bytes a device."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    constants: int

    @property
    def peak(self) -> int:
        """Arguments + outputs + temporaries - aliased + captured constants."""
        return self.arguments + self.outputs + self.temporaries - self.aliased + self.constants


@dataclass(frozen=True, slots=True)
class Held:
    """A buffer that is live at the peak, largest first in `Evidence.buffers`: bytes a device.

    ``kind`` is argument, output, temporary or constant, ``stack`` the user's lines ``path:line``, the innermost first, empty where
    XLA inserted the buffer. ``name`` is the argument that the buffer is made of by copies only, ``whole`` says that it is all of it.
    """

    bytes: int
    shape: str
    kind: str
    operation: str
    stack: tuple[str, ...] = ()
    name: str = ""
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Residue:
    """A tracer that outlived its trace: ``layer`` left it, empty for the call itself; ``line`` is where it was made."""

    path: str
    holder: str
    kind: str
    type: str
    line: str
    layer: str


@dataclass(frozen=True, slots=True)
class Moved:
    """A donated leaf: its type before and after (empty where nothing came back), and whether it kept its buffer."""

    path: str
    before: str
    after: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one nesting left; ``un_nested`` is the split of the un-nested program beside it, ``expected`` the expected peak.

    ``reusable`` names the inputs that were not donated, though an output has their type and could take their buffer.
    """

    split: Split | None = None
    expected: int | None = None
    un_nested: Split | None = None
    buffers: tuple[Held, ...] = ()
    leaks: tuple[Residue, ...] = ()
    moves: tuple[Moved, ...] = ()
    reusable: tuple[str, ...] = ()
