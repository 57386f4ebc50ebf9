"""Graph nodes, their Variables and tracers in every version of flax; Variables and tracers are read without running their code.

First single objects: what a Variable holds, which trace a tracer belongs to, which line made it. Then whole graphs: paths, leaves, attributes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Container, Iterator
from types import FunctionType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jax._src import core
from jax.tree_util import DictKey, tree_flatten_with_path

from pytest_nnxcheck.compat.arrays import describe, in_type, is_held_ref, is_ref, value_of
from pytest_nnxcheck.compat.flax_modes import iter_graph, mode_flags, split
from pytest_nnxcheck.compat.owner import is_library_file, of_file, surrounds
from pytest_nnxcheck.core.text import near

__tracebackhide__ = True  # pytest shows the frames of the user, not these

_mro: Callable[[type], tuple[type, ...]] = type.__dict__["__mro__"].__get__

_NNX = {
    "Variable": "variable",
    "VariableState": "variable",
    "List": "nnx list",
    "Dict": "nnx dict",
    "Object": "node",
    "Pytree": "node",
}
"""Classes of `flax.nnx` and their kinds. Flax 0.12 has no VariableState, flax before has no List and no Pytree, and 0.11 no Dict."""

# By id, since the hash of a class may be the code of its metaclass.
_KINDS = {
    id(jax.core.Tracer): "tracer",
    **({id(jax.Ref): "reference"} if hasattr(jax, "Ref") else {}),
    **{id(vars(nnx)[name]): kind for name, kind in _NNX.items() if name in vars(nnx)},
}


def is_variable(value: object) -> bool:
    """True if a value is a Variable; asks its class alone, see `kind_of`."""
    return kind_of(type(value)) == "variable"


def kind_of(cls: type) -> str:
    """The kind of a class in the walk: ``tracer``, ``array``, ``reference``, ``variable``, ``nnx list``, ``nnx dict``, ``node``, or empty.

    Looks at the class only: `isinstance` would ask the object for its ``__class__``, which may be the user's code.
    On jax 0.4 concrete arrays are virtual subclasses of `jax.Array`, an abstract class. All versions.
    """
    for base in _mro(cls):
        if id(base) in _KINDS:
            return _KINDS[id(base)]
    module = type.__dict__["__module__"].__get__(cls)
    from_jax = isinstance(module, str) and module.partition(".")[0] in ("jax", "jaxlib")
    return "array" if from_jax and issubclass(cls, jax.Array) else ""


def is_tracer(value: object) -> bool:
    """True if the value is a jax tracer, by its class alone. `jax.core.Tracer` is public. All versions."""
    return any(base is jax.core.Tracer for base in _mro(type(value)))


def _read(value: object, name: str, default: Any = None) -> Any:
    """Read an attribute past the object's own ``__getattr__``, which has hooks, trace checks and warnings."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


_ABSENT: Any = object()
_FIELDS = frozenset(("raw_value", "_raw_value", "value", "type", "_trace_state", "_var_metadata", "_aval", "_refs"))
"""The attributes of a Variable that are no metadata; the last two are those of a reference that no Variable holds."""


def variable_value(variable: Any) -> Any:
    """The raw value of a Variable (or VariableState); a reference that no Variable holds is its own.

    Public access (``.value``, ``[...]``) runs the Variable's hooks and warns by version; the slot is ``_raw_value`` from
    flax 0.12, ``raw_value`` before, and ``value`` in a VariableState. All versions.
    """
    for name in ("_raw_value", "raw_value", "value"):
        if (value := _read(variable, name, _ABSENT)) is not _ABSENT:
            return value
    return variable if is_ref(variable) else None


def variable_kind(variable: Any) -> str:
    """The Variable type as the user knows it, such as ``Param``; a VariableState carries it in ``type``. All versions."""
    is_state = any(base.__name__ == "VariableState" for base in type(variable).__mro__)
    return str((_read(variable, "type") if is_state else type(variable)).__name__)


def is_pinned(variable: Any) -> bool:
    """True if flax refuses every write to a Variable here, since it was made in another trace.

    No public way on flax before 0.12, where only a write that raises shows it. All versions.
    """
    trace = _read(variable, "_trace_state")
    return trace is not None and not trace.is_valid()


def set_variable_value(variable: Any, raw: Any) -> None:
    """Put a raw value back, past the hooks and the check of the trace level, which no public setter leaves out. A reference stays, and takes in a value of its own type. All versions."""
    held = variable_value(variable)
    if is_held_ref(held) and not is_tracer(raw) and describe(raw) == describe(held):
        held[...] = value_of(raw)
        return
    for name in ("_raw_value", "raw_value", "value"):
        if _read(variable, name, _ABSENT) is not _ABSENT:
            object.__setattr__(variable, name, raw)
            return


def is_hijax(variable: Any) -> bool:
    """True if a Variable is one of the experimental hijax types: its value is no attribute. Flax 0.12.12; before 0.12 there are none."""
    return type(variable).__name__ == "HijaxVariable"


def is_optimizer_state(variable: Any) -> bool:
    """True if a Variable holds the state of an optimizer. `nnx.OptState` is public from flax 0.10.7 on; before, it is known by its name. All versions."""
    return any(base.__name__ == "OptState" for base in _mro(type(variable))) or type(variable).__name__ in (
        "OptArray",
        "OptVariable",
    )


def variable_metadata(variable: Any) -> dict[str, Any]:
    """The metadata of a Variable.

    From flax 0.10.7 on it is a dict of its own, which is returned itself; before, the rest of the instance's ``__dict__``, returned as a new
    dict. ``get_metadata`` is public, but a copy on some versions. All versions.
    """
    metadata: dict[str, Any] | None = _read(variable, "_var_metadata")
    if metadata is not None:
        return metadata
    return {key: value for key, value in (_read(variable, "__dict__") or {}).items() if key not in _FIELDS}


def set_metadata(variable: Any, name: str, value: Any) -> None:
    """Put an entry into the metadata of a Variable past its check of the trace level. All versions."""
    metadata: dict[str, Any] | None = _read(variable, "_var_metadata")
    (metadata if metadata is not None else vars(variable))[name] = value


@contextlib.contextmanager
def writes_noted(note: Callable[[Any, Any], None], replaced: Callable[[Any, Any], None], mark: str) -> Iterator[None]:
    """Call ``note(variable, value before)`` after each write of another value to a Variable with this mark in its metadata for a while, and
    ``replaced(variable, other)`` where a module gets another Variable in its place.

    All ways to write come to these methods of a Variable: ``value``, ``[...]``, ``set_value``, ``copy_from``, `nnx.update`, and what a transform of flax
    hands out. Some take the metadata of another Variable over, and the mark is put back. No public way: the hooks of Variables are deprecated from
    flax 0.12 on. Before it, a list in a module is a list of Python, whose items are replaced unseen. Tried on all versions.
    """
    written = set[int]()

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def write(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = variable_metadata(self).get(mark)
            if own is None or id(self) in written:
                return method(self, *args, **kwargs)
            before = variable_value(self)
            written.add(id(self))
            try:
                result = method(self, *args, **kwargs)
            finally:
                written.discard(id(self))
            set_metadata(self, mark, own)
            if variable_value(self) is not before:
                note(self, before)
            return result

        return write

    set_attribute = nnx.Module.__setattr__

    @functools.wraps(set_attribute)
    def set_noted(self: Any, name: str, value: Any) -> None:
        before = (_read(self, "__dict__") or {}).get(name)
        set_attribute(self, name, value)
        after = (_read(self, "__dict__") or {}).get(name)
        if after is not before and is_variable(before) and is_variable(after):
            replaced(before, after)

    owner = next(base for base in nnx.Module.__mro__ if "__setattr__" in vars(base))
    with contextlib.ExitStack() as patches:
        for name in ("__setattr__", "copy_from", "update_from_state"):
            patches.enter_context(mock.patch.object(nnx.Variable, name, noted(vars(nnx.Variable)[name])))
        patches.enter_context(mock.patch.object(owner, "__setattr__", set_noted))
        yield


@contextlib.contextmanager
def clones_noted(note: Callable[[Any], None]) -> Iterator[None]:
    """Call ``note(copy)`` with each copy that `nnx.clone` makes for a while, whatever name the user's code has for the function.

    No public way: it calls ``merge`` of its own module, which is replaced there. Tried on all versions.
    """
    clone = inspect.unwrap(nnx.clone)
    merge = clone.__globals__["merge"]

    @functools.wraps(merge)
    def merged(*args: Any, **kwargs: Any) -> Any:
        copy = merge(*args, **kwargs)
        if sys._getframe(1).f_code is clone.__code__:
            note(copy)
        return copy

    with mock.patch.dict(clone.__globals__, {"merge": merged}):
        yield


_COPIES = ("copy", "copy_p", "name")
"""The equations of `jnp.copy`, by version, and of `jax.ad_checkpoint.checkpoint_name`."""


def is_computed(value: Any) -> bool:
    """True if an equation of a trace made a value: it is no argument of the traced function, nothing that the function captured, and no copy of these.

    What a derivative or a `vmap` holds in its place is taken for it. No public way: tracers know their equation from jax 0.7 on (``parent``), before
    it is in the frame of the trace. Tried on jax 0.4.33, 0.5.3, 0.6.2, 0.10.2 and 0.12.
    """
    while (
        inner := next((each for name in ("primal", "val") if is_tracer(each := _read(value, name))), None)
    ) is not None:
        value = inner
    if not is_tracer(value):
        return False
    if (parent := _read(value, "parent", _ABSENT)) is not _ABSENT:
        is_copy = parent is not None and parent.primitive.name in _COPIES
        return is_computed(parent.in_tracers[0]) if is_copy else parent is not None
    frame = _read(_read(value, "_trace"), "frame")
    var = getattr(frame, "tracer_to_var", {}).get(id(value))
    maker = {made: eqn for eqn in getattr(frame, "eqns", ()) for made in eqn.outvars}
    while var in maker and maker[var].primitive.name in _COPIES:
        (var,) = maker[var].invars
    return var in maker


def trace_identity(tracer: Any) -> tuple[Any, Any]:
    """The identity of the trace that a tracer belongs to; keep the objects alive, and compare by `trace_key`.

    No public way. ``_trace.main`` where it is set (the MainTrace of jax 0.4, the tag from 0.5), else ``_trace``. On jax 0.4 the body
    of a custom_vjp or a shard_map shares the MainTrace around it, one ``sublevel`` deeper. All versions.
    """
    trace = object.__getattribute__(tracer, "_trace")
    return getattr(trace, "main", None) or trace, getattr(trace, "sublevel", None)


def is_tracing() -> bool:
    """True if a trace is under way, in which a tracer may be alive; outside of any, every tracer has outlived its trace.

    No public way since `jax.core.trace_state_clean` is deprecated. All versions.
    """
    return not core.trace_state_clean()


def trace_key(identity: tuple[Any, Any]) -> tuple[int, int]:
    """`trace_identity` as a key, valid while the identity itself is kept."""
    main, sublevel = identity
    return id(main), 0 if sublevel is None else int(sublevel.level)


def tracer_line(tracer: Any) -> str:
    """The line that created a tracer, ``FILE:LINE (FUNCTION)``; empty where jax kept no line.

    The public way is `jax.errors.UnexpectedTracerError`, raised by using the dead tracer eagerly; it has no line for vmap and
    grad tracers, and inside an outer trace nothing is raised. ``_line_info`` (jit, scan, ...) and ``source_info`` (vmap) are
    private but there on all versions. A tracer without either (grad) is unwrapped: ``val``, ``primal``. All versions.
    """
    while is_tracer(tracer):
        source = _read(tracer, "_line_info") or _read(tracer, "source_info")
        traceback = getattr(source, "traceback", None)
        for frame in traceback.frames if traceback is not None else ():
            if surrounds(frame.file_name):
                break  # an argument of the call: further out is the line that makes the call
            if not is_library_file(frame.file_name):
                return near(f"{frame.file_name}:{frame.line_num} ({frame.function_name})")
        tracer = next((inner for name in ("val", "primal") if is_tracer(inner := _read(tracer, name))), None)
    return ""


def equation_line(eqn: Any) -> str:
    """The user's innermost line of a jaxpr's equation, ``path:line``; empty where jax kept none, or where it is outside of the call.

    No public way: `jax.extend.source_info_util.summarize` leaves out the frames of jax, but not those of flax, nor of a plugin. All versions.
    """
    traceback = _read(_read(eqn, "source_info"), "traceback")
    for frame in traceback.frames if traceback is not None else ():
        if surrounds(frame.file_name):
            return ""
        if not is_library_file(frame.file_name):
            return near(f"{frame.file_name}:{frame.line_num}")
    return ""


_CASTS = {"astype", "asarray", "array", "convert_element_type"}
"""The functions of jax that convert an array because their caller names a type."""


def is_cast(eqn: Any) -> bool:
    """True if the user asked for the conversion that an equation makes: no promotion of types made it.

    No public way: by the names of functions of jax. Those of flax that promote, ``promote_dtype``, ask for it too. Tried on all versions.
    """
    traceback = _read(_read(eqn, "source_info"), "traceback")
    frames = traceback.frames if traceback is not None else ()
    inner = itertools.takewhile(lambda frame: is_library_file(frame.file_name), frames)
    names = [frame.function_name.rpartition(".")[2] for frame in inner]
    return not _CASTS.isdisjoint(names) and not any(name.startswith("promote_") for name in names)


def is_of_derivative(eqn: Any) -> bool:
    """True if an equation of a jaxpr is a part of a derivative. No public way: jax 0.6 and newer write their transforms into the names of equations."""
    return bool(re.search(r"jvp\(|transpose\(", str(_read(_read(eqn, "source_info"), "name_stack"))))


def frames_of_call(eqn: Any) -> tuple[tuple[str, int], ...]:
    """(file, line) of the frames of the call that made a jaxpr's equation, from the user's innermost one outwards; empty where jax kept none.

    A line of an installed package counts where there is none of the user's. The frames end where jax runs the function that the user's are in,
    unless that is the rule of a `jax.custom_vjp`, which runs where the function is called. No public way; all versions.
    """
    traceback = _read(_read(eqn, "source_info"), "traceback")
    every = traceback.frames if traceback is not None else ()
    inside = [*itertools.takewhile(lambda frame: not surrounds(frame.file_name), every)]
    owners = [of_file(frame.file_name) for frame in inside]
    first = next((owners.index(whose) for whose in ("user", "installed") if whose in owners), len(inside))
    frames = list[Any]()
    for of_jax, block in itertools.groupby(inside[first:], lambda frame: of_file(frame.file_name) == "jax"):
        called = [*block]
        if not of_jax:
            frames += called
        elif not any(frame.file_name.endswith(CUSTOM_RULES) for frame in called[-2:]):  # the last may filter tracebacks
            break
    return tuple((frame.file_name, frame.line_num) for frame in frames)


CUSTOM_RULES = "custom_derivatives.py"
"""The file of `jax.custom_vjp` and `jax.custom_jvp`."""


def called_by(call: Any, of_library: bool, eqn: Any) -> Any:
    """An equation inside of a call as one of the code around it: its names are within those of the call, and so are the lines of a library's.

    No public way; all versions.
    """
    around, own = call.source_info, eqn.source_info
    source = around if of_library else own.replace(name_stack=around.name_stack + own.name_stack)
    return eqn.replace(source_info=source)


def is_of_flax(eqn: Any) -> bool:
    """True if a line of flax makes an equation, called by the user's code or not. No public way; all versions."""
    traceback = _read(_read(eqn, "source_info"), "traceback")
    owners = (of_file(frame.file_name) for frame in (traceback.frames if traceback is not None else ()))
    return next((owner for owner in owners if owner != "jax"), "") == "flax"


def is_jit_of_library(eqn: Any, inner: Any) -> bool:
    """True if an equation calls a jitted function that is not the user's: jax keeps the trace of its first call, and the lines of that call.

    No public way; all versions.
    """
    name = eqn.params.get("name")
    tracebacks = (_read(_read(each, "source_info"), "traceback") for each in inner.eqns)
    frames = (frame for traceback in tracebacks if traceback is not None for frame in traceback.frames)
    files = (frame.file_name for frame in frames if name and frame.function_name.rpartition(".")[2] == name)
    return of_file(next(files, "")) not in ("user", "python")


def is_backward(eqn: Any) -> bool:
    """True if an equation of a jaxpr is of the backward part of a derivative.

    No public way: the stack of names says which transforms made an equation. Its text has them from jax 0.7 on, and before only where a scope is
    named inside; what it consists of has them on all versions.
    """
    parts = _read(_read(_read(eqn, "source_info"), "name_stack"), "stack") or ()
    return any(type(part).__name__ == "Transform" and part.name == "transpose" for part in parts)


def is_recomputed(eqn: Any) -> bool:
    """True if an equation inside of a differentiated remat computes values of the forward part again. No public way; all versions."""
    return "rematted_computation" in str(_read(_read(eqn, "source_info"), "name_stack"))


def is_graph_node(value: object) -> bool:
    """True if flax treats the value as a node of a graph: a Module, Rngs, Optimizer, or a Variable.

    `nnx.graph.is_graph_node` is public but says False of a Variable before flax 0.12, and True of one after; there it also says True of a
    reference. All versions.
    """
    if type(value) in PLAIN:
        return False
    return isinstance(value, nnx.Variable) or (not is_ref(value) and bool(nnx.graph.is_graph_node(value)))


PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None), FunctionType, functools.partial))
"""The types of most attributes of a module: no graph node has one of these, and flax looks for none inside. To ask flax and jax for each value takes a tenth of a check."""


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
        if type(node) not in PLAIN and (isinstance(node, nnx.Variable) or is_ref(node)):
            nodes.setdefault(id(node), (tuple(path), node))
    return list(nodes.values())


def raw_leaves(state: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of every Variable of a graph node, read without the trace checks of ``Variable.value``. All versions."""
    return [(path, variable_value(variable)) for path, variable in variables(state)]


def attributes(state: Any, *, with_nodes: bool = False) -> list[tuple[tuple[Any, ...], Any]]:
    """(path, value) of the attributes of a graph's modules that are no Variable, graph node or reference, nor a container of some unless ``with_nodes``: Python values, bare arrays.

    `nnx.iter_graph` is public, but shows a value once however many modules hold it, and takes lists apart on flax 0.10. All versions.
    """
    return [
        ((*path, name), value)
        for path, node in iter_graph(state)
        if is_graph_node(node) and not isinstance(node, nnx.Variable)
        for name, value in attributes_of(node).items()
        if type(value) in PLAIN or not (is_ref(value) or (is_graph_node(value) if with_nodes else holds_nodes(value)))
    ]


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes of a graph node, but for those that flax itself keeps; read without running its code. All versions."""
    try:
        own = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return {}
    return {name: value for name, value in own.items() if not is_upkeep(name)}


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


def remat_updates_can_be_off() -> bool:
    """True if `nnx.remat` takes ``graph_updates``, from flax 0.12.6 on; without, `nnx.scan` copies the state that it hands out.

    From flax 0.10.7 on `nnx.scan` itself copies nothing; that of 0.10.2 copies whatever it scans over. Tried on all versions.
    """
    return "graph_updates" in inspect.signature(nnx.remat).parameters


class _Off:
    """False, as a setting of flax, that notes whether anybody asked."""

    asked = False

    def __bool__(self) -> bool:
        self.asked = True
        return False


@contextlib.contextmanager
def remat_without_updates() -> Iterator[Callable[[], bool]]:
    """Let `nnx.remat` take ``graph_updates=False`` for a while where its caller names no other, and give a function that says whether anybody called it.

    It changes the default of the function, which everybody has who imported it by name; a function that `nnx.remat` made before stays as it is.
    What is traced meanwhile is forgotten. No public way for `nnx.remat` alone. From flax 0.12.6 on, tried on 0.12.8 and 0.12.12.
    """
    off = _Off()
    defaults: dict[str, Any] = nnx.remat.__kwdefaults__ or {}
    jax.clear_caches()  # a jit that traced the function before would not call it again
    try:
        with mock.patch.dict(defaults, graph_updates=off):
            yield lambda: off.asked
    finally:
        jax.clear_caches()


@contextlib.contextmanager
def taken_for_arrays(traces: Container[tuple[int, int]]) -> Iterator[None]:
    """Let flax treat the tracers of these traces as arrays for a while where it looks at the attributes of a module, as in a plain call.

    Flax 0.12 asks ``pytreelib.is_data``, which is False for every tracer, since `isinstance` with a `typing.Union` looks at the type alone;
    with jax 0.7 and from Python 3.14 on it is True. Flax 0.10.7 takes tracers for arrays, and flax before looks at no attribute. No public way. Tried on all versions.
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
