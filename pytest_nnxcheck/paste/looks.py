"""The functions of a program that no other module of ours has: those that take a call apart, stage it, and look for what was found.

`slicer` copies those that a program needs. A look says whether what was found is there, and `broken` says it in the plugin's words. Looks search all objects of Python for tracers, take memory from `memory_analysis()`, find a donated
buffer by its pointer, and compare a value with the eager one.
"""

from __future__ import annotations

import contextlib
import gc
import math
import operator
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.staging import configured
from pytest_nnxcheck.compat.targets import lowered_on, mesh_of
from pytest_nnxcheck.jaxprs.flow import constants

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def broken(invariant: str, found: Any, *words: str) -> None:
    """End the program as the plugin would, where something was found."""
    if found:
        raise AssertionError("\n  ".join([f"nnx invariant broken: {invariant}", *words]))


def describe(array: Any) -> str:
    """``float32[2,4]``."""
    return array.dtype.name + str([*array.shape]).replace(" ", "") if hasattr(array, "shape") else type(array).__name__


# --- the parts of a call


def is_node(value: Any) -> bool:
    """True if a value of the user's is taken as a whole."""
    return isinstance(value, nnx.Variable | nnx.State) or nnx.graph.is_graph_node(value)


def arrays_of(*outputs: Any) -> tuple[Any, ...]:
    """The arrays of outputs, and numbers as arrays."""
    parts = [
        nnx.state(output) if is_node(output) and not isinstance(output, nnx.Variable | nnx.State) else output
        for output in outputs
    ]
    return tuple(map(jnp.asarray, jax.tree.leaves(parts)))


def read_field(owner: Any, name: Any, item: bool) -> Any:
    return owner[name] if item else getattr(owner, name, None)


@contextlib.contextmanager
def filled(fields: Any, values: Any) -> Iterator[None]:
    """Let objects of the user's hold the values of the program while the call runs. What the call itself puts there stays."""

    def put(value: Any, owner: Any, name: Any, item: bool) -> None:
        (operator.setitem if item else object.__setattr__)(owner, name, value)

    before = [read_field(*field) for field in fields]
    for field, value in zip(fields, values, strict=True):
        put(value, *field)
    try:
        yield
    finally:
        for field, old, new in zip(fields, before, values, strict=True):
            if read_field(*field) is new:
                put(old, *field)


def abstractly(subject: Any, *args: Any, **kwargs: Any) -> Any:
    """The types of what a call without values returns."""
    leaves, tree = jax.tree.flatten((subject, args, kwargs), is_leaf=is_node)
    given = {number: leaf for number, leaf in enumerate(leaves) if is_node(leaf) or hasattr(leaf, "dtype")}

    def call(given: Any) -> Any:
        function, args, kwargs = jax.tree.unflatten(
            tree, [given.get(number, leaf) for number, leaf in enumerate(leaves)]
        )
        return function(*args, **kwargs)

    return nnx.eval_shape(call, given)


def value_at(state: Any, *keys: Any) -> Any:
    """The value of the Variable with these keys, or a Python attribute."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(state)):
        if tuple(getattr(key, "key", "") for key in path)[: len(keys)] == keys:
            return leaf
    owner = dict(nnx.iter_graph(state))[keys[:-1]] if keys[:-1] else state
    return getattr(owner, str(keys[-1]), None)


# --- tracers


def living_tracers() -> dict[int, str]:
    """The types of the tracers that are alive."""
    gc.collect()
    return {id(each): describe(each.aval) for each in gc.get_objects() if issubclass(type(each), jax.core.Tracer)}


def run_for_tracers(run: Callable[[], Any], kinds: set[str], *words: str) -> Any:
    """Run, and look for new tracers of these types that are alive: each has outlived its trace."""
    output, error, before = None, None, living_tracers()
    try:
        output = jax.block_until_ready(run())
    except Exception as raised:  # noqa: BLE001 - the call may raise anything
        traceback.print_exc()
        error = raised.with_traceback(None)  # its frames hold tracers of their own
        error.__cause__ = error.__context__ = None
    jax.clear_caches()
    new = {kind for key, kind in living_tracers().items() if key not in before}
    broken("tracers", new & kinds or isinstance(error, jax.errors.UnexpectedTracerError), *words)
    if error is not None:
        raise error
    return output


def refuses_writes(state: Any, *keys: Any) -> bool:
    """True if flax refuses every write to a Variable: it was made in a trace that has ended."""
    return graph.is_pinned(next(node for path, node in nnx.iter_graph(state) if tuple(path) == keys))


# --- memory


def peak(program: Any) -> Any:
    totals = program.memory_analysis()
    print(totals)  # noqa: T201 - the program shows its figures, whether they hold or not
    return (
        totals.argument_size_in_bytes
        + totals.output_size_in_bytes
        + totals.temp_size_in_bytes
        - totals.alias_size_in_bytes
    )


def captured_bytes(program: Any, state: Any, inputs: Any) -> Any:
    """Bytes of the arrays that a call captures: they should be its arguments."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in constants(jaxpr_of(program, state, inputs)))


def jaxpr_of(program: Any, state: Any, inputs: Any, *keys: Any) -> Any:
    """The trace of a call, which returns the leaf with these keys last."""
    graphdef, leaves = nnx.split(state)

    def pure(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        return program(module, *inputs), value_at(module, *keys) if keys else None

    return jax.make_jaxpr(pure)(leaves, *inputs)


# --- donation


def pointers(*trees: Any) -> set[tuple[int, str]]:
    """The places where the shards of arrays lie, and the part of the array that each is."""
    arrays = jax.tree.leaves([nnx.state(tree) if isinstance(tree, nnx.Module) else tree for tree in trees])
    living = [array for array in arrays if isinstance(array, jax.Array) and array.size and not array.is_deleted()]
    keys = jax.dtypes.prng_key
    plain = [jax.random.key_data(array) if jnp.issubdtype(array.dtype, keys) else array for array in living]
    shards = [shard for array in plain for shard in array.addressable_shards]
    return {(shard.data.unsafe_buffer_pointer(), str(shard.index)) for shard in shards}


def lost_by_program(program: Any, lowered: Any) -> list[int]:
    """The numbers of the donated arguments whose buffer no output of a compiled program takes."""
    # By the text: it is copied into the user's file, which has no reader of protos.
    head = program.as_text().partition("\n")[0].partition("input_output_alias={")[2]
    kept = set(map(int, re.findall(r": \((\d+), \{\}", head)))
    donated = [number for number, info in enumerate(jax.tree.leaves(lowered.args_info)) if info.donated]
    return [number for number in donated if number not in kept]


def is_handed_on(program: Any, state: Any, inputs: Any, *keys: Any) -> bool:
    """True if the trace of a call gives a leaf back as it was."""
    jaxpr = jaxpr_of(program, state, inputs, *keys).jaxpr
    return any(jaxpr.outvars[-1] is var for var in jaxpr.invars)


def is_constant(program: Any, state: Any, inputs: Any, *keys: Any) -> bool:
    """True if the trace of a call has a leaf as a constant, by identity: the call reads it past its arguments."""
    leaf = value_at(state, *keys)
    return any(constant is leaf for constant in constants(jaxpr_of(program, state, inputs)))


# --- values


def stacked(*outputs: Any) -> Any:
    """The outputs of several calls as one, with an axis for the calls."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def differs(want: Any, have: Any, least: float) -> bool:
    """True if two values are of different types, or so far apart."""
    one, two = jax.tree.leaves(want), jax.tree.leaves(have)
    same_types = [*map(describe, one)] == [*map(describe, two)]
    return not same_types or not all(is_near(*pair, least) for pair in zip(one, two, strict=True))


def is_near(one: Any, two: Any, least: float) -> bool:
    if hasattr(one, "dtype") and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
        one, two = jax.random.key_data(one), jax.random.key_data(two)
    if isinstance(one, str):
        return bool(one == two)
    first, second = (np.asarray(value).astype(complex) for value in (one, two))
    return np.allclose(first, second, rtol=0, atol=least, equal_nan=True)


# --- a program, staged

STAGED: list[Any] = []
"""The programs of the outermost jit: traced, with the jitted function and its arguments."""


def staged(wrapper: Any, f: Any, finish: Any = None, jit: Any = jax.jit, **options: Any) -> Any:
    """``wrapper(f, **options)``, `jax.jit` or `nnx.jit`, traced before it is called; ``finish`` gives the outputs in the place of a run."""

    def ahead(*given: Any, **options: Any) -> Any:
        def call(*args: Any) -> Any:
            jitted = jit(*given, **options)
            STAGED.append((jitted.trace(*args), jitted, args))
            return finish(STAGED[-1][0]) if finish else jitted(*args)

        return call

    with mock.patch("jax.jit", ahead):
        return (ahead if wrapper is jit else wrapper)(f, **options)


def types_of(traced: Any) -> Any:
    """The types of the outputs of a program that is not run."""
    return jax.tree.map(lambda info: jax.ShapeDtypeStruct(info.shape, info.dtype), traced.out_info)


# --- a target


def on_target(
    where: dict[str, Any], effort: dict[str, Any], options: Any, traced: Any, jitted: Any, args: Any
) -> tuple[Any, Any]:
    """Compile for a chip that is not there what jax has traced. Nothing runs on it. The program, or why its compiler refused it."""
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(**where).devices
    donated = tuple(number for number, info in enumerate(jax.tree.leaves(traced.args_info)) if info.donated)
    try:
        here = traced.lower().compile()
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):
        here = None  # the chip alone can lower it
    mesh = mesh_of(jax.tree.leaves(args), here)
    there = lowered_on(where["platform"], devices, mesh, jitted, args, donated)
    try:
        with configured(effort):
            return there.compile(compiler_options=options), there
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf, there


def peak_on_target(program: Any, gpu: bool) -> Any:
    """The compiler's own count on a TPU, which is less than the sum of the parts."""
    if program == math.inf:
        return program
    parts = peak(program)
    return parts if gpu else getattr(program.memory_analysis(), "peak_memory_in_bytes", 0) or parts
