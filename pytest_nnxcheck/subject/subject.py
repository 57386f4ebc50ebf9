"""One call of the user's object, taken apart: a callable, the graph nodes it touches (its state), and its inputs.

`bind` takes a call as the user wrote it apart, `Subject.fresh` makes the state that every program gets, `on_arrays` gives jax a function of arrays to trace.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import NUMBERS, as_array, copied, describe, is_array, is_in_ref, is_ref
from pytest_nnxcheck.compat.graph import is_hijax, variable_value
from pytest_nnxcheck.core.errors import CheckError, Unfit
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.nesting import Misfit
from pytest_nnxcheck.subject import plain_objects
from pytest_nnxcheck.subject.abstract_arrays import abstract_inputs, abstract_state
from pytest_nnxcheck.walk.fingerprint import Known, Unknown, exact, fingerprint, show
from pytest_nnxcheck.walk.visit import FoundTracer
from pytest_nnxcheck.walk.walk import Walk, tracers_left, walk
from pytest_nnxcheck.xla.buffers import PROGRAM

__tracebackhide__ = True  # pytest shows the frames of the user, not these


class Nodes(nnx.Module):
    """The graph nodes and references of a subject that has several, or none, as one node; shared Variables stay shared."""

    def __init__(self, nodes: Mapping[str, Any]) -> None:
        for name, node in nodes.items():
            setattr(self, name, node)


Unwrapped = Literal["partial", "cached partial", "method", "object"]
"""A kind of callable that holds arguments of the function behind it."""


@dataclass(frozen=True, slots=True)
class Source:
    """The source of a leaf of the call's arguments: a graph node or a reference by name, or an input by number."""

    node: str | None = None
    input: int | None = None


@dataclass(slots=True)
class OutputTree:
    """The structure of what one program of the subject returned, whose arrays travel through the program. Filled in while that is traced or run."""

    names: tuple[str, ...] = ()
    """A name for each array: its place in the output."""
    arrays: tuple[Any, ...] = ()
    """The arrays; until the program has ended their types."""
    plain: bool = False
    """True if jax alone gives the output its structure: arrays and numbers, in containers that jax knows."""
    rebuild: Callable[[tuple[Any, ...]], Any] = field(default=lambda arrays: arrays)
    """A function that gives arrays the structure of the output."""

    def roots(self) -> list[tuple[str, Any]]:
        """The roots of the walk over the output: a module, a static field of a tree, keep more than arrays."""
        # A tree of the user's own may refuse types in the place of arrays: it is looked at when the program has ended.
        with contextlib.suppress(Exception):
            return [("output", self.rebuild(self.arrays))]
        return []


@dataclass(frozen=True, slots=True)
class Subject:
    """One call of the user's object, taken apart."""

    name: str
    function: Callable[..., Any]
    """The function that the user calls."""
    program: Callable[..., tuple[Any, ...]]
    """``program(state, *inputs)`` calls it and returns a flat tuple of arrays. Every run and every trace takes a program of its own, see `for_run`."""
    program_of: Callable[[Callable[..., Any], OutputTree], Callable[..., tuple[Any, ...]]]
    """A function that makes such a program of another function."""
    state: Any
    """The user's graph nodes, as one node."""
    names: tuple[str, ...]
    """The attribute of ``state`` for each of the user's graph nodes."""
    inputs: tuple[Any, ...]
    """The arrays among the arguments that no graph node holds."""
    input_names: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]
    """The other values among the arguments, and the static fields of objects that jax takes apart."""
    output_tree: OutputTree
    """The structure that the user returned, for the arrays of ``program``."""
    abstract: bool
    """True if its arrays have no values: nothing is run."""
    labels: Mapping[str, str]
    """The user's words for ``names``."""
    opened: tuple[tuple[str, Any], ...]
    """The plain objects that hold graph nodes or arrays."""
    code: Any
    """A key of the code and the static values of this call, to tell them from another's."""
    arguments: Any = ((), {})
    """The arguments of ``function`` as `open_up` opens them: by position, and by name."""
    sources: tuple[Any, ...] = ()
    """For each of their leaves its `Source`, or the static value that it is."""
    unwrapped: tuple[Unwrapped, ...] = ()
    """The kinds of callable that the user wrapped, down to ``function``."""
    in_refs: bool = False
    """True if the Variables of its copies are references."""

    def split(self) -> tuple[Any, Any]:
        """The definition of the graph, and its leaves. Raises `CheckError` for what flax has no place for, an array outside a Variable before 0.12: it works eagerly only; and for a reference in two places."""
        first: dict[int, Path] = {}
        # Before flax splits it, which takes such a reference out of the user's second Variable.
        for path, value in graph.raw_leaves(self.state):
            if is_ref(value) and (other := first.setdefault(id(value), path)) != path:
                raise CheckError(
                    f"{self.path(other)} and {self.path(path)} are one mutable array of jax (jax.Ref), and a program takes it once: put one Variable into both places"
                )
        try:
            graphdef, leaves = flax_modes.split(self.state)
        except (TypeError, ValueError) as error:
            raise CheckError(
                f"flax cannot split {', '.join(self.labels.values())}, so no transform can take it: {error!s:.200}"
            ) from None
        return graphdef, leaves

    def for_run(self, function: Callable[..., Any] | None = None) -> Subject:
        """The same call with a program of its own, or one of another function, whose output no other run or trace can touch."""
        tree = OutputTree()
        return replace(self, program=self.program_of(function or self.function, tree), output_tree=tree)

    @property
    def label(self) -> str:
        """The name of the frames of its program."""
        return str(self.program.__code__.co_qualname)

    def fresh(self, copy_of: Callable[[Any], Any] | None = None) -> Any:
        """The same graph with arrays of its own, made by ``copy_of``: a donated copy leaves the user's arrays alone. All abstract, or none."""
        copy = abstract_state if self.abstract else functools.partial(jax.tree.map, copy_of or copy_leaf)
        graphdef, leaves = flax_modes.split(flax_modes.with_refs(self.state, ref=True) if self.in_refs else self.state)
        return nnx.merge(graphdef, copy(leaves))

    def donated(self, donate: str) -> tuple[int, ...]:
        """The numbers of the inputs that are donated. Raises `CheckError` for the name of no argument that holds arrays."""
        if donate == "all":
            return tuple(range(len(self.input_names)))
        names = [re.match(r"\w*", label)[0] for label in self.input_names]  # type: ignore[index]
        first, *wanted = donate.split(",")
        if wanted and first in names:  # an argument of the name that means the state of the modules
            wanted.append(first)
        for word in wanted:
            if word not in names:
                valid = ", ".join(dict.fromkeys(names)) or "none"
                raise CheckError(
                    f"donate={donate!r}: {self.name} takes no array argument named {word!r}; its array arguments are: {valid}"
                )
        return tuple(number for number, name in enumerate(names) if name in wanted)

    def path(self, path: Path) -> str:
        """A path of the state as the user would write it: ``model.layers[0].kernel``."""
        if isinstance(self.state, Nodes):
            return spell(self.labels.get(path[0], str(path[0])), path[1:])
        return spell(self.labels[self.names[0]], path)

    def roots(self, state: Any) -> list[tuple[str, Any]]:
        """The roots of the walk over a copy of the state: the graph nodes under the user's names, other arguments (a callback, a configuration), then the code."""
        # Flax, which raises for an abstract reference, takes the attributes off before.
        nodes = (
            [(self.labels[name], getattr(state, name)) for name in self.names if hasattr(state, name)]
            if isinstance(state, Nodes)
            else [(self.labels[self.names[0]], state)]
        )
        return [*nodes, *self.opened, *self.static, (function_name(self.function), self.function)]

    def tracers(
        self, state: Any, earlier: Walk | None = None, alive: Container[tuple[int, int]] = ()
    ) -> tuple[FoundTracer, ...]:
        """The tracers of traces that are not ``alive``, reachable from a copy of the state, other arguments, the code, or the output; ``earlier`` is a walk
        that found none.
        """
        return tracers_left([*self.roots(state), *self.output_tree.roots()], earlier, alive)

    @contextlib.contextmanager
    def undone(self, state: Any, before: Walk | None = None) -> Iterator[list[FoundTracer]]:
        """Put back the places that a run or a trace changes, where the test did not ask for it, and empty the caches of jax if it leaks tracers.

        The places get what they held at a walk ``before``. The caches compare static attributes: a dead tracer among these makes every later
        call raise. The list that this gives holds, at the end, the tracers that nobody could put back.
        """
        before = before or walk(self.roots(state))
        left: list[FoundTracer] = []
        try:
            yield left
        finally:
            leaked = self.tracers(state, before)
            before.places.restore()
            if leaked:
                jax.clear_caches()
                left += self.tracers(state, before)


def ref_refused(path: str) -> str:
    """Why a mutable array of jax cannot be checked: outside a Variable, or before jax 0.10 and flax 0.12.7."""
    kept = (
        "the array in an nnx.Variable with ref=True" if flax_modes.takes_refs() else "a plain array in an nnx.Variable"
    )
    return f"{path} is a mutable array of jax (jax.Ref), which is not supported: keep {kept}"


def spell(root: str, path: Path) -> str:
    """Join a path onto its root: attributes after a dot, numbers and other keys in brackets."""
    parts = [f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in path]
    return (root + "".join(parts)).removeprefix(".")


def function_name(function: Any) -> str:
    """The name of the user's code in messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def users_function(function: Any) -> Any:
    """The function that the user wrote, without the transforms and partials around it."""
    inner = inspect.unwrap(function) if callable(function) else function
    inner = inner.func if isinstance(inner, functools.partial) else getattr(inner, "__func__", inner)
    return inner if inner is function else users_function(inner)


def is_plain(output: Any) -> bool:
    """True if an output is made of arrays and numbers, in containers that jax knows."""
    leaves = jax.tree.leaves(output, is_leaf=graph.is_graph_node)
    return all(is_array(leaf) or isinstance(leaf, NUMBERS) for leaf in leaves)


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
            plain_objects.open_up(output), is_leaf=graph.is_graph_node
        )
    except (TypeError, ValueError) as error:
        raise CheckError(
            f"jax cannot flatten what the call returns, so no transform can hand it out: {error}"
        ) from None
    own: dict[int, Path] = {}
    if state is not None and any(graph.is_graph_node(leaf) for _, leaf in leaves):
        nodes = [(tuple(path), node) for path, node in flax_modes.iter_graph(state) if graph.is_graph_node(node)]
        own = {id(node): path for path, node in reversed(nodes)}  # a node in two places is the first

    def at_home(path: Path) -> Callable[[tuple[Any, ...]], Any]:
        # Looked up when the call is over: the user's own node may have come with the call.
        return lambda _: next((node for there, node in flax_modes.iter_graph(home) if tuple(there) == path), None)

    parts: list[tuple[int, Callable[[tuple[Any, ...]], Any]]] = []
    arrays: list[Any] = []
    names: list[str] = []
    for path, leaf in leaves:
        held, rebuild = flatten_leaf(leaf) if id(leaf) not in own else ((), at_home(own[id(leaf)]))
        parts.append((len(held), rebuild))
        arrays.extend(held)
        names.extend([jax.tree_util.keystr(path)] * len(held))

    def rebuild_all(arrays: tuple[Any, ...]) -> Any:
        rest, values = list(arrays), []
        for count, rebuild in parts:
            values.append(rebuild(tuple(rest[:count])))
            del rest[:count]
        return plain_objects.rebuilt(jax.tree_util.tree_unflatten(treedef, values))

    return tuple(arrays), rebuild_all, tuple(names)


def flatten_leaf(leaf: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The arrays of one leaf of an output, and how to build the leaf from them."""
    if graph.is_graph_node(leaf):
        graphdef, state = flax_modes.split(Nodes({"node": leaf}))
        values, treedef = jax.tree_util.tree_flatten(state)

        def rebuild(arrays: tuple[Any, ...]) -> Any:
            holder: Any = nnx.merge(graphdef, jax.tree_util.tree_unflatten(treedef, arrays))
            return holder.node

        return tuple(values), rebuild
    # A reference too: jax says in its own words that no program returns one.
    if is_array(leaf) or is_ref(leaf) or isinstance(leaf, NUMBERS):
        return (as_array(leaf),), lambda arrays: arrays[0]
    # Where no transform has to hand it out, the walk looks at its content as at that of a module.
    if graph.is_tracing() and walk([("", leaf)]).tracers:
        raise Unfit(Misfit("hidden arrays", type(leaf).__name__))
    return (), lambda _: leaf


def copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) or is_ref(leaf):
        return copied(leaf)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


# --- take a call apart


def bind(subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str = "") -> Subject:
    """Take a call apart; ``owner`` is the user's name for the object that the subject is a method of.

    Raises `CheckError` for a subject that is not callable and for inputs that no transform can take.
    """
    unwrapped: list[Unwrapped] = []
    function, args, kwargs, labels = unwrap(subject, args, kwargs, unwrapped, owner)
    try:
        tree = plain_objects.open_up((args, kwargs))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=graph.is_graph_node)
    except (TypeError, ValueError) as error:
        raise CheckError(
            f"jax cannot flatten the arguments of {function_name(function)}, so no transform can take them: {error}"
        ) from None
    parts = Parts(tuple(plain_objects.originals(tree, lambda path: name_of(path, labels))), tuple(unwrapped))
    for path, leaf in leaves:
        parts.file(name_of(path, labels), leaf)
    parts.static += plain_objects.static_fields(tree, lambda path: name_of(path, labels))
    return assemble(subject, function, tree, treedef, parts)


@dataclass(slots=True)
class Parts:
    """The leaves of a call's arguments, sorted into graph nodes, inputs and static values; ``values`` are those of the nodes' Variables."""

    opened: tuple[tuple[str, Any], ...]
    unwrapped: tuple[Unwrapped, ...]
    nodes: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    input_names: list[str] = field(default_factory=list)
    static: list[tuple[str, Any]] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)

    def file(self, label: str, leaf: Any) -> None:
        """Put one leaf in its place. Raises `CheckError` for one that cannot be run."""
        if graph.is_graph_node(leaf) or is_in_ref(leaf):
            variables = graph.variables(leaf)
            refuse_variables(label, variables)
            self.values += [variable_value(variable) for _, variable in variables]
            name = node_name(self.nodes, label, leaf)
            self.labels.setdefault(name, label)
            self.sources.append(Source(node=name))
        elif is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
            self.sources.append(Source(input=len(self.inputs)))
            self.inputs.append(leaf)
            self.input_names.append(label)
        else:
            refuse(label, leaf)
            self.sources.append(leaf)
            self.static.append((label, leaf))


def unwrap(
    subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], unwrapped: list[Unwrapped], name: str = ""
) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]:
    """The function behind a module, a bound method or a partial, whose kinds go into ``unwrapped``; its arguments, with those that they hold; the names of the arguments."""
    if not callable(subject):
        raise CheckError(
            f"nnx_wrap got {type(subject).__name__}, which is not callable: "
            "wrap a module with __call__, a bound method such as model.decode, or a function"
        )
    if isinstance(subject, functools.partial):
        unwrapped.append("partial")
        return unwrap(subject.func, (*subject.args, *args), {**subject.keywords, **kwargs}, unwrapped, name)
    if cached := graph.cached_partial(subject):
        unwrapped.append("cached partial")
        return unwrap(cached[0], (*cached[1], *args), kwargs, unwrapped, name)
    owner, function = owner_of(subject)
    if owner is None:
        return subject, args, kwargs, argument_names(subject, args)
    unwrapped.append("object" if owner is subject else "method")
    args = (owner, *args)
    own = name or ("model" if graph.is_graph_node(owner) else "self")
    return function, args, kwargs, [own, *argument_names(function, args)[1:]]


def owner_of(subject: Any) -> tuple[Any, Any]:
    """The object that the subject is called on, if it holds state, and the function that takes it first."""
    owner = subject.__self__ if inspect.ismethod(subject) else subject
    if not graph.is_graph_node(owner) and not isinstance(plain_objects.open_up(owner), plain_objects.Opened):
        return None, subject
    return owner, type(subject).__call__ if owner is subject else subject.__func__


def argument_names(function: Any, args: tuple[Any, ...]) -> list[str]:
    """The names of the parameters that take the positional arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    several = next((f"{p.name}[{{}}]" for p in parameters if p.kind is p.VAR_POSITIONAL), "argument {}")
    further = range(max(len(args) - len(positional), 0))
    return [*positional[: len(args)], *(several.format(index) for index in further)]


def name_of(path: Any, labels: list[str]) -> str:
    """The user's name for a leaf of ``(args, kwargs)``: ``batch['x']``."""
    root = labels[path[1].idx] if path[0].idx == 0 else str(path[1].key)
    return root + jax.tree_util.keystr(path[2:])


def node_name(nodes: dict[str, Any], label: str, node: Any) -> str:
    """File a graph node under an attribute name; the same object keeps one name."""
    for name, other in nodes.items():
        if other is node:
            return name
    name = base = re.sub(r"\W+", "_", label).strip("_") or "node"
    while name in nodes:
        name = f"{base}_{len(nodes)}"
    nodes[name] = node
    return name


def refuse(label: str, leaf: Any) -> None:
    """Raise `CheckError` for an iterator: it can be read once, and the call is made many times."""
    if isinstance(leaf, Iterator):
        raise CheckError(
            f"{label} is a {type(leaf).__name__}, which can be read once, and the call is made under every nesting: "
            "pass a list of its items, or one item"
        )


def refuse_variables(label: str, variables: list[tuple[Path, Any]]) -> None:
    """Raise `CheckError` for a hijax Variable, whose value is no attribute that a copy could be given, and for a reference in an attribute; on old versions for any."""
    for path, variable in variables:
        if is_hijax(variable):
            raise CheckError(
                f"{spell(label, path)} is a hijax Variable, which is not supported: build the module without nnx.var_defaults(hijax=True)"
            )
        if is_ref(variable_value(variable)) and (not flax_modes.takes_refs() or (path and is_ref(variable))):
            raise CheckError(ref_refused(spell(label, path)))


def assemble(subject: Any, function: Callable[..., Any], arguments: Any, treedef: Any, parts: Parts) -> Subject:
    """Put the parts of a call together as a program of state and inputs."""
    nodes, sources, inputs = parts.nodes, parts.sources, parts.inputs
    names = tuple(nodes)
    single = len(nodes) == 1 and isinstance(next(iter(nodes.values())), nnx.Module)
    state = nodes[names[0]] if single else Nodes(nodes)
    home = state

    def fill(source: Any, state: Any, inputs: tuple[Any, ...]) -> Any:
        if not isinstance(source, Source):
            return source
        if source.input is not None:
            return inputs[source.input]
        return state if single else getattr(state, str(source.node))

    def program_of(function: Callable[..., Any], tree: OutputTree) -> Callable[..., tuple[Any, ...]]:
        def program(state: Any, *inputs: Any) -> tuple[Any, ...]:
            filled = jax.tree_util.tree_unflatten(treedef, [fill(source, state, inputs) for source in sources])
            with plain_objects.filled(filled) as (args, kwargs):
                output = function(*args, **kwargs)
                arrays, tree.rebuild, tree.names = flatten_output(output, state, home)
                tree.plain = is_plain(output)
                tree.arrays = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in arrays)
            return arrays

        labelled(program, function)
        return program

    tree = OutputTree()
    abstract = any(isinstance(value, jax.ShapeDtypeStruct) for value in (*inputs, *parts.values, *nodes.values()))
    if abstract and (bare := [parts.labels[name] for name, node in nodes.items() if is_in_ref(node)]):
        raise CheckError(ref_refused(f"{bare[0]}, beside abstract arrays,"))
    # A program without inputs would give the layers nothing to map over and the guards no tracer to know their trace by.
    filled = inputs or [np.zeros((), np.float32)]
    return Subject(
        name=getattr(subject, "__qualname__", None) or type(subject).__qualname__,
        function=function,
        program=program_of(function, tree),
        program_of=program_of,
        state=state,
        names=names,
        inputs=abstract_inputs(filled) if abstract else tuple(map(jnp.asarray, filled)),
        input_names=tuple(parts.input_names),
        static=tuple(parts.static),
        output_tree=tree,
        abstract=abstract,
        labels=parts.labels,
        opened=parts.opened,
        code=(fingerprint(function), tuple((label, fingerprint(value)) for label, value in parts.static)),
        arguments=arguments,
        sources=tuple(sources),
        unwrapped=parts.unwrapped,
    )


def labelled(program: Callable[..., Any], function: Any) -> None:
    """Rename the program of a subject's function, to tell its frames from those of other subjects."""
    code = getattr(function, "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code else repr(type(function))
    name = f"{PROGRAM}{getattr(function, '__qualname__', '')} at {where}"
    program.__code__ = renamed(program.__code__, name)


@functools.lru_cache(maxsize=256)
def renamed(code: CodeType, name: str) -> CodeType:
    """The same code under another name, and the same object for the same name."""
    # Older jax keeps locations by code objects, which compare equal whatever their qualified names are.
    return code.replace(co_name=name, co_qualname=name)


# --- the call as jax traces it: a function of arrays alone, which the messages of jax call by the user's names

Key = tuple[Path, int]
"""One array of a state: the path of its Variable, and its number among the arrays of that."""


def on_arrays(
    body: Callable[..., Any], subject: Subject, state: Any = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """``body(module, *inputs)`` as a function of the leaves of the module and the inputs, and these arguments.

    The module is that of the call, or another ``state`` of it. Its arrays are not copied: a trace reads no values, and those that an earlier
    trace handed out have none.
    """
    own = subject.fresh() if subject.abstract or subject.in_refs else subject.state
    graphdef, leaves = flax_modes.split(own if state is None else state)

    def of_leaves(leaves: Any, *inputs: Any) -> Any:
        return body(nnx.merge(graphdef, leaves), *inputs)

    return in_users_words(of_leaves, subject), (leaves, *subject.inputs)


def in_users_words(traced: Callable[..., Any], subject: Subject) -> Callable[..., Any]:
    """``traced(state, *inputs)`` under the name, the file and the line of the user's function, with the user's names for the arguments.

    It sets the attributes that `inspect.unwrap` and `inspect.signature` follow, which jax asks.
    """

    def call(state: Any, *inputs: Any) -> Any:
        return traced(state, *inputs)

    function = inspect.unwrap(getattr(subject.function, "__func__", subject.function))
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not inspect.isfunction(function) and callable(function):
        function = inspect.unwrap(type(function).__call__)
    if inspect.isfunction(function):
        call.__wrapped__ = function  # type: ignore[attr-defined]
        call.__name__, call.__qualname__ = function.__name__, function.__qualname__
    state = "_".join(subject.labels.values()) or "state"
    kind = inspect.Parameter.POSITIONAL_ONLY
    names = identifiers((state, *subject.input_names))
    call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return call


def identifiers(labels: tuple[str, ...]) -> Iterator[str]:
    """A Python name for each label, none twice: ``batch['x']`` is ``batch_x``."""
    seen: set[str] = set()
    for label in labels:
        plain = re.sub(r"\W+", "_", label).strip("_") or "argument"
        plain = f"_{plain}" if plain[0].isdigit() else plain
        number = 2
        name = plain
        while name in seen:
            name, number = f"{plain}_{number}", number + 1
        seen.add(name)
        yield name


def numbered(state: Any) -> Iterator[tuple[Key, Any]]:
    """The leaves of a state, each with its path and its number among the arrays of one Variable."""
    seen: Counter[Path] = Counter()
    for path, leaf in graph.flat_state(state):
        yield (path, seen[path]), leaf
        seen[path] += 1


# --- keys of calls, under which facts about them are remembered: calls of one signature have one profile, equal calls one result


@dataclass(frozen=True, slots=True, eq=False)
class ByValue:
    """A graph definition, or its content, as part of a key. Its ``==`` may be the user's, and raise."""

    # The hash alone is no key: hashes collide, ``hash(-1) == hash(-2)``.

    definition: Any
    hashed: int

    def __hash__(self) -> int:
        return self.hashed

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, ByValue) and bool(self.definition == other.definition)
        except Exception:  # noqa: BLE001 - the user's code may raise anything
            return False


def signature(subject: Subject, graphdef: Any, leaves: Any) -> Any:
    """Everything that the profile of a call depends on: code, graph, shapes, static arguments, and the mode of flax."""
    shapes = tuple((path, describe(leaf)) for path, leaf in graph.flat_state(leaves))
    kind = (subject.abstract, subject.in_refs, flax_modes.mode_flags())
    definition = definition_of(subject, graphdef)
    return (subject.name, subject.code, definition, shapes, tuple(map(describe, subject.inputs)), *kind)


def definition_of(subject: Subject, graphdef: Any) -> Any:
    """A graph definition by its content: a test body makes its functions of optax and its configurations anew for every nesting.

    Where that is uncertain, by its own ``==``, and where it has no hash, by what a trace takes for alike.
    """
    with contextlib.suppress(Exception):  # a hash, an ``==`` of the user's
        definition = exact(graphdef, in_graph=True)
        return ByValue(definition, hash(definition))
    try:
        return ByValue(graphdef, hash(graphdef))
    except TypeError:  # an attribute that has no hash
        known = Known()
        return tuple((path, fingerprint(value, known=known)) for path, value in graph.attributes(subject.state))


def identity(subject: Subject) -> Any:
    """Everything that the result of a call depends on; None if that is uncertain."""
    graphdef, leaves = flax_modes.split(subject.state)
    try:
        content = tuple((path, exact(leaf)) for path, leaf in graph.flat_state(leaves))
        inputs = tuple(map(exact, subject.inputs))
        static = tuple((label, show(value)) for label, value in subject.static)
        definition = exact(graphdef, in_graph=True)
        key = (exact(subject.function), definition, content, inputs, static, flax_modes.mode_flags())
        hash(key)
    except (Unknown, TypeError):
        return None
    return key
