"""Devices: their simulation by XLA on the CPU, the advice where there are too few, and the stamp of a run.

Nothing here imports jax before somebody asks for the devices that there are: the flag counts only until jax starts.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.text import counted

if TYPE_CHECKING:
    from pytest_nnxcheck.core.facts import Stamp

FLAGS = "XLA_FLAGS"
FLAG = "--xla_force_host_platform_device_count"
_OVERRIDE = "JAX_NUM_CPU_DEVICES"
"""Newer versions of jax read this too, and it wins over the flag."""

_GIVEN = re.compile(rf"(?<!\S){FLAG}(?:=\S*)?(?!\S)\s*")


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that jax shows."""

    count: int
    platform: str


def with_flag(flags: str, count: int) -> str:
    """Flags of XLA that simulate ``count`` CPU devices, all others as they were.

    Raises `CheckError` for the name of a file, which XLA takes as well.
    """
    if flags.strip() and not flags.lstrip().startswith("--"):
        raise CheckError(
            f"{FLAGS} names a file, {flags.strip()!r}, and no flag can be added to that: write the flags themselves into {FLAGS}"
        )
    return f"{_GIVEN.sub('', flags).strip()} {FLAG}={count}".lstrip()


def simulate(environment: MutableMapping[str, str], count: int) -> Callable[[], None]:
    """Ask for ``count`` CPU devices in the environment. Returns a function that puts it back. Raises `CheckError`."""
    changed = {FLAGS: with_flag(environment.get(FLAGS, ""), count)}
    if _OVERRIDE in environment:
        changed[_OVERRIDE] = str(count)
    return set_variables(environment, changed)


def set_variables(environment: MutableMapping[str, str], changed: Mapping[str, str]) -> Callable[[], None]:
    """Set variables of the environment. Returns a function that puts it back."""
    before = {name: environment.get(name) for name in changed}
    environment.update(changed)

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value

    return restore


def is_simulated(environment: Mapping[str, str]) -> bool:
    """True if the environment sets the number of CPU devices."""
    return _OVERRIDE in environment or FLAG in environment.get(FLAGS, "")


def available() -> Devices:
    """The devices of this process. Starts jax."""
    jax: Any = importlib.import_module("jax")
    return Devices(jax.device_count(), jax.default_backend())


def stamp() -> Stamp:
    """The versions and the device that the figures of this process depend on. Starts jax."""
    from pytest_nnxcheck.core.facts import Stamp

    jax, jaxlib, flax = (importlib.import_module(name) for name in ("jax", "jaxlib", "flax"))
    first = jax.devices()[0]
    # A CPU is one device, so several are simulated; how many chips a host has says nothing about one of them.
    simulated = jax.device_count() if first.platform == "cpu" else 1
    return Stamp(
        jax.__version__, jaxlib.__version__, flax.__version__, first.platform, first.device_kind, str(simulated)
    )


def too_few(needed: int, there: Devices, simulated: int | None) -> str:
    """Why a test cannot run, and how to start pytest instead; empty where there are enough devices."""
    if there.count >= needed:
        return ""
    lacks = f"needs {counted(needed, 'device')}, jax has {there.count}"
    if there.platform != "cpu":
        return f"{lacks} ({there.platform}): JAX_PLATFORMS=cpu pytest --nnx-devices {needed} simulates them on the CPU"
    if simulated is None or simulated < needed:
        return f"{lacks}: run pytest --nnx-devices {needed}, or write nnx_devices = {needed} into the ini file"
    return (
        f"{lacks}, since it was started before pytest could simulate {simulated}: start pytest with"
        f" {FLAGS}={FLAG}={simulated} in the environment"
    )


def require(needed: int, there: Devices) -> None:
    """Refuse a check outside pytest, where no option simulates devices. Raises `CheckError`."""
    if there.count < needed:
        platform = "" if there.platform == "cpu" else f" ({there.platform})"
        cpu = "" if there.platform == "cpu" else "JAX_PLATFORMS=cpu "
        raise CheckError(
            f"check(..., devices={needed}) needs {counted(needed, 'device')}, jax has {there.count}{platform}: start Python with"
            f" {cpu}{FLAGS}={FLAG}={needed} in the environment"
        )
