"""Take a call of the user's apart: the graph nodes and arrays among its arguments, and the parts of its output."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.compat.arrays import is_array, is_in_ref, is_ref
from pytest_nnxcheck.compat.variables import is_hijax, variable_value
from pytest_nnxcheck.core.errors import CheckError
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.subject import plain_objects
from pytest_nnxcheck.subject.abstract_arrays import abstract_inputs
from pytest_nnxcheck.subject.subject import (
    Nodes,
    OutputTree,
    Source,
    Subject,
    flatten_output,
    function_name,
    is_plain,
    ref_refused,
    spell,
)
from pytest_nnxcheck.walk.fingerprint import fingerprint
from pytest_nnxcheck.xla.origins import PROGRAM

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def bind(subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], owner: str = "") -> Subject:
    """Take a call apart; ``owner`` is the user's name for the object that the subject is a method of.

    Raises `CheckError` for a subject that is not callable and for inputs that no transform can take.
    """
    function, args, kwargs, labels = unwrap(subject, args, kwargs, owner)
    try:
        tree = plain_objects.open_up((args, kwargs))
        leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=graph.is_graph_node)
    except (TypeError, ValueError) as error:
        raise CheckError(
            f"jax cannot flatten the arguments of {function_name(function)}, so no transform can take them: {error}"
        ) from None
    given = jax.tree.leaves((args, kwargs), is_leaf=graph.is_graph_node)
    plain = not holds_arguments(subject) and list(map(id, given)) == [id(leaf) for _, leaf in leaves]
    parts = Parts(opened=tuple(plain_objects.originals(tree, lambda path: name_of(path, labels))), plain=plain)
    for path, leaf in leaves:
        parts.file(name_of(path, labels), leaf)
    return assemble(subject, function, treedef, parts)


@dataclass(slots=True)
class Parts:
    """The leaves of a call's arguments, sorted into graph nodes, inputs and static values; ``values`` are those of the nodes' Variables."""

    opened: tuple[tuple[str, Any], ...]
    plain: bool
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
    subject: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = ""
) -> tuple[Any, tuple[Any, ...], dict[str, Any], list[str]]:
    """The function behind a module, a bound method or a partial; its arguments, with those that they hold; the names of the arguments."""
    if not callable(subject):
        raise CheckError(
            f"nnx_wrap got {type(subject).__name__}, which is not callable: "
            "wrap a module with __call__, a bound method such as model.decode, or a function"
        )
    if isinstance(subject, functools.partial):
        return unwrap(subject.func, (*subject.args, *args), {**subject.keywords, **kwargs}, name)
    if cached := graph.cached_partial(subject):
        return unwrap(cached[0], (*cached[1], *args), kwargs, name)
    owner, function = owner_of(subject)
    if owner is None:
        return subject, args, kwargs, argument_names(subject, args)
    args = (owner, *args)
    own = name or ("model" if graph.is_graph_node(owner) else "self")
    return function, args, kwargs, [own, *argument_names(function, args)[1:]]


def holds_arguments(subject: Any) -> bool:
    """True if arguments of the call are in an `nnx.cached_partial`."""
    while isinstance(subject, functools.partial):
        subject = subject.func
    return graph.cached_partial(subject) is not None


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


def assemble(subject: Any, function: Callable[..., Any], treedef: Any, parts: Parts) -> Subject:
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
                tree.opened = () if tree.plain else tuple(plain_objects.fields_by_class(output).items())
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
        plain=parts.plain,
        partial=isinstance(subject, functools.partial) or inspect.ismethod(subject) or holds_arguments(subject),
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
