"""What a nesting means: the same calls, made eagerly one after the other on a copy of the state, without any transform.

Most transforms mean the call once. Those that mean more have a row in `MEANINGS`; many nestings share one meaning, and a test
evaluates each only once for the same call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.catalogue import CALL_FIRST, ROWS, row_of
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.engine.observe import run
from pytest_nnxcheck.inspection.fingerprint import show
from pytest_nnxcheck.inspection.walk import walk
from pytest_nnxcheck.subject.state_facts import UNCHANGED, Effect, Facts, changed, is_array, read, structure
from pytest_nnxcheck.subject.subject import Subject, copy_leaf
from pytest_nnxcheck.transforms.layer import LENGTH, Program

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Meaning = tuple[str, ...]
"""The layers of a nesting that mean more than the call once, from the outermost inwards."""

NUDGE = 4
"""How far a nudged reference starts from the real one, in units of the last place."""


def once(f: Program, subject: Program, axes: int) -> Program:
    return f


def carried(f: Program, subject: Program, axes: int) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return stacked([f(state, *(leaf[step] for leaf in inputs)) for step in range(LENGTH)])

    return layer


def mapped(f: Program, subject: Program, axes: int) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        states = [state, *(separate(state) for _ in range(LENGTH - 1))]
        return stacked([f(own, *(leaf[index] for leaf in inputs)) for index, own in enumerate(states)])

    return layer


def repeated(f: Program, subject: Program, axes: int) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        return [f(state, *inputs) for _ in range(LENGTH)][-1]

    return layer


def iterated(f: Program, subject: Program, axes: int) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        outs = []
        for _ in range(LENGTH):
            outs.append(f(state, *inputs))
            inputs = (*outs[-1], *inputs[len(outs[-1]) :])
        return stacked(outs)

    return layer


def called_first(f: Program, subject: Program, axes: int) -> Program:
    def layer(state: Any, *inputs: Any) -> Any:
        before = subject(state, *(leaf[(0, *(0,) * axes)] for leaf in inputs))
        return before, f(state, *(leaf[1] for leaf in inputs))

    return layer


EAGER: dict[str, Callable[[Program, Program, int], Program]] = {
    "carry": carried,
    "map": mapped,
    "repeat": repeated,
    "iterate": iterated,
    "call first": called_first,
}
"""The eager calls that a transform stands for, by `Transform.means`."""

MEANINGS = {row.name: EAGER[row.means] for row in ROWS if row.means}


def separate(state: Any) -> Any:
    """The same graph with arrays of its own: a call may donate the arrays that it gets."""
    graphdef, leaves = compat.split(state)
    return nnx.merge(graphdef, jax.tree.map(copy_leaf, leaves))


def stacked(outputs: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)


def meaning_of(nesting: Nesting) -> Meaning:
    return tuple(layer.transform for layer in nesting.layers if layer.transform in MEANINGS)


def evaluate(subject: Subject, meaning: Meaning, *, nudged: bool = False, precision: float = 0.0) -> Effect:
    """Make the calls on a copy, and put back whatever else they touched; ``nudged`` from a start that is a few roundings away.

    ``precision`` is the distance between one and the next number of the lowest precision that the program computes in.
    """
    subject = subject.for_run()
    state, inputs = subject.fresh(), subject.inputs
    if nudged:
        state, inputs = nudge(state, precision), tuple(nudge_leaf(leaf, precision) for leaf in inputs)
    program = composed(subject, meaning)

    def whole(state: Any, *inputs: Any) -> Any:
        for name in meaning:
            if bool(row_of(name).axis):
                inputs = tuple(jnp.stack([leaf] * LENGTH) for leaf in inputs)
        return program(state, *inputs)

    return effect(subject, whole, state, inputs, meaning)


def effect(subject: Subject, program: Program, state: Any, inputs: tuple[Any, ...], meaning: Meaning = ()) -> Effect:
    """What a program of the subject returns and leaves in the state; all else that it touches is put back."""
    before, places = read(subject, state), walk(subject.roots(state)).places
    returned, error = run(program, state, inputs)
    try:
        if error is not None:
            return Effect(error=error)
        output = un_nested(meaning, returned)
        returned_structure = structure(subject.output_tree.names, subject.output_tree.rebuild, output)
        after = changed(before, read(subject, state))
        kept = Facts(
            {name: leaf for name, leaf in before.leaves.items() if after.leaves.get(name, leaf).value is not UNCHANGED},
            {},
        )
        return Effect(returned, names_of(meaning, returned_structure.names), output, returned_structure, kept, after)
    finally:
        places.restore()


def composed(subject: Subject, meaning: Meaning) -> Program:
    """The eager program of a meaning."""
    program: Program = subject.program
    axes = 0
    for name in reversed(meaning):
        program = MEANINGS[name](program, subject.program, axes)
        axes += bool(row_of(name).axis)
    return program


def un_nested(meaning: Meaning, out: Any) -> Any:
    """The first element of every axis, as the un-nested call returns it."""
    for name in meaning:
        if name == CALL_FIRST:
            out = out[1]
        elif row_of(name).stacks:
            out = jax.tree.map(lambda leaf: leaf[0], out)
    return out


def names_of(meaning: Meaning, names: tuple[str, ...]) -> Any:
    """The names of the arrays of ``returned``, in its structure."""
    tree: Any = names
    for name in reversed(meaning):
        if name == CALL_FIRST:
            tree = (tuple(f"{name} of the first call" for name in names), tree)
    return tree


# --- a reference that starts a few roundings away: what it changes, no other order of the same operations can keep


def nudge(state: Any, precision: float = 0.0) -> Any:
    graphdef, leaves = compat.split(state)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: nudge_leaf(leaf, precision), leaves))


def nudge_leaf(leaf: Any, precision: float = 0.0) -> Any:
    """The array, each element a few units of the last place away, always by the same amount, or by ``precision`` where that is more."""
    if not (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)):
        return leaf
    steps = np.random.default_rng(leaf.size).choice([-1.0, 1.0], leaf.shape)
    # Half precision is moved by one unit: four of bfloat16 are three per cent.
    units = NUDGE if leaf.dtype.itemsize >= 4 else 1
    factor = 1 + max(units * float(jnp.finfo(leaf.dtype).eps), precision) * steps  # type: ignore[no-untyped-call]
    return (jnp.asarray(leaf) * jnp.asarray(factor, leaf.dtype)).astype(leaf.dtype)


# --- the memo


@dataclass(frozen=True, slots=True)
class Entry:
    """A reference, and what its key names by identity: held, so that no id is used again."""

    effect: Effect
    held: Any


def recalled(table: dict[Any, Entry], subject: Subject, meaning: Meaning, number: int) -> Effect | None:
    """The reference of a call, the manieth of its example, from the table or evaluated; none where the call cannot run.

    The key holds all that decides the result: the number, the code with what it captured, the graph, the content of state and inputs.
    Where one of them cannot be told for sure, the reference is evaluated anew.
    """
    if subject.abstract:
        return None
    content = identity(subject)
    if content is None:
        return evaluate(subject, meaning)
    key = (number, meaning, content)
    if key not in table:
        table[key] = Entry(evaluate(subject, meaning), (subject.function, subject.program_of))
    return table[key].effect


class Unknown(Exception):
    """A value whose content cannot be told for sure."""


def identity(subject: Subject) -> Any:
    """What decides the result of a call; None where that cannot be told."""
    graphdef, leaves = compat.split(subject.state)
    try:
        content = tuple((path, digest(leaf)) for path, leaf in compat.flat_state(leaves))
        inputs = tuple(map(digest, subject.inputs))
        static = tuple((label, show(value)) for label, value in subject.static)
        key = (code(subject.function), graphdef, content, inputs, static, compat.mode_flags())
        hash(key)
    except (Unknown, TypeError):
        return None
    return key


def digest(value: Any) -> Any:
    """The content of an array, as a hash that collides for nobody."""
    if not is_array(value):
        return atom(value)
    array = np.asarray(jax.random.key_data(value) if compat.is_key(value) else value)
    if array.dtype == object:
        raise Unknown
    return describe(value), hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=20).digest()


def atom(value: Any) -> Any:
    """A plain value, told apart by type: ``1 == True == 1.0``."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)
    if isinstance(value, tuple):
        return tuple(map(atom, value))
    if is_array(value):
        return digest(value)
    if isinstance(value, type) or type(value).__name__ in ("module", "builtin_function_or_method"):
        return value
    return code(value)


def code(function: Any, seen: frozenset[int] = frozenset()) -> Any:
    """A function as the code it runs, with all that the code captured. Raises `Unknown`."""
    own: CodeType | None = getattr(function, "__code__", None)
    if own is None or id(own) in seen:
        if own is not None:
            return own
        raise Unknown
    seen |= {id(own)}
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    captured = tuple(code(value, seen) if hasattr(value, "__code__") else atom(value) for value in [*cells, *defaults])
    return own, captured, tuple(plain_globals(own, function.__globals__))


def plain_globals(own: CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The numbers and strings among the globals that code names: a test may set them."""
    for name in own.co_names:
        if isinstance(names.get(name), bool | int | float | complex | str | bytes):
            yield name, atom(names[name])
    for inner in own.co_consts:
        if isinstance(inner, CodeType):
            yield from plain_globals(inner, names)
