"""The subject of a check: a callable, the graph nodes it touches (its state), and its inputs.

`bind` takes a call as the user wrote it apart, and `Subject.fresh` makes the state that every program gets.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.observation import Path
from pytest_nnxcheck.core.outcome import CheckError, Unfit
from pytest_nnxcheck.inspection.origins import labelled
from pytest_nnxcheck.inspection.walk import walk
from pytest_nnxcheck.subject import plain_objects
from pytest_nnxcheck.subject.abstract_arrays import abstract_inputs, abstract_state
from pytest_nnxcheck.subject.fingerprint import fingerprint, show

__tracebackhide__ = True  # pytest shows the frames of the user, not these


class Nodes(nnx.Module):
    """The graph nodes of a subject that has several, or none, as one node; shared Variables stay shared."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        for name, node in nodes.items():
            setattr(self, name, node)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a leaf of the call's arguments comes from: a graph node by name, or an input by number."""

    node: str | None = None
    input: int | None = None


@dataclass(slots=True)
class Outbox:
    """The structure of what the subject returned last, with a name for each of its arrays, which travel through the program.

    An output is ``plain`` where jax alone gives it its structure: arrays and numbers, in containers that jax knows.
    """

    names: tuple[str, ...] = ()
    plain: bool = False
    rebuild: Callable[[tuple[Any, ...]], Any] = field(default=lambda arrays: arrays)


@dataclass(frozen=True, slots=True)
class Subject:
    """One call of the user's object, taken apart.

    ``program(state, *inputs)`` returns a flat tuple of arrays; ``outbox`` gives them back the structure the user returned.
    ``program_of`` makes the same call of another function. ``labels`` are the user's words for ``names``, ``opened`` the plain
    objects that hold graph nodes or arrays, and ``code`` tells this call's code and static values from another's. ``owner`` is the user's
    name of the object that a method is called on, where he has one. A call is ``plain`` where jax alone takes its arguments apart.
    """

    name: str
    function: Callable[..., Any]
    program: Callable[..., tuple[Any, ...]]
    program_of: Callable[[Callable[..., Any]], Callable[..., tuple[Any, ...]]]
    state: Any
    names: tuple[str, ...]
    inputs: tuple[Any, ...]
    input_names: tuple[str, ...]
    static: tuple[str, ...]
    outbox: Outbox
    abstract: bool
    labels: Mapping[str, str]
    opened: tuple[tuple[str, Any], ...]
    code: Any
    owner: str = ""
    plain: bool = False

    def refuse_what_flax_cannot_split(self) -> None:
        """A module that holds what flax has no place for (an array outside a Variable, before 0.12) works eagerly only. Raises `CheckError`."""
        try:
            compat.split(self.state)
        except (TypeError, ValueError) as error:
            raise CheckError(
                f"flax cannot split {', '.join(self.labels.values())}, so no transform can take it: {error!s:.200}"
            ) from None

    @property
    def label(self) -> str:
        """What the frames of its program are called."""
        return str(self.program.__code__.co_qualname)

    def fresh(self) -> Any:
        """The same graph with arrays of its own: a donated copy leaves the user's arrays alone. All abstract, or none."""
        graphdef, leaves = compat.split(self.state)
        return nnx.merge(graphdef, abstract_state(leaves) if self.abstract else jax.tree.map(copy_leaf, leaves))

    def donated(self, donate: str) -> tuple[int, ...]:
        """The numbers of the inputs that are donated. Raises `CheckError` for the name of no argument that holds arrays."""
        if donate == "all":
            return tuple(range(len(self.input_names)))
        names = [re.match(r"\w*", label)[0] for label in self.input_names]  # type: ignore[index]
        _, *wanted = donate.split(",")
        for word in wanted:
            if word not in names:
                known = ", ".join(dict.fromkeys(names)) or "none"
                raise CheckError(f"donate={donate!r}: {self.name} has no argument {word} with arrays, it has {known}")
        return tuple(number for number, name in enumerate(names) if name in wanted)

    def path(self, path: Path) -> str:
        """A path of the state as the user would write it: ``model.layers[0].kernel``."""
        if isinstance(self.state, Nodes):
            return spell(self.labels.get(path[0], str(path[0])), path[1:])
        return spell(self.labels[self.names[0]], path)

    def roots(self, state: Any) -> list[tuple[str, Any]]:
        """Where the walk over a copy of the state begins: the graph nodes under the user's names, then the code."""
        nodes = (
            [(self.labels[name], getattr(state, name)) for name in self.names]
            if isinstance(state, Nodes)
            else [(self.labels[self.names[0]], state)]
        )
        return [*nodes, *self.opened, (function_name(self.function), self.function)]


def spell(root: str, path: Path) -> str:
    """Join a path onto its root: attributes after a dot, numbers and other keys in brackets."""
    parts = [f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path]
    return (root + "".join(parts)).removeprefix(".")


def function_name(function: Any) -> str:
    """The name of the user's code in messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def bind(subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str = "") -> Subject:
    """Take a call apart; ``owner`` is what the user calls the object that the subject is a method of.

    Raises `CheckError` for a subject that is not callable and for inputs that no transform can take.
    """
    function, args, kwargs, labels = unwrap(subject, args, kwargs, owner)
    try:
        tree = plain_objects.open_up((args, kwargs))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=compat.is_graph_node)
    except (TypeError, ValueError) as error:
        raise CheckError(
            f"jax cannot flatten the arguments of {function_name(function)}, so no transform can take them: {error}"
        ) from None
    given = jax.tree.leaves((args, kwargs), is_leaf=compat.is_graph_node)
    plain = not holds_arguments(subject) and list(map(id, given)) == [id(leaf) for _, leaf in leaves]
    parts = Parts(opened=tuple(plain_objects.originals(tree, lambda path: name_of(path, labels))), plain=plain)
    for path, leaf in leaves:
        parts.file(name_of(path, labels), leaf)
    return assemble(subject, function, treedef, parts, owner)


@dataclass(slots=True)
class Parts:
    """The leaves of a call's arguments, sorted into graph nodes, inputs and static values."""

    opened: tuple[tuple[str, Any], ...]
    plain: bool
    nodes: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    inputs: list[Any] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    static: list[tuple[str, Any]] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)

    def file(self, label: str, leaf: Any) -> None:
        """Put one leaf in its place. Raises `CheckError` for one that cannot be run."""
        if compat.is_graph_node(leaf):
            name = node_name(self.nodes, label, leaf)
            self.labels.setdefault(name, label)
            self.places.append(Place(node=name))
        elif is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            self.places.append(Place(input=len(self.inputs)))
            self.inputs.append(leaf)
            self.input_names.append(label)
        else:
            refuse(label, leaf)
            self.places.append(leaf)
            self.static.append((label, leaf))


def is_array(value: Any) -> bool:
    """Whether jax takes the value for an array; NumPy also has arrays of text, dates and objects."""
    if isinstance(value, jax.Array):
        return True
    if not isinstance(value, np.ndarray | np.generic):
        return False
    return value.dtype.kind in "biufc" or bool(value.dtype.kind == "V" and jnp.issubdtype(value.dtype, jnp.number))


def unwrap(
    subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]:
    """The function behind a module, a bound method or a partial; what they hold, put among its arguments; names of those."""
    if not callable(subject):
        raise CheckError(
            f"nnx_wrap got {type(subject).__name__}, which is not callable: "
            "wrap a module with __call__, a bound method such as model.decode, or a function"
        )
    if isinstance(subject, functools.partial):
        return unwrap(subject.func, (*subject.args, *args), {**subject.keywords, **kwargs}, name)
    if cached := compat.cached_partial(subject):
        return unwrap(cached[0], (*cached[1], *args), kwargs, name)
    owner, function = owner_of(subject)
    if owner is None:
        return subject, args, kwargs, argument_names(subject, args)
    args = (owner, *args)
    own = name or ("model" if compat.is_graph_node(owner) else "self")
    return function, args, kwargs, [own, *argument_names(function, args)[1:]]


def holds_arguments(subject: Any) -> bool:
    """Whether arguments of the call are in an `nnx.cached_partial`."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    return compat.cached_partial(subject) is not None


def owner_of(subject: Any) -> tuple[Any, Any]:
    """The object that the subject is called on, if it holds state, and the function that takes it first."""
    owner = subject.__self__ if inspect.ismethod(subject) else subject
    if not compat.is_graph_node(owner) and not isinstance(plain_objects.open_up(owner), plain_objects.Opened):
        return None, subject
    return owner, type(subject).__call__ if owner is subject else subject.__func__


def argument_names(function: Any, args: tuple[Any, ...]) -> list[str]:
    """The names of the parameters that take the positional arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = []
    for index in range(len(args)):
        last = parameters[min(index, len(parameters) - 1)] if parameters else None
        if last is None:
            names.append(f"argument {index}")
        elif last.kind is inspect.Parameter.VAR_POSITIONAL:
            names.append(f"{last.name}[{index - len(parameters) + 1}]")
        else:
            names.append(last.name)
    return names


def name_of(path: Any, labels: list[str]) -> str:
    """What the user calls a leaf of ``(args, kwargs)``: ``batch['x']``."""
    root = labels[path[1].idx] if path[0].idx == 0 else str(path[1].key)
    return root + jax.tree_util.keystr(path[2:])


def node_name(nodes: dict[str, Any], label: str, node: Any) -> str:
    """File a graph node under an attribute name; the same object keeps one name."""
    for name, known in nodes.items():
        if known is node:
            return name
    name = base = re.sub(r"\W+", "_", label).strip("_") or "node"
    while name in nodes:
        name = f"{base}_{len(nodes)}"
    nodes[name] = node
    return name


def refuse(label: str, leaf: Any) -> None:
    """What is read once cannot be handed to a call that is made many times. Raises `CheckError`."""
    if isinstance(leaf, Iterator):
        raise CheckError(
            f"{label} is a {type(leaf).__name__}, which can be read once, and the call is made under every nesting: "
            "pass a list of its items, or one item"
        )


def assemble(subject: Any, function: Callable[..., Any], treedef: Any, parts: Parts, owner: str) -> Subject:
    """Put the parts of a call together as a program of state and inputs."""
    nodes, places, inputs = parts.nodes, parts.places, parts.inputs
    names = tuple(nodes)
    single = len(nodes) == 1 and isinstance(next(iter(nodes.values())), nnx.Module)
    state = nodes[names[0]] if single else Nodes(nodes)
    outbox = Outbox()
    home = state

    def fill(place: Any, state: Any, inputs: tuple[Any, ...]) -> Any:
        if not isinstance(place, Place):
            return place
        if place.input is not None:
            return inputs[place.input]
        return state if single else getattr(state, str(place.node))

    def program_of(function: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def program(state: Any, *inputs: Any) -> tuple[Any, ...]:
            filled = jax.tree_util.tree_unflatten(treedef, [fill(place, state, inputs) for place in places])
            with plain_objects.filled(filled) as (args, kwargs):
                output = function(*args, **kwargs)
                arrays, outbox.rebuild, outbox.names = flatten_output(output, state, home)
                outbox.plain = is_plain(output)
            return arrays

        labelled(program, function)
        return program

    values = [*inputs, *(value for _, value in compat.raw_leaves(state))]
    abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    # A program without inputs would give the layers nothing to map over and the guards no tracer to know their trace by.
    filled = inputs or [np.zeros((), np.float32)]
    return Subject(
        name=getattr(subject, "__qualname__", None) or type(subject).__qualname__,
        function=function,
        program=program_of(function),
        program_of=program_of,
        state=state,
        names=names,
        inputs=abstract_inputs(filled) if abstract else tuple(map(jnp.asarray, filled)),
        input_names=tuple(parts.input_names),
        static=tuple(f"{label}={show(value)}" for label, value in parts.static),
        outbox=outbox,
        abstract=abstract,
        labels=parts.labels,
        opened=parts.opened,
        code=(fingerprint(function), tuple((label, fingerprint(value)) for label, value in parts.static)),
        owner=owner,
        plain=parts.plain,
    )


def is_plain(output: Any) -> bool:
    """Whether an output is made of arrays and numbers, in containers that jax knows."""
    leaves = jax.tree.leaves(output, is_leaf=compat.is_graph_node)
    return all(is_array(leaf) or isinstance(leaf, bool | int | float | complex) for leaf in leaves)


def flatten_output(
    output: Any, state: Any = None, home: Any = None
) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any], tuple[str, ...]]:
    """The arrays of an output, the function that gives them back its structure, and their names: ``[1].mu['kernel']``.

    Numbers become arrays, as under `jax.jit`. A graph node of the state comes back as the user's own, at the same path of ``home``;
    others are split and merged again; other leaves (strings, say) stay as they are. Raises `CheckError` where jax has no structure
    for the output, and `Unfit` where a leaf hides arrays from it.
    """
    try:
        leaves, treedef = jax.tree_util.tree_flatten_with_path(
            plain_objects.open_up(output), is_leaf=compat.is_graph_node
        )
    except (TypeError, ValueError) as error:
        raise CheckError(
            f"jax cannot flatten what the call returns, so no transform can hand it out: {error}"
        ) from None
    own = paths_of_nodes(state) if any(compat.is_graph_node(leaf) for _, leaf in leaves) else {}
    parts: list[tuple[int, Callable[[tuple[Any, ...]], Any]]] = []
    arrays: list[Any] = []
    names: list[str] = []
    for path, leaf in leaves:
        found, rebuild = flatten_leaf(leaf) if id(leaf) not in own else ((), at_home(home, own[id(leaf)]))
        parts.append((len(found), rebuild))
        arrays.extend(found)
        names.extend([jax.tree_util.keystr(path)] * len(found))

    def rebuild_all(arrays: tuple[Any, ...]) -> Any:
        rest, values = list(arrays), []
        for count, rebuild in parts:
            values.append(rebuild(tuple(rest[:count])))
            del rest[:count]
        return plain_objects.rebuilt(jax.tree_util.tree_unflatten(treedef, values))

    return tuple(arrays), rebuild_all, tuple(names)


def paths_of_nodes(state: Any) -> dict[int, Path]:
    """Every graph node of the state by its identity."""
    found: dict[int, Path] = {}
    if state is not None:
        for path, node in compat.iter_graph(state):
            if compat.is_graph_node(node):
                found.setdefault(id(node), tuple(path))
    return found


def at_home(home: Any, path: Path) -> Callable[[tuple[Any, ...]], Any]:
    """The user's own node at a path, looked up when the call is over: it may have come with the call."""
    return lambda _: next((node for there, node in compat.iter_graph(home) if tuple(there) == path), None)


def flatten_leaf(leaf: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The arrays of one leaf of an output, and how to build the leaf from them."""
    if compat.is_graph_node(leaf):
        graphdef, state = compat.split(Nodes({"node": leaf}))
        values, treedef = jax.tree_util.tree_flatten(state)

        def rebuild(arrays: tuple[Any, ...]) -> Any:
            holder: Any = nnx.merge(graphdef, jax.tree_util.tree_unflatten(treedef, arrays))
            return holder.node

        return tuple(values), rebuild
    if is_array(leaf) or isinstance(leaf, bool | int | float | complex):
        return (jnp.asarray(leaf),), lambda arrays: arrays[0]
    if walk([("", leaf)]).tracers:
        raise Unfit(
            f"the call returns a {type(leaf).__name__} that holds arrays, which no transform hands out: "
            "return a tuple, a list, a dict or a dataclass"
        )
    return (), lambda _: leaf


def copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return compat.copied(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf
