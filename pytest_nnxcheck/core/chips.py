"""The chips whose compilers judge memory and donation beside that of the CPU: one row each, and how a target is written.

A target is a chip (``v5e``) or a slice of several (``v5e:4x4``, ``h100:8``). Nothing here imports jax.
"""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from pytest_nnxcheck.core.text import Unreadable, one_of

GIB = 2**30
_PLANE = tuple("1x1 1x2 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split())
"""The slices of a v5e and a v6e, as clouds rent them."""
_CUBE = tuple("1x1x1 1x1x2 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16".split())
"""Slices of the chips that are wired in three dimensions."""
HOST = 8
"""GPUs of one host."""
MOST_GPUS = 4096


class Gpu(NamedTuple):
    """The numbers of a GPU that its compiler reads: those of ``xla/backends/gpu/target_config/specs`` in openxla/xla."""

    label: str
    compute_capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block: int
    bandwidth: int
    l2_cache: int
    clock_ghz: float


class Chip(NamedTuple):
    """One chip. ``memory`` are the bytes that a program may use, of a GPU all of the device's.

    A TPU is ``spelled`` so in the name of a topology, with these ``slices``; some have several ``devices`` a chip, or need a ``config``.
    The memory of a TPU is what its compiler says when it refuses a program (libtpu 0.0.50); that of a GPU stands in openxla's file.
    """

    name: str
    memory: int
    slices: tuple[str, ...] = ()
    spelled: str = ""
    devices: int = 1
    config: str = ""
    gpu: Gpu | None = None

    @property
    def compiler(self) -> Literal["tpu", "cuda"]:
        """The platform of jax that compiles for it."""
        return "tpu" if self.gpu is None else "cuda"


CHIPS = (
    # Without megacore, which clusters run, a v4 has two devices a chip with half the memory each.
    Chip("v4", round(30.75 * GIB), _CUBE, "v4", config="megacore"),
    Chip("v5e", round(15.75 * GIB), _PLANE, "v5e"),
    Chip("v5p", round(95.73 * GIB), _CUBE, "v5p"),
    Chip("v6e", round(31.24 * GIB), _PLANE, "v6e"),
    Chip("v7x", round(94.74 * GIB), _CUBE, "tpu7x", devices=2),
    Chip(
        "a100-40",
        42331013120,
        gpu=Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 167936, 166912, 1555200000000, 41943040, 1.41),
    ),
    Chip(
        "a100",
        85100068864,
        gpu=Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 167936, 166912, 2039040000000, 41943040, 1.41),
    ),
    Chip(
        "h100",
        84942979072,
        gpu=Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 233472, 232448, 3352320000000, 52428800, 1.98),
    ),
    Chip("h200", 151397597184, gpu=Gpu("NVIDIA H200", (9, 0), 132, 128, 233472, 232448, 4800000000000, 52428800, 1.98)),
    Chip(
        "b200",
        191514411008,
        gpu=Gpu("NVIDIA B200", (10, 0), 148, 128, 233472, 232448, 7672320000000, 132644864, 1.965),
    ),
)
"""All chips, the oldest first."""

BY_NAME = {chip.name: chip for chip in CHIPS}


class Target(NamedTuple):
    """A chip, and the slice that was named: ``4x4`` of a TPU, ``8`` of a GPU, or nothing."""

    chip: Chip
    slice: str = ""

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.slice}" if self.slice else self.chip.name

    @property
    def devices(self) -> int:
        """The devices of the slice; 1 where none was named."""
        sizes = math.prod(map(int, self.slice.split("x"))) if self.slice else 1
        return sizes * self.chip.devices if self.slice else sizes

    def of_size(self, devices: int) -> Target | None:
        """The slice of this chip that has so many devices; `None` where there is none."""
        if devices == 1:
            return Target(self.chip)
        if self.chip.gpu is not None:
            return Target(self.chip, str(devices)) if devices <= MOST_GPUS else None
        slices = (Target(self.chip, name) for name in self.chip.slices)
        return next((target for target in slices if target.devices == devices), None)


def parse_target(word: str) -> Target:
    """Read ``v5e``, ``v5e:4x4`` or ``h100:8``. Raises `Unreadable` with what to write instead."""
    name, colon, slice_ = word.partition(":")
    chip = BY_NAME[one_of("target", name.strip().lower(), BY_NAME)]
    if not colon:
        return Target(chip)
    if chip.gpu is not None:
        if not re.fullmatch(r"[1-9]\d{0,3}", slice_, re.ASCII) or int(slice_) > MOST_GPUS:
            raise Unreadable(f"unknown slice {word!r}, write the number of GPUs: {chip.name}:{HOST}")
        return Target(chip, slice_)
    by_size = {tuple(sorted(known.split("x"))): known for known in chip.slices}
    known = by_size.get(tuple(sorted(slice_.split("x"))))
    if known is None:
        raise Unreadable(f"unknown slice {word!r}, {chip.name} has {', '.join(chip.slices)}")
    return Target(chip, known)


def sizes_of(chip: Chip) -> str:
    """``1, 2, 4, 8``: the numbers of devices that slices of a chip have, as a sentence says them."""
    if chip.gpu is not None:
        return f"1 to {MOST_GPUS}"
    return ", ".join(str(Target(chip, name).devices) for name in chip.slices)
