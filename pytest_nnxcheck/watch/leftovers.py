"""The objects that a test can reach when its call has ended, and the leftovers among them: tracers that graph nodes, attributes of the user's other objects, or
code outside of the test's file hold, and Variables of a trace that has ended.

First the frames of the user's code and the roots of a walk, none at the level of the process; `look` walks from them, and `Reported` tells what is new.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

from pytest_nnxcheck.compat.owner import is_library, is_of_jax_or_flax, of_frame
from pytest_nnxcheck.invariants.tracers import MadeInEndedTrace, TracerLeft
from pytest_nnxcheck.walk.raw_access import class_dict, class_name, code_names, layout, mro, top_package

_MOST = 8
_CALLERS = ("pytest_pyfunc_call", "pytest_fixture_setup")


def callers(frame: FrameType) -> Iterator[FrameType]:
    """The frames that a frame was called from, the nearest first."""
    outer = frame.f_back
    while outer is not None:
        yield outer
        outer = outer.f_back


def inside_a_transform(frame: FrameType) -> bool:
    """True if jax or flax has called the function of a frame: its tracers are alive then. Other libraries trace by calling jax."""
    return any(map(is_of_jax_or_flax, callers(frame)))


def of_user(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames that are the user's, the innermost first, up to where pytest called."""
    count = 0
    while frame is not None and count < _MOST and frame.f_code.co_name not in _CALLERS:
        if of_frame(frame) == "user":
            count += 1
            yield frame
        frame = frame.f_back


Root = tuple[str, object]


def bodies(function: object) -> tuple[FunctionType, ...]:
    """The function of a test and those that it wraps: hypothesis, decorators and parametrized methods hide the one that was written."""
    functions: dict[int, FunctionType] = {}
    pending = [function]
    while pending:
        candidate = pending.pop(0)
        if type(candidate) is not FunctionType or id(candidate) in functions:
            continue
        functions[id(candidate)] = candidate
        own = candidate.__dict__
        pending += [own.get("__wrapped__"), getattr(own.get("hypothesis"), "inner_test", None)]
    return tuple(functions.values())


def of_test(function: object, instance: object, fixtures: Iterable[Root]) -> list[Root]:
    """The fixtures of a test, the attributes of its instance, and what its code names: globals, closures, defaults, helpers."""
    functions = bodies(function)
    names = {name for body in functions for name in code_names(body.__code__)}
    return [*fixtures, *_of_instance(instance, names), *((body.__name__, body) for body in functions)]


def of_other_tests(instance: object) -> tuple[object, ...]:
    """The instance of a test and its classes, which lead to the code of other tests. `of_test` lists the parts that are for this one."""
    if instance is None:
        return ()
    return (instance, *(cls for cls in mro(type(instance)) if not is_library(top_package(cls))))


def files_of_test(function: object, instance: object, module: str) -> frozenset[str]:
    """The names of the modules that a test is written in: its own, and those of the classes that it inherits from."""
    return frozenset((module, *(_written(code)[0] for code in (*bodies(function), *of_other_tests(instance)[1:]))))


def code_by_file(objects: Iterable[object], files: frozenset[str]) -> tuple[list[object], list[Root]]:
    """The functions and classes that are written in ``files``, and those of the user's other modules.

    Of the others those at module level alone: what a function makes ends with the test.
    """
    own, others = list[object](), list[Root]()
    for value in objects:
        file, name = _written(value)
        if file in files:
            own.append(value)
        elif file and not is_library(file) and "<locals>" not in name:
            others.append((name, value))
    return own, others


def instances(objects: Iterable[object]) -> Iterator[tuple[str, object, str]]:
    """The instances of the user's classes among some objects: name of the class, instance, module that the class is written in."""
    for value in objects:
        file = class_dict(type(value)).get("__module__")
        if type(file) is str and not is_library(file) and not isinstance(value, type):
            yield class_name(type(value)), value, file


def _written(value: Any) -> tuple[str, str]:
    """The module and the qualified name of a function or a class; empty for anything else."""
    file: object
    if type(value) is FunctionType:
        file, name = value.__module__, value.__qualname__
    elif issubclass(type(value), type):
        file, name = class_dict(value).get("__module__"), class_dict(type)["__qualname__"].__get__(value)
    else:
        return "", ""
    return (file if type(file) is str else ""), name


def _of_instance(instance: object, names: set[str]) -> Iterator[Root]:
    """``self.model``, the attributes of the classes, and the methods that the test names: the others are for other tests."""
    if instance is None:
        return
    own: Any = getattr(instance, "__dict__", {})
    yield from ((f"self.{name}", value) for name, value in list(own.items()) if not name.startswith("_outcome"))
    for cls in mro(type(instance)):
        if is_library(top_package(cls)):
            continue
        for name, value in class_dict(cls).items():
            if not name.startswith("__") and (name in names or type(value) is not FunctionType):
                yield f"{class_name(cls)}.{name}", value


MOST_OBJECTS = 20_000
"""The fuse of one walk: a fixture may hold a data set. The largest of 48 real models has 874 objects."""


Leftover = TracerLeft | MadeInEndedTrace
"""A tracer that a graph node holds, or a Variable that was made in a trace which has ended: findings of every check."""


@dataclass(frozen=True, slots=True)
class Look:
    """The leftovers that one walk came to, with the very objects, and whether it saw everything."""

    leftovers: tuple[tuple[object, Leftover], ...] = ()
    complete: bool = True


class Reported:
    """The leftovers that were reported. Weak references wherever a type takes one: a run keeps no arrays of its tests alive."""

    def __init__(self) -> None:
        self._references: dict[int, Callable[[], object]] = {}

    def holds(self, value: object) -> bool:
        """True if this very object was reported."""
        reference = self._references.get(id(value))
        return reference is not None and reference() is value

    def new(self, look: Look) -> tuple[Leftover, ...]:
        """The leftovers that were not reported before. A tracer stays in its place, and every later test meets it."""
        unreported = []
        for value, leftover in look.leftovers:
            if not self.holds(value):
                self._references[id(value)] = _reference(value)
                unreported.append(leftover)
        return tuple(unreported)


def _reference(value: object) -> Callable[[], object]:
    try:
        return weakref.ref(value)
    except TypeError:  # Variables of flax 0.12 have slots
        return lambda: value


def can_be_there() -> bool:
    """True if there may be graph nodes: somebody has imported flax."""
    return "flax.nnx" in sys.modules


def look(
    roots: Iterable[Root],
    left_out: tuple[object, ...] = (),
    reported: Reported | None = None,
    files: frozenset[str] | None = None,
) -> Look:
    """Walk from the roots, while no trace is under way: every tracer in a graph node is then one of a trace that has ended.

    ``files`` are the modules of the test: what the code of other modules keeps, and objects beside graph nodes, are looked at too. `None` looks at graph nodes alone.
    Garbage is collected only where something was not ``reported`` yet: in a large process that takes a second.

    A suite without flax has no graph nodes: nothing is imported for it. Of a model that is gone the class is there still, with what its code
    keeps. A tracer that only the test itself keeps, in a list beside the model, is the test's own business; an attribute of an object is not.
    """
    if not can_be_there():
        return Look()
    from pytest_nnxcheck.walk.walk import OLD, without_garbage

    roots, reported = tuple(roots), reported or Reported()

    def has_new(seen: Look) -> bool:
        return not all(reported.holds(value) for value, _ in seen.leftovers)

    return without_garbage(lambda: _look(roots, left_out, files), has_new, OLD)


def _look(roots: tuple[Root, ...], left_out: tuple[object, ...], files: frozenset[str] | None) -> Look:
    from pytest_nnxcheck.compat import graph
    from pytest_nnxcheck.compat.arrays import describe
    from pytest_nnxcheck.subject.originals import leak
    from pytest_nnxcheck.walk.walk import walk

    seen = walk(roots, MOST_OBJECTS, left_out)
    kinds = {path: graph.kind_of(type(node)) for path, node in seen.nodes}
    leftovers: list[tuple[object, Leftover]] = []
    # From the nodes and the code of other files alone: what else leads to a tracer is the test's own.
    tracers = [*walk(seen.nodes, MOST_OBJECTS, left_out).tracers] if seen.tracers else []
    if seen.tracers:
        skipped = {*map(id, left_out)}
        written = (
            [] if files is None else [*instances(value for value in seen.seen.values() if id(value) not in skipped)]
        )
        of_others = [(name, value) for name, value, file in written if file not in (files or ())]
        held = {id(leaked.tracer) for leaked in walk(of_others, MOST_OBJECTS, left_out).tracers}
        held |= {id(item) for _, value, _ in written for item in (layout(type(value)).read(value) or {}).values()}
        objects = [each for each in seen.tracers if id(each.tracer) in held]
        own, others = ([], []) if files is None else code_by_file(seen.seen.values(), files)
        kept = walk(others, MOST_OBJECTS, (*left_out, *own, *(value for _, value in roots))).tracers
        tracers = [*{id(leaked.tracer): leaked for leaked in (*kept, *objects, *tracers)}.values()]
    for leaked in tracers:
        found = TracerLeft(leaked.path, leak=leak(leaked, None, _place(leaked.path, kinds)))
        leftovers.append((leaked.tracer, found))
    for path, node in seen.nodes:
        if graph.is_variable(node):
            value = graph.variable_value(node)
            if not graph.is_tracer(value) and graph.is_pinned(node):
                type_ = f"{graph.variable_kind(node)} {describe(value)}"
                leftovers.append((node, MadeInEndedTrace(path, type=type_)))
    return Look(tuple(leftovers), seen.complete)


def _place(path: str, nodes: Mapping[str, str]) -> str:
    """The place of a value: in a Variable, in an attribute of another graph node, in an object that a node holds, or outside of them."""
    owner = path
    while owner not in nodes and (cut := max(owner.rfind("."), owner.rfind("["))) > 0:
        owner = owner[:cut]
    if owner not in nodes:
        return "outside"
    if nodes[owner] == "variable":
        return "variable"
    return "module" if path[len(owner) :].count(".") <= 1 else "object"
