"""Compile programs for absent chips, with the compilers that come as wheels: libtpu, and the CUDA plugin of jax.

`jax.export` lowers an existing trace for another platform, and names no device: constraints on a mesh of CPU devices follow. All of it is public API of jax. Tried on jax 0.5.3, 0.6.2, 0.10.2 and 0.12.0.1.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import math
import os
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from pytest_nnxcheck.compat.arrays import HOST_MEMORY, active_mesh
from pytest_nnxcheck.compat.backend import Machine
from pytest_nnxcheck.compat.compile_cache import judged_compiles
from pytest_nnxcheck.compat.staging import configured
from pytest_nnxcheck.core.chips import HOST, SHARE, Chip, Target, sizes_of
from pytest_nnxcheck.core.errors import CheckError

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Variables that say which share of a GPU's memory jax takes."""

_CHIPS_OF_A_HOST = 4
"""TPUs of a host in a topology that says nothing else."""
_LONGEST = 400
"""Characters of an exception that a row of a message shows: jax says the reason in its second sentence."""
_LONGEST_REFUSAL = 150
"""Characters of a compiler's refusal that a row shows. It says the reason first, and prints the instruction after that."""
_OF_KERNELS = ("VMEM", "SMEM", "shared memory", "registers")
"""The memories of a kernel, in the words of the compilers."""


_ENDINGS = [
    *(signal.SIGTERM, signal.SIGABRT, signal.SIGSEGV, signal.SIGFPE, signal.SIGILL),
    *(getattr(signal, name) for name in ("SIGHUP", "SIGBUS", "SIGTRAP") if hasattr(signal, name)),
]
"""The signals that end a process, and that libtpu handles."""
_SIGACTION = 256
"""Bytes that hold a ``struct sigaction`` of the C library, on all machines."""


class LeftOut(Exception):
    """A program cannot be compiled for a target; the text says why, in one line."""


class TooLarge(Exception):
    """A compiler refused a program for its size; the text is the compiler's."""

    def __init__(self, text: str, memory: str) -> None:
        super().__init__(text)
        self.memory = memory
        """The memory of a kernel that the program needs too much of; empty for that of the chip, HBM."""


def target_of(named: Target, mesh: Any) -> Target:
    """The slice of a chip for a program over a mesh; one device where the mesh is `None`.

    Raises `CheckError` where another slice was named, `LeftOut` where the chip has none of that size.
    """
    if mesh is None:
        return Target(named.chip)
    if mesh.size == named.devices:
        return named
    target, sizes = named.of_size(mesh.size), f"{named.chip.name} has slices of {sizes_of(named.chip)} devices"
    if named.slice:
        advice = f"write {target}" if target else sizes
        raise CheckError(f"target {named}: the mesh has {mesh.size} devices, {named} has {named.devices}: {advice}")
    if target is None:
        raise LeftOut(f"a mesh of {mesh.size} devices: {sizes}")
    return target


def mesh_of(leaves: Sequence[Any], compiled: Any = None) -> Any:
    """The mesh of several devices that leaves are sharded over; `None` without one. Raises `LeftOut` for meshes of two sizes.

    Where only the code names a mesh, a flat one of the devices that the program was ``compiled`` for takes its place.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    named = [sharding.mesh for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding)]
    meshes = {mesh.size: mesh for mesh in named if mesh.size > 1}
    if len(meshes) > 1:
        raise LeftOut(f"meshes of {' and '.join(map(str, meshes))} devices in one program")
    if meshes or compiled is None:
        return next(iter(meshes.values()), None)
    try:
        shardings = jax.tree.leaves(compiled.input_shardings)
    except ValueError:
        # jax 0.12 counts a captured reference among the inputs, and finds no place for it: such a program has no mesh.
        return None
    devices = max((each.device_set for each in shardings), key=len, default=())
    return jax.sharding.Mesh(np.array([*devices]), ("devices",)) if len(devices) > 1 else None


def machine_of(target: Target) -> Machine:
    """The machine that a program runs on, as jax answers for it there. Raises `CheckError` with the compiler's words."""
    return Machine("gpu" if target.chip.gpu else "tpu", _devices(target)[: target.devices])


def limit_of(chip: Chip) -> tuple[int, float]:
    """The bytes of a chip that a program may use, and their share of its memory."""
    if not chip.gpu:
        return chip.memory, 1.0
    given, share = next((os.environ[name] for name in _FRACTIONS if os.environ.get(name)), ""), SHARE
    with contextlib.suppress(ValueError):
        share = share if not 0 < float(given) <= 1 else float(given)  # more is memory of the host
    return round(chip.memory * share), share


def lowered_for(target: Target, mesh: Any, jitted: Any, arguments: Any, donated: tuple[int, ...]) -> Any:
    """Lower the trace of ``jitted`` for these arguments, some of whose leaves are ``donated``, for the devices of a target.

    Raises `LeftOut` for a program that jax cannot lower for another platform: a callback, a kernel that asks for the device.
    """
    devices = _devices(target)
    try:
        return lowered_on(target.chip.compiler, devices, mesh, jitted, arguments, donated)
    except Exception as error:
        raise LeftOut(_line(error)) from error


def lowered_on(
    platform: str, devices: Sequence[Any], mesh: Any, jitted: Any, arguments: Any, donated: tuple[int, ...]
) -> Any:
    """Lower what ``jitted`` has traced for devices of a topology. A program to paste has a copy of this function."""
    active = active_mesh(of_one=True)  # a mesh of one device would mix with the target's as well
    like = active if active is not None and (mesh is None or active.size == mesh.size) else mesh
    there = _mesh(like, devices if mesh is not None else devices[:1])
    unsharded: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(devices[0])
    if mesh is not None:
        unsharded = jax.sharding.NamedSharding(there, jax.sharding.PartitionSpec())

    def placed(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        put = unsharded
        if isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1:
            put = jax.sharding.NamedSharding(_mesh(sharding.mesh, devices), sharding.spec)
        # The memory of the host has one name everywhere; that of a CPU device has a name which no chip has before jax 0.8.
        if getattr(sharding, "memory_kind", None) == HOST_MEMORY:
            put = put.with_memory_kind(HOST_MEMORY)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=put, weak_type=getattr(leaf, "weak_type", False))

    leaves, tree = jax.tree.flatten(arguments)
    try:
        program = jax.export.export(jitted, platforms=[platform])(*arguments)
    except ValueError as error:
        if "compatibility guarantees" not in str(error):
            raise
        # It is to be compiled at once, by this very version.
        text = jitted.trace(*arguments).lower(lowering_platforms=(platform,)).as_text()
        names = {*re.findall(r"custom_call @([\w.$]+)", text)}
        unchecked = [*map(jax.export.DisabledSafetyCheck.custom_call, names)]
        program = jax.export.export(jitted, platforms=[platform], disabled_checks=unchecked)(*arguments)

    def call(*leaves: Any) -> Any:
        return jax.tree.leaves(program.call(*jax.tree.unflatten(tree, leaves)))

    # In place of the user's mesh, whose devices would mix. `jax.set_mesh` came with jax 0.7; before, nothing mixes.
    with contextlib.nullcontext() if there is None or not hasattr(jax, "set_mesh") else jax.set_mesh(there):
        return jax.jit(call, donate_argnums=donated, keep_unused=True).lower(*map(placed, leaves))


def compiled_for(target: Target, lowered: Any, *, effort: str = "default") -> Any:
    """Compile a program of `lowered_for`. Raises `TooLarge`, or `LeftOut` where the compiler refuses it for another reason.

    At ``O0`` the compiler of a TPU takes a ninth of the time of ``default``; that of a GPU ignores the effort.
    """
    with judged_compiles(ours=False), configured(effort_options(effort)):
        options = options_for(target.chip)
        try:
            return lowered.compile(compiler_options=options)
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise LeftOut(_line(error)) from error
            text = _line(error, _LONGEST_REFUSAL)
            of_kernel = (memory for memory in _OF_KERNELS if memory.lower() in text.lower())
            raise TooLarge(text, "" if "hbm" in text.lower() else next(of_kernel, "")) from error


# --- devices


@functools.cache
def _devices(target: Target) -> tuple[Any, ...]:
    """The devices of a topology, in order. Raises `CheckError` with the compiler's words."""
    from jax.experimental import topologies

    jax.devices()  # the user's backend first: it stays the default
    try:
        with _same_signals():
            try:
                described = topologies.get_topology_desc(**topology(target))
            except NotImplementedError:  # jax was started before the environment that takes the plugin without a driver
                _start_plugin()
                described = topologies.get_topology_desc(**topology(target))
    except Exception as error:
        advice = "start Python with JAX_PLATFORMS=cpu in the environment, or update jax together with its wheel"
        raise CheckError(f"target {target}: its compiler cannot be loaded ({_line(error)}): {advice}") from error
    return tuple(described.devices)


@contextlib.contextmanager
def _same_signals() -> Iterator[None]:
    """Put back the handlers of signals that libtpu replaces as it is loaded, so that a process ends as without it.

    That of SIGTERM prints a stack trace, and those of crashes take the place of `faulthandler`, which pytest turns on. Its profiler needs that of SIGPROF.
    Python does not know the handlers of C, so that the C library is asked. Tried on Linux with libtpu 0.0.50.
    """
    library = ctypes.CDLL(None)
    held = {number: (ctypes.c_ubyte * _SIGACTION)() for number in _ENDINGS}
    for number, action in held.items():
        library.sigaction(int(number), None, ctypes.byref(action))
    try:
        yield
    finally:
        for number, action in held.items():
            library.sigaction(int(number), ctypes.byref(action), None)


def topology(target: Target) -> dict[str, Any]:
    """The arguments of `jax.experimental.topologies.get_topology_desc` that give the devices of a target."""
    chip = target.chip
    if chip.gpu:
        count = target.devices
        hosts, each = (count // HOST, HOST) if count % HOST == 0 else (1, count)
        # jax 0.5 has no such field; from 0.6 on it has to be there.
        runtime = "" if jax.__version_info__ < (0, 6) else "runtime_version { major: 12 minor: 8 }"
        config = f"{chip.gpu} {runtime}"
        shape = f"1x{hosts}x{each}"  # partitions, hosts, devices of a host
        return {"platform": "cuda", "topology_name": chip.name, "topology": shape, "target_config": config}
    shape = target.slice or chip.slices[0]
    options: dict[str, Any] = {"chip_config_name": chip.config} if chip.config else {}
    sizes = [*map(int, shape.split("x")), 1][:3]
    if math.prod(sizes) < _CHIPS_OF_A_HOST:
        options["chips_per_host_bounds"] = sizes  # before libtpu 0.0.50 a slice has at least the chips of a host
    if target.slices > 1:
        options["num_slices"] = target.slices
    return {"platform": "tpu", "topology_name": f"{chip.spelled}:{shape}", **options}


def _start_plugin() -> None:
    """Start the CUDA plugin of jax, as jax itself does. Tried on jax 0.6.2 and 0.12.0.1."""
    for name in ("xla_cuda13", "xla_cuda12"):
        with contextlib.suppress(ImportError):
            importlib.import_module(f"jax_plugins.{name}").initialize()
            return


def _mesh(like: Any, devices: Sequence[Any]) -> Any:
    """A mesh of these devices with the axes of another; all of size 1 for one device, `None` where there is no mesh at all."""
    if like is None:
        return None
    sizes = tuple(like.shape.values()) if len(devices) > 1 else (1,) * len(like.axis_names)
    # jax 0.5 has another type for the kinds of axes.
    kinds = {"axis_types": like.axis_types} if jax.__version_info__ >= (0, 6) else {}
    return jax.sharding.Mesh(in_slices(sizes, devices), like.axis_names, **kinds)


def in_slices(sizes: tuple[int, ...], devices: Sequence[Any]) -> Any:
    """Lay devices out in the shape of a mesh. The network between slices has the first axis that their number divides.

    So does `jax.experimental.mesh_utils.create_hybrid_device_mesh`, where the caller names the axis.
    """
    placed = np.empty(len(devices), object)
    placed[:] = devices
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    across = next((axis for axis, size in enumerate(sizes) if slices > 1 and size % slices == 0), None)
    if across is None:
        return placed.reshape(sizes)
    parts = (slices, *sizes[:across], sizes[across] // slices, *sizes[across + 1 :])
    return np.moveaxis(placed.reshape(parts), 0, across).reshape(sizes)


# --- options


def effort_options(effort: str) -> dict[str, Any]:
    """Options of jax for a target: the optimizations that a check leaves out on the CPU, and the effort of a TPU's compiler."""
    level = {} if effort == "default" else {"jax_optimization_level": effort}
    return {"jax_disable_most_optimizations": False, **level}


def options_for(chip: Chip) -> dict[str, Any] | None:
    """Options of the compiler: before jax 0.10 that of a GPU needs the device to try variants, unless autotuning is off."""
    old = chip.gpu and jax.__version_info__ < (0, 10)
    return {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False} if old else None


def _line(error: BaseException, longest: int = _LONGEST) -> str:
    """The text of an exception of jax or a compiler, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(r"^.*RESOURCE_EXHAUSTED: (E\d+: )?(\w+: )?", "", text)
    if len(text) > longest:  # whole sentences, as far as they go
        text = text[:longest].rpartition(". ")[0] or f"{text[: longest - 3]}..."
    return text
