"""What a run returns and leaves behind is what the same calls return and leave without it.

Integers, flags and keys are compared bit by bit. Floats may differ by what another order of the same operations does to them:
a part of the distance that the value moved, and a few roundings of the largest value in the array. Both were measured (see
``RELATIVE`` and ``ROUNDING``). Where rounding is not harmless, as with Adam on a gradient that is zero but for noise, a reference
that started a few roundings away tells how far the value may lie; and a program that computes in half precision leaves its
roundings in float32 too, as mixed precision does in the moments of Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pytest_nnxcheck import compat
from pytest_nnxcheck.compat.arrays import describe
from pytest_nnxcheck.core.notes import Fact
from pytest_nnxcheck.core.outcome import ValueDiffers
from pytest_nnxcheck.invariants.case import Case, Judgement
from pytest_nnxcheck.subject.state_facts import UNCHANGED, Effect, Facts, Leaf, show, type_of

SHOWN = 6
WIDEST, SINGLE, HALF = 8, 4, 2
"""Bytes of floats."""
RELATIVE = {WIDEST: 1e-9, SINGLE: 1e-4, HALF: 2e-2}
"""Part of the distance moved that a float may differ by, by the bytes of its type."""
ROUNDING = 16
"""Roundings (units of the last place of the largest value) that a float of four bytes or more may differ by; half precision: 2."""
NOISE = 10
"""How many times the spread of the nudged reference a float may differ by."""


class Shaken(NamedTuple):
    """What the same calls do from starts a few roundings away, and the bytes of the narrowest float whose roundings those were."""

    effects: tuple[Effect, ...]
    width: int = WIDEST


class Slack(NamedTuple):
    """How far rounding took a value from the other starts, and the bytes of the narrowest float that it may have been rounded to."""

    spread: float | None = None
    width: int = WIDEST


def judge(case: Case) -> Judgement:
    """What the values are that differ from those of the same calls without the nesting."""
    return Judgement() if case.compare is None else case.compare()


def differences(
    wanted: Effect,
    got: Effect,
    before: Facts,
    shaken: Shaken | None = None,
    *,
    drawn: bool = False,
    inside: bool = False,
) -> tuple[ValueDiffers, ...]:
    """All differences, the state first. ``before`` is the state that both started from; ``drawn`` excepts what random numbers decide;
    ``inside`` says that both are the un-nested call.
    """
    return (
        *of_state(wanted, got, before, shaken, drawn=drawn),
        *of_attributes(wanted.after, got.after, before),
        *(() if drawn else of_outputs(wanted, got, shaken, inside=inside)),
    )


def of_state(
    wanted: Effect, got: Effect, before: Facts, shaken: Shaken | None, *, drawn: bool
) -> Iterator[ValueDiffers]:
    for path in dict.fromkeys([*wanted.after.leaves, *got.after.leaves]):
        old, want, have = before.leaves.get(path), wanted.after.leaves.get(path), got.after.leaves.get(path)
        if want is None or have is None:
            if (leaf := want or have) and not (drawn and old is None):
                yield ValueDiffers(path, label="missing" if have is None else "added", of=leaf.kind)
            continue
        want, have = of_old(want, old), of_old(have, old)
        if want.value is have.value or (drawn and want is not old and not want.kind.startswith("Rng")):
            continue
        slack = Slack(spread_of(path, wanted, shaken.effects), shaken.width) if shaken else Slack()
        difference = compare(path, want.value, have.value, old.value if old else None, slack, want.kind)
        if difference is not None:
            yield difference


def of_old(leaf: Leaf, old: Leaf | None) -> Leaf:
    return old if leaf.value is UNCHANGED and old is not None else leaf


def of_attributes(wanted: Facts, got: Facts, before: Facts) -> Iterator[ValueDiffers]:
    for path in dict.fromkeys([*wanted.attributes, *got.attributes]):
        old, want, have = (facts.attributes.get(path) for facts in (before, wanted, got))
        if want == have:
            continue
        texts = [show(value) if value is not None else "missing" for value in (want, have)]
        yield ValueDiffers(
            path,
            label="dropped" if have == old else "attribute",
            of="attribute",
            type=type_of(have if want is None else want),
            want=texts[0],
            have=texts[1],
        )


def of_outputs(wanted: Effect, got: Effect, shaken: Shaken | None, *, inside: bool) -> Iterator[ValueDiffers]:
    if wanted.structure.others != got.structure.others:
        yield from of_plain_leaves(wanted.structure.others, got.structure.others)
        return
    structures: list[Any] = [jax.tree.structure(effect.returned) for effect in (wanted, got)]
    effects, width = (wanted, got, *(shaken.effects if shaken else ())), shaken.width if shaken else WIDEST
    runs = [by_name(effect, whole=structures[0] == structures[1]) for effect in effects]
    for name in dict.fromkeys([*runs[0], *runs[1]]):
        want, have, *moved = (run.get(name, []) for run in runs)
        if len(want) != len(have):
            # A module that a jit inside the call hands out as a copy comes in arrays, the call's own module in none: neither is wrong.
            if not inside:
                yield ValueDiffers(name, label="differs", want=f"{len(want)} arrays", have=str(len(have)))
            continue
        paired = [arrays for arrays in moved if len(arrays) == len(want)]
        for a, b, *others in zip(want, have, *paired, strict=True):
            spread = widest(distance(a, other) for other in others)
            if difference := compare(name, a, b, None, Slack(spread, width), ""):
                yield difference


def of_plain_leaves(wanted: Mapping[str, Any], got: Mapping[str, Any]) -> Iterator[ValueDiffers]:
    """Leaves of an output that are no arrays: by path, with what stands there."""
    for path in dict.fromkeys([*wanted, *got]):
        if path not in wanted or path not in got or wanted[path] != got[path]:
            want, have = (show(leaves[path]) if path in leaves else "none that is no array" for leaves in (wanted, got))
            yield ValueDiffers(path, label="differs", want=want, have=have)


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


def compare(path: str, want: Any, have: Any, old: Any, slack: Slack, kind: str) -> ValueDiffers | None:
    """One array against the other."""
    if isinstance(have, jax.Array) and have.is_deleted():
        return ValueDiffers(path, label="deleted", of=kind, type=describe(want))
    want, have = comparable(want, kind), comparable(have, kind)
    if describe(want) != describe(have):
        return ValueDiffers(path, label="differs", of=kind, want=describe(want), have=describe(have))
    difference = of_floats(want, have, old, slack) if inexact(want) else of_bits(want, have, old)
    return difference and replace(difference, path=path, of=kind, type=describe(want))


def of_bits(want: Any, have: Any, old: Any) -> ValueDiffers | None:
    a, b = bits(want), bits(have)
    wrong = a != b
    if not wrong.any():
        return None
    first = tuple(int(number[0]) for number in np.nonzero(wrong)) if a.ndim else ()
    return ValueDiffers(
        label=label_of(b, old),
        want=str(a[first]),
        have=str(b[first]),
        wrong=int(np.count_nonzero(wrong)),
        elements=a.size,
    )


def of_floats(want: Any, have: Any, old: Any, slack: Slack) -> ValueDiffers | None:
    a, b = numbers(want), numbers(have)
    allowed = allowance(a, want, numbers(old) if same_type(want, old) else None, slack.width)
    allowed += NOISE * slack.spread if slack.spread is not None else 0.0
    off = apart(a, b)
    wrong = ~(off <= allowed)
    if not wrong.any():
        return None
    worst = np.unravel_index(int(np.argmax(off)), off.shape)
    return ValueDiffers(
        label=label_of(b, old),
        want=a[worst].item(),
        have=b[worst].item(),
        wrong=int(np.count_nonzero(wrong)),
        elements=a.size,
        size=float(off[worst]),
        allowed=float(allowed),
        rounding=bool(np.all(np.isfinite(off))),
    )


def comparable(value: Any, kind: str) -> Any:
    """A Python scalar, and an array of NumPy that is a plain attribute, as the array that jax makes of it: it carries no other."""
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
    """Whether the value that is there is the old one: then the update was dropped."""
    if old is None or np.shape(bits(old)) != np.shape(have):
        return "differs"
    before = numbers(old) if inexact(old) else bits(old)
    return "dropped" if np.array_equal(before, have, equal_nan=before.dtype.kind in "fc") else "differs"


def same_type(value: Any, old: Any) -> bool:
    return old is not None and describe(value) == describe(old)


def inexact(value: Any) -> bool:
    return not hasattr(value, "dtype") or (not compat.is_key(value) and bool(jnp.issubdtype(value.dtype, jnp.inexact)))


def bits(value: Any) -> Any:
    """What is compared exactly: integers, flags, the data of keys."""
    return np.asarray(jax.random.key_data(value) if hasattr(value, "dtype") and compat.is_key(value) else value)


def numbers(value: Any) -> Any:
    array = np.asarray(value)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def apart(a: Any, b: Any) -> Any:
    """Element by element how far two arrays lie apart: nothing where both are NaN or the same infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.abs(a - b)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return np.where(same, 0.0, np.where(np.isnan(off), np.inf, off))


def allowance(want: Any, typed: Any, old: Any, computed: int) -> float:
    """How far a float may lie off: for a leaf of the state as a part of what it moved, for an output of its size; ``computed`` are bytes, see `Slack`."""
    size = largest(want)
    moved = size if old is None else largest(want - old)
    kind = jnp.dtype(getattr(typed, "dtype", np.float64))
    width = kind.itemsize // (2 if kind.kind == "c" else 1)
    roundings = (ROUNDING if width >= SINGLE else 2) * float(jnp.finfo(kind).eps)  # type: ignore[no-untyped-call]
    return RELATIVE.get(min(width, computed), RELATIVE[HALF]) * moved + roundings * size


def largest(array: Any) -> float:
    sizes = np.abs(array)
    return float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))


def distance(a: Any, b: Any) -> float | None:
    if describe(a) != describe(b) or not inexact(a):
        return None
    return largest(apart(numbers(a), numbers(b)))


def widest(spreads: Iterable[float | None]) -> float | None:
    """The largest of these, where one is known."""
    return max((spread for spread in spreads if spread is not None), default=None)


def spread_of(path: str, wanted: Effect, nudged: Iterable[Effect]) -> float | None:
    """How much further, or less far, a leaf moved in a nudged reference."""
    return widest(spread_between(path, wanted, effect) for effect in nudged)


def spread_between(path: str, wanted: Effect, nudged: Effect) -> float | None:
    want, shaken = wanted.after.leaves.get(path), nudged.after.leaves.get(path)
    if want is None or shaken is None or UNCHANGED in (want.value, shaken.value):
        return None
    if describe(want.value) != describe(shaken.value) or not inexact(want.value):
        return None
    starts = [effect.before.leaves.get(path) for effect in (wanted, nudged)]
    moves = [numbers(want.value), numbers(shaken.value)]
    if all(start is not None and describe(start.value) == describe(want.value) for start in starts):
        moves = [move - numbers(start.value) for move, start in zip(moves, starts, strict=True) if start]
    return largest(apart(*moves))
