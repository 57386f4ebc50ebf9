"""Updates that a transform inside the user's own call drops: made in its body, to a copy, and never handed back.

Such a drop is the same with and without our layers, so no nesting shows it. The call is made once more with `jax.disable_jit`, under
Python's profiling hook, which sees every function of the user that a transform calls: a body. What a body changes in the graph
nodes among its arguments must have changed, when the transform returns, in one of those that the transform was given.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat import frames
from pytest_nnxcheck.engine.causes import profiled
from pytest_nnxcheck.engine.reference import effect
from pytest_nnxcheck.subject.state_facts import UNCHANGED, Effect, frozen, is_array
from pytest_nnxcheck.subject.subject import Subject

Path = tuple[Any, ...]
LIBRARIES = ("jax", "jaxlib", "flax")

MOST_EVENTS = 2_000_000
"""The fuse: a loop of many steps takes minutes without jit. The attention layers of flax make 20 000."""

ABSENT: Any = type("Absent", (), {"__slots__": ()})()


@dataclass(frozen=True, slots=True)
class Value:
    """What a Variable or an attribute held: an array, a tracer, or a frozen Python value."""

    value: Any = ABSENT
    kind: str = ""


class TooLong(Exception):
    """The call makes too many steps to be watched."""


@dataclass(frozen=True, slots=True)
class Drop:
    """An update that was lost: of what, in the body of which transform."""

    path: str
    new: Value
    transform: str
    library: str
    place: str

    @property
    def where(self) -> str:
        """The transform as one writes it, and where it was called."""
        home = "nnx" if self.library == "flax" else "jax.lax" if self.transform in frames.LAX else "jax"
        return f"{home}.{self.transform} at {self.place}"


@dataclass(frozen=True, slots=True)
class Held:
    """A graph node, and what it held when it was looked at, by path."""

    node: Any
    values: dict[Path, Value]

    @classmethod
    def of(cls, node: Any) -> Self:
        return cls(node, values_of(node))

    def moved(self) -> dict[Path, tuple[bool | None, Value]]:
        """Whether each value changed since, and what it is now; none where tracers hide it."""
        now = values_of(self.node)
        pairs = {path: (self.values.get(path, Value()), now.get(path, Value())) for path in {**self.values, **now}}
        return {
            path: (differ(old.value, new.value), Value(new.value, new.kind or old.kind))
            for path, (old, new) in pairs.items()
        }


def values_of(node: Any) -> dict[Path, Value]:
    if isinstance(node, nnx.Variable):
        return {(): Value(compat.variable_value(node), compat.variable_kind(node))}
    values = {
        path: Value(compat.variable_value(each), compat.variable_kind(each)) for path, each in compat.variables(node)
    }
    for path, value in compat.attributes(node):
        values[path] = Value(value if is_array(value) else frozen(value), "attribute")
    return values


def differ(a: Any, b: Any) -> bool | None:
    """Whether two values differ; none where a tracer hides that."""
    if a is b:
        return False
    if a is ABSENT or b is ABSENT:
        return True
    if isinstance(a, tuple) or isinstance(b, tuple):
        return not (isinstance(a, tuple) and isinstance(b, tuple) and a == b)
    a, b = compat.concrete(a), compat.concrete(b)
    if not (is_array(a) and is_array(b)):
        return None
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if compat.is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    first, second = np.asarray(a), np.asarray(b)
    return not np.array_equal(first, second, equal_nan=first.dtype.kind in "fc")


@dataclass(slots=True)
class Transform:
    """A transform at work: the nodes that it was given, and what its bodies changed in their copies."""

    frame: FrameType
    name: str
    library: str
    place: str
    given: list[Held]
    changes: dict[tuple[type, Path], Value] = field(default_factory=dict)


@dataclass(slots=True)
class Body:
    """A function that a transform called, with the copies that it got."""

    frame: FrameType
    copies: list[Held]


class Watch:
    """The profiling hook."""

    def __init__(self, subject: Subject, state: Any) -> None:
        self.drops: dict[tuple[str, str], Drop] = {}
        self._subject = subject
        self._nodes = [(tuple(path), node) for path, node in compat.iter_graph(state) if compat.is_graph_node(node)]
        self._roots = {id(node): path for path, node in self._nodes}
        self._events = 0
        self._active: list[Transform | Body] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        self._events += 1
        if self._events > MOST_EVENTS:
            raise TooLong(f"more than {MOST_EVENTS} Python calls without jit")
        if event == "return":
            if self._active and self._active[-1].frame is frame:
                self._leave(self._active.pop())
        elif event == "call":
            top = self._active[-1] if self._active else None
            if isinstance(top, Transform):
                if not machinery(frame):
                    known = {id(held.node) for held in top.given}
                    self._active.append(Body(frame, [Held.of(node) for node in nodes(frame) if id(node) not in known]))
            elif (name := transform_of(frame)) is not None and (given := nodes(frame)):
                library = str(frame.f_globals["__name__"]).partition(".")[0]
                self._active.append(Transform(frame, name, library, place_of(frame), [Held.of(node) for node in given]))

    def _leave(self, left: Transform | Body) -> None:
        if isinstance(left, Transform):
            for drop in self._dropped(left):
                self.drops.setdefault((drop.path, drop.place), drop)
            return
        above = self._active[-1] if self._active else None
        if isinstance(above, Transform):
            for held in left.copies:
                above.changes.update(
                    {(type(held.node), path): new for path, (moved, new) in held.moved().items() if moved}
                )

    def _dropped(self, transform: Transform) -> Iterator[Drop]:
        """The changes of bodies that no given node of the same type shows: of several such nodes, one that may have changed is enough."""
        if not transform.changes:
            return
        moves = [(held.node, held.moved()) for held in transform.given]
        for (cls, path), new in transform.changes.items():
            given = [(node, moved[path][0] if path in moved else False) for node, moved in moves if type(node) is cls]
            name = self._name(given[0][0], path) if given else None
            if name is not None and all(moved is False for _, moved in given):
                yield Drop(name, new, transform.name, transform.library, transform.place)

    def _name(self, node: Any, path: Path) -> str | None:
        """The name of a value of the state; a copy that an outer transform made goes by its type, where only one node has it."""
        root = self._roots.get(id(node))
        if root is None:
            alike = [path for path, known in self._nodes if type(known) is type(node)]
            root = alike[0] if len(alike) == 1 else None
        return None if root is None else self._subject.path((*root, *path))


def machinery(frame: FrameType) -> bool:
    """Whether the code is that of jax, flax, or the standard library, and no layer."""
    name = str(frame.f_globals.get("__name__", ""))
    if name.startswith(frames.BODIES):
        return False
    file = frame.f_code.co_filename
    return name.partition(".")[0] in LIBRARIES or (compat.is_library_file(file) and not file.startswith("<"))


def transform_of(frame: FrameType) -> str | None:
    """The name of the transform that a function of jax or flax carries out."""
    library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return frames.transform_of(frame.f_code.co_name, frame.f_code.co_qualname) if library in LIBRARIES else None


def nodes(frame: FrameType) -> list[Any]:
    """The graph nodes among the arguments of a function that was just called."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    values = [frame.f_locals[name] for name in code.co_varnames[:count] if name in frame.f_locals]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jax warns of generators among them
        leaves = jax.tree.leaves(values, is_leaf=compat.is_graph_node)
    found = [leaf for leaf in leaves if compat.is_graph_node(leaf)]
    return list({id(node): node for node in found}.values())


def place_of(frame: FrameType) -> str:
    above = frame.f_back
    while above is not None and machinery(above):
        above = above.f_back
    return f"{above.f_code.co_filename}:{above.f_lineno}" if above else "an unknown line"


def transparent(subject: Subject) -> tuple[Effect, tuple[Drop, ...]]:
    """The call on a copy with its jits off, and the updates that its other transforms dropped."""
    subject = subject.for_run()
    state = subject.fresh()
    watch = Watch(subject, state)

    def program(state: Any, *inputs: Any) -> Any:
        with jax.disable_jit(), profiled(watch):
            return subject.program(state, *inputs)

    found = effect(subject, program, state, subject.inputs)
    drops = () if found.error else tuple(drop for drop in watch.drops.values() if not handed_back(drop, found))
    return found, drops


def handed_back(drop: Drop, found: Effect) -> bool:
    """Whether the update arrived by another way: written to the state by the call itself, or among what it returns."""
    leaf = found.after.leaves.get(drop.path)
    old = found.before.leaves.get(drop.path)
    if leaf is not None and leaf.value is not UNCHANGED and (old is None or differ(old.value, leaf.value)):
        return True
    return any(differ(drop.new.value, array) is False for array in found.output)
