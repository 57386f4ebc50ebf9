"""What a pasted program is made of beside the layers: it takes a call apart, runs its nesting once, and keeps what it left.

Nothing of the plugin calls these functions. Those that a program needs are copied into it, with all they name (see `own_source`), so they
use jax, flax and the standard library, and of this package only what can be copied along. They are the short form of `subject`, `transforms`
and `engine.observe`: what a program needs to know of a call beforehand (`Facts`) was found by those.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.observation import Leaf
from pytest_nnxcheck.inspection.pointers import read_leaf
from pytest_nnxcheck.inspection.raw_access import LIBRARIES
from pytest_nnxcheck.subject.subject import Nodes, argument_names, copy_leaf, is_array, node_name, spell
from pytest_nnxcheck.transforms.layer import Plan, Program, stack

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True)
class Facts:
    """What is known of one call: paths of the state that it changes, of what it writes and restores, and of what a gradient is taken by;
    by layer the shapes of what is inside it; the numbers of the donated inputs, and with them those of the outputs that are their new values; leaves of an
    optimizer that must change; whether random numbers differ in a batch; and the user's name of the object that a method is called on.
    """

    changed: frozenset[Any] = frozenset()
    restored: frozenset[Any] = frozenset()
    parameters: frozenset[Any] = frozenset()
    shapes: Any = ()
    donated: tuple[int, ...] = ()
    returned: tuple[tuple[int, int], ...] = ()
    updated: tuple[str, ...] = ()
    drawn: bool = False
    owner: str = ""


@dataclass(frozen=True)
class Setup:
    """The nesting: ``nest(call, plans)`` puts the layers around a call, ``runs`` runs them, ``un_nest`` takes their axes off the output.

    ``inside`` says of each layer how many leading axes those inside it take off the inputs, ``axes`` how many all of them do;
    ``root`` how many arguments of the outermost jit are state, None where the outermost layer is no jit.
    """

    runs: Callable[..., Any]
    nest: Callable[..., Program]
    un_nest: Callable[[Any], Any]
    inside: tuple[int, ...] = ()
    axes: int = 0
    root: int | None = None
    donate: str = "state"
    place: Callable[[Any], Any] = lambda tree: tree


@dataclass(frozen=True)
class Call:
    """One call, taken apart: ``program(state, *inputs)`` makes it, and returns arrays, which ``rebuild`` gives their structure."""

    program: Program
    state: Any
    inputs: tuple[Any, ...]
    input_names: tuple[str, ...]
    roots: Callable[[Any], list[tuple[str, Any]]]
    path: Callable[[Any], str]
    rebuild: Callable[[Any], Any]
    names: list[str]
    abstract: bool


@dataclass
class Ran:
    """What one run of the nesting left: its copy of the state, the output or the exception, and the program that its jit compiled."""

    call: Call
    facts: Facts
    setup: Setup
    state: Any
    output: Any = None
    error: Exception | None = None
    tracers: list[tuple[str, Any]] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    compiled: list[Any] = field(default_factory=list)
    before: list[Leaf] = field(default_factory=list)
    after: dict[str, Leaf] = field(default_factory=dict)
    reused: set[int] = field(default_factory=set)


def shape(text: str) -> Any:
    """The abstract array of ``float32[8,64]``."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    kinds = ("threefry2x32", "rbg", "unsafe_rbg") if dtype.startswith("key<") else ()
    keys = {key.name: key for key in (jax.random.key(0, impl=kind).dtype for kind in kinds)}
    kind = keys[dtype] if keys else jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(int(size) for size in sizes.split(",") if size), kind)


# --- a call, taken apart


def unwrapped(subject: Any, args: Any, kwargs: Any, name: str) -> tuple[Any, Any, Any, list[str], Any]:
    """The function behind a module, a bound method or a partial, its arguments and their names, and the object that it is called on."""
    while isinstance(subject, functools.partial) or compat.cached_partial(subject):
        if known := compat.cached_partial(subject):
            subject, args = known[0], (*known[1], *args)
        else:
            subject, args, kwargs = subject.func, (*subject.args, *args), {**subject.keywords, **kwargs}
    owner = subject.__self__ if inspect.ismethod(subject) else subject
    if inspect.isfunction(subject) or not flatten(owner, str)[0]:
        return subject, args, kwargs, argument_names(subject, args), None
    function = subject.__func__ if inspect.ismethod(subject) else type(subject).__call__
    own = name or ("model" if compat.is_graph_node(owner) else "self")
    return function, (owner, *args), kwargs, [own, *argument_names(function, (owner, *args))[1:]], owner


def take_apart(subject: Any, args: Any, kwargs: Any, name_of_owner: str = "") -> Call:
    """The call ``subject(*args, **kwargs)`` as a program of state and inputs."""
    function, args, kwargs, labels, owner = unwrapped(subject, args, kwargs, name_of_owner)

    def name(path: Any) -> str:
        root = labels[path[1].idx] if path[0].idx == 0 else str(path[1].key)
        return root + jax.tree_util.keystr(path[2:])

    parts, fill = flatten((args, kwargs), name)
    nodes: dict[str, Any] = {}
    home: dict[str, str] = {}
    inputs: list[tuple[str, Any]] = []
    places: list[Any] = []
    for label, part in parts:
        if compat.is_graph_node(part):
            places.append(node_name(nodes, label, part))
            home.setdefault(places[-1], label)
        else:
            places.append(len(inputs))
            inputs.append((label, part))
    single = len(nodes) == 1 and isinstance(next(iter(nodes.values())), nnx.Module)
    state = next(iter(nodes.values())) if single else Nodes(nodes)
    owned = {tuple(path): node for path, node in compat.iter_graph(state) if compat.is_graph_node(node)}
    last: list[Callable[[Any], Any]] = []
    outputs: list[str] = []

    def program(state: Any, *inputs: Any) -> Any:
        held = [inputs[at] if isinstance(at, int) else state if single else getattr(state, at) for at in places]
        undo: list[Callable[[], None]] = []
        new_args, new_kwargs = fill(iter(held), undo)
        try:
            found, again = flatten(function(*new_args, **new_kwargs), jax.tree_util.keystr, numbers=True)
        finally:
            for put_back in undo:
                put_back()
        arrays, make = pack([value for _, value in found], state, owned)
        outputs[:] = [each for each, value in found if not compat.is_graph_node(value)]
        last[:] = [lambda arrays: again(iter(make(arrays)), [])]
        return arrays

    def path(keys: Any) -> str:
        return spell(next(iter(home.values())), keys) if single else spell(home.get(keys[0], str(keys[0])), keys[1:])

    def roots(state: Any) -> list[tuple[str, Any]]:
        named = [(label, state if single else getattr(state, node)) for node, label in home.items()]
        objects = [] if owner is None or compat.is_graph_node(owner) else [(labels[0], owner)]
        return [*named, *objects, (getattr(function, "__qualname__", type(function).__qualname__), function)]

    def rebuilt(arrays: Any) -> Any:
        return last[0](arrays)

    values = [value for _, value in inputs] or [np.zeros((), np.float32)]
    every = [*values, *(value for _, value in compat.raw_leaves(state))]
    abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in every)
    values = [abstract_twin(value) if abstract else jnp.asarray(value) for value in values]
    names = tuple(label for label, _ in inputs)
    return Call(program, state, tuple(values), names, roots, path, rebuilt, outputs, abstract)


def is_whole(leaf: Any) -> bool:
    return isinstance(leaf, nnx.State) or compat.is_graph_node(leaf)


def flatten(tree: Any, name: Callable[[Any], str], *, numbers: bool = False, above: tuple[int, ...] = ()) -> Any:
    """(name, value) of the graph nodes and arrays in a tree, and the function that makes the tree of others in their place."""
    try:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_whole)
    except (TypeError, ValueError):
        return [], lambda _values, _undo: tree  # a container that jax cannot flatten holds no state
    pieces = [flatten_leaf(leaf, name(path), numbers=numbers, above=above) for path, leaf in leaves]

    def fill(values: Iterator[Any], undo: list[Any]) -> Any:
        return jax.tree_util.tree_unflatten(treedef, [make(values, undo) for _, make in pieces])

    return [part for parts, _ in pieces for part in parts], fill


def flatten_leaf(leaf: Any, name: str, *, numbers: bool, above: tuple[int, ...]) -> Any:
    if isinstance(leaf, nnx.State):
        found, treedef = jax.tree_util.tree_flatten_with_path(leaf)
        paths = [jax.tree_util.keystr(path).removesuffix(".value").removesuffix(".raw_value") for path, _ in found]
        parts = [(name + path, value) for path, (_, value) in zip(paths, found, strict=True)]
        return parts, lambda values, _: jax.tree_util.tree_unflatten(treedef, [next(values) for _ in found])
    number = numbers and isinstance(leaf, bool | int | float | complex)
    if compat.is_graph_node(leaf) or is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) or number:
        return [(name, leaf)], lambda values, _: next(values)
    above = (*above, id(leaf))
    inner = fields(leaf) if len(above) == len({*above}) < DEEPEST else []
    held = {key: flatten(value, keyed(name + key), above=above) for key, value in inner}
    held = {key: parts for key, parts in held.items() if parts[0]}

    def fill(values: Iterator[Any], undo: list[Any]) -> Any:
        """The object itself, which holds the values of the program while the call runs."""
        for key, (_, make) in held.items():
            old, new = dict(fields(leaf))[key], make(values, undo)
            put(leaf, key, new)
            undo.append(functools.partial(put_if, leaf, key, new, old))
        return leaf

    return [part for parts, _ in held.values() for part in parts], fill


DEEPEST = 7


def keyed(name: str) -> Callable[[Any], str]:
    return lambda path: name + jax.tree_util.keystr(path)


def put_if(owner: Any, key: str, new: Any, old: Any) -> None:
    """What the call itself has put there stays."""
    if dict(fields(owner)).get(key) is new:
        put(owner, key, old)


def fields(value: Any) -> list[tuple[str, Any]]:
    """What a plain object of the user holds: (``.name`` or ``['key']``, value)."""
    packages = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    known = packages[0] in LIBRARIES and not isinstance(value, types.SimpleNamespace)
    if isinstance(value, type | enum.Enum) or known or {"jax", "jaxlib", "flax"}.intersection(packages):
        return []
    places = [vars(base).items() for base in type(value).__mro__ if base is not types.SimpleNamespace]
    slots = [name for place in places for name, slot in place if inspect.ismemberdescriptor(slot)]
    found = [*getattr(value, "__dict__", {}).items(), *((name, getattr(value, name, None)) for name in slots)]
    items = dict.items(value) if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*((f".{key}", held) for key, held in found), *((f"[{key!r}]", held) for key, held in items)]


def put(owner: Any, key: str, value: Any) -> None:
    """Set a field by the name that `fields` gives it."""
    if key.startswith("."):
        object.__setattr__(owner, key[1:], value)
    else:
        place = next(each for each in (owner if isinstance(owner, dict) else range(len(owner))) if f"[{each!r}]" == key)
        (dict if isinstance(owner, dict) else list).__setitem__(owner, place, value)


def pack(values: list[Any], state: Any, owned: Any) -> Any:
    """The arrays of an output, graph nodes taken apart, and what makes the output's values of them; nodes of the state are the user's own."""
    mine = {id(node): tuple(path) for path, node in compat.iter_graph(state) if compat.is_graph_node(node)}
    arrays: list[Any] = []
    makers: list[Callable[[Any], Any]] = []
    for value in values:
        if id(value) in mine:
            makers.append(functools.partial(lambda path, _: owned.get(path), mine[id(value)]))
        elif compat.is_graph_node(value):
            graphdef, leaves = compat.split(Nodes({"node": value}))
            flat, treedef = jax.tree.flatten(leaves)
            makers.append(
                functools.partial(unpack_node, graphdef, treedef, slice(len(arrays), len(arrays) + len(flat)))
            )
            arrays += flat
        else:
            makers.append(functools.partial(lambda index, arrays: arrays[index], len(arrays)))
            arrays.append(jnp.asarray(value))
    return tuple(arrays), lambda arrays: [make(arrays) for make in makers]


def unpack_node(graphdef: Any, treedef: Any, part: slice, arrays: Any) -> Any:
    merged: Any = nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays[part]))
    return merged.node


# --- copies


def copied(state: Any) -> Any:
    """The same graph with arrays of its own: what a run donates is not the user's."""
    graphdef, leaves = compat.split(state)
    return nnx.merge(graphdef, jax.tree.map(copy_leaf, leaves))


def abstract_twin(leaf: Any) -> Any:
    """The shape of an array, an object of its own, with its sharding where it lies on several devices."""
    if not hasattr(leaf, "shape"):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    several = sharding is not None and len(sharding.device_set) > 1
    kind = (
        leaf.dtype if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) else jax.dtypes.canonicalize_dtype(leaf.dtype)
    )
    return jax.ShapeDtypeStruct(leaf.shape, kind, sharding=sharding if several else None)


# --- the run


def run(call: Call, facts: Facts, setup: Setup) -> Ran:
    """Run the nesting on a copy of the state: what it donates must not be the user's own array."""
    state, inputs = setup.place(copied(call.state)), tuple(map(jnp.copy, setup.place(stacked(call.inputs, setup.axes))))
    ran = Ran(call, facts, setup, state)
    program = setup.nest(call.program, make_plans(ran, root_jit(ran)))
    ran.before = [read_leaf(*leaf) for leaf in donated_leaves(ran, inputs)]
    try:
        with warnings.catch_warnings(), compat.quick_compiles():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            ran.output = jax.block_until_ready(program(state, *inputs))
    except Exception as error:  # noqa: BLE001 - the call may raise anything
        ran.error = error
        return ran
    read_what_came_back(ran, read_leaf)
    return ran


def read_what_came_back(ran: Ran, read: Callable[[str, Any], Leaf]) -> None:
    """The state after the run, the outputs that are new values of donated inputs, and the buffers of all of them."""
    call, leaves = ran.call, jax.tree.leaves(ran.output)
    ran.after = {call.path(path): read(call.path(path), value) for path, value in compat.raw_leaves(ran.state)}
    plain = [leaf for _, value in compat.attributes(ran.state) for leaf in jax.tree.leaves(value)]
    arrays = [*leaves, *(leaf for leaf in plain if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct))]
    came_back = [*ran.after.values(), *(read("", leaf) for leaf in arrays)]
    ran.reused = {pointer for leaf in came_back for pointer in leaf.pointers}
    if not (ran.before and ran.facts.returned):
        return
    # Which leaf of the output is the call's own is asked of their numbers: taking axes off the arrays would copy them.
    numbers = [np.full((1,) * ran.setup.axes, number) for number in range(len(leaves))]
    own = jax.tree.leaves(ran.setup.un_nest(jax.tree.unflatten(jax.tree.structure(ran.output), numbers)))
    for number, place in ran.facts.returned:
        ran.after[call.input_names[number]] = read("output", leaves[own[place].item()])


def stacked(inputs: Any, axes: int) -> Any:
    """Inputs with a leading axis for every scan, vmap and first call."""
    for _ in range(axes):
        inputs = stack(inputs)
    return inputs


def first_of(tree: Any) -> Any:
    """The first element of the leading axis of every leaf."""

    def first_of_leaf(leaf: Any) -> Any:
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if abstract else leaf[0]

    return jax.tree.map(first_of_leaf, tree)


def registered(transform: Callable[..., Any]) -> Callable[[Program, Plan], Program]:
    """The layer of a transform of the user's own."""

    def make(f: Program, _plan: Plan) -> Program:
        def layer(state: Any, *inputs: Any) -> Any:
            return transform(f)(state, *inputs)

        return layer

    return make


def make_plans(ran: Ran, jit: Callable[..., Program]) -> list[Plan]:
    """What each layer must know, from the outermost inwards."""
    return [make_plan(ran, number, jit) for number in range(len(ran.setup.inside))]


def make_plan(ran: Ran, number: int, jit: Callable[..., Program]) -> Plan:
    facts = ran.facts
    return Plan(
        changed=lambda path, _: tuple(path) in facts.changed,
        written=lambda path, _: tuple(path) in facts.changed | facts.restored,
        subject=ran.call.program,
        element=lambda leaf: leaf[(0,) * ran.setup.inside[number]],
        shapes=None,
        empty=lambda: jax.tree.map(compat.zeros, facts.shapes[number]),
        parameters=lambda path, _: tuple(path) in facts.parameters,
        jit=jit if number == 0 else lambda wrapper, f: wrapper(f),
        unchanged=lambda state: unchanged(ran, state),
        graph_updates=compat.mode_flags()[1],
    )


@contextlib.contextmanager
def unchanged(ran: Ran, state: Any) -> Iterator[None]:
    """Note what ``eval_shape`` puts into the state, which must be nothing."""
    before = dict(compat.raw_leaves(state))
    yield
    after = dict(compat.raw_leaves(state))
    paths = sorted(before.keys() | after.keys(), key=str)
    ran.touched += [ran.call.path(path) for path in paths if before.get(path) is not after.get(path)]


def compiled_of(lowered: Any) -> Any:
    return lowered.compile(compiler_options=compat.compiler_options())


def root_jit(ran: Ran) -> Callable[..., Program]:
    """The jit of the outermost layer: it donates, keeps unused parameters, and shows what it compiled."""

    def show(compiled: Any, _arguments: Any, _lowered: Any) -> None:
        ran.compiled.append(compiled)

    options = {"abstract": False, "keep_unused": True}
    return lambda wrapper, f: compat.staged(wrapper, f, compiled_of, show, **options, **root_options(ran))


def root_options(ran: Ran) -> dict[str, Any]:
    """What the outermost jit donates."""
    states = ran.setup.root or 0
    donated: tuple[int, ...] = (0,) if states and ran.setup.donate != "none" else ()
    donated += tuple(states + number for number in ran.facts.donated)
    return {"donate_argnums": donated} if donated else {}


def donated_leaves(ran: Ran, inputs: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Names and values of what the outermost jit donates."""
    if ran.setup.root is None or ran.setup.donate == "none":
        return []
    leaves = [(path, value) for path, value in compat.raw_leaves(ran.state) if ran.setup.root]
    if ran.setup.root == 2:
        leaves = [(path, value) for path, value in leaves if tuple(path) in ran.facts.changed]
    named = [(ran.call.path(path), value) for path, value in leaves]
    return named + [(ran.call.input_names[number], inputs[number]) for number in ran.facts.donated]


def finish(ran: Ran) -> Any:
    """Give the user's own objects what the run left in its copy, and the output its structure."""
    put_back(ran.call.state, ran.state)
    return ran.call.rebuild(ran.setup.un_nest(ran.output))


def put_back(mine: Any, copy: Any) -> None:
    values = dict(compat.raw_leaves(copy))
    nodes = {tuple(path): node for path, node in compat.iter_graph(mine)}
    for path, variable in compat.variables(mine):
        real = isinstance(values.get(path), jax.ShapeDtypeStruct) and isinstance(
            compat.variable_value(variable), jax.Array
        )
        if path in values and not real:
            compat.set_variable_value(variable, values[path])
    for path, node in compat.iter_graph(copy):
        own = nodes.get(tuple(path))
        if own is None or isinstance(node, nnx.Variable) or not hasattr(node, "__dict__"):
            continue
        for name, value in vars(node).items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if name not in vars(own) or (plain and vars(own)[name] != value):
                setattr(own, name, value)
        for name in [name for name in vars(own) if name not in vars(node)]:
            delattr(own, name)
