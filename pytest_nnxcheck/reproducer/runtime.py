"""What stands in a pasted program beside the layers and the test: it takes a call apart, and looks for what was found.

Nothing of the plugin calls these functions: those that a program needs are copied into it, with all they name (see `own_source`). A program looks for
what is known of a broken nesting: these tracers, this leaf, this figure. So none of them searches, or judges once more.
"""

from __future__ import annotations

import contextlib
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

from pytest_nnxcheck import compat

__tracebackhide__ = True  # pytest shows the frames of the user, not these

COMPILED: list[Any] = []
"""The programs that the outermost jit compiled."""
FILLED: list[Any] = []
"""(object, field, whether it is an item, its own value, that of the program) while a call runs."""


# --- a call, taken apart


def describe(array: Any) -> str:
    sizes = f"[{','.join(map(str, array.shape))}]" if hasattr(array, "shape") else ""
    return array.dtype.name + sizes if sizes else type(array).__name__


def is_node(value: Any) -> bool:
    return isinstance(value, nnx.Variable | nnx.State) or nnx.graph.is_graph_node(value)


def is_input(value: Any) -> bool:
    known = isinstance(value, nnx.State | jax.Array | jax.ShapeDtypeStruct)
    return known or (isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSUMm")


def take_apart(subject: Any, args: Any, kwargs: Any, names: tuple[str, ...], pack: Any) -> tuple[Any, Any, Any, Any]:
    """``subject(*args, **kwargs)`` as a program of its graph nodes and arrays; the nodes, the arrays, and what gives an output its structure."""
    owner = subject.__self__ if inspect.ismethod(subject) else subject
    if is_node(owner) or not jax.tree_util.all_leaves([owner]):
        subject, args = subject.__func__ if inspect.ismethod(subject) else type(owner).__call__, (owner, *args)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_node)
    nodes = list({id(leaf): leaf for leaf in leaves if is_node(leaf) and not is_input(leaf)}.values())
    alone = len(nodes) == 1 and isinstance(nodes[0], nnx.Module)
    home = nodes[0] if alone else nnx.Module()
    for name, node in zip(() if alone else names, nodes, strict=False):
        setattr(home, name, node)
    last: list[Any] = []

    def program(state: Any, *inputs: Any) -> Any:
        mine = {id(node): state if alone else getattr(state, name) for name, node in zip(names, nodes, strict=True)}
        rest = iter(inputs)
        filled = [
            jax.tree.map(lambda _: next(rest), leaf) if is_input(leaf) else mine.get(id(leaf), leaf) for leaf in leaves
        ]
        new_args, new_kwargs = jax.tree.unflatten(treedef, filled)
        values, last[:] = pack(subject(*new_args, **new_kwargs), state, home)
        return values

    inputs = [array for leaf in leaves if is_input(leaf) for array in jax.tree.leaves(leaf)]
    return program, home, inputs or [jnp.zeros((), np.float32)], lambda output: last[0](output)  # noqa: PLW0108


def arrays_of(output: Any, _state: Any, _home: Any) -> Any:
    """The arrays of an output, and what gives them its structure."""
    values, treedef = jax.tree.flatten(output)
    return tuple(map(jnp.asarray, values)), [functools.partial(jax.tree.unflatten, treedef)]


def parts_of(output: Any, state: Any, home: Any) -> Any:
    """The arrays of an output in which there is more than those, and what gives them its structure."""
    values, treedef = jax.tree.flatten(output, is_leaf=is_node)
    parts = [part_of(value, state, home) for value in values]
    makers = [(len(arrays), make) for arrays, make in parts]

    def rebuild(arrays: Any) -> Any:
        rest = iter(arrays)
        return jax.tree.unflatten(treedef, [make([next(rest) for _ in range(count)]) for count, make in makers])

    return tuple(array for arrays, _ in parts for array in arrays), [rebuild]


def part_of(value: Any, state: Any, home: Any) -> tuple[list[Any], Callable[[Any], Any]]:
    """The arrays of a part of an output, and what makes it of them; a node of the state is the user's own."""
    if isinstance(value, nnx.State):
        arrays, treedef = jax.tree.flatten(value)
        return arrays, functools.partial(jax.tree.unflatten, treedef)
    if is_node(value):
        place = next((path for path, node in nnx.iter_graph(state) if node is value), None)
        if place is not None:
            return [], lambda _: next(node for path, node in nnx.iter_graph(home) if path == place)
        holder: Any = nnx.Module()
        holder.node = value
        graphdef, leaves = nnx.split(holder)
        arrays, treedef = jax.tree.flatten(leaves)
        return arrays, lambda arrays: nnx.merge(graphdef, jax.tree.unflatten(treedef, arrays)).node
    if is_input(value) or isinstance(value, bool | int | float | complex):
        return [jnp.asarray(value)], lambda arrays: arrays[0]
    return [], lambda _: value


def open_objects(tree: Any, opened: dict[str, Any]) -> None:
    """Let jax take objects apart, of which it knows nothing, by these fields: (name, whether it is an item)."""
    for value in jax.tree.leaves(tree, is_leaf=is_node):
        if fields := opened.pop(type(value).__qualname__, ()):
            with contextlib.suppress(ValueError):  # it is known already
                flatten = functools.partial(read_fields, fields=fields)
                jax.tree_util.register_pytree_node(type(value), flatten, fill_fields)
            open_objects(tree, opened)


def read_fields(owner: Any, fields: Any) -> Any:
    return [owner[name] if item else getattr(owner, name, None) for name, item in fields], (owner, fields)


def fill_fields(held: Any, values: Any) -> Any:
    """The object itself, which holds the values of the program while the call runs."""
    owner, fields = held
    for (name, item), old, new in zip(fields, read_fields(owner, fields)[0], values, strict=True):
        FILLED.append((owner, name, item, old, new))
        (operator.setitem if item else object.__setattr__)(owner, name, new)
    return owner


def emptied(pack: Any, opened: dict[str, Any]) -> Any:
    """The same, and after it the objects hold their own values again, unless the call itself has put others there."""

    def packed(output: Any, state: Any, home: Any) -> Any:
        open_objects(output, opened)
        arrays, rebuild = pack(output, state, home)
        for owner, name, item, old, new in FILLED:
            if (owner[name] if item else getattr(owner, name, None)) is new:
                (operator.setitem if item else object.__setattr__)(owner, name, old)
        # What is returned keeps no tracers until it is made of arrays.
        jax.tree.map(lambda _: None, output, is_leaf=is_node)
        FILLED.clear()
        return arrays, rebuild

    return packed


def unwrapped(subject: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """The function in a partial, and all of its arguments; also those that `nnx.cached_partial` keeps."""
    if isinstance(subject, functools.partial):
        return unwrapped(subject.func, (*subject.args, *args), {**subject.keywords, **kwargs})
    known = compat.cached_partial(subject)
    return (subject, args, kwargs) if known is None else unwrapped(known[0], (*known[1], *args), kwargs)


def own(tree: Any) -> Any:
    """The same with arrays of its own, which nobody else donates."""
    return jax.tree.map(lambda leaf: jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def first_abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def registered(transform: Callable[..., Any]) -> Callable[..., Any]:
    """The layer of a transform of the user's own."""

    def make(f: Any, _plan: Any) -> Any:
        return lambda state, *inputs: transform(f)(state, *inputs)  # noqa: PLW0108 - it is made anew for each trace

    return make


def variable_at(state: Any, *keys: Any) -> Any:
    return next((node for path, node in nnx.iter_graph(state) if tuple(path) == keys), None)


def value_at(state: Any, *keys: Any) -> Any:
    """The value of the Variable with these keys, None where there is none."""
    leaves = [
        ([getattr(key, "key", "") for key in path], leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(state))
    ]
    return next((leaf for path, leaf in leaves if tuple(path[: len(keys)]) == keys), None)


def anything_at(state: Any, *keys: Any) -> Any:
    """The value of a Variable, or of a Python attribute."""
    owner = variable_at(state, *keys[:-1]) if keys[:-1] else state
    return own(value_at(state, *keys) if is_node(variable_at(state, *keys)) else getattr(owner, str(keys[-1]), None))


# --- a program that is compiled, or only traced


def staged(wrapper: Any, f: Any, show: Callable[[Any, Any], Any], **options: Any) -> Any:
    """``wrapper(f, **options)``, `jax.jit` or `nnx.jit`, that shows what it compiled, and runs it unless its outputs are given then."""

    def stage(jitted: Any) -> Any:
        def run(*args: Any) -> Any:
            lowered = jitted.trace(*args).lower()
            level = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
            compiled = lowered.compile(compiler_options=level)
            outputs = show(compiled, lowered)
            return compiled(*args) if outputs is None else outputs

        return run

    jit = jax.jit
    if wrapper is jit:
        return stage(jit(f, **options))
    with mock.patch.object(jax, jit.__name__, lambda *args, **kwargs: stage(jit(*args, **kwargs))):
        return wrapper(f, **options)


def abstract_outputs(compiled: Any, lowered: Any) -> Any:
    """The outputs of a program that is not run."""
    infos, treedef = jax.tree.flatten(lowered.out_info)
    shardings = [each if len(each.device_set) > 1 else None for each in jax.tree.leaves(compiled.output_shardings)]
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
