"""The checks of a pasted program: each looks for what is known of a broken nesting, and raises what the plugin would say of it.

Copied by `own_source`, as `runtime` is.
"""

from __future__ import annotations

import contextlib
import gc
import math
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import staging, variables
from pytest_nnxcheck.compat.primitives import COPIES
from pytest_nnxcheck.compat.staging import configured
from pytest_nnxcheck.compat.targets import effort_options, lowered_on, mesh_of
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.jaxprs.flow import constants, inner_jaxprs
from pytest_nnxcheck.reporting import target_rows
from pytest_nnxcheck.reproducer.runtime import COMPILED, describe, value_at, variable_at

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def report(invariant: str, lines: list[str], cause: BaseException | None = None) -> None:
    """End the program as the plugin would, where there is something to say, or with what the call raised."""
    if lines:
        raise AssertionError("\n  ".join([f"nnx invariant broken: {invariant}", *lines])) from cause
    if cause is not None:
        raise cause


# --- tracers


def living_tracers() -> dict[int, Any]:
    """The tracers among all objects of Python."""
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), jax.core.Tracer)}


def of_other_traces(tracers: dict[int, Any], ours: Any) -> dict[int, Any]:
    """The tracers of any trace but that of ``ours``."""
    keys = {variables.trace_key(variables.trace_identity(each)) for each in ours if isinstance(each, jax.core.Tracer)}
    return {at: each for at, each in tracers.items() if variables.trace_key(variables.trace_identity(each)) not in keys}


def leaves_no_tracers(
    run: Callable[[], Any], leaked: Any, living: Callable[[], dict[int, Any]] = living_tracers
) -> Any:
    """Run, and look for new tracers that are alive: each has outlived its trace. ``leaked`` are where, and their types."""
    output, error, before = None, None, living()
    try:
        output = jax.block_until_ready(run())
    except Exception as raised:  # noqa: BLE001 - the call may raise anything
        # Its frames hold tracers of their own: they are shown, and go.
        traceback.print_exc()
        error = raised.with_traceback(None)
        error.__cause__ = error.__context__ = None
    # Those that nobody needs any more go.
    jax.clear_caches()
    gc.collect()
    kinds = {describe(tracer.aval) for key, tracer in living().items() if key not in before}
    report(
        "tracers",
        [
            f"leaked {path}   {kind}"
            for path, kind in leaked
            if kind in kinds or isinstance(error, jax.errors.UnexpectedTracerError)
        ],
        error,
    )
    return output


def holds_no_tracers(held: Any) -> None:
    """Look for tracers that are alive before the call. ``held`` are where, and their types."""
    gc.collect()
    kinds = {describe(tracer.aval) for tracer in living_tracers().values()}
    report("tracers", [f"before the call {path}   {kind}" for path, kind in held if kind in kinds])


@contextlib.contextmanager
def touches_nothing(state: Any, paths: dict[str, Any]) -> Iterator[None]:
    """Hold the state after an ``eval_shape`` against that before it."""
    before = {name: value_at(state, *keys) for name, keys in paths.items()}
    yield
    touched = [name for name, keys in paths.items() if value_at(state, *keys) is not before[name]]
    report("tracers", [f"eval_shape changed {name}" for name in touched])


def may_be_written(state: Any, paths: dict[str, Any]) -> None:
    """Look for Variables that were made in a trace that has ended."""
    pinned = [name for name, keys in paths.items() if variables.is_pinned(variable_at(state, *keys))]
    why = "was made in a trace that has ended: flax refuses every write to it"
    report("tracers", [f"{name} {why}" for name in pinned])


# --- donation


def pointers(*arrays: Any) -> set[int]:
    """Where the shards of arrays lie."""
    living = [array for array in arrays if isinstance(array, jax.Array) and array.size and not array.is_deleted()]
    keys = jax.dtypes.prng_key
    plain = [jax.random.key_data(array) if jnp.issubdtype(array.dtype, keys) else array for array in living]
    return {shard.data.unsafe_buffer_pointer() for array in plain for shard in array.addressable_shards}


def shares_no_buffer(
    state: Any, inputs: Any, leaves: dict[str, Any], why: str = "XLA refuses to donate it twice"
) -> None:
    """Hold leaves against all other arrays of the call, where one is donated; ``why`` both are lost then."""
    every = [pointers(array) for array in (*jax.tree.leaves(nnx.state(state)), *inputs)]
    shared = [name for name, leaf in leaves.items() if sum(bool(pointers(leaf) & other) for other in every) > 1]
    report("donation", [f"{name} shares its buffer with another array: {why}" for name in shared])


def leaves_no_deleted_arrays() -> None:
    """Look among all objects of Python for Variables whose array was donated for another one."""
    gc.collect()
    held = [variables.variable_value(each) for each in gc.get_objects() if issubclass(type(each), nnx.Variable)]
    arrays = [each for each in held if isinstance(each, jax.Array) and not isinstance(each, jax.core.Tracer)]
    lost = [describe(array) for array in arrays if array.size and array.is_deleted()]
    report("donation", [f"{kind} is left with a deleted array: a jit inside the call donates it" for kind in lost])


def counterpart(old: Any, donated: Any, output: Any) -> Any:
    """An output of the type of a donated array; None where fewer come back than are donated."""
    new = [leaf for leaf in jax.tree.leaves(output) if describe(leaf) == describe(old)]
    return new[-1] if len(new) >= sum(describe(each) == describe(old) for each in donated) else None


def keeps_donated_buffers(before: dict[str, Any], after: dict[str, Any], kept: Callable[[Any, Any], Any]) -> None:
    """Hold donated leaves against what came back for them; ``kept`` says whether that lies in a donated buffer."""
    lines = []
    for name, old in before.items():
        new, kind = after.get(name), describe(old)
        if describe(new) != kind:
            lines.append(f"{name}   {kind}   " + ("not returned" if new is None else f"became {describe(new)}"))
        elif not kept(old, new):
            lines.append(f"{name}   {kind}   not reused by XLA, or in other shards")
    report("donation", lines)


def in_same_shards(old: Any, new: Any) -> Any:
    return old.sharding.is_equivalent_to(new.sharding, len(old.shape))


# --- memory


def peak_is_within(limit: int, state: int = 0, copied: int = 0, seen: int = 0) -> None:
    """Hold the peak of what was compiled last against a limit; ``copied`` are the bytes of a ``state`` that a peak of ``seen`` held once more."""
    parts = parts_of_peak(COMPILED[-1])
    aliased = COMPILED[-1].memory_analysis().alias_size_in_bytes
    peak = sum(parts.values()) - aliased
    text = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    figures = [
        f"peak {format_bytes(peak)} = {text} - aliased {format_bytes(aliased)}",
        f"budget {format_bytes(limit)}",
    ]
    print(*figures, sep="\n")  # noqa: T201 - the program tells its figures, whether they hold or not
    wrong = [f"peak {format_bytes(peak)} is over the budget of {format_bytes(limit)}"] if peak > limit else []
    if copied and peak > seen - copied / 2:
        wrong.append(f"the program holds {copied / max(state, 1):.2f} more copies of its state at the peak")
    report("memory", wrong and [*wrong, *figures])


def parts_of_peak(compiled: Any) -> dict[str, int]:
    """What XLA sets aside for a program; captured constants are in no total, so they are counted in its text."""
    totals = compiled.memory_analysis()
    arrays = re.findall(r"= (\w+)\[([\d,]*)\]\S* constant\(", compiled.as_text())
    return {
        "arguments": totals.argument_size_in_bytes,
        "outputs": totals.output_size_in_bytes,
        "temporaries": totals.temp_size_in_bytes,
        "constants": sum(bytes_of_constant(kind, sizes) for kind, sizes in arrays),
    }


def bytes_of_constant(kind: str, sizes: str) -> int:
    """The bytes of ``f32[4,8]``; a single number is part of the code."""
    elements = math.prod(int(size) for size in sizes.split(",") if size)
    bits = int((re.findall(r"\d+", kind) or ["8"])[0])
    return elements * bits // 8 if elements > 1 else 0


def captures_little(program: Any, state: Any, inputs: Any, most: int) -> None:
    """Hold the arrays that the call captures against a limit: they should be its arguments."""
    graphdef, leaves = nnx.split(state)
    jaxpr = jax.make_jaxpr(lambda leaves, *inputs: program(nnx.merge(graphdef, leaves), *inputs))(leaves, *inputs)
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in constants(jaxpr))
    report("memory", [f"the call captures {format_bytes(size)} of constants"] if size >= most else [])


# --- on a target

TARGET: dict[str, Any] = {}
"""What is compiled for, and how. A program has its own."""
ON_TARGET: list[Any] = []
"""Of each program that was compiled for the target: its arguments, the numbers of those that it donates, and the program, or why the compiler refused it."""


def compile_on_target(compiled: Any, lowered: Any, jitted: Any, args: Any) -> None:
    """Compile what jax has traced for a chip that is not there. Nothing runs on it."""
    from jax.experimental import topologies

    leaves = jax.tree.leaves(args)
    donated = [number for number, info in enumerate(jax.tree.leaves(lowered.args_info)) if info.donated]
    where = TARGET["topology"]
    devices = topologies.get_topology_desc(**where).devices
    there = lowered_on(where["platform"], devices, mesh_of(leaves, compiled), jitted, args, tuple(donated))
    try:
        with configured(effort_options(TARGET["effort"])):
            program = there.compile(compiler_options=TARGET["options"])
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        program = str(error).partition("\n")[0]
    ON_TARGET.append((leaves, donated, program))


def fits_target(budget: int = 0, state: int = 0, copied: int = 0, seen: int = 0) -> None:
    """Hold the peak on the target against what fits, and a budget; ``copied`` are the bytes of a ``state`` that parts of ``seen`` bytes held once more."""
    program, name, most = ON_TARGET[-1][2], TARGET["name"], TARGET["limit"]
    limit, unfit = format_bytes(most, decimals=2), "the program does not fit " + TARGET["device"]
    if isinstance(program, str):
        report("memory", [f"{unfit}: it needs more than {limit}", program])
    totals = program.memory_analysis()
    parts = totals.argument_size_in_bytes + totals.output_size_in_bytes + totals.temp_size_in_bytes
    parts -= totals.alias_size_in_bytes
    gpu = TARGET["topology"]["platform"] == "cuda"
    # What the compiler of a TPU counts is less than the sum of the parts, and it refuses what does not fit.
    held = parts if gpu else getattr(totals, "peak_memory_in_bytes", 0) or parts
    print(f"peak {target_rows.peak(held, most)} of {limit} on {name}")  # noqa: T201 - as above
    wrong = [f"{unfit}: peak {target_rows.peak(held, most)} of {limit}"] if gpu and held > most else []
    if budget and held > budget:
        wrong.append(f"peak {target_rows.peak(held, budget)} on {name} is over the budget of {format_bytes(budget)}")
    if copied and parts > seen - copied / 2:
        wrong.append(f"the program holds {copied / max(state, 1):.2f} more copies of its state on {name}")
    report("memory", wrong)


def keeps_buffers_on_target(named: dict[str, Any]) -> None:
    """Look among donated leaves for those whose buffer no output of the program takes there."""
    leaves, donated, program = ON_TARGET[-1]
    head = program.as_text().partition("\n")[0].partition("input_output_alias={")[2]
    kept = [leaves[int(number)] for number in re.findall(r": \((\d+), \{\}", head)]
    lost = [name for name, leaf in named.items() if not any(leaf is each for each in kept)]
    where, names = TARGET["name"], ", ".join(lost)
    text = f"{len(lost)} of {len(donated)} donated leaves {target_rows.lose(len(lost))} on {where}: {names}"
    report("donation", [text] if lost else [])


# --- values


def distance(want: Any, have: Any) -> float:
    """How far two values lie apart: those of another type or structure infinitely, others than floats by one."""
    one, two = jax.tree.leaves(want), jax.tree.leaves(have)
    if list(map(describe, one)) != list(map(describe, two)):
        return math.inf
    return max((distance_of_arrays(*map(plain, pair)) for pair in zip(one, two, strict=True)), default=0.0)


def distance_of_arrays(want: Any, have: Any) -> float:
    if want.dtype.kind not in "fc":
        return float((want != have).any())
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(want - have)
    same = (want == have) | (np.isnan(want) & np.isnan(have))
    return float(np.max(np.where(same, 0, np.where(np.isnan(off), np.inf, off)), initial=0))


def plain(value: Any) -> Any:
    """A value as an array of NumPy, a float in the widest type."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    inexact = jnp.issubdtype(array.dtype, jnp.inexact)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64) if inexact else array


def changes(invariant: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Look for values of which every one is still what it was: then an update of them was dropped."""
    same = all(describe(old) == describe(after[name]) and np.all(old == after[name]) for name, old in before.items())
    report(invariant, [f"{name}   its update is dropped, or not written back" for name in before if same])


def is_written(program: Any, state: Any, inputs: Any, paths: dict[str, Any]) -> None:
    """The same for an abstract call, whose trace says which leaves come back as they were."""
    graphdef, leaves = nnx.split(state)

    def pure(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        program(module, *inputs)
        return [value_at(module, *keys) for keys in paths.values()]

    jaxpr = staging.open_jaxpr(jax.make_jaxpr(pure)(leaves, *inputs))
    same = all(handed_on(jaxpr, [True for _ in jaxpr.invars]))
    report("donation", [f"{name}   not written back" for name in paths if same])


def handed_on(jaxpr: Any, given: list[bool]) -> list[bool]:
    """Of each output of a jaxpr whether it is one of the ``given`` inputs, also where calls, branches and loops hand that on."""
    known = {id(var) for var, mine in zip(jaxpr.invars, given, strict=True) if mine}
    for eqn in jaxpr.eqns:
        operands = [id(each) in known for each in eqn.invars]
        # What is no argument of a body, as the operands of a condition, stands before those that are.
        bodies = [body for body in inner_jaxprs(eqn) if len(body.outvars) == len(eqn.outvars)]
        ways = [handed_on(body, operands[len(operands) - len(body.invars) :]) for body in bodies]
        ways += [operands] if eqn.primitive.name in COPIES else []
        known |= {id(out) for out, *way in zip(eqn.outvars, *ways, strict=True) if way and all(way)}
    return [id(out) in known for out in jaxpr.outvars]


def agree(wanted: dict[str, Any], found: dict[str, Any], least: dict[str, float], reference: str) -> None:
    """Hold what the nesting left against what a ``reference`` leaves; ``least`` is how far apart counts as another value."""
    sizes = {name: distance(want, found[name]) for name, want in wanted.items()}
    large = {name: size for name, size in sizes.items() if size >= least[name]}
    report("parity", [f"{name} differs from that of {reference}, by {size:.3g}" for name, size in large.items()])
