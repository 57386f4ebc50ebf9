"""A second call with arguments of the same types is not traced again, nor is a jit inside it, so that nothing is compiled for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import is_weak, typed
from pytest_nnxcheck.core.notes import Fact, Note
from pytest_nnxcheck.core.outcome import TypeMoved, Violation
from pytest_nnxcheck.invariants.case import Case, Judgement
from pytest_nnxcheck.subject.subject import Subject

MISSING = "missing"


def judge(case: Case) -> Judgement:
    """What the call leaves in another type than it was handed, where the next one is traced again for that, and the jits inside that are traced in each call."""
    moved, inside = case.second_call(), case.jits_inside()
    notes: tuple[Note, ...] = ()
    if any(MISSING in (finding.before, finding.after) for finding in moved):
        moved, notes = (), (Fact("adds state", ("recompilation",)),)
    findings = (*moved, *inside)
    return Judgement((Violation("recompilation", findings=findings),) if findings else (), notes)


def moved(subject: Subject, before: Any, after: Any) -> tuple[TypeMoved, ...]:
    """What a jit compiles for, and is other in the state after a call: attributes first, then the types of leaves. Never empty."""
    return (*attributes_moved(subject, before, after), *types_moved(subject, before, after)) or (TypeMoved(),)


def attributes_moved(subject: Subject, before: Any, after: Any) -> Iterator[TypeMoved]:
    old, new = (dict(compat.attributes(state)) for state in (before, after))
    for path in dict.fromkeys([*old, *new]):
        texts = [short(values[path]) if path in values else MISSING for values in (old, new)]
        if (path in old) != (path in new) or not same(old[path], new[path]):
            kind = type(old.get(path)).__name__
            yield TypeMoved(subject.path(path), label="attribute", type=kind, before=texts[0], after=texts[1])


def types_moved(subject: Subject, before: Any, after: Any) -> Iterator[TypeMoved]:
    old, new = (dict(compat.raw_leaves(state)) for state in (before, after))
    for path in dict.fromkeys([*old, *new]):
        texts = [typed(leaves[path]) if path in leaves else MISSING for leaves in (old, new)]
        if texts[0] != texts[1]:
            hardened = path in old and path in new and is_weak(old[path]) and not is_weak(new[path])
            yield TypeMoved(subject.path(path), label="leaf", before=texts[0], after=texts[1], hardened=hardened)


def same(one: Any, other: Any) -> bool:
    """Whether two attributes are equal, as far as they can be compared."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:  # noqa: BLE001 - arrays, and whatever the user's class does
        return True


def short(value: Any) -> str:
    """A value in a message: of an object that is no plain value the type alone, whose text may be an address."""
    plain = value is None or isinstance(value, bool | int | float | complex | str | bytes | tuple | list)
    return f"{value!r:.60}" if plain else f"a {type(value).__name__}"
