"""The functions by which code asks jax what it runs on: the lines that ask, and the answers of another machine for a while.

There is no public way to give another answer: the functions are replaced in every module that holds them. jax and flax get the answers of this
machine, whose devices their programs are traced for. Tried on all versions.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import jax
import jax.extend.backend

from pytest_nnxcheck.compat.owner import of_frame, owner
from pytest_nnxcheck.core.text import near

_ASKING = {
    **dict.fromkeys(("devices", "local_devices", "device_count", "local_device_count", "default_backend"), jax),
    "get_backend": jax.extend.backend,
}
"""The functions that code calls to branch on the device, each with a module that has it."""

_PUBLIC = ("jax", "jax.extend.backend", "jax.lib.xla_bridge")
"""The modules of jax by which a user reaches them."""

_KERNELS = "jax.experimental.pallas.ops."
"""Kernels that come with jax: they choose the sizes of their blocks by the device, as the code of a user would."""

_OF_THE_RUNTIME = frozenset({"client", "memory", "memory_stats", "default_memory", "addressable_memories", "live_buffers"})  # fmt: skip
"""Attributes of a device that need one which is there."""

_HAVE_ASKED: set[CodeType] = set()
"""The functions of this process that have asked, and those that called them."""

_CACHED = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class Machine:
    """One process with the devices of a target."""

    platform: str
    """The name of its backend: ``tpu``, ``gpu``."""
    devices: tuple[Any, ...]
    """Its devices, those of a topology."""

    @property
    def names(self) -> set[str]:
        """The names that its backend has."""
        return {self.platform, *(["cuda"] if self.platform == "gpu" else [])}


@contextlib.contextmanager
def asked(machine: Machine | None = None) -> Iterator[dict[str, str]]:
    """Collect the user's lines that ask jax what it runs on for a while, each with its answer: ``model.py:12 asked jax.default_backend()``.

    With a ``machine`` these lines get its answers. A jit that has its trace asks nobody, nor does a function with a `functools.lru_cache`: both are
    emptied if their code has asked before.
    """
    lines: dict[str, str] = {}
    _forget()
    real = {name: getattr(module, name) for name, module in _ASKING.items()}
    noted = {id(function): _noted(name, function, machine, lines) for name, function in real.items()}
    held = [each for each in _globals() if id(each[2]) in noted]
    for names, name, function in held:
        names[name] = noted[id(function)]
    try:
        with _meshes_of_this_machine() if machine else contextlib.nullcontext():
            yield lines
    finally:
        for names, name, function in held:
            names[name] = function
        if machine:
            _forget()


def _globals() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The global names of all modules whose code may ask, with what they hold."""
    for module in [*sys.modules.values()]:
        name = getattr(module, "__name__", "")
        if name in _PUBLIC or owner(name) in ("user", "installed"):
            names = getattr(module, "__dict__", {})
            yield from ((names, name, value) for name, value in [*names.items()])


def _forget() -> None:
    """Empty the caches that may keep an answer; nothing is touched before somebody has asked."""
    if _HAVE_ASKED:
        jax.clear_caches()
        for _, _, value in _globals():
            if type(value) is _CACHED and getattr(value.__wrapped__, "__code__", None) in _HAVE_ASKED:
                value.cache_clear()


def _callers(frame: FrameType | None) -> Iterator[CodeType]:
    """The code of a frame, and of those that called it."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _asks(frame: FrameType) -> bool:
    """True if the code of a frame is to get the answers of a target."""
    return of_frame(frame) in ("user", "installed") or str(frame.f_globals.get("__name__")).startswith(_KERNELS)


def _noted(name: str, function: Callable[..., Any], machine: Machine | None, lines: dict[str, str]) -> Any:
    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        named = {value for value in (*args, *kwargs.values()) if isinstance(value, str)}
        # The CPU of a machine is that of any other.
        if not _asks(caller) or named == {"cpu"}:
            return function(*args, **kwargs)
        line = f"{near(caller.f_code.co_filename)}:{caller.f_lineno} asked {_ASKING[name].__name__}.{name}()"
        lines[line] = "an exception"
        _HAVE_ASKED.update(_callers(caller))
        answer = _Answers(machine).of(name) if machine and named <= machine.names else function(*args, **kwargs)
        lines[line] = _shown(answer)
        return answer

    return noted


def _shown(answer: Any) -> str:
    """An answer in words: ``"tpu"``, ``8``, ``8 of TPU v5 lite``."""
    if isinstance(answer, list):
        return f"{len(answer)} of {answer[0].device_kind}" if answer else "none"
    return f'"{answer}"' if isinstance(answer, str) else str(getattr(answer, "platform", answer))


@dataclass(frozen=True, slots=True)
class _Answers:
    """The answers of a machine; a backend has most of them as methods."""

    machine: Machine

    def of(self, name: str) -> Any:
        match name:
            case "default_backend":
                return self.platform
            case "get_backend":
                return _Told(jax.extend.backend.get_backend(), self)
            case _:
                return getattr(self, name)()

    @property
    def platform(self) -> str:
        return self.machine.platform

    @property
    def platform_version(self) -> str:
        return str(self.machine.devices[0].client.platform_version)

    def devices(self) -> list[Any]:
        here = jax.devices()
        return [_Told(here[number % len(here)], there) for number, there in enumerate(self.machine.devices)]

    def device_count(self) -> int:
        return len(self.machine.devices)

    # A program for many hosts is traced here by one process.
    local_devices, local_device_count = devices, device_count


class _Told:
    """A device or a backend of this machine that says of itself what one ``there`` does."""

    def __init__(self, here: Any, there: Any) -> None:
        self._here, self._there = here, there

    def __getattr__(self, name: str) -> Any:
        first, second = (self._here, self._there) if name in _OF_THE_RUNTIME else (self._there, self._here)
        return getattr(first, name) if hasattr(first, name) else getattr(second, name)

    def __repr__(self) -> str:
        return repr(self._there)


def _meshes_of_this_machine() -> contextlib.AbstractContextManager[Any]:
    """Let meshes take the devices that were given as answers, and hold those of this machine instead."""
    real = jax.sharding.Mesh.__new__

    def made(cls: type, devices: Any, *args: Any, **kwargs: Any) -> Any:
        import numpy as np

        devices = np.array(devices, dtype=object)
        own = np.empty(devices.shape, object)
        own.flat = [device._here if isinstance(device, _Told) else device for device in devices.flat]
        return real(cls, own, *args, **kwargs)

    return mock.patch.object(jax.sharding.Mesh, "__new__", staticmethod(made))
