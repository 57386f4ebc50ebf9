"""What stands in a pasted program beside the layers and the test: it takes a call apart, and looks for what was found.

Nothing of the plugin calls these functions: those that a program needs are copied into it, with all they name (see `own_source`). A program looks for
what is known of a broken nesting: these tracers, this leaf, this figure. So none of them searches, or judges once more.
"""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.subject.subject import Nodes

__tracebackhide__ = True  # pytest shows the frames of the user, not these

COMPILED: list[Any] = []
"""The programs that the outermost jit compiled."""


# --- a call, taken apart


def describe(array: Any) -> str:
    """``float32[2,4]``."""
    return array.dtype.name + str([*array.shape]).replace(" ", "") if hasattr(array, "shape") else type(array).__name__


def is_node(value: Any) -> bool:
    return isinstance(value, nnx.Variable | nnx.State) or nnx.graph.is_graph_node(value)


def is_input(value: Any) -> bool:
    return isinstance(value, nnx.State | jax.Array | jax.ShapeDtypeStruct) or (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSUMm"
    )


def take_apart(subject: Any, args: Any, kwargs: Any, names: tuple[str, ...], pack: Any) -> tuple[Any, Any, Any, Any]:
    """``subject(*args, **kwargs)`` as a program of its graph nodes and arrays; the nodes, the arrays, and what gives an output its structure."""
    owner = subject.__self__ if inspect.ismethod(subject) else subject
    if is_node(owner) or not jax.tree_util.all_leaves([owner]):
        subject, args = subject.__func__ if inspect.ismethod(subject) else type(owner).__call__, (owner, *args)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = list({id(leaf): leaf for leaf in leaves if is_node(leaf) and not is_input(leaf)}.values())
    alone = len(nodes) == 1 and isinstance(nodes[0], nnx.Module)
    home = nodes[0] if alone else Nodes(dict(zip(names, nodes, strict=True)))
    makers: list[Any] = []

    def program(state: Any, *inputs: Any) -> Any:
        mine = {id(node): state if alone else getattr(state, name) for name, node in zip(names, nodes, strict=True)}
        rest = iter(inputs)
        filled = [
            jax.tree.map(lambda _: next(rest), leaf) if is_input(leaf) else mine.get(id(leaf), leaf) for leaf in leaves
        ]
        new_args, new_kwargs = jax.tree.unflatten(treedef, filled)
        values, makers[:] = pack(subject(*new_args, **new_kwargs), state, home)
        return values

    inputs = [array for leaf in leaves if is_input(leaf) for array in jax.tree.leaves(leaf)]
    return program, home, inputs or [jnp.zeros((), np.float32)], lambda output: makers[0](output)  # noqa: PLW0108


def arrays_of(output: Any, _state: Any, _home: Any) -> Any:
    """The arrays of an output, and what gives them its structure."""
    values, treedef = jax.tree.flatten(output)
    return tuple(map(jnp.asarray, values)), [functools.partial(jax.tree.unflatten, treedef)]


def parts_of(output: Any, state: Any, home: Any) -> Any:
    """The arrays of an output in which there is more than those, and what gives them its structure."""
    values, treedef = jax.tree.flatten(output, is_leaf=is_node)
    parts = [part_of(value, state, home) for value in values]
    arrays, inner = jax.tree.flatten([tree for tree, _ in parts])
    makers = [make for _, make in parts]

    def rebuild(arrays: Any) -> Any:
        return jax.tree.unflatten(
            treedef, [make(tree) for make, tree in zip(makers, jax.tree.unflatten(inner, arrays), strict=True)]
        )

    return tuple(map(jnp.asarray, arrays)), [rebuild]


def part_of(value: Any, state: Any, home: Any) -> tuple[Any, Callable[[Any], Any]]:
    """A part of an output as a tree of arrays, and what makes it of them; a node of the state is the user's own."""
    if is_input(value) or isinstance(value, bool | int | float | complex):
        return value, lambda tree: tree
    if not is_node(value):
        return (), lambda _: value
    if (path := next((path for path, node in nnx.iter_graph(state) if node is value), None)) is not None:
        return (), lambda _: dict(nnx.iter_graph(home))[path]
    graphdef, leaves = nnx.split(Nodes({"node": value}))
    return leaves, lambda leaves: nnx.merge(graphdef, leaves).node  # type: ignore[attr-defined]


# --- objects that jax cannot take apart

OPENED: dict[str, tuple[tuple[str, bool], ...]] = {}
"""The fields of each class that hold what a program must know: (name, whether it is an item). A program has its own table."""
ACCESS: dict[bool, tuple[Callable[..., Any], Callable[..., Any]]] = {
    False: (lambda owner, name: getattr(owner, name, None), object.__setattr__),
    True: (operator.getitem, operator.setitem),
}
"""How a field is read, and written, past the user's own ``__setattr__``."""
FILLED: list[Any] = []
"""(object, field, whether it is an item, its own value, that of the program) while a call runs."""


def open_objects(tree: Any) -> Any:
    """Let jax take objects apart by their fields; the same tree."""
    new = {type(value) for value in jax.tree.leaves(tree, is_leaf=is_node) if type(value).__qualname__ in OPENED}
    for cls in new:
        jax.tree_util.register_pytree_node(cls, read_fields, fill_fields)
    return open_objects(tree) if new else tree


def read_fields(owner: Any) -> Any:
    return [ACCESS[item][0](owner, name) for name, item in OPENED[type(owner).__qualname__]], owner


def fill_fields(owner: Any, values: Any) -> Any:
    """The object itself, which holds the values of the program while the call runs."""
    for (name, item), old, new in zip(OPENED[type(owner).__qualname__], read_fields(owner)[0], values, strict=True):
        ACCESS[item][1](owner, name, new)
        FILLED.append((owner, name, item, old, new))
    return owner


def emptied(output: Any, packed: Any) -> Any:
    """The same, after the objects hold their own values again, unless the call itself has put others there."""
    for owner, name, item, old, new in FILLED:
        if ACCESS[item][0](owner, name) is new:
            ACCESS[item][1](owner, name, old)
    # What is returned keeps no tracers until it is made of arrays.
    jax.tree.map(lambda _: None, output, is_leaf=is_node)
    FILLED.clear()
    return packed


# --- arguments in a partial


def unwrapped(subject: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The function in a partial, and all of its arguments; also those that `nnx.cached_partial` keeps."""
    if isinstance(subject, functools.partial):
        return unwrapped(subject.func, (*subject.args, *args), {**subject.keywords, **kwargs})
    known = graph.cached_partial(subject)
    return (subject, args, kwargs) if known is None else unwrapped(known[0], (*known[1], *args), kwargs)


# --- state and arrays


def own(tree: Any) -> Any:
    """The same with arrays of its own, which nobody else donates."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def registered(transform: Callable[..., Any], f: Any) -> Any:
    """The layer of a transform of the user's own, made anew for each trace."""
    return lambda state, *inputs: transform(f)(state, *inputs)  # noqa: PLW0108 - that is what makes it anew


def variable_at(state: Any, *keys: Any) -> Any:
    return next((node for path, node in nnx.iter_graph(state) if tuple(path) == keys), None)


def value_at(state: Any, *keys: Any) -> Any:
    """The value of the Variable with these keys, None where there is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(state)):
        if tuple(getattr(key, "key", "") for key in path)[: len(keys)] == keys:
            return leaf
    return None


def anything_at(state: Any, *keys: Any) -> Any:
    """The value of a Variable, or of a Python attribute."""
    owner = variable_at(state, *keys[:-1]) if keys[:-1] else state
    return own(value_at(state, *keys) if is_node(variable_at(state, *keys)) else getattr(owner, str(keys[-1]), None))


# --- a program that is compiled, or only traced


def staged(wrapper: Any, f: Any, show: Callable[..., Any], **options: Any) -> Any:
    """``wrapper(f, **options)``, `jax.jit` or `nnx.jit`, that shows what it compiled, and runs it unless its outputs are given then.

    ``show`` gets the program, compiled and lowered, the jitted function, and its arguments.
    """

    def stage(jitted: Any) -> Any:
        def run(*args: Any) -> Any:
            lowered = jitted.trace(*args).lower()
            level = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
            compiled = lowered.compile(compiler_options=level)
            outputs = show(compiled, lowered, jitted, args)
            return compiled(*args) if outputs is None else outputs

        return run

    jit = jax.jit
    if wrapper is jit:
        return stage(jit(f, **options))
    with mock.patch.object(jax, jit.__name__, lambda *args, **kwargs: stage(jit(*args, **kwargs))):
        return wrapper(f, **options)


def abstract_outputs(compiled: Any, lowered: Any, *_: Any) -> Any:
    """The outputs of a program that is not run."""
    infos, treedef = jax.tree.flatten(lowered.out_info)
    shardings = [each if each.num_devices > 1 else None for each in jax.tree.leaves(compiled.output_shardings)]
    made = [
        jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=each) for info, each in zip(infos, shardings, strict=True)
    ]
    COMPILED.append(compiled)
    head = compiled.as_text().partition("\n")[0].partition("input_output_alias={")[2]
    ALIASED.extend(made[int(output or 0)] for output in re.findall(r"\{(\d*)\}: \(\d+, \{\}", head))
    return jax.tree.unflatten(treedef, made)


ALIASED: list[Any] = []
"""The outputs of a compiled program that take the buffer of a donated argument."""


def is_aliased(array: Any) -> bool:
    return 0 in array.shape or any(array is each for each in ALIASED)


def stack_abstract(leaf: Any) -> Any:
    """An abstract array with a leading axis of two."""
    sharding = leaf.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(None, *sharding.spec))
    return jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype, sharding=sharding)


def traced(program: Any, state: Any, inputs: Any, look: Callable[..., Any]) -> Any:
    """The abstract output of a program that is only traced; ``look`` runs it inside."""
    graphdef, leaves = nnx.split(state)

    def pure(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        output = look(lambda: program(module, *inputs), [*jax.tree.leaves(leaves), *inputs])
        return output, nnx.state(module)

    output, after = jax.eval_shape(pure, leaves, *inputs)
    nnx.update(state, after)
    return output
