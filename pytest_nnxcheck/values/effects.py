"""The effect of a call, as values by the names that users know, and the comparison of two effects: which values differ, and how far they may lie apart.

Arrays are kept by reference (those of jax never change); plain Python values are kept by `plain`, since a call may append to the very list.

A difference counts if it is more than ten times what moving the start of those calls by a few roundings does. A value that rounding decides (a sign of Adam
where the gradient is noise, an index of two scores that are alike) moves as far from a start that is a few roundings away; an error of a transform
does not. Keys and other values that are no numbers are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import describe, value_of
from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.subject.contents import diff
from pytest_nnxcheck.subject.subject import Subject
from pytest_nnxcheck.walk.fingerprint import is_array, plain, plain_text, plain_type
from pytest_nnxcheck.walk.raw_access import MISSING

__tracebackhide__ = True  # pytest shows the frames of the user, not these

UNCHANGED: Any = type("Unchanged", (), {"__slots__": ()})()
"""The mark in place of the value of a leaf that a run did not replace."""


@dataclass(frozen=True, slots=True)
class EffectLeaf:
    """One array of the state: its value, and the type of the Variable that holds it."""

    value: Any
    kind: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The leaves of a state and its Python attributes, by path."""

    leaves: Mapping[str, EffectLeaf]
    attributes: Mapping[str, Any]


NOTHING = Facts({}, {})


@dataclass(frozen=True, slots=True)
class Structure:
    """The content of an output."""

    names: tuple[str, ...]
    """The names of its arrays, in order."""
    others: Mapping[str, Any]
    """Its other leaves (strings, say) by name."""


@dataclass(frozen=True, slots=True)
class Effect:
    """The output of one run, and the state before and after it."""

    returned: Any = None
    """A tree of flat arrays, with the axes that the layers added."""
    names: Any = ()
    """The names of these, in the same tree."""
    output: tuple[Any, ...] = ()
    """The arrays of the un-nested output."""
    structure: Structure = Structure((), {})
    before: Facts = NOTHING
    after: Facts = NOTHING
    """The facts after the run; leaves that are the very arrays of ``before`` are marked."""
    error: Exception | None = None


def changed(before: Facts, after: Facts, earlier: Facts | None = None) -> Facts:
    """The facts after a run without the arrays that it did not replace, so that a kept effect holds no copy of the state.

    Where the state ``before`` is a copy of the state after an ``earlier`` run, such an array is taken from that run.
    """

    def leaf_of(name: str, leaf: EffectLeaf) -> EffectLeaf:
        if name not in before.leaves or before.leaves[name].value is not leaf.value:
            return leaf
        kept = earlier.leaves.get(name) if earlier is not None else None
        return EffectLeaf(UNCHANGED if kept is None else kept.value, leaf.kind)

    return Facts({name: leaf_of(name, leaf) for name, leaf in after.leaves.items()}, after.attributes)


def read(subject: Subject, state: Any) -> Facts:
    """The facts of a state."""
    leaves = {}
    for path, variable in graph.variables(state):
        for key, value in jax.tree_util.tree_leaves_with_path(value_of(graph.variable_value(variable))):
            name = subject.path(path) + jax.tree_util.keystr(key)
            leaves[name] = EffectLeaf(value, graph.variable_kind(variable))
    attributes = {}
    for path, value in graph.attributes(state):
        name = subject.path(path)
        leaves |= {name + place: EffectLeaf(array, "attribute") for place, array in arrays_in(value)}
        if not is_array(value):
            attributes[name] = plain(value)
    return Facts(leaves, attributes)


def arrays_in(value: Any) -> Iterator[tuple[str, Any]]:
    """The arrays of a plain value, with their places in lists, tuples and dicts: ``[0]['a']``."""
    if is_array(value):
        yield "", value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, list | tuple):
        items = enumerate(value)
    elif isinstance(value, dict):
        items = value.items()
    for key, item in items:
        yield from ((f"[{key!r}]{place}", array) for place, array in arrays_in(item))


def structure(names: tuple[str, ...], rebuild: Callable[[tuple[Any, ...]], Any], output: tuple[Any, ...]) -> Structure:
    """The names of an output's arrays, and its leaves that are no arrays."""
    named = ["output" + name for name in names]
    rebuilt = rebuild(output)
    leaves, _ = jax.tree_util.tree_flatten_with_path(rebuilt, is_leaf=graph.is_graph_node)
    others = {
        "output" + jax.tree_util.keystr(path): plain(leaf)
        for path, leaf in leaves
        if not (is_array(leaf) or graph.is_graph_node(leaf))
    }
    return Structure(tuple(named[: len(output)]), others)


# --- the comparison of two effects

SHOWN = 6
"""Variables that notes name."""
TIMES = 10
"""The distance that a value may differ by, as a multiple of the distance that the nudged starts move it."""
ROUNDINGS = 4
"""Units in the last place of the largest value of an array: less is no difference."""
PART = 2.0**-15
"""Share of the distance that the call moved an array: less is no difference.

So most arrays need no nudged start. It also leaves room for values that are computed of constants alone, which no start moves: the angles of rotary positions.
"""

Nudged = tuple[Effect, ...]
"""The effects of the same calls from starts a few roundings away."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A leaf, an attribute or an output that is not as it should be."""

    path: str
    label: Literal["missing", "added", "dropped", "attribute", "deleted", "differs"]
    of: str = ""
    """The type of the Variable."""
    type: str = ""
    """The type of the array, or of the Python value of an attribute."""
    want: str | complex = ""
    """The value, type or count that should be there: of an array, that of the element whose values differ most."""
    have: str | complex = ""
    """The value, type or count that is there."""
    wrong: int = 0
    """The number of elements that differ."""
    elements: int = 0
    size: float = 1.0
    """The distance between the two values of that element; 1 where it is no float."""
    allowed: float | None = None
    """The distance that is allowed."""
    rounding: bool = False
    """True if only floats differ, by a finite amount."""


def differences(
    wanted: Effect,
    got: Effect,
    nudged: Nudged = (),
    *,
    drawn: bool = False,
    state_only: bool = False,
) -> tuple[Difference, ...]:
    """Find all differences, those of the state first.

    Both results started from the state that ``got`` names. With ``drawn``, values that depend on random numbers do not count.
    """
    before = got.before
    return (
        *of_state(wanted, got, before, nudged, drawn=drawn),
        *of_attributes(wanted.after, got.after, before),
        *(() if drawn or state_only else of_outputs(wanted, got, nudged)),
    )


def of_state(wanted: Effect, got: Effect, before: Facts, nudged: Nudged, *, drawn: bool) -> Iterator[Difference]:
    for path in dict.fromkeys([*wanted.after.leaves, *got.after.leaves]):
        old, want, have = before.leaves.get(path), wanted.after.leaves.get(path), got.after.leaves.get(path)
        if want is None or have is None:
            if (leaf := want or have) and not (drawn and old is None):
                yield Difference(path, label="missing" if have is None else "added", of=leaf.kind)
            continue
        want, have = of_old(want, old), of_old(have, old)
        if want.value is have.value or (drawn and want is not old and not want.kind.startswith("Rng")):
            continue
        spread = max((moved_apart(path, wanted, effect) for effect in nudged), default=0.0)
        difference = compare(path, want.value, have.value, old.value if old else None, spread, want.kind)
        if difference is not None:
            yield difference


def of_old(leaf: EffectLeaf, old: EffectLeaf | None) -> EffectLeaf:
    return old if leaf.value is UNCHANGED and old is not None else leaf


def of_attributes(wanted: Facts, got: Facts, before: Facts) -> Iterator[Difference]:
    for path, want, have in diff(wanted.attributes, got.attributes):
        yield Difference(
            path,
            label="dropped" if have == before.attributes.get(path, MISSING) else "attribute",
            of="attribute",
            type=plain_type(have if want is MISSING else want),
            want="nothing" if want is MISSING else plain_text(want),
            have="nothing" if have is MISSING else plain_text(have),
        )


def of_outputs(wanted: Effect, got: Effect, nudged: Nudged) -> Iterator[Difference]:
    if wanted.structure.others != got.structure.others:
        for path, *values in diff(wanted.structure.others, got.structure.others):
            texts = ["none that is no array" if value is MISSING else plain_text(value) for value in values]
            yield Difference(path, label="differs", want=texts[0], have=texts[1])
        return
    structures: list[Any] = [jax.tree.structure(effect.returned) for effect in (wanted, got)]
    runs = [by_name(effect, whole=structures[0] == structures[1]) for effect in (wanted, got, *nudged)]
    for name in dict.fromkeys([*runs[0], *runs[1]]):
        want, have, *moved = (run.get(name, []) for run in runs)
        if len(want) != len(have):
            yield Difference(name, label="differs", want=f"{len(want)} arrays", have=str(len(have)))
            continue
        paired = [arrays for arrays in moved if len(arrays) == len(want)]
        for a, b, *others in zip(want, have, *paired, strict=True):
            spread = max((distance(a, other) for other in others), default=0.0)
            if difference := compare(name, a, b, None, spread, ""):
                yield difference


def by_name(effect: Effect, *, whole: bool) -> dict[str, list[Any]]:
    """The arrays of an output by name, with the axes that the layers added where ``whole`` says so."""
    arrays: dict[str, list[Any]] = {}
    trees = (effect.names, effect.returned) if whole else (effect.structure.names, effect.output)
    names, leaves = map(jax.tree.leaves, trees)
    if len(names) != len(leaves):  # the first call of `call_first` returned more than the second, or less
        names = [f"output {number}" for number in range(len(leaves))]
    for name, leaf in zip(names, leaves, strict=True):
        arrays.setdefault(name, []).append(leaf)
    return arrays


def compare(path: str, want: Any, have: Any, old: Any, spread: float, kind: str) -> Difference | None:
    """Compare two arrays; ``spread`` is the distance that the nudged starts moved the first, see `distance`."""
    if isinstance(have, jax.Array) and have.is_deleted():
        return Difference(path, label="deleted", of=kind, type=describe(want))
    want, have = comparable(want, kind), comparable(have, kind)
    if describe(want) != describe(have):
        return Difference(path, label="differs", of=kind, want=describe(want), have=describe(have))
    a, b = numbers(want), numbers(have)
    off = apart(a, b)
    allowed = rounding_of(want, a, old) + TIMES * spread if inexact(want) else 0.0
    wrong = ~(off <= allowed)
    if not wrong.any() or (not inexact(want) and np.count_nonzero(wrong) <= TIMES * spread):
        return None
    worst = np.unravel_index(int(np.argmax(off)), off.shape)
    return Difference(
        path,
        label=label_of(b, old),
        of=kind,
        type=describe(want),
        want=a[worst].item() if inexact(want) else str(a[worst]),
        have=b[worst].item() if inexact(want) else str(b[worst]),
        wrong=int(np.count_nonzero(wrong)),
        elements=a.size,
        size=float(off[worst]),
        allowed=float(allowed) if inexact(want) else None,
        rounding=bool(np.all(np.isfinite(off))) and not is_key(want),
    )


def comparable(value: Any, kind: str) -> Any:
    """Return a Python scalar, or an array of NumPy that is a plain attribute, as the array that jax makes of it: it carries no other."""
    if not is_scalar(value) and not (kind == "attribute" and isinstance(value, np.ndarray | np.generic)):
        return value
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


def is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex) and not isinstance(value, np.generic)


def scalars(got: Facts, before: Facts) -> tuple[Fact, ...]:
    """A note on Variables that hold a Python scalar in place of an array: an eager `jax.checkpoint` of jax 0.11 and 0.12 hands out a constant so."""
    numbers_at = [
        Fact("number", (path,), type(leaf.value).__name__)
        for path, leaf in got.leaves.items()
        if is_scalar(leaf.value) and path in before.leaves and not is_scalar(before.leaves[path].value)
    ]
    return tuple(numbers_at[:SHOWN])


def label_of(have: Any, old: Any) -> Literal["dropped", "differs"]:
    """Return "dropped" if the value is the old one, since then the update was dropped; else "differs"."""
    before = None if old is None else numbers(old)
    if before is None or before.shape != have.shape:
        return "differs"
    return "dropped" if np.array_equal(before, have, equal_nan=before.dtype.kind in "fc") else "differs"


def inexact(value: Any) -> bool:
    """True if a value is of floats."""
    return not hasattr(value, "dtype") or (not is_key(value) and bool(jnp.issubdtype(value.dtype, jnp.inexact)))


def is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and graph.is_key(value)


def numbers(value: Any) -> Any:
    """The numbers of an array: floats and integers widened, flags as they are, the data of keys."""
    array = np.asarray(jax.random.key_data(value) if is_key(value) else value)
    if inexact(value):
        return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    return array.astype(np.int64) if array.dtype.kind == "V" else array  # int4 is no type of NumPy's own


def alike(one: Any, other: Any) -> bool:
    """True if two arrays or references are of one type, and hold the same numbers."""
    same_type = describe(one) == describe(other)
    return same_type and np.array_equal(numbers(value_of(one)), numbers(value_of(other)), equal_nan=inexact(one))


def apart(a: Any, b: Any) -> Any:
    """The distance of two arrays, element by element: zero where both are NaN or the same infinity, at least one where integers differ."""
    if a.dtype.kind not in "biufc":
        return np.where(a == b, 0.0, np.inf)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(a.astype(wide) - b.astype(wide))
    least = 0.0 if a.dtype.kind in "fc" else 1.0
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, np.maximum(off, least)))


def rounding_of(typed: Any, values: Any, old: Any) -> float:
    """A few roundings of the largest float, and a part of the distance moved: for an output, which has no old value, of its size."""
    kind = jnp.dtype(getattr(typed, "dtype", np.float64))
    moved = values if old is None or describe(old) != describe(typed) else values - numbers(old)
    roundings = ROUNDINGS * float(jnp.finfo(kind).eps)  # type: ignore[no-untyped-call]
    return roundings * largest(values) + PART * largest(moved)


def largest(array: Any) -> float:
    """The largest finite size."""
    sizes = np.abs(array)
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))


def distance(a: Any, b: Any) -> float:
    """The largest distance of two arrays of floats; for others the number of elements that differ; zero where they cannot be compared, or are keys."""
    if describe(a) != describe(b) or is_key(a):
        return 0.0
    off = apart(numbers(a), numbers(b))
    return largest(off) if inexact(a) else float(np.count_nonzero(off))


def moved_apart(path: str, wanted: Effect, nudged: Effect) -> float:
    """The largest difference between the moves of a leaf from the real start and from a nudged one."""
    ends = [effect.after.leaves.get(path) for effect in (wanted, nudged)]
    starts = [effect.before.leaves.get(path) for effect in (wanted, nudged)]
    if any(end is None or end.value is UNCHANGED for end in ends):
        return 0.0
    first, *others = [leaf.value for leaf in (*ends, *starts) if leaf is not None]
    if len(others) < 3 or not inexact(first) or any(describe(other) != describe(first) for other in others):
        return distance(first, others[0])
    want, have, start, other_start = map(numbers, (first, *others))
    return largest(apart(want - start, have - other_start))
