"""The short form of `long_form` and its checks, for a program to paste whose call and finding are plain.

The call hands over graph nodes, arrays and static values in containers that jax knows, and returns arrays; what broke is one invariant, and
the program looks for that very finding: these tracers, these leaves, this figure. Copied by `own_source`, as `long_form` is.
"""

from __future__ import annotations

import functools
import gc
import inspect
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe, is_array, nbytes
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.inspection.pointers import pointers
from pytest_nnxcheck.reproducer.runtime.checks import broken, used_by
from pytest_nnxcheck.subject.jaxpr_flow import constants
from pytest_nnxcheck.subject.subject import Nodes

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def plain_call(subject: Any, args: Any, kwargs: Any, names: tuple[str, ...]) -> tuple[Any, Any, Any, Any]:
    """``subject(*args, **kwargs)`` as a program of its graph nodes and arrays; the nodes, the arrays, and what gives an output its structure."""
    while isinstance(subject, functools.partial):
        subject, args, kwargs = subject.func, (*subject.args, *args), {**subject.keywords, **kwargs}
    owner = subject.__self__ if inspect.ismethod(subject) else subject
    if compat.is_graph_node(owner):
        subject, args = subject.__func__ if inspect.ismethod(subject) else type(owner).__call__, (owner, *args)
    leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=compat.is_graph_node)
    nodes = list({id(leaf): leaf for leaf in leaves if compat.is_graph_node(leaf)}.values())
    alone = len(nodes) == 1 and isinstance(nodes[0], nnx.Module)
    last: list[Any] = []

    def program(state: Any, *inputs: Any) -> Any:
        mine = [state] if alone else [getattr(state, name) for name in names]
        node_of, arrays = dict(zip(map(id, nodes), mine, strict=True)), iter(inputs)
        filled = [node_of.get(id(leaf), leaf) if not is_array(leaf) else next(arrays) for leaf in leaves]
        new_args, new_kwargs = jax.tree.unflatten(treedef, filled)
        values, structure = jax.tree.flatten(subject(*new_args, **new_kwargs))
        last[:] = [structure]
        return tuple(map(jnp.asarray, values))

    state = nodes[0] if alone else Nodes(dict(zip(names, nodes, strict=True)))
    # Copies: what is donated must not be the arrays of the test.
    inputs = [jnp.array(leaf) for leaf in leaves if is_array(leaf)] or [jnp.zeros((), np.float32)]
    return program, state, inputs, lambda output: jax.tree.unflatten(last[0], output)


def living_tracers() -> dict[int, Any]:
    """The tracers among all objects of Python, without those that nobody needs any more."""
    jax.clear_caches()
    gc.collect()
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), jax.core.Tracer)}


def leaves_no_tracers(run: Callable[[], Any], *leaked: tuple[str, str]) -> Any:
    """Run, and look for new tracers that are alive: each has outlived its trace. ``leaked`` are where, and their types."""
    output: Any = None
    error, told, before = None, "", living_tracers()
    try:
        output = jax.block_until_ready(run())
    except Exception as raised:  # noqa: BLE001 - the call may raise anything
        # Its frames hold tracers of their own.
        error, told = raised, traceback.format_exc()
        error.__traceback__ = error.__cause__ = error.__context__ = None
    kinds = {describe(tracer.aval) for key, tracer in living_tracers().items() if key not in before}
    dropped = isinstance(error, jax.errors.UnexpectedTracerError)
    lines = [f"leaked {path}   {kind}" for path, kind in leaked if kind in kinds or dropped]
    if lines:
        broken("tracers", lines, error)
    if error is not None:
        print(told)  # noqa: T201 - with the lines that it lost
        raise error
    return output


def keeps_donated_buffers(run: Callable[..., Any], state: Any, inputs: Any, leaves: Any, arrays: Any) -> Any:
    """Run, and hold what was donated against what came back: leaves of the state, and inputs, by name with their numbers before and after."""
    before = jax.tree.leaves(nnx.state(state))
    donated = {pointer for array in [*before, *inputs] for pointer in pointers(array)}
    types = {name: describe(before[number]) for name, (number, _) in leaves.items()}
    types |= {name: describe(inputs[number]) for name, (number, _) in arrays.items()}
    output = jax.block_until_ready(run(state, *inputs))
    after, returned = (dict(enumerate(jax.tree.leaves(tree))) for tree in (nnx.state(state), output))
    new = {name: after.get(number) for name, (_, number) in leaves.items()}
    new |= {name: returned.get(number) for name, (_, number) in arrays.items()}
    lines = []
    for name, kind in types.items():
        if new[name] is None:
            lines.append(f"{name}   {kind}   not returned")
        elif describe(new[name]) != kind:
            lines.append(f"{name}   {kind}   became {describe(new[name])}")
        elif not donated.issuperset(pointers(new[name])):
            lines.append(f"{name}   {kind}   not reused by XLA")
    if lines:
        broken("donation", lines)
    return output


def peak_is_within(compiled: Any, limit: int, state: int = 0, copied: int = 0, seen: int = 0) -> None:
    """Hold the peak against a limit; ``copied`` are the bytes of a ``state`` that a peak of ``seen`` held once more."""
    used = used_by(compiled)
    figures = [str(used), f"budget {format_bytes(limit)}"]
    print(*figures, sep="\n")  # noqa: T201 - the program tells its figures, whether they hold or not
    wrong = [f"peak {format_bytes(used.peak)} is over the budget of {format_bytes(limit)}"] if used.peak > limit else []
    if copied and used.peak > seen - copied / 2:
        wrong.append(f"the program holds {copied / max(state, 1):.1f} more copies of its state at the peak")
    if wrong:
        broken("memory", [*wrong, *figures])


def captures_little(program: Any, state: Any, inputs: Any, most: int) -> None:
    """Hold the arrays that the call captures against a limit: they should be its arguments."""
    graphdef, leaves = nnx.split(state)

    def pure(leaves: Any, *inputs: Any) -> Any:
        return program(nnx.merge(graphdef, leaves), *inputs)

    size = sum(map(nbytes, constants(jax.make_jaxpr(pure)(leaves, *inputs))))
    if size >= most:
        broken("memory", [f"the call captures {format_bytes(size)} of constants"])
