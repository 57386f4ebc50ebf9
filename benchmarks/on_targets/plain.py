"""Programs through the plugin, and through a plain ahead-of-time compile: traced a second time on the devices of a topology, without `jax.export`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.on_targets import on_mesh, one_chip, programs
from benchmarks.on_targets.rows import Row, There, measured
from pytest_nnxcheck.compat.staging import configured
from pytest_nnxcheck.compat.targets import effort_options, limit_of, machine_of
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.xla.hlo import aliases

CHIPS, TWO = "v5e,v5p,v6e,h100", "v5e,h100"
SLICES = "v5e:2x4,v5p:2x2x2,v6e:2x4,h100:8"


def rows() -> Iterator[Row]:
    """The programs for one chip, the fifteen of `targets` on two chips, then those over a mesh on slices."""
    for found, chips in ((one_chip.PROGRAMS, CHIPS), (programs.PROGRAMS, TWO)):
        for name, make in found.items():
            with jax.enable_x64(name in one_chip.IN_DOUBLE):
                function, args = make()
                row = with_plain(measured(name, function, args, chips), function, args)
            yield row
    for name, (axes, make_on) in on_mesh.PROGRAMS.items():
        mesh = on_mesh.mesh_of(**axes)
        with jax.set_mesh(mesh):
            function, args = make_on(mesh)
            row = measured(name, function, args, SLICES, devices=on_mesh.DEVICES)
        yield with_plain(row, function, args, mesh)


def with_plain(row: Row, function: Any, args: Sequence[Any], mesh: Any = None) -> Row:
    """The row with what a plain compile says: at the effort that the plugin asked for, and at the default one."""

    def beside(there: There) -> There:
        default = plain(there.target, function, args, mesh, "default")
        same = default if there.effort in ("default", "") else plain(there.target, function, args, mesh, there.effort)
        return replace(
            there,
            plain=same.peak,
            plain_default=default.peak,
            plain_fits=default.fits,
            plain_kept=default.kept,
            plain_said=default.said,
        )

    return replace(row, targets=tuple(map(beside, row.targets)))


@dataclass(frozen=True, slots=True)
class Plain:
    """A plain compile: its peak, whether that fits, the donated leaves that keep their buffer, and why it failed for another reason than memory."""

    peak: int | None = None
    fits: bool = True
    kept: int = 0
    said: str = ""


def plain(word: str, function: Any, args: Sequence[Any], like: Any, effort: str) -> Plain:
    """Compile a program whose state is donated, traced on the target itself."""
    target = parse_target(word)
    machine, (limit, _) = machine_of(target), limit_of(target.chip)
    mesh = None
    if like is not None:
        shape = tuple(like.shape.values())
        mesh = Mesh(np.array(machine.devices).reshape(shape), like.axis_names, axis_types=like.axis_types)

    def there(leaf: Any) -> Any:
        sharding: Any = getattr(leaf, "sharding", None)
        put: Any = SingleDeviceSharding(machine.devices[0])
        if mesh is not None:
            put = NamedSharding(mesh, getattr(sharding, "spec", P()))
        if getattr(sharding, "memory_kind", None) == "pinned_host":
            put = put.with_memory_kind("pinned_host")
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=put)

    call, (state, inputs) = functional(function, args)
    jitted = jax.jit(call, donate_argnums=0, keep_unused=True)
    with configured(effort_options(effort)), contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        try:
            with mock.patch.object(jax, "default_backend", return_value=machine.platform):
                lowered = jitted.lower(jax.tree.map(there, state), jax.tree.map(there, inputs))
            compiled = lowered.compile()
        except Exception as error:  # noqa: BLE001 - jax and a compiler refuse in many ways
            full = "RESOURCE_EXHAUSTED" in str(error)
            return Plain(fits=not full, said="" if full else first_line(error))
    totals: Any = compiled.memory_analysis()
    parts = (totals.argument_size_in_bytes, totals.output_size_in_bytes, totals.temp_size_in_bytes)
    on_chip = sum(parts) - totals.alias_size_in_bytes
    peak = on_chip if target.chip.gpu else totals.peak_memory_in_bytes
    if totals.host_argument_size_in_bytes or totals.host_temp_size_in_bytes:
        peak = min(peak, on_chip)  # that of a TPU counts the memory of the host
    return Plain(peak, peak <= limit, len({*(aliases(compiled) or {}).values()}))


def functional(function: Any, args: Sequence[Any]) -> tuple[Callable[[Any, Any], Any], tuple[Any, Any]]:
    """A call as a function of the state of its modules, which it hands back, and of its inputs; and both."""
    called, args = unbound(function, args)
    nodes = tuple(arg for arg in args if isinstance(arg, nnx.Module | nnx.Optimizer))
    inputs = tuple(arg for arg in args if not isinstance(arg, nnx.Module | nnx.Optimizer))
    graphdef, state = nnx.split(nodes)

    def call(state: Any, inputs: Any) -> Any:
        nodes = nnx.merge(graphdef, state)
        out = called(*nodes, *inputs)
        return nnx.split(nodes)[1], out  # the order of the plugin: a compiler that moves an array to VMEM chooses by it

    return call, (state, inputs)


def unbound(function: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A subject as a function of its modules: a module, or a method of one, is its first argument."""
    if isinstance(function, nnx.Module):
        return type(function).__call__, (function, *args)
    owner = getattr(function, "__self__", None)
    return (function.__func__, (owner, *args)) if isinstance(owner, nnx.Module) else (function, tuple(args))
