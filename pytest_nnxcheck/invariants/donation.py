"""Every donated buffer is reused for the new value of its leaf, shard by shard."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import jax

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.arrays import array_type, quantizes
from pytest_nnxcheck.core.catalogue import InvariantRow
from pytest_nnxcheck.core.facts import ArrayType, InnerDonation, Leaf, Observation, Pairs
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import BufferPlace, BufferRetyped, Fact, Note, other_dtype, retyped
from pytest_nnxcheck.core.outcome import Finding, FindingOnTarget, InProgram, Moment, Words
from pytest_nnxcheck.core.settings import DEFAULTS
from pytest_nnxcheck.core.text import Row, counted, some
from pytest_nnxcheck.engine import trials
from pytest_nnxcheck.engine.example import Call
from pytest_nnxcheck.engine.observe import observe
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.invariants import carried, snapshots
from pytest_nnxcheck.reporting.target_rows import lose
from pytest_nnxcheck.subject.profile import UNKNOWN, successors

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ROW = InvariantRow("donation", order=30, severity=20, default=True, compiled=True, targeted=True, error="DonationLost")


def asserts(ran: Ran) -> bool:
    """True if buffers are donated, by the generated jit or by one inside the un-nested call, and jax does not keep their values."""
    seen = ran.observation
    there = seen.refused and any(on.donated for on in seen.targets)
    return bool(seen.inside.consumed or there or (seen.moves and not jax.config.jax_debug_nans))


def judge(ran: Ran) -> Iterator[Finding | Note]:
    """Judge the donation by the generated jit, or, for the un-nested call, that by its own jits."""
    seen = ran.observation
    if not seen.nesting.layers:
        yield from of_jits_inside(ran)
        yield from ran.call.once("carried", lambda: carried.retyped(ran), ran.call.settings.donate)
    elif seen.moves and jax.config.jax_debug_nans:
        yield Fact("values are kept", ("donation",), "jax_debug_nans")
    elif seen.moves:
        yield from of_program(ran)
    meant = {leaf.path for leaf, _ in converted(seen)}
    for on in seen.targets:
        if lost := tuple(path for path in on.lost if path not in meant):
            yield LostOnTarget(lost[0], on=replace(on, lost=lost))


def of_program(ran: Ran) -> Iterator[Finding | Note]:
    """Donated leaves that lost their buffer, and those that cannot be donated: in a buffer of another leaf, or of a view."""
    seen, originals = ran.observation, ran.call.originals
    after = {move.before.path: move.after for move in seen.moves}
    found = [finding for pair in originals.shared if (finding := sharing(*pair, ran)) is not None]
    by_user = donated_by_user(ran, [(finding.path, finding.other) for finding in found]) | state_twice(ran, found)
    yield from (finding for finding in found if (finding.path, finding.other) in by_user)
    if rest := [finding for finding in found if (finding.path, finding.other) not in by_user]:
        yield BuffersShared(tuple(counts(rest)))
    yield from ran.call.once("snapshots", lambda: snapshots.held_beside(ran))
    yield from (ViewedBuffer(leaf, holder=holder) for holder, leaf in originals.views if leaf in after)
    meant = {leaf.path for leaf, _ in converted(seen)}
    yield from (lost_buffer(leaf, after[leaf.path], ran) for leaf in lost_leaves(seen) if leaf.path not in meant)


def donated_by_user(ran: Ran, pairs: Sequence[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """The pairs of leaves in one buffer for which the user donates: all where the test names what to donate, else those that a jit of the call's own breaks.

    By default it is the plugin that donates: a live network and its clone, a step and the snapshot that it holds, work as they are.
    """
    call = ran.call
    if call.settings.donate != DEFAULTS.donate:
        return frozenset(pairs)
    if not pairs or not ran.profile.program.inner_donations:
        return frozenset()
    inside = call.tried("donated inside", lambda: observe(call, Nesting(mode=call.nesting.mode)).inside)
    return frozenset((finding.path, finding.other) for finding in broken_inside(ran, inside, pairs))


def state_twice(ran: Ran, found: Iterable[SharedBuffer]) -> frozenset[tuple[str, str]]:
    """The pairs of leaves in one buffer that each are state of their own: the call writes both, or modules hold both and are no two copies of one.

    An optimizer that keeps the parameters is one, and so are two parameters of a layer that begin as one array. A snapshot is none.
    """
    subject, walked = ran.call.subject, ran.call.originals.walk
    types = {path: type(node) for path, node in walked.nodes if not graph.is_variable(node)} if walked else {}
    changed = {subject.path(path) for path in ran.profile.state.changed}

    def is_state(one: str, two: str) -> bool:
        if {one, two} & {*subject.input_names}:
            return False
        outer, other = holders(one, two)
        are_copies = outer in types and types[outer] is types.get(other)
        in_modules = all(leaf.rpartition(".")[0] in types for leaf in (one, two))
        return not are_copies and ({one, two} <= changed or in_modules)

    return frozenset((each.path, each.other) for each in found if is_state(each.path, each.other))


def holders(one: str, two: str) -> tuple[str, str]:
    """The objects that hold two leaves at the same place: of ``q.head.kernel`` and ``best['head']['kernel']`` these are ``q`` and ``best``."""
    keys, others = re.split(r"(?=[.\[])", one), re.split(r"(?=[.\[])", two)
    while len(keys) > 1 and len(others) > 1 and bare(keys[-1]) == bare(others[-1]):
        del keys[-1], others[-1]
    return "".join(keys), "".join(others)


def bare(key: str) -> str:
    """The name or number of one step of a path: ``kernel`` of ``.kernel`` and of ``['kernel']``."""
    return key.strip(".[]'\"")


def counts(pairs: Iterable[SharedBuffer]) -> Iterator[tuple[str, str, str]]:
    """The objects that share buffers, two and two, with the number of buffers in words: a single one is named itself."""
    together: dict[tuple[str, str], list[SharedBuffer]] = {}
    for each in pairs:
        together.setdefault(holders(each.path, each.other), []).append(each)
    for (one, other), group in together.items():
        if len(group) == 1:
            yield group[0].path, group[0].other, "a buffer"
        else:
            yield one, other, how_many(len(group), group[0].leaves)


def leaves_in(ran: Ran, holder: str) -> int:
    """The number of leaves and inputs that an object holds."""
    subject = ran.call.subject
    names = [*(subject.path(path) for path, _ in graph.raw_leaves(subject.state)), *subject.input_names]
    return sum(re.match(rf"{re.escape(holder)}(?=[.\[])", name) is not None for name in names)


def how_many(count: int, every: int) -> str:
    """``all 8 buffers``, ``3 of 8 buffers``; without the number of all, ``3 buffers``."""
    if count < every:
        return f"{count} of {every} buffers"
    return counted(count, "buffer") if count > every or count == 1 else f"all {count} buffers"


def of_jits_inside(ran: Ran) -> Iterator[Finding]:
    """Leaves whose array a jit of the call's own takes away from them, since it donates another leaf that has the same: a target network's."""
    inside = ran.observation.inside
    if not inside.consumed:
        return
    yield from broken_inside(ran, inside, ran.call.originals.shared + held_outside(ran.call))
    yield from (Orphaned(path, other=other) for path, other in inside.orphans)


def broken_inside(ran: Ran, inside: InnerDonation, pairs: Iterable[tuple[str, str]]) -> Iterator[SharedBuffer]:
    """The pairs of leaves in one buffer that a jit of the call's own breaks: the other leaf goes on with a deleted array, or XLA refuses the call."""
    new, own = renewed(ran, inside), {*ran.call.originals.shared}
    donated = [pair for pair in pairs if inside.consumed & {*pair}]
    # The call was run on arrays of their own. One more run, on arrays that are shared as the user's are, shows the refusal.
    as_shared = functools.partial(trials.raised_as_shared, ran.call)
    raised = ran.call.tried("raised as shared", as_shared, ran.call.originals.shared) if own & {*donated} else ""
    for one, two in donated:
        deletes = takes_away({one, two}, inside.consumed, new)
        if deletes or (raised and (one, two) in own):
            twice = {one, two} <= inside.consumed
            every = leaves_in(ran, holders(one, two)[1])
            yield SharedBuffer(one, other=two, twice=twice, inside=True, raises="" if deletes else raised, leaves=every)


def takes_away(pair: set[str], consumed: AbstractSet[str], renewed: AbstractSet[str]) -> bool:
    """True if a jit of the call's own donates one of two leaves in one buffer, and the other one, or its holder, goes on with it."""
    others = pair - consumed
    return len(others) < len(pair) and not others & renewed


def sharing(one: str, two: str, ran: Ran) -> SharedBuffer | None:
    """Two leaves in one buffer, where XLA refuses the program: both donated, or one donated and the other one used beside it."""
    subject = ran.call.subject
    donated = {move.before.path for move in ran.observation.moves}
    every = leaves_in(ran, holders(one, two)[1])
    if {one, two} <= donated or not {one, two} & {*subject.input_names}:
        return SharedBuffer(one, other=two, twice=True, leaves=every)
    # A leaf that the call leaves alone is donated by the generated jit only.
    changed = {subject.path(path) for path in ran.profile.state.changed}
    return SharedBuffer(one, other=two, twice=False, leaves=every) if {one, two} & donated & changed else None


def renewed(ran: Ran, inside: InnerDonation) -> frozenset[str]:
    """The leaves and inputs whose old arrays have no use after the call: it put others there, or returned their new values."""
    subject, profile = ran.call.subject, ran.profile
    leaves = {subject.path(path) for path, _ in graph.raw_leaves(subject.state)}
    if profile is UNKNOWN:
        return frozenset(leaves.union(subject.input_names)) - inside.kept
    inputs = {
        subject.input_names[number]
        for number, output in successors(subject, profile, "all").items()
        if array_type(profile.output.types[output]) == array_type(subject.inputs[number])
    }
    return frozenset(leaves | inputs) - inside.kept


def held_outside(call: Call) -> Pairs:
    """Pair each leaf with a Variable outside of the state that holds the same array.

    The code may have captured such a Variable, of a target network say. A jit inside the call that donates the leaf deletes the array for the Variable too.
    """
    subject, walked = call.subject, call.originals.walk
    own_variables = {id(variable) for _, variable in graph.variables(subject.state)}
    leaf = {id(array): subject.path(path) for path, array in graph.raw_leaves(subject.state)}
    outside = (
        (leaf.get(id(graph.variable_value(node))), path)
        for path, node in (walked.nodes if walked else ())
        if graph.is_variable(node) and id(node) not in own_variables
    )
    return tuple((name, path) for name, path in outside if name is not None)


# --- findings


@dataclass(frozen=True, slots=True)
class BuffersShared:
    """Objects that hold the same arrays, which nobody but the plugin donates: a note."""

    both: tuple[tuple[str, str, str], ...]
    """Two objects, and the number of buffers that they share, in words."""
    of_call: ClassVar[bool] = True
    SHOWN: ClassVar[int] = 4

    def words(self) -> str:
        share = [f"{one} and {other} share {buffers}" for one, other, buffers in self.both[: self.SHOWN]]
        more = [f"and {len(self.both) - self.SHOWN} more"] if len(self.both) > self.SHOWN else []
        return (
            f"{', '.join([*share, *more])}, as nnx.clone and nnx.state leave them: a jit of yours that donates one takes the arrays of the other too;"
            " give it arrays of its own, jax.tree.map(jnp.copy, ...)"
        )


class OfBuffer(Finding):
    """A finding of this invariant: one row, which is the summary where it is the first. Who mends lost buffers wants the list."""

    __slots__ = ()
    SHOWN: ClassVar[int] = 12

    def sentence(self) -> str:
        ((_, text),) = self.rows()
        return text

    def first_rows(self) -> Iterable[Row]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBuffer(OfBuffer):
    """Two leaves in one buffer, and a program donates one of them."""

    other: str
    twice: bool
    """True if both are donated; else the other is used beside that."""
    inside: bool = False
    """True if a jit of the call's own donates them."""
    raises: str = ""
    """The exception that the call raises then, in one line; empty where one of them is left with a deleted array."""
    leaves: int = 0
    """The number of leaves of the object that holds the other one, at the same place."""

    def words(self, others: Sequence[Finding] = ()) -> Words:
        """One row for each two objects that share buffers: a network and its clone share all of them."""
        lines: dict[tuple[Any, ...], list[SharedBuffer]] = {}
        for each in (self, *others):
            if isinstance(each, SharedBuffer):
                lines.setdefault((*holders(each.path, each.other), each.result("")), []).append(each)
        rest = [each for each in others if not isinstance(each, SharedBuffer)]
        rows = [("shared", group[0].line(len(group))) for group in lines.values()]
        shown = max(self.SHOWN - len(rows), 0)
        more = [row for each in rest[:shown] for row in each.rows()]
        left_out = sum(map(len, [*lines.values()][self.SHOWN :])) + len(rest[shown:])
        rows = [*rows[: self.SHOWN], *more, *([("", f"and {left_out} more")] if left_out else [])]
        return Words(rows[0][1], rows, self.cure())

    def rows(self) -> list[Row]:
        return [("shared", self.line(1))]

    def line(self, count: int) -> str:
        """Say it of this pair, or of so many pairs of the same two objects."""
        if count == 1:
            return f"{self.path} and {self.other} share a buffer: {self.result('it')}"
        one, two = holders(self.path, self.other)
        return f"{one} and {two} share {how_many(count, self.leaves)}: {self.result('them')}"

    def result(self, them: str) -> str:
        """Say what becomes of them."""
        if self.inside:
            donates = f"a jit inside the call donates {them}"
            return f"{donates}, and the call raises {self.raises}" if self.raises else f"{donates}, and deletes both"
        return (
            f"XLA refuses to donate {them} twice"
            if self.twice
            else f"XLA refuses to donate {them} and use {them} beside that"
        )

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        if (one := call.value(self.path)) and (other := call.value(self.other)):
            yield "first", f"pointers({one}) & pointers({other})"

    def cure(self) -> str:
        return OWN_ARRAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphaned(OfBuffer):
    """A leaf that the call gave the array of an ``other`` one, which a jit inside the call donates."""

    other: str

    def rows(self) -> list[Row]:
        whose = f"{self.path} got the array of {self.other}"
        return [("deleted", f"{whose}, which a jit inside the call donates: it is deleted")]

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        if value := call.value(self.path):
            yield "after", f"{value}.is_deleted()"

    def cure(self) -> str:
        return OWN_ARRAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewedBuffer(OfBuffer):
    """A donated leaf whose buffer a NumPy array, or another array, looks into."""

    holder: str

    def rows(self) -> list[Row]:
        return [("viewed", f"{self.path} is viewed by {self.holder}: its buffer cannot be reused")]

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield from moved(call.value(self.path))
        yield "in place", ""

    def cure(self) -> str:
        return "copy the view: np.array(view), or drop it before the step"


LossCause = Literal["dtype", "shape", "sharding", "not returned", "not reused", "reference"]
"""The reason why a buffer was lost."""

NOT_RETURNED = "return the new value of every donated array; do not donate an array that has none, a batch for example"
CURES: dict[LossCause, str] = {
    "sharding": "give the new value the old sharding before it is stored: jax.lax.with_sharding_constraint(value, old)",
    "not returned": NOT_RETURNED,
    "reference": "write into the reference that is there, variable[...] = value, and hand nnx.update no arrays for it: in place it keeps its buffer",
}
GROWS = "make it as long as it gets from the start, and write with jax.lax.dynamic_update_slice: a donated buffer keeps its size"
OWN_ARRAYS = (
    "give one of them an array of its own, jnp.copy(value); after nnx.clone too, which copies no array, and where an"
    " optimizer keeps the parameters: nnx.update(optimizer, jax.tree.map(jnp.copy, nnx.state(optimizer)))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostBuffer(OfBuffer):
    """A donated leaf whose buffer nothing came back in."""

    cause: LossCause
    type: ArrayType
    new: ArrayType | None = None
    """The type of its new value, as the call sees it."""
    output: bool = False
    """True if the new value is an output, for an input."""
    shardings: tuple[str, ...] = ()
    """The shardings before and after, as their user writes them."""
    pointers: tuple[int, ...] = field(default=(), compare=False)
    """The pointers before and after; the first alone where there is no buffer after."""
    line: str = ""
    """The line where the leaf got another dtype."""
    abstract: bool = False
    """True if nothing was run."""

    def rows(self) -> list[Row]:
        return [("lost", f"{self.path}   {self.type}   {self.why()}")]

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        value = "" if self.abstract else call.value(self.path)
        if value and self.cause == "reference":
            yield "before", f"pointer = {value}.unsafe_buffer_pointer()"
            yield "after", f"{value}.unsafe_buffer_pointer() != pointer"
        elif value and self.cause == "sharding":
            yield from moved(value)
        else:
            yield "after", "lost_by_program(executable, lowered)"

    def why(self) -> str:
        """The reason why the buffer was lost."""
        match self.cause:
            case "dtype" | "shape":
                return retyped(self.cause, self.new, output=self.output)
            case "sharding":
                return "sharding changed from {} to {}".format(*self.shardings)
            case "not returned":
                return "not returned"
            case "reference":
                return "replaced, and not written: its Variable holds another reference now, or an array"
        if self.abstract:
            return "no output of the compiled program is aliased with it"
        before, *after = self.pointers
        where = f"pointer {before:#x} before, {after[0]:#x} after" if after else "no buffer after"
        return f"not reused by XLA ({where})"

    def cure(self) -> str:
        if self.cause == "dtype":
            changes = f": it changes at {self.line}" if self.line else ""
            return other_dtype(self.type.dtype, self.new.dtype if self.new else "", changes)
        if self.cause == "shape":
            return GROWS if elements(self.new) > elements(self.type) else ""
        return CURES.get(self.cause, "")


def moved(value: str) -> Iterator[tuple[Moment, str]]:
    """Look for a value whose buffer holds nothing of the state or the output after the run."""
    if value:
        yield "before", f"donated = pointers({value})"
        yield "after", "donated - pointers(state, output)"


def elements(type_: ArrayType | None) -> int:
    """The number of elements of an array of this type."""
    return math.prod(type_.shape or ()) if type_ else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LostOnTarget(OfBuffer, FindingOnTarget):
    """Donated leaves, ``on.lost``, whose buffers are lost on a target, and kept on the CPU."""

    def rows(self) -> list[Row]:
        lost, on = self.on.lost, self.on
        return [("lost", f"{len(lost)} of {on.donated} donated leaves {lose(len(lost))} on {on.target}: {some(lost)}")]

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield "after", "lost_by_program(executable, lowered)"


# --- the fate of a donated leaf


def converted(seen: Observation) -> list[tuple[Leaf, Leaf]]:
    """The donated leaves that come back in a type that no promotion of types gives: a float as an integer or a flag, or as a float of eight bits and fewer.

    That is meant: the call quantizes them.
    """
    moves = ((move.before, move.after) for move in seen.moves if move.after is not None)
    return [(old, new) for old, new in moves if old.path == new.path and quantizes(old.type, new.type)]


def lost_buffer(before: Leaf, after: Leaf | None, ran: Ran) -> LostBuffer:
    """The finding on a donated leaf that lost its buffer."""
    if after is None:
        return LostBuffer(before.path, type=before.type, cause="not returned")
    name, state, nesting = ran.call.subject.path, ran.profile.state, ran.observation.nesting
    promoted = {name(leaf.path): leaf.line for leaf in state.retyped if leaf.line}
    return LostBuffer(
        before.path,
        type=before.type,
        cause="reference" if before.path in map(name, state.references) else cause(before, after, nesting),
        new=as_called(after, before, nesting),
        output=before.path != after.path,
        shardings=(written(before.sharding), written(after.sharding)),
        pointers=(*before.pointers[:1], *after.pointers[:1]),
        line=promoted.get(before.path, ""),
        abstract=ran.observation.abstract,
    )


def cause(before: Leaf, after: Leaf, nesting: Nesting) -> LossCause:
    """The cause of a lost buffer."""
    if before.type != after.type:
        old, new = as_called(before, after, nesting), as_called(after, before, nesting)
        return "dtype" if old.dtype != new.dtype and old.shape == new.shape else "shape"
    return "sharding" if resharded(before, after) else "not reused"


def as_called(leaf: Leaf, other: Leaf, nesting: Nesting) -> ArrayType:
    """The type that the call sees: scan and vmap give the program's own inputs, and the outputs that are their new values, a leading axis each."""
    axes = sum(bool(layer.row.axis) for layer in nesting.layers)
    return leaf.type if leaf.path == other.path else leaf.type.without_axes(axes)


def devices_of(leaf: Leaf) -> int:
    """The number of devices that a leaf lies on; an abstract leaf on one device has no sharding."""
    return 1 if leaf.sharding is None else leaf.sharding.num_devices


def resharded(before: Leaf, after: Leaf) -> bool:
    """True if a leaf came back in other shards."""
    if before.sharding is None or after.sharding is None:
        return devices_of(before) != devices_of(after)
    return not before.sharding.is_equivalent_to(after.sharding, len(before.type.shape or ()))


def in_other_shards(before: Leaf, after: Leaf) -> bool:
    """True if a leaf of the state came back with its type, but in other shards: an output for an input has a path of its own."""
    same = (before.path, before.type) == (after.path, after.type)
    return same and resharded(before, after) and not spread(before, after)


def spread(before: Leaf, after: Leaf) -> bool:
    """True if a leaf that lay on one device came back on several: it was never placed, and jit placed it."""
    return devices_of(before) == 1 < devices_of(after)


def written(sharding: Any) -> str:
    """A sharding as its user writes it: ``P(None, 'model')``."""
    if sharding is not None and hasattr(sharding, "spec"):
        return f"P({', '.join(map(repr, sharding.spec))})"
    return "one device" if sharding is None or sharding.num_devices == 1 else str(sharding)


def lost_leaves(seen: Observation) -> tuple[Leaf, ...]:
    """The donated leaves to name for the buffers that nothing came back in.

    Pointers say whether a buffer was lost, whatever the names and types of what came back. XLA gives donated buffers to outputs by
    their type, so that it may be the buffer of another leaf that is left over. The new value of that one took a buffer, whose leaf is asked
    next, and the last one is named: it came back with another type, in a new buffer, or not at all. A leaf of the state that came back in
    other shards is named whatever their buffers: they hold another part of it.
    """
    before, held = [move.before for move in seen.moves], seen.reused
    after = {move.before.path: move.after for move in seen.moves if move.after is not None}
    owner = {pointer: leaf for leaf in before for pointer in leaf.pointers}
    named: dict[str, Leaf] = {}
    for lost in before:
        new = after.get(lost.path)
        if lost.pointers and new is not None and in_other_shards(lost, new):
            named[lost.path] = lost
        if set(lost.pointers) <= held:
            continue
        leaf, passed = lost, {lost.path}
        while (new := after.get(leaf.path)) and new.type == leaf.type and new.pointers:
            taken = owner.get(new.pointers[0])
            if taken is None or taken.path in passed:
                break
            leaf = taken
            passed.add(leaf.path)
        new = after.get(leaf.path)
        if new is None or not spread(leaf, new):
            named[leaf.path] = leaf
    return tuple(leaf for leaf in before if leaf.path in named)


# --- notes on leaves that lost nothing


def notes(seen: Observation) -> tuple[Note, ...]:
    """Notes on donated leaves that did not lose their buffer."""
    nesting, donated, named = seen.nesting, seen.moves, {leaf.path for leaf in lost_leaves(seen)}
    moves = [(move.before, move.after) for move in donated if move.after and move.before.path not in named]
    old = {pointer for move in donated for pointer in move.before.pointers}
    kept = [(before, after) for before, after in moves if before.path == after.path and before.type == after.type]
    facts = (
        # Reused all the same, so noted and not judged.
        Fact("in another buffer", tuple(leaf.path for leaf, after in kept if place(leaf, after, old) == "another")),
        Fact("on all devices", tuple(leaf.path for leaf, after in moves if spread(leaf, after))),
        Fact("converted", tuple(before.path for before, _ in converted(seen))),
        Fact("in a new buffer", tuple(leaf.path for leaf, after in kept if is_displaced(leaf, after, old))),
    )
    retyped = (
        BufferRetyped(
            before.path,
            type=before.type,
            new=as_called(after, before, nesting),
            cause=cause(before, after, nesting),
            output=before.path != after.path,
            place=where,
        )
        for before, after in moves
        # A Python number in a Variable owns no buffer.
        if before.pointers and before.type != after.type and (where := place(before, after, old))
    )
    return (*(fact for fact in facts if fact.names), *retyped)


def is_displaced(before: Leaf, after: Leaf, old: set[int]) -> bool:
    """True if a leaf that lies on the same devices is in a buffer that was not donated."""
    has_buffers = bool(before.pointers and after.pointers)
    return has_buffers and before.sharding == after.sharding and place(before, after, old) == "new"


def place(before: Leaf, after: Leaf, old: set[int]) -> BufferPlace | None:
    """The buffer of the new value of a leaf whose old buffer was not lost: newer jax lets XLA take over any that fits.

    For an input only pointers count, since its new value among the outputs is a guess.
    """
    if before.pointers and before.pointers == after.pointers:
        return "same"
    if after.pointers and set(after.pointers) <= old:
        return "another"
    return "new" if before.path == after.path else None
