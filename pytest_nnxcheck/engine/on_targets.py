"""One program on each target: lowered from the trace that is there, compiled, and read. Nothing runs there.

A call that asks jax what it runs on is traced once more, with the answers of the target.

The facts that are read are kept, in the process and between runs. jax's own cache cannot read a program for a chip that is not there, so the facts are
kept, not the program: some 600 bytes, for a second of compiling.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pytest_nnxcheck import wheels
from pytest_nnxcheck.compat import staging, targets
from pytest_nnxcheck.compat.compile_cache import canonical, folder_of_compiles
from pytest_nnxcheck.core.catalogue import JIT, TARGETED
from pytest_nnxcheck.core.chips import Target, parse_target
from pytest_nnxcheck.core.memory_picture import Picture
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.on_target import OnTarget, Spread
from pytest_nnxcheck.core.peak import SHOWN, Split, by_line, least_copy
from pytest_nnxcheck.core.text import first_line
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.host_memory import OnHost
from pytest_nnxcheck.engine.known_programs import key_of
from pytest_nnxcheck.engine.observe import OnMachine, Program
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.jaxprs.copies import copies_in
from pytest_nnxcheck.kept import Folder, Kept
from pytest_nnxcheck.xla import buffers
from pytest_nnxcheck.xla.collectives import traffic
from pytest_nnxcheck.xla.hlo import Module, aliases, module_of
from pytest_nnxcheck.xla.products import beside_peak

__tracebackhide__ = True  # pytest shows the frames of the user, not these

NEAR = 0.8
"""Share of the limit from which on the compiler of a TPU is asked again with its default effort. On a slice its fast one may count less, or refuse a program that fits."""
FULL = 0.95
"""The same, for the peak with the casts that the default effort may add: see `casts`."""
QUICK, DEFAULT = "O0", "default"
"""Efforts of a compiler. The compiler of a TPU is asked with the quick one first: most programs have room, and their verdict needs no better figure."""


def is_for_targets(call: Call) -> bool:
    """True if targets compile the nesting even if it passes on the CPU: the un-nested jit, one that is replayed, with ``thorough`` all."""
    settings, layers = call.settings, call.nesting.layers
    judged = settings.target and TARGETED & {*settings.invariants}
    if not judged or not layers or not layers[0].row.compiles:
        return False
    return layers == (Layer(JIT, settings.styles[0]),) or settings.effort == "thorough" or settings.nesting is not None


@dataclass(frozen=True, slots=True)
class Donation:
    """The leaves that a program donates."""

    names: dict[int, str]
    """Their names, by their numbers among the arguments. An empty leaf has no buffer to donate."""
    lost: frozenset[int]
    """The numbers of the leaves that lose their buffer on the CPU; none where that refuses the program."""

    @classmethod
    def of(cls, program: Program) -> Donation:
        """The donation of a program."""
        names, arguments = dict(enumerate(program.names)), program.traced.arguments
        donated = {number: names.get(number, "") for number in program.traced.donated if arguments[number].size}
        kept = donated if program.known is None else (program.known.facts.aliases or {}).values()
        return cls(donated, frozenset(donated.keys() - {*kept}))

    def told(self, on: OnTarget, compiled: Any) -> OnTarget:
        """Add the leaves that lose their buffer in the program compiled for a target."""
        kept = aliases(compiled)
        if kept is None:
            return on
        gone = self.names.keys() - {*kept.values()}
        lost = tuple(self.names[number] for number in sorted(gone - self.lost))
        return replace(on, donated=len(self.names), lost=lost, lost_too=len(gone & self.lost))


def with_totals(on: OnTarget, compiled: Any, constants: int, on_host: OnHost) -> OnTarget:
    """Add the totals of the target's compiler, where it gives some.

    A peak is jax's ``peak_memory_in_bytes`` on a TPU, from jax 0.7.2 on, else the sum of the totals.
    """
    totals = compiled.memory_analysis()
    if totals is None:
        return on
    split, gpu = on_host.on_device(buffers.split_of(compiled)), bool(parse_target(on.target).chip.gpu)
    host = buffers.on_the_host(totals) + sum(on_host.held.values())
    heap = 0 if gpu else getattr(totals, "peak_memory_in_bytes", 0)
    if host:
        # The peak of a TPU counts it too, not always all of it at once; the sum of the totals is of the chip alone.
        heap = min(heap, split.peak)
    if not heap:  # it counts constants, and no total does
        split = replace(split, constants=constants)
    # A GPU's compiler refuses nothing, and that of a TPU counts no outputs before jax 0.7.2. At the end of a call they are there, beside the arguments.
    least = split.peak if gpu else split.peak - split.temporaries
    unpadded = getattr(totals, "peak_unpadded_heap_bytes", 0) if heap else 0
    return replace(
        on, split=split, peak=heap or split.peak, unpadded=unpadded or None, host=host, fits=least <= on.limit
    )


def with_most(on: OnTarget, module: Module | None, on_host: OnHost) -> OnTarget:
    """Add what the device may need at most, on a GPU whose compiler gives totals and the program."""
    chip = parse_target(on.target).chip
    room = beside_peak(module, chip.workspace) if chip.gpu else None
    return on if on.split is None or room is None else replace(on, most=on.split.peak + room + on_host.moved)


def with_buffers(on: OnTarget, compiled: Any, program: Program, on_host: OnHost) -> OnTarget:
    """Add the lines and the largest buffers of the peak there, where its compiler gives the program."""
    gpu = bool(parse_target(on.target).chip.gpu)
    memory = buffers.read(compiled, gpu=gpu, on_host=on_host.held).with_names(program.names)
    shown = tuple(replace(buffer, live=None) for buffer in memory.made[:SHOWN])
    return replace(on, places=by_line(memory.made, ())[:SHOWN], buffers=shown, picture=Picture.of(memory, on.peak))


def with_traffic(on: OnTarget, compiled: Any, module: Module | None) -> OnTarget:
    """Add the operations between devices and the work of each, where the compiler gives the program."""
    target = parse_target(on.target)
    sent = traffic(module, slices=target.slices > 1)
    on = replace(on, collectives=sent.collectives)
    # The figures of a GPU's compiler are empty. A TPU's counts the body of a loop once.
    costs = None if target.chip.gpu or sent.loops else compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) and costs else costs  # before jax 0.6
    if not costs or "flops" not in costs:
        return on
    return replace(on, flops=round(costs["flops"]), accessed=round(costs.get("bytes accessed", 0)))


def spread(arguments: Sequence[Any]) -> tuple[Spread, ...]:
    """The arguments of a program by the axes of a mesh that cut them."""
    found = dict[tuple[str, ...], Spread]()
    for leaf in arguments:
        if not isinstance(getattr(leaf, "sharding", None), jax.sharding.Sharding):
            continue
        parts = leaf.sharding.spec if isinstance(leaf.sharding, jax.sharding.NamedSharding) else ()
        names = (name for part in parts for name in (part if isinstance(part, tuple) else (part,)))
        axes = tuple(name for name in names if isinstance(name, str))
        here = found.get(axes, Spread(axes, 0, 0, 0))
        size = math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        elements = here.elements + math.prod(leaf.shape)
        found[axes] = Spread(axes, here.leaves + 1, elements, here.bytes + size)
    return tuple(sorted(found.values(), key=lambda each: -each.elements))


def casts(arguments: Sequence[Any], split: Split | None) -> int:
    """The bytes that the default effort of a TPU's compiler may hold beside those of the fast one: all float32 weights once more in bfloat16.

    It casts them before a loop that computes in bfloat16, and those of a product without more precision. Narrower weights it casts one layer at a time.
    """
    sizes = [(leaf.dtype, math.prod(leaf.shape) * leaf.dtype.itemsize) for leaf in arguments if hasattr(leaf, "dtype")]
    wide = sum(size for dtype, size in sizes if dtype == jnp.float32)
    # The totals are those of one device, with the padding of its layout.
    return wide * split.arguments // sum(size for _, size in sizes) // 2 if wide and split else 0


@dataclass(frozen=True, slots=True)
class OnTargets:
    """Compile the programs of one call for targets."""

    words: tuple[str, ...]
    """The targets, as they were named."""
    known: Kept[OnTarget]
    """Results for the programs of one test, by the text of the program and all else that decides them."""
    state: int
    """Bytes of one copy of the state; 0 where copies are not looked for."""
    asks: bool = False
    """True if the call asks jax what it runs on, so that it may be another program on each target."""

    def all(self, program: Program, on_machine: OnMachine) -> tuple[OnTarget, ...]:
        """Collect what each target says of a program; nothing if the program has a parameter that nobody passes.

        Raises `CheckError` where a named slice has another size.
        """
        if program.traced.hoisted:
            return ()
        return tuple(self._one(parse_target(word), program, on_machine) for word in self.words)

    def _one(self, named: Target, program: Program, on_machine: OnMachine) -> OnTarget:
        started = time.perf_counter()
        said = OnTarget(str(named), wheel=wheels.versions(named.chip.compiler), state=self.state)
        try:
            # A program that an earlier run knows, and that was not compiled, is for one device.
            compiled = program.compiled if program.known and not program.known.earlier else None
            mesh = targets.mesh_of(program.traced.arguments, compiled and compiled.program)
            target = targets.target_of(named, mesh)
            if self.asks:
                program, answered = _there(target, on_machine)
                said = replace(said, answered=tuple(answered.items()))
            said = self._compiled(said, target, mesh, program)
        except targets.LeftOut as error:
            calls_back = (
                "the program calls Python code while it runs: " if flow.calls_back(program.traced.jaxpr) else ""
            )
            said = replace(said, left_out=f"{calls_back}{error}")
        return replace(said, seconds=time.perf_counter() - started)

    def _compiled(self, said: OnTarget, target: Target, mesh: Any, program: Program) -> OnTarget:
        limit, share = targets.limit_of(target.chip)
        first = DEFAULT if target.chip.gpu else QUICK
        pieces = spread(program.traced.arguments) if mesh is not None else ()
        said = replace(said, target=str(target), limit=limit, share=share, effort=first, spread=pieces)
        donation, constants = Donation.of(program), program.memory.constants if program.memory else 0

        # What is printed holds no memory, and would be a callback, which jax lowers for no device that is not there.
        traced = replace(program.traced, jaxpr=flow.without_prints(program.traced.jaxpr))
        own: tuple[Any, Any] = program.staged.jitted, program.staged.arguments
        # What was traced on another machine is in no cache of jax.
        if program.in_refs or self.asks or traced.jaxpr is not program.traced.jaxpr:
            own = staging.jitted_jaxpr(traced.jaxpr, traced.donated, keep_unused=True), traced.arguments

        def lower(jitted: Any = own[0], arguments: Any = own[1]) -> Any:
            return targets.lowered_for(target, mesh, jitted, arguments, traced.donated)

        def compiled(lowered: Any, effort: str) -> OnTarget:
            try:
                there = targets.compiled_for(target, lowered, effort=effort)
            except targets.TooLarge as error:
                return replace(said, effort=effort, fits=False, refused=str(error), exhausted=error.memory)
            module = module_of(there)
            on_host = OnHost.of(traced, module) if target.chip.gpu else OnHost()
            found = with_totals(donation.told(replace(said, effort=effort), there), there, constants, on_host)
            most = with_most(found, module, on_host)
            return with_traffic(with_buffers(most, there, program, on_host), there, module) if found.split else found

        def with_copies(on: OnTarget) -> OnTarget:
            def split_of(jitted: Any) -> Split | None:
                plain = compiled(lower(jitted, traced.arguments), on.effort).split
                return plain and replace(plain, constants=0)

            if not self.state or on.split is None:
                return on
            return replace(on, copies=copies_in(traced, on.split, self.state, split_of).bytes)

        def judged() -> OnTarget:
            on, least = with_copies(compiled(lowered, first)), least_copy(self.state)
            peak = on.peak or 0
            near = peak > NEAR * limit or peak + casts(traced.arguments, on.split) > FULL * limit
            if first == DEFAULT or not (on.refused or near or on.copies >= least):
                return on
            # Lowered anew: jax keeps what it compiled of a lowered program, whatever the effort.
            again = with_copies(compiled(lower(), DEFAULT))
            # Where there is room the default effort spends memory on speed, on bfloat16 twins of weights say: it tells whether copies remain,
            # and not how many there are.
            found = again.copies if on.refused else on.copies
            return replace(again, copies=found if again.copies >= least else 0)

        lowered = lower()
        return self._kept(judged, canonical(lowered.as_text()), repr((said, donation.names, sorted(donation.lost))))

    def _kept(self, judge: Callable[[], OnTarget], *text: str) -> OnTarget:
        """Return the kept result of a program, from this process or the folder of compiled programs; else judge it, and keep the result."""
        folder = folder_of_compiles()
        kept = None if folder is None else Folder(folder, "-target.json", _to_bytes, OnTarget.of_json)
        return self.known.recall(key_of(*text), judge, kept)


def _there(target: Target, on_machine: OnMachine) -> tuple[Program, dict[str, str]]:
    """The program as it is traced on a target, and the lines that asked what it is. Raises `LeftOut` where the call raises there."""
    machine = targets.machine_of(target)
    try:
        return on_machine(machine)
    except Exception as error:
        raise targets.LeftOut(f"traced as on {target}, the call raises {first_line(error)}") from error


def _to_bytes(on: OnTarget) -> bytes:
    return json.dumps(asdict(on)).encode()
