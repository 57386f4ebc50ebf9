"""The expected result of a nesting: the same calls, made eagerly on a copy of the state, without any transform.

Most transforms mean the call once. For others `calls_of` says which calls they mean. Whatever is nested, and in whatever order, the calls are the
first, second, ... of one trajectory: elements of a ``vmap`` start from equal states and have equal inputs. A test makes these calls once, for all its nestings.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.compat.arrays import is_held_ref, value_of
from pytest_nnxcheck.compat.compile_cache import to_the_end
from pytest_nnxcheck.core.catalogue import CALL_FIRST, ROWS, row_of
from pytest_nnxcheck.core.facts import Observation
from pytest_nnxcheck.core.nesting import Layer, Nesting
from pytest_nnxcheck.subject.subject import Subject, copy_leaf
from pytest_nnxcheck.transforms.compose import primal, un_nest
from pytest_nnxcheck.transforms.layers import LENGTH
from pytest_nnxcheck.values.effects import UNCHANGED, Effect, Facts, Structure, changed, read, structure
from pytest_nnxcheck.walk.fingerprint import is_array
from pytest_nnxcheck.walk.walk import walk

__tracebackhide__ = True  # pytest shows the frames of the user, not these

Meaning = tuple[str, ...]
"""The layers of a nesting that mean more than the call once, from the outermost inwards."""

MOST_EQUATIONS = 100_000
"""Equations of the un-nested call that may be made one by one, without jit: a loop of many steps takes minutes."""

NUDGE = 4
"""The distance of a nudged start from the real one, in units of the last place."""


def calls_of(meaning: Meaning, first: int = 0) -> tuple[Any, int]:
    """The numbers of the calls whose outputs a meaning returns, in lists where it stacks them, and the number of calls that it makes.

    ``scan`` over ``call_first`` is ``([(0, 1), (2, 3)], 4)``: calls are counted from the ``first`` on.
    """
    if not meaning:
        return first, first + 1
    means, inner, numbers, after = row_of(meaning[0]).means, meaning[1:], list[Any](), first
    if means == "call first":
        last, after = calls_of(inner, first + 1)
        return (first, last), after
    for _ in range(LENGTH):
        # The elements of a map start from equal states, and have equal inputs: each makes the calls of the first.
        part, after = calls_of(inner, first if means == "map" else after)
        numbers.append(part)
    return numbers[-1] if means == "repeat" else numbers, after


def outputs_of(numbers: Any, output_of: Callable[[int], Any]) -> Any:
    """The outputs of these calls, in their structure."""
    if isinstance(numbers, list):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *(outputs_of(each, output_of) for each in numbers))
    return tuple(outputs_of(each, output_of) for each in numbers) if isinstance(numbers, tuple) else output_of(numbers)


MEANINGS = frozenset(row.name for row in ROWS if row.means)
"""The transforms that mean more than the call once."""


def separate(state: Any) -> Any:
    """The same graph with arrays of its own: a call may donate the arrays that it gets."""
    graphdef, leaves = flax_modes.split(state)
    return nnx.merge(graphdef, jax.tree.map(copy_leaf, leaves))


def meaning_of(nesting: Nesting) -> Meaning:
    return tuple(layer.transform for layer in nesting.layers if layer.transform in MEANINGS)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of the calls: the state and the inputs as they are, or a few roundings away."""

    again: bool = False
    """True for a second run from the same start."""
    nudged: bool = False
    """True if it is a few roundings of the lowest precision away."""
    precision: float = 0.0
    """The distance between one and the next number of the lowest precision that the program computes in."""
    direction: int = 0
    """The number of a nudged start among those of one distance: an odd one is opposite to the one before."""

    def of(self, subject: Subject) -> tuple[Any, tuple[Any, ...]]:
        """A copy of the state, and the inputs."""
        state, inputs = replace(subject, in_refs=False).fresh(), tuple(map(copy_leaf, subject.inputs))
        if not self.nudged:
            return state, inputs
        graphdef, leaves = flax_modes.split(state)
        return nnx.merge(graphdef, jax.tree.map(self.nudge, leaves)), tuple(map(self.nudge, inputs))

    def nudge(self, leaf: Any) -> Any:
        """The array, each element a few units of the last place away, always by the same amount, or by ``precision`` where that is more.

        Any other order of the same operations may change the results that this changes.
        """
        if is_held_ref(leaf):
            leaf[...] = self.nudge(value_of(leaf))
        if not (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)):
            return leaf
        steps = np.random.default_rng((leaf.size, self.direction // 2)).choice([-1.0, 1.0], leaf.shape)
        if self.direction % 2:
            steps = -steps
        # Half precision is moved by one unit: four of bfloat16 are three per cent.
        units = NUDGE if leaf.dtype.itemsize >= 4 else 1
        factor = 1 + max(units * float(jnp.finfo(leaf.dtype).eps), self.precision) * steps  # type: ignore[no-untyped-call]
        return (jnp.asarray(leaf) * jnp.asarray(factor, leaf.dtype)).astype(leaf.dtype)


AS_IT_IS = Start()


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The facts of one call: its trajectories, by their start."""

    jits: bool = True
    """True if the jits inside the call are on."""
    held: Any = None
    """The objects that its key names by identity: held, so that no id is used again."""
    trajectories: dict[Start, Trajectory] = field(default_factory=dict)

    def effect(self, subject: Subject, meaning: Meaning, start: Start = AS_IT_IS) -> Effect:
        """The effect of the calls of a meaning, made on a copy; whatever else they touch is put back."""
        _, calls = calls_of(meaning)
        if start not in self.trajectories or not self.trajectories[start].covers(calls):
            with contextlib.nullcontext() if self.jits else jax.disable_jit():
                self.trajectories[start] = follow(subject, start, calls)
        return self.trajectories[start].effect(meaning)


@dataclass(frozen=True, slots=True)
class Reference:
    """The effect of the same calls without the nesting, or of an un-nested call without its jits."""

    meaning: Meaning
    wanted: Effect
    evaluated: Evaluated

    @classmethod
    def of(cls, subject: Subject, meaning: Meaning, evaluated: Evaluated) -> Reference:
        """The reference of one call."""
        return cls(meaning, evaluated.effect(subject, meaning), evaluated)


def un_nested(meaning: Meaning, out: Any) -> Any:
    """The first element of every axis, as the un-nested call returns it."""
    return un_nest(Nesting(tuple(map(Layer, meaning))), out)


def names_of(meaning: Meaning, names: tuple[str, ...]) -> Any:
    """The names of the arrays of ``returned``, in its structure."""
    tree: Any = names
    for name in reversed(meaning):
        if name == CALL_FIRST:
            tree = (tuple(f"{name} of the first call" for name in names), tree)
    return tree


def effect_against(subject: Subject, observation: Observation, wanted: Effect) -> Effect:
    """The output of a run and its copy of the state, with the names of the reference's outputs."""
    return Effect(
        returned=primal(observation.nesting.layers, observation.returned),
        names=names_of(meaning_of(observation.nesting), wanted.structure.names),
        output=observation.output,
        structure=structure(observation.output_names, observation.rebuild, observation.output),
        before=read(subject, subject.state),
        after=read(subject, observation.state),
    )


# --- a trajectory: the same call again and again


@dataclass(frozen=True, slots=True)
class Step:
    """One call: its output, with the structure, and the state after it."""

    returned: Any
    structure: Structure
    after: Facts

    @classmethod
    def of(cls, subject: Subject, returned: Any, output: tuple[Any, ...], after: Facts) -> Step:
        """The call that a program of the subject ended with; ``output`` is that of one call."""
        return cls(returned, structure(subject.output_tree.names, subject.output_tree.rebuild, output), after)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A call made again and again with the same inputs, from a state ``before``; ``error`` ended it."""

    before: Facts
    steps: tuple[Step, ...]
    error: Exception | None = None

    def covers(self, calls: int) -> bool:
        """True if it has the results of so many calls."""
        return self.error is not None or len(self.steps) >= calls

    def effect(self, meaning: Meaning) -> Effect:
        """The effect of the calls of a meaning."""
        numbers, calls = calls_of(meaning)
        if calls > len(self.steps):
            return Effect(error=self.error)
        returned, last = outputs_of(numbers, lambda number: self.steps[number].returned), self.steps[calls - 1]
        after, names = last.after, last.structure.names
        # A leaf that the calls did not change is in the state that the other run starts from as well: its old value need not be kept.
        kept = {
            name: leaf
            for name, leaf in self.before.leaves.items()
            if after.leaves.get(name, leaf).value is not UNCHANGED
        }
        output = un_nested(meaning, returned)
        return Effect(returned, names_of(meaning, names), output, last.structure, Facts(kept, {}), after)


def donated(arrays: Any, facts: Facts) -> bool:
    """True if some of these arrays, or of a state's, were donated since."""
    values = [*jax.tree.leaves(arrays), *(leaf.value for leaf in facts.leaves.values())]
    return any(isinstance(value, jax.Array) and value.is_deleted() for value in values)


def follow(subject: Subject, start: Start, calls: int, *, apart: bool = False) -> Trajectory:
    """Make so many calls one after the other, and put back whatever else they touched; ``apart``, each on arrays of its own."""
    subject = subject.for_run()
    state, inputs = start.of(subject)
    before, places = read(subject, state), walk(subject.roots(state)).places
    steps: list[Step] = []
    handed = before
    error: Exception | None = None
    try:
        while len(steps) < calls and error is None:
            if apart:
                try:
                    state = separate(state)
                except (TypeError, ValueError) as refused:  # flax has no place for what the call put there
                    error = refused
                    break
                handed = read(subject, state)
            returned, error = to_the_end(subject.program, state, tuple(map(copy_leaf, inputs)))
            if error is None:
                last = steps[-1].after if apart and steps else None
                after = changed(handed, read(subject, state), last)
                steps.append(Step.of(subject, returned, returned, after))
    finally:
        places.restore()
    if not apart and (donated((), before) or any(donated(step.returned, step.after) for step in steps)):
        # The call donates what it is handed.
        return follow(subject, start, calls, apart=True)
    return Trajectory(before, tuple(steps), error)
