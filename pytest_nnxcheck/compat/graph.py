"""Graph nodes and their state in every version of flax."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import sys
from collections.abc import Container, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import DictKey, tree_flatten_with_path

from pytest_nnxcheck.compat.arrays import is_ref
from pytest_nnxcheck.compat.flax_modes import flax_version, iter_graph, mode_flags, split
from pytest_nnxcheck.compat.sharding import in_type
from pytest_nnxcheck.compat.variables import is_tracer, trace_identity, trace_key, variable_value

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def is_graph_node(value: object) -> bool:
    """True if flax treats the value as a node of a graph: a Module, Rngs, Optimizer, or a Variable.

    `nnx.graph.is_graph_node` is public but says False of a Variable before flax 0.12, and True of one after; there it also says True of a
    reference. All versions.
    """
    return isinstance(value, nnx.Variable) or (not is_ref(value) and bool(nnx.graph.is_graph_node(value)))


def flat_state(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path of the Variable, array) of every leaf of an `nnx.State`, in the order in which jax flattens it.

    `State.flat_state()` gives a dict or a `FlatState` by version; the key path of jax ends in the Variable's own attribute,
    which is left out here. All versions.
    """

    def keys(path: Any) -> tuple[Any, ...]:
        return tuple(key.key for key in itertools.takewhile(lambda key: isinstance(key, DictKey), path))

    return [(keys(path), leaf) for path, leaf in tree_flatten_with_path(state)[0]]


def flattened_paths(node: Any) -> list[tuple[Any, ...]]:
    """The paths of a graph node's leaves in the order in which `nnx.jit` takes them, in the present mode of flax.

    In graph mode it is the order of its `nnx.State`, which sorts names; in tree mode that of the pytree, where a namedtuple (of optax, say)
    keeps its own order. All versions.
    """
    leaves = flat_state(split(node)[1])
    if not mode_flags()[0]:
        order = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(node))}
        leaves.sort(key=lambda leaf: order.get(id(leaf[1]), len(order)))
    return [path for path, _ in leaves]


def variables(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, Variable) of every Variable of a graph node, and of every reference that no Variable holds, which is a place of its own. All versions.

    `nnx.iter_graph` of flax 0.10 yields a shared Variable under each of its names: the first one counts.
    """
    nodes: dict[int, tuple[tuple[Any, ...], Any]] = {}
    for path, node in iter_graph(state):
        if isinstance(node, nnx.Variable) or is_ref(node):
            nodes.setdefault(id(node), (tuple(path), node))
    return list(nodes.values())


def raw_leaves(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of every Variable of a graph node, read without the trace checks of ``Variable.value``. All versions."""
    return [(path, variable_value(variable)) for path, variable in variables(state)]


def attributes(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of the attributes of a graph's modules that hold no Variable and no graph node: Python values, bare arrays.

    `nnx.iter_graph` is public, but shows a value once however many modules hold it, and takes lists apart on flax 0.10. The attributes
    that flax itself keeps are left out, see `is_upkeep`. All versions.
    """
    leaves = []
    for path, node in iter_graph(state):
        if not is_graph_node(node) or isinstance(node, nnx.Variable):
            continue
        for name, value in vars(node).items() if hasattr(node, "__dict__") else ():
            if not is_upkeep(name) and not (holds_nodes(value) or is_ref(value)):
                leaves.append(((*path, name), value))
    return leaves


def is_upkeep(name: object) -> bool:
    """True for the name of an attribute in which flax keeps marks of its own: ``_object__state``, ``_pytree__nodes``.

    `nnx.List` of flax 0.12.0 to 0.12.4 keeps its elements in attributes that have numbers for names. No public way. All versions.
    """
    return isinstance(name, str) and name.startswith(("_pytree__", "_object__", "_trace_state", "_graph__"))


def holds_nodes(value: Any) -> bool:
    """True if a graph node is in the value: itself, or as an item of a list, tuple or dict. All versions."""
    if isinstance(value, list | tuple):
        return any(map(holds_nodes, value))
    if isinstance(value, dict):
        return any(map(holds_nodes, value.values()))
    return is_graph_node(value)


def is_key(array: Any) -> bool:
    """True if an array, or its abstract twin, holds PRNG keys. All versions."""
    return bool(jnp.issubdtype(array.dtype, jax.dtypes.prng_key))


def zeros(shape: Any) -> Any:
    """An array of zeros of the type of an abstract array, its sharding included where that is part of the type. All versions.

    `jnp.zeros` makes no key arrays: their data are zeros.
    """
    if is_key(shape):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
        return jax.random.wrap_key_data(jnp.zeros(data.shape, data.dtype), impl=shape.dtype._impl)
    return jnp.zeros(shape.shape, shape.dtype, device=in_type(shape))


def take_marks(node: Any, other: Any) -> None:
    """Copy flax's marks of attributes that are data from another node to a node.

    `nnx.data` is public, but only marks a value that is assigned; nothing public reads a mark. Flax before 0.11 keeps none. All versions.
    """
    marks = getattr(other, "__dict__", {}).get("_pytree__nodes")
    if marks is not None:
        object.__setattr__(node, "_pytree__nodes", marks)


def cached_partial(function: Any) -> tuple[Any, tuple[Any, ...]] | None:
    """The function and the arguments that an `nnx.cached_partial` or `nnx.jit_partial` holds; `None` for any other function.

    `nnx.jit_partial` with ``graph=False`` holds Variables, and makes the modules of them again. It also holds a jit whose options nobody can
    read: the function here is the one inside that jit. No public way. From flax 0.10.7 on, tried on 0.10.7, 0.12.8 and 0.12.12.
    """
    by_jit_partial = type(function).__name__ == "SimpleJitPartialWrapped"
    inner = function.fun if by_jit_partial else function
    code = getattr(inner, "__code__", None)
    cells = dict(zip(getattr(code, "co_freevars", ()), getattr(inner, "__closure__", None) or (), strict=False))
    if by_jit_partial and {"fun", "graph", "partial_treedef"} <= cells.keys() and not cells["graph"].cell_contents:
        arguments = jax.tree.unflatten(cells["partial_treedef"].cell_contents, function.partial_args)
        return cells["fun"].cell_contents, tuple(arguments)
    if getattr(code, "co_name", "") == "cache_args_wrapper" and {"f", "cached_args"} <= cells.keys():
        return cells["f"].cell_contents, tuple(cells["cached_args"].cell_contents)
    return None


def loops_that_compare() -> frozenset[str]:
    """The argument layers that refuse a module whose static attributes a step changed: `nnx.scan` takes it from flax 0.12 on.

    Tried on all versions.
    """
    always = frozenset(("while_loop", "fori_loop", "cond", "switch"))
    return always if _flax() >= (0, 12) else always | {"scan"}


def layers_that_keep_variables() -> frozenset[str]:
    """The argument layers that refuse a call which replaces a Variable by another; the ``fori_loop`` of flax 0.12 takes it.

    Tried on all versions, and on flax 0.11.2.
    """
    always = frozenset(("while_loop", "cond", "switch"))
    return always if _flax() >= (0, 12) else always | {"fori_loop"}


def _flax() -> tuple[int, ...]:
    return tuple(map(int, flax_version().split(".")[:2]))


def remat_updates_can_be_off() -> bool:
    """True if `nnx.remat` takes ``graph_updates``, from flax 0.12 on; without, `nnx.scan` copies the state that it hands out.

    From flax 0.10.7 on `nnx.scan` itself copies nothing; that of 0.10.2 copies whatever it scans over. Tried on all versions.
    """
    return "graph_updates" in inspect.signature(nnx.remat).parameters


@contextlib.contextmanager
def taken_for_arrays(traces: Container[tuple[int, int]]) -> Iterator[None]:
    """Let flax treat the tracers of these traces as arrays for a while where it looks at the attributes of a module, as in a plain call.

    Flax 0.12 asks ``pytreelib.is_data``, which is False for every tracer, since `isinstance` with a `typing.Union` looks at the type alone;
    from Python 3.14 on it is True. Flax 0.10.7 takes tracers for arrays, and flax before looks at no attribute. No public way. Tried on all versions.
    """
    module: Any = sys.modules.get("flax.nnx.pytreelib")
    if not hasattr(module, "is_data"):
        yield
        return
    is_data = module.is_data

    def is_data_or_ours(value: Any) -> bool:
        return is_data(value) or (is_tracer(value) and trace_key(trace_identity(value)) in traces)

    module.is_data = is_data_or_ours
    try:
        yield
    finally:
        module.is_data = is_data


def has_data() -> bool:
    """True if flax has `nnx.data`, which marks a plain value as data, from 0.12 on. Tried on all versions."""
    return hasattr(nnx, "data")


@functools.cache
def takes_variables() -> bool:
    """True if a transform of flax takes a Variable that no module holds; flax 0.10.2 treats it as a leaf. Tried on all versions."""
    try:
        nnx.split(nnx.Variable(0))
    except RuntimeError:
        return False
    return True


def variable_name(kind: str) -> str:
    """A type of Variable as code names it, ``nnx.BatchStat``; one of the user's own by its name. All versions."""
    return f"nnx.{kind}" if hasattr(nnx, kind) else kind
