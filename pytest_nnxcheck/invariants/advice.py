"""Advice on the memory of the un-nested call, where nobody set a bound: causes that most authors would avoid, with their lines.

A note, and a violation only where ``memory_advice`` asks for it. A cause is a definition on the jaxpr or on the state, and counts by the bytes
that the compiled program holds for it at its peak. Each was tried on the healthy models of this repository and those of published packages: see
docs/memory.md. Below the pieces with their words: the rules that decide which of them matter at a peak, and the facts that they are made of.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import array_type, nbytes
from pytest_nnxcheck.core.facts import Evidence, Path
from pytest_nnxcheck.core.notes import Note, texts
from pytest_nnxcheck.core.outcome import Finding, UnNested
from pytest_nnxcheck.core.peak import FLOOR, SHOWN, SHOWN_LINES, Buffer, Memory, by_line
from pytest_nnxcheck.core.text import Row, at_line, beginning, format_bytes, some
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.jaxprs.guarded import GuardedWrite, guarded
from pytest_nnxcheck.jaxprs.saved import SavedLine, saved
from pytest_nnxcheck.jaxprs.waste import HeldTwice, NamesNothing, Stack, names_nothing, waste
from pytest_nnxcheck.subject.profile import Profile, StateUse, common, keys, successors
from pytest_nnxcheck.subject.subject import Nodes, Subject, users_function


@dataclass(frozen=True, slots=True)
class Unused:
    """State that the call neither reads nor writes."""

    names: tuple[str, ...]
    """The largest parts that are unused as a whole."""
    bytes: int
    line: str = ""

    def words(self) -> str:
        unused = f"the call neither reads nor writes {some(self.names)}; hand it only what it uses"
        return f"{format_bytes(self.bytes)}: {unused}"


@dataclass(frozen=True, slots=True)
class NotDonated:
    """State that the call changes, where the wrapped function is itself a jit that does not donate it."""

    function: str
    jit: str
    """The jit as its user writes it."""
    line: str
    """The line where the function begins."""
    arguments: tuple[str, ...]
    """The arguments that hold the state."""
    donate: str
    """The option that donates all that changes."""
    bytes: int
    """The bytes that are in memory old and new."""

    def words(self) -> str:
        why = f"{self.function} is a jit that changes {' and '.join(self.arguments)}, and does not donate that"
        cure = f"write {self.donate} in its {self.jit}"
        return f"{format_bytes(self.bytes)}: {why}: old and new lie side by side; {cure}{at_line(self.line)}"


Fact = HeldTwice | Stack | SavedLine | GuardedWrite | NamesNothing
"""A cause that is found in the jaxpr."""

Advice = Fact | Unused | NotDonated
"""One thing that most authors would change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWasted(Finding):
    """Memory that the un-nested call need not spend."""

    OF_PEAK: ClassVar[bool] = True

    advice: tuple[Note, ...]

    def sentence(self) -> str:
        return "the un-nested call spends memory that it need not"

    def rows(self) -> list[Row]:
        return [("advice", text) for text in dict.fromkeys(texts(self.advice))]

    def brief(self, summary: str, evidence: Evidence | None) -> str:
        return texts(self.advice)[0]


# --- what is advised


def advised(ran: Ran) -> tuple[Note, ...]:
    """The advice on the un-nested call, where the settings make it a violation of the nestings that are measured by it.

    The un-nested call is measured whatever breaks, and kept for reports, which show its figures.
    """
    memory, known, baseline = ran.un_nested_memory, ran.call.known, ran.baseline
    if (
        memory is None or baseline is None or len(baseline) > 1
    ):  # where the nesting takes a gradient, it is that of the call
        return ()
    known.un_nested = known.un_nested or un_nested(ran, memory)
    return () if ran.call.settings.memory_advice == "note" else known.un_nested.advice


def un_nested(ran: Ran, memory: Memory) -> UnNested:
    """The memory figures of the un-nested program, and advice on them."""
    subject, profile, program = ran.call.subject, ran.profile, ran.profile.program
    # Not the program's own names, which are in the order of its parameters.
    names = (*map(subject.path, profile.state.paths), *subject.input_names)
    sizes = Sizes(profile.state.bytes, profile.input_bytes, profile.output.bytes, len(profile.state.paths))
    facts = () if program.jaxpr is None else facts_of(program.jaxpr, program.rewritten)
    advised = advice(memory.made, facts, names, sizes, tuple(of_state(subject, profile)))
    lines = by_line(memory.made, memory.made)[:SHOWN_LINES]
    evidence = Evidence(memory.split, un_nested=memory.split, buffers=memory.made[:SHOWN], places=lines)
    return UnNested(subject.name, evidence, advised)


# --- the rules

SHARE = 0.25
"""Share of the state: a leaf that is smaller is not worth a line."""

TENTH = 0.1
"""Share of the state: less is not worth a line on state that the call does not use, or does not donate."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one call: its state, its inputs, its outputs."""

    state: int
    inputs: int
    outputs: int
    leaves: int
    """The number of leaves of the state: inputs have the numbers from there on."""

    @property
    def handed(self) -> int:
        """All that goes in and comes out."""
        return self.state + self.inputs + self.outputs


def facts_of(jaxpr: Any, successors: Mapping[int, int]) -> tuple[Fact, ...]:
    """All causes in a jaxpr; ``successors`` are the outputs that replace inputs, by the number of the input."""
    return (*waste(jaxpr, successors), *saved(jaxpr), *guarded(jaxpr), *names_nothing(jaxpr))


def advice(
    live: Sequence[Buffer], facts: Sequence[Fact], names: Sequence[str], sizes: Sizes, of_state: Sequence[Advice] = ()
) -> tuple[Advice, ...]:
    """All pieces, the largest first: of the facts, and of the buffers ``live`` at the peak of the un-nested program.

    ``names`` are those of the flat leaves of the state, and of the flat inputs behind them. ``of_state`` are the pieces that no buffer has to show.
    """
    pieces: list[Advice] = [
        *held_twice([fact for fact in facts if isinstance(fact, HeldTwice)], live, names, sizes),
        *guarded_at_peak([fact for fact in facts if isinstance(fact, GuardedWrite)], live, sizes),
        *saved_at_peak([fact for fact in facts if isinstance(fact, SavedLine)], live, sizes),
        *(piece for piece in of_state if piece.bytes >= max(FLOOR, TENTH * (sizes.state or sizes.inputs))),
        *(fact for fact in facts if isinstance(fact, NamesNothing)),
        *(
            fact
            for fact in facts
            if isinstance(fact, Stack) and fact.bytes >= FLOOR and at_peak(live, (fact.type,), "output")
        ),
    ]
    return tuple(sorted(dict.fromkeys(pieces), key=lambda piece: -piece.bytes))


def at_peak(live: Sequence[Buffer], types: Collection[str], *kinds: str) -> int:
    """The bytes of the temporaries, and of further kinds of buffers, that have one of these types."""
    return sum(held.bytes for held in live if held.kind in ("temporary", *kinds) and held.shape in types)


def held_twice(
    facts: Sequence[HeldTwice], live: Sequence[Buffer], names: Sequence[str], sizes: Sizes
) -> Iterator[HeldTwice]:
    """The leaves of the state that are held once more at the peak, by what happens to them and where, if they are large together.

    An input counts where a loop takes it reversed or transposed, and by all that goes in and comes out: nobody donates a batch. A copy that XLA
    avoids does not count: the temporaries of such types do, and no more than the leaves have.
    """
    lines: dict[tuple[str, str, bool], list[HeldTwice]] = {}
    for fact in dict.fromkeys(facts):
        of_inputs = max(fact.leaves) >= sizes.leaves
        if not of_inputs or fact.operation == "reordered":
            lines.setdefault((fact.operation, fact.line, of_inputs), []).append(fact)
    for (operation, line, of_inputs), group in lines.items():
        types = tuple(dict.fromkeys(kind for fact in group for kind in fact.types))
        size = min(at_peak(live, types), sum(fact.bytes for fact in group))
        if size >= max(FLOOR, SHARE * (sizes.handed if of_inputs else sizes.state)):
            numbers = tuple(dict.fromkeys(number for fact in group for number in fact.leaves))
            yield HeldTwice(numbers, operation, line, types, size, tuple(names[number] for number in numbers))


def saved_at_peak(facts: Sequence[SavedLine], live: Sequence[Buffer], sizes: Sizes) -> Iterator[SavedLine]:
    """The lines that save more than all that goes in and comes out: one for scans, one for remats, one for lines that run several times."""
    made = [held for held in live if held.part != "gradients"]
    most: dict[tuple[bool, bool], SavedLine] = {}
    for fact in facts:
        # Without what a remat of the line saves as well, or the values of one remat.
        size = min(at_peak(made, fact.types), fact.bytes) - (fact.largest or fact.kept)
        if size > max(FLOOR, sizes.handed) and fact.line and (fact.repeated or fact.largest):
            of_kind, piece = (fact.scanned, bool(fact.largest)), replace(fact, bytes=size, handed=sizes.handed)
            most[of_kind] = max(piece, most.get(of_kind, piece), key=lambda piece: piece.bytes)
    yield from most.values()


def guarded_at_peak(facts: Sequence[GuardedWrite], live: Sequence[Buffer], sizes: Sizes) -> Iterator[GuardedWrite]:
    """The guarded writes that XLA does not make in place: more arrays of the type are there than the program needs, one of the line among them, or a copy that has none.

    It needs no new one for a leaf of the state, which is donated, and one for each other array.
    """
    for fact in facts:
        arrays = {other.array for other in facts if other.type == fact.type}
        needed = fact.bytes * sum(array not in range(sizes.leaves) for array in arrays)
        size = min(at_peak(live, (fact.type,), "output") - needed, fact.bytes * len(arrays))
        of_line = any(held.shape == fact.type and (fact.line in held.stack or not held.stack) for held in live)
        if size >= max(FLOOR, SHARE * sizes.state) and of_line:
            yield replace(fact, array=0, bytes=size)


# --- state that the call does not use, and state that it changes and does not donate


def of_state(subject: Subject, profile: Profile) -> Iterator[Advice]:
    """Advice on state that the call does not use, or changes and does not donate, whatever its size."""
    state = profile.state
    used = {path for number, path in enumerate(state.paths) if number not in state.unused}
    # What a plain object holds is handed to no jit: jax takes none, and its own methods choose what they use.
    held = tuple(f"{name}{step}" for name, _ in subject.opened for step in ".[")
    unused = [
        number
        for number, path in enumerate(state.paths)
        if path not in used and not subject.path(path).startswith(held)
    ]
    if unused:
        # Several objects are named one by one: nothing is the name of all.
        least = int(isinstance(subject.state, Nodes))
        parts = whole_parts((state.paths[number] for number in unused), used, least)
        names = dict.fromkeys(map(subject.path, parts))
        yield Unused(tuple(names), sum(state.sizes[number] for number in unused))
    if jit := staging.jitted(subject.function):
        yield from not_donated(subject, profile, jit)


def whole_parts(paths: Iterable[Path], others: Collection[Path], least: int) -> Iterator[Path]:
    """The shortest paths of ``least`` keys or more that lead to these leaves, and to none of the others."""
    shared = {path[:length] for path in others for length in range(len(path) + 1)}
    for path in paths:
        yield next((path[:length] for length in range(least, len(path)) if path[:length] not in shared), path)


def not_donated(subject: Subject, profile: Profile, jit: str) -> Iterator[NotDonated]:
    """State that the wrapped function, a jit, changes and does not donate. A leaf that gets another type has no use for its old buffer."""
    names = [*map(subject.path, profile.state.paths), *subject.input_names]
    every, leaves = [*profile.state.sizes, *map(nbytes, subject.inputs)], len(profile.state.paths)
    changed = {*changed_leaves(profile.state), *(leaves + number for number in changed_inputs(subject, profile))}
    by_argument: Counter[str] = Counter()
    for number in sorted(changed):
        if profile.program.donated[number] is False:
            by_argument[argument_of(names[number])] += every[number]
    if by_argument:
        donated = {argument_of(name) for name, given in zip(names, profile.program.donated, strict=False) if given}
        function = users_function(subject.function)
        code = getattr(function, "__code__", None)
        yield NotDonated(
            function=getattr(function, "__name__", type(function).__name__),
            jit=jit,
            line=beginning(code) if code else "",
            arguments=tuple(by_argument),
            donate=option(subject.function, {*by_argument, *donated}),
            bytes=by_argument.total(),
        )


def changed_leaves(state: StateUse) -> Iterator[int]:
    """The numbers of the leaves that come back with another value of the same type."""
    moved = state.changed - {leaf.path for leaf in state.retyped} - {*state.removed}
    return (number for number, path in enumerate(state.paths) if path in moved)


def changed_inputs(subject: Subject, profile: Profile) -> Iterator[int]:
    """The numbers of the inputs that are state, and come back with another value of the same type: arguments, an `nnx.State` say, whose every array an output of the same name follows."""
    new = successors(subject, profile, "all")
    names, outputs = subject.input_names, profile.output
    followed = {
        number: output for number, output in new.items() if common(keys(names[number]), keys(outputs.names[output]))
    }
    batches = {argument_of(name) for number, name in enumerate(names) if number not in followed}
    for number, output in followed.items():
        same_type = array_type(outputs.types[output]) == array_type(subject.inputs[number])
        if argument_of(names[number]) not in batches and same_type and outputs.handed_out[output] != number:
            yield number


def argument_of(name: str) -> str:
    """The argument that a name begins with."""
    return re.match(r"\w*", name)[0]  # type: ignore[index]


def option(function: Any, arguments: Collection[str]) -> str:
    """The option of a jit that donates these arguments; a name that is no parameter is that of a method's object, the first argument."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    positions = {each.name: number for number, each in enumerate(parameters) if each.kind is not each.KEYWORD_ONLY}
    if any(each.name in arguments for each in parameters if each.kind is each.KEYWORD_ONLY):
        return f"donate_argnames={tuple(sorted(arguments))}"
    numbers = sorted({positions.get(name, 0) for name in arguments})
    return f"donate_argnums={numbers[0] if len(numbers) == 1 else tuple(numbers)}"
