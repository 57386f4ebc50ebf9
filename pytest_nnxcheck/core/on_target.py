"""One program as the compiler of a target made it, as plain data: whether it fits, its totals, lines, buffers and picture."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_nnxcheck.core.memory_picture import Picture
from pytest_nnxcheck.core.peak import Buffer, PeakLine, Split

Network = Literal["", "ici", "dcn"]
"""The network between devices, for several slices of TPUs: that of a slice, or that of the data center between them; empty where there is one."""


@dataclass(frozen=True, slots=True)
class Collective:
    """The operations of one kind between the devices of a program, in one call."""

    kind: str
    """The name of XLA: ``all-gather``."""
    count: int
    """Their number; those of a loop count in each of its steps."""
    bytes: int
    """The bytes of one device that take part, in all of them."""
    network: Network = ""
    at_least: bool = False
    """True if a loop has them whose number of steps is not known, so that they count once."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The arguments of a program that the same axes of its mesh cut into pieces."""

    axes: tuple[str, ...]
    """The names of the axes; none for arguments that are whole on each device."""
    leaves: int
    elements: int
    """The number of their elements, on all devices together."""
    bytes: int
    """The bytes of one device."""


@dataclass(frozen=True, slots=True)
class OnTarget:
    """One program as the compiler of a target made it, which ran nothing: bytes a device."""

    target: str
    """The chip, or the slice of the program's mesh: ``v5e``, ``v5e:2x4``."""
    limit: int = 0
    """The bytes that a program may use there: the compiler's own limit on a TPU, a share of the memory on a GPU."""
    share: float = 1.0
    """The part of a GPU's memory that jax takes."""
    fits: bool = True
    """On a TPU, true if its compiler took the program; on a GPU, true if ``peak`` is within ``limit``."""
    peak: int | None = None
    """The bytes to compare with ``limit``; `None` where this compiler gives no totals, or refused the program."""
    split: Split | None = None
    """The totals of the compiler. Their sum is ``peak`` on a GPU, and more on a TPU."""
    unpadded: int | None = None
    """``peak`` on a TPU without the padding of its tiles."""
    most: int | None = None
    """On a GPU, ``peak`` with what the device may need beside it: memory of one product, and buffers for what the program moves from the host.

    See `xla.products` and `engine.host_memory`. `None` where the compiler does not give the program.
    """
    copies: int = 0
    """Bytes of copies of the state, by forwarding."""
    state: int = 0
    """Bytes of one copy of the state, as the CPU counts them."""
    donated: int = 0
    """Leaves that the program donates."""
    lost: tuple[str, ...] = ()
    """The names of leaves whose buffer no output takes over, there and not on the CPU."""
    lost_too: int = 0
    """The number of leaves that lose their buffer there and on the CPU."""
    refused: str = ""
    """The compiler's words on a program that does not fit, in one line."""
    exhausted: str = ""
    """The memory of a kernel, if a program was refused because it needs too much of that: ``VMEM``, ``SMEM``, ``shared memory``, ``registers``. Empty for that of the chip."""
    host: int = 0
    """Bytes in the memory of the host, which ``peak`` does not count."""
    left_out: str = ""
    """The reason why this program cannot be compiled for the target, in one line: jax's own words, or that a mesh has no such slice."""
    answered: tuple[tuple[str, str], ...] = ()
    """The lines that asked jax what they run on, each with the answer that it got in place of the CPU's: ``("model.py:12 asked jax.default_backend()", '"tpu"')``."""
    effort: str = ""
    """The effort that the compiler of a TPU was asked for: ``O0``, which is fast, or ``default``."""
    wheel: str = ""
    """The compiler: ``libtpu 0.0.50.1``."""
    places: tuple[PeakLine, ...] = ()
    """The lines that hold most of the peak there, largest first."""
    buffers: tuple[Buffer, ...] = ()
    """The largest buffers at that peak that are no arguments."""
    picture: Picture | None = None
    """The picture of its memory there."""
    collectives: tuple[Collective, ...] = ()
    """The operations between devices, by network and kind: those with the most bytes first."""
    spread: tuple[Spread, ...] = ()
    """The arguments of a program over a mesh, by the axes that cut them: those with the most elements first."""
    flops: int | None = None
    """The floating point operations of one device in one call; `None` where the compiler counts none, or counts those of a loop once."""
    accessed: int | None = None
    """The bytes that one device reads and writes in its memory, known where ``flops`` is."""
    seconds: float = field(default=0.0, compare=False)
    """The seconds to lower and compile."""

    @property
    def may_not_fit(self) -> bool:
        """True if the program fits as it was compiled, and the device may need more than the limit."""
        return self.fits and self.most is not None and self.most > self.limit

    @classmethod
    def of_json(cls, text: bytes) -> OnTarget:
        """Read one. Raises `LookupError`, `TypeError` or `ValueError`."""
        found = without_lists(json.loads(text))
        split, places, buffers = found["split"], found["places"], found["buffers"]
        return cls(
            **{
                **found,
                "split": split and Split(**split),
                "places": tuple(PeakLine(**place) for place in places),
                "buffers": tuple(Buffer(**buffer) for buffer in buffers),
                "collectives": tuple(Collective(**each) for each in found["collectives"]),
                "spread": tuple(Spread(**each) for each in found["spread"]),
                "picture": Picture.of_json(found["picture"]) if found["picture"] else None,
            }
        )


def without_lists(value: Any) -> Any:
    """A value that JSON read, with a tuple in place of each list."""
    if isinstance(value, dict):
        return {name: without_lists(item) for name, item in value.items()}
    return tuple(map(without_lists, value)) if isinstance(value, list) else value
