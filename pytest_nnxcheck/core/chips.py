"""The chips whose compilers judge memory and donation as well: one row each, and the notation of a target.

A target is a chip (``v5e``), a slice of several (``v5e:4x4``, ``h100:8``), or several slices of a TPU (``2*v5e:16x16``), which a network of the data
center joins. Nothing here imports jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from pytest_nnxcheck.core.text import Unreadable, one_of

Compiler = Literal["tpu", "cuda"]
GIB = 2**30
_PLANE = tuple("1x1 1x2 2x2 2x4 4x4 4x8 8x8 8x16 16x16".split())
"""The slices of a v5e and a v6e, as clouds rent them."""
_CUBE = tuple("1x1x1 1x1x2 2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x8x8 8x8x8 8x8x16 8x16x16 16x16x16".split())
"""Slices of the chips that are wired in three dimensions."""
HOST = 8
"""GPUs of one host."""
MOST_GPUS = 4096
"""The largest slice of GPUs that can be written."""
SHARE = 0.75
"""The share of a GPU's memory that jax takes, unless the environment says another one."""


class Chip(NamedTuple):
    """One chip."""

    name: str
    memory: int
    """Bytes that a program may use on a TPU, as its compiler says when it refuses one (libtpu 0.0.50); all of the device's on a GPU."""
    slices: tuple[str, ...]
    spelled: str = ""
    """The name of a TPU in that of a topology."""
    devices: int = 1
    """Devices of one chip."""
    config: str = ""
    """The ``chip_config_name`` of a topology; most chips need none."""
    gpu: str = ""
    """The description that the compiler of a GPU reads; empty for a TPU."""
    workspace: int = 0
    """Bytes that a kernel of cuBLAS may take beside its arrays on a GPU: ``GetWorkspaceSize`` in openxla/xla."""

    @property
    def compiler(self) -> Compiler:
        """The platform of jax that compiles for it."""
        return "cuda" if self.gpu else "tpu"


_GPU = """gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: {core_memory} threads_per_core_limit: 2048 core_count: {cores} fpus_per_core: {fpus}
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {bandwidth}
l2_cache_size: {l2_cache} clock_rate_ghz: {clock} device_memory_size: {memory}
shared_memory_per_block_optin: {block_memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
cuda_compute_capability {{ major: {major} minor: {minor} }} }}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "NVIDIA {label}" """
"""A ``GpuTargetConfigProto`` as text: jax has no names for GPUs. XLA reads the memory, and rematerializes to stay within it."""

_GPUS = """
name    memory       major minor cores fpus core_memory block_memory bandwidth     l2_cache  clock label
a100-40 42331013120  8     0     108   64   167936      166912       1555200000000 41943040  1.41  A100-SXM4-40GB
a100    85100068864  8     0     108   64   167936      166912       2039040000000 41943040  1.41  A100-SXM4-80GB
h100    84942979072  9     0     132   128  233472      232448       3352320000000 52428800  1.98  H100 80GB HBM3
h200    151397597184 9     0     132   128  233472      232448       4800000000000 52428800  1.98  H200
b200    191514411008 10    0     148   128  233472      232448       7672320000000 132644864 1.965 B200
"""
"""The numbers by which GPUs differ, from ``xla/backends/gpu/target_config/specs`` in openxla/xla."""


def _gpus() -> Iterator[Chip]:
    names, *rows = (line.split(maxsplit=11) for line in _GPUS.strip().splitlines())
    for row in rows:
        gpu = dict(zip(names, row, strict=True))
        workspace = (32 if int(gpu["major"]) >= 9 else 4) * 2**20
        slices = tuple(map(str, range(1, MOST_GPUS + 1)))
        yield Chip(gpu["name"], int(gpu["memory"]), slices, gpu=_GPU.format(**gpu), workspace=workspace)


CHIPS = (
    # Without megacore, which clusters run, a v4 has two devices a chip with half the memory each.
    Chip("v4", round(30.75 * GIB), _CUBE, "v4", config="megacore"),
    Chip("v5e", round(15.75 * GIB), _PLANE, "v5e"),
    Chip("v5p", round(95.73 * GIB), _CUBE, "v5p"),
    Chip("v6e", round(31.24 * GIB), _PLANE, "v6e"),
    Chip("v7x", round(94.74 * GIB), _CUBE, "tpu7x", devices=2),
    *_gpus(),
)
"""All chips, the oldest first."""

BY_NAME = {chip.name: chip for chip in CHIPS}


class Target(NamedTuple):
    """A chip, and the slice that was named: ``4x4`` of a TPU, ``8`` of a GPU, or nothing."""

    chip: Chip
    slice: str = ""
    slices: int = 1
    """The number of such slices."""

    def __str__(self) -> str:
        several = f"{self.slices}*" if self.slices > 1 else ""
        return f"{several}{self.chip.name}:{self.slice}" if self.slice else self.chip.name

    @property
    def devices(self) -> int:
        """The devices of all slices; 1 where none was named."""
        return self.slices * math.prod(map(int, self.slice.split("x"))) * self.chip.devices if self.slice else 1

    def of_size(self, devices: int) -> Target | None:
        """The slice of this chip that has so many devices, or so many of the same slices; `None` where there is none."""
        if self.slices > 1:
            slices, rest = divmod(devices * self.slices, self.devices)
            return self._replace(slices=slices) if slices > 1 and not rest else None
        known = (Target(self.chip, name) for name in self.chip.slices)
        return next((target for target in known if target.devices == devices), None)


def parse_target(word: str) -> Target:
    """Read ``v5e``, ``v5e:4x4``, ``2*v5e:16x16`` or ``h100:8``. Raises `Unreadable` with what to write instead."""
    count, star, one = word.lower().rpartition("*")
    name, colon, slice_ = one.partition(":")
    chip = BY_NAME[one_of("target", name.strip(), BY_NAME)]
    slices = int(count) if count.strip().isdecimal() else 0
    if star and (chip.gpu or not colon or not slices):
        example = f"{chip.name}:{2 * HOST}" if chip.gpu else f"2*{chip.name}:{chip.slices[-1]}"
        raise Unreadable(f"unknown slices {word!r}, write {example}" + (", two hosts of eight" if chip.gpu else ""))
    if not colon:
        return Target(chip)
    by_size = {tuple(sorted(known.split("x"))): known for known in chip.slices}
    known = by_size.get(tuple(sorted(slice_.split("x"))))
    if known is None:
        there = (
            f"write the number of GPUs: {chip.name}:{HOST}" if chip.gpu else f"{chip.name} has {', '.join(chip.slices)}"
        )
        raise Unreadable(f"unknown slice {word!r}, {there}")
    return Target(chip, known, slices or 1)


def sizes_of(chip: Chip) -> str:
    """``1, 2, 4, 8``: how many devices the slices of a chip have, for a sentence."""
    if chip.gpu:
        return f"1 to {MOST_GPUS}"
    return ", ".join(str(Target(chip, name).devices) for name in chip.slices)
