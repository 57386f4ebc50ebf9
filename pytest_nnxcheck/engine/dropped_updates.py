"""Updates that a transform inside the user's own call drops: made in its body, to a copy, and never handed back.

Such a drop is the same with and without our layers, so no nesting shows it. The call is made once more with `jax.disable_jit`, under
Python's profiling hook, which sees every function of the user that a transform calls: a body. What a body changes in the graph
nodes among its arguments must have changed, when the transform returns, in one of those that the transform was given.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import jax
import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat import frames
from pytest_nnxcheck.engine.causes import profiled
from pytest_nnxcheck.engine.reference import effect
from pytest_nnxcheck.invariants.parity import bits
from pytest_nnxcheck.subject.state_facts import UNCHANGED, Effect, Leaf, frozen, is_array
from pytest_nnxcheck.subject.subject import Subject

Path = tuple[Any, ...]
Nodes = list[tuple[Any, dict[Path, Leaf]]]
"""Graph nodes, with what they held when they were looked at."""

ABSENT = Leaf((), "")

MOST_EVENTS = 2_000_000
"""The fuse: a loop of many steps takes minutes without jit. The attention layers of flax make 20 000."""


class TooLong(Exception):
    """The call makes too many steps to be watched."""


@dataclass(frozen=True, slots=True)
class Drop:
    """An update that was lost: of what, in the body of which transform, which was called where."""

    path: str
    new: Leaf
    transform: str
    place: str

    @property
    def where(self) -> str:
        return f"{self.transform} at {self.place}"


@dataclass(frozen=True, slots=True)
class TransparentCall:
    """What a call does with its jits off, and the updates that its other transforms dropped.

    ``branches`` are the updates in a branch of jax, which is handed the module itself here, and a copy where it is traced.
    """

    effect: Effect
    drops: tuple[Drop, ...] = ()
    branches: tuple[Drop, ...] = ()


@dataclass(slots=True)
class Running:
    """A function at work, a ``transform`` or the body of one, with the graph nodes that it was given and what they held.

    ``changes`` is what the bodies of a transform changed in their copies, by the type of the node.
    """

    frame: FrameType
    nodes: Nodes
    transform: str = ""
    changes: dict[tuple[type, Path], Leaf] = field(default_factory=dict)


class Watch:
    """The profiling hook."""

    def __init__(self, subject: Subject, state: Any) -> None:
        self.drops: dict[tuple[str, str], Drop] = {}
        self.branches: dict[tuple[str, str], Drop] = {}
        self._subject = subject
        nodes = [(tuple(path), node) for path, node in compat.iter_graph(state) if compat.is_graph_node(node)]
        self._state = {id(node): (path, node) for path, node in reversed(nodes)}
        self._events = 0
        self._running: list[Running] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        self._events += 1
        if self._events > MOST_EVENTS:
            raise TooLong(f"more than {MOST_EVENTS} Python calls without jit")
        innermost = self._running[-1] if self._running else None
        if event == "return" and innermost is not None and innermost.frame is frame:
            self._running.pop()
            if innermost.transform:
                self._find_drops(innermost)
            else:
                self._running[-1].changes |= changes_of(innermost)
        elif event == "call" and innermost is not None and innermost.transform:
            if not frames.is_machinery(frame):
                self._running.append(Running(frame, nodes_of(frame)))
        elif event == "call" and (transform := frames.transform_of(frame)) and (given := nodes_of(frame)):
            self._running.append(Running(frame, given, transform))

    def _find_drops(self, left: Running) -> None:
        """The changes of bodies that no given node of the same type shows: of several such nodes, one that may have changed is enough."""
        given = [(node, old, values_of(node)) for node, old in left.nodes] if left.changes else []
        for (kind, path), new in left.changes.items():
            alike = [entry for entry in given if type(entry[0]) is kind]
            name = self._name(alike[0][0], path) if alike else ""
            kept = [differ(old.get(path, ABSENT).value, now.get(path, ABSENT).value) is False for _, old, now in alike]
            if name and (all(kept) or left.transform in frames.BRANCHES):
                place = frames.caller_line(left.frame)
                updates = self.drops if all(kept) else self.branches
                updates.setdefault((name, place), Drop(name, new, left.transform, place))

    def _name(self, node: Any, path: Path) -> str:
        """The name of a value of the state; a copy that an outer transform made goes by its type, where only one node has it."""
        alike = [root for root, other in self._state.values() if type(other) is type(node)]
        roots = [self._state[id(node)][0]] if id(node) in self._state else alike
        return self._subject.path((*roots[0], *path)) if len(roots) == 1 else ""


def nodes_of(frame: FrameType) -> Nodes:
    """The graph nodes among the arguments of a function that was just called, each once."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    values = [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of generators among them
        leaves = jax.tree.leaves(values, is_leaf=compat.is_graph_node)
    nodes = {id(leaf): leaf for leaf in leaves if compat.is_graph_node(leaf)}
    return [(node, values_of(node)) for node in nodes.values()]


def values_of(node: Any) -> dict[Path, Leaf]:
    """What the Variables and attributes of a node hold: arrays, tracers, frozen Python values."""
    values = {
        path: Leaf(compat.variable_value(variable), compat.variable_kind(variable))
        for path, variable in compat.variables(node)
    }
    for path, value in compat.attributes(node):
        values[path] = Leaf(value if is_array(value) else frozen(value), "attribute")
    return values


def changes_of(body: Running) -> dict[tuple[type, Path], Leaf]:
    """What a body changed in the nodes that it was given."""
    changes = {}
    for node, old in body.nodes:
        new = values_of(node)
        for path, leaf in {**old, **new}.items():
            if differ(old.get(path, ABSENT).value, new.get(path, ABSENT).value):
                changes[type(node), path] = leaf
    return changes


def differ(a: Any, b: Any) -> bool | None:
    """Whether two values differ; none where a tracer hides that."""
    if a is b:
        return False
    if isinstance(a, tuple) or isinstance(b, tuple):
        return type(a) is not type(b) or a != b
    a, b = compat.concrete(a), compat.concrete(b)
    if not (is_array(a) and is_array(b)):
        return None
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    first, second = bits(a), bits(b)
    return not np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")


def transparent(subject: Subject) -> TransparentCall:
    """The call on a copy with its jits off, and the updates that its other transforms dropped."""
    subject = subject.for_run()
    state = subject.fresh()
    watch = Watch(subject, state)

    def program(state: Any, *inputs: Any) -> Any:
        with jax.disable_jit(), profiled(watch):
            return subject.program(state, *inputs)

    eager = effect(subject, program, state, subject.inputs)
    if eager.error:
        return TransparentCall(eager)
    drops = tuple(drop for drop in watch.drops.values() if not handed_back(drop, eager))
    return TransparentCall(eager, drops, tuple(watch.branches.values()))


def handed_back(drop: Drop, eager: Effect) -> bool:
    """Whether the update arrived by another way: written to the state by the call itself, or among what it returns."""
    leaf = eager.after.leaves.get(drop.path)
    old = eager.before.leaves.get(drop.path)
    if leaf is not None and leaf.value is not UNCHANGED and (old is None or differ(old.value, leaf.value)):
        return True
    return any(differ(drop.new.value, array) is False for array in eager.output)
