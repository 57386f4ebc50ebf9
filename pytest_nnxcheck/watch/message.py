"""What is said of what a test left behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple

from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.outcome import TracerLeft
from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.core.text import Row, counted, format_bytes, lay_out, some
from pytest_nnxcheck.reporting import hints
from pytest_nnxcheck.watch.donation import Unused
from pytest_nnxcheck.watch.leftovers import Leftover
from pytest_nnxcheck.watch.programs import Program

SHOWN = 6
FEW = 3


@dataclass(frozen=True, slots=True)
class Finding:
    """What one test left behind: ``before`` was there when its call began, ``after`` came with the call; ``unused`` are
    the buffers that were donated for nothing, ``programs`` those that hold too much memory.
    """

    before: tuple[Leftover, ...] = ()
    after: tuple[Leftover, ...] = ()
    unused: tuple[Unused, ...] = ()
    programs: tuple[Program, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.before or self.after or self.unused or self.programs)

    @property
    def tracers(self) -> tuple[str, ...]:
        return tuple(leftover.path for leftover in (*self.after, *self.before) if leftover.tracer)

    @property
    def pinned(self) -> tuple[str, ...]:
        return tuple(leftover.path for leftover in (*self.after, *self.before) if not leftover.tracer)

    @property
    def over_budget(self) -> tuple[Program, ...]:
        return tuple(program for program in self.programs if program.budget)

    @property
    def copying(self) -> tuple[Program, ...]:
        return tuple(program for program in self.programs if program.copied)

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the end of the run counts."""
        kinds = (
            ("tracers", self.tracers),
            ("pinned", self.pinned),
            ("donation", self.unused),
            ("budget", self.over_budget),
            ("copies", self.copying),
        )
        return tuple(kind for kind, there in kinds if there)


def headline(finding: Finding) -> str:
    """One line: ``tracers in model.last, model.log[0]``."""
    parts = [f"tracers in {some(finding.tracers)}"] if finding.tracers else []
    parts += [f"Variables of a trace that has ended: {some(finding.pinned)}"] if finding.pinned else []
    parts += (
        [f"donated for nothing: {some(name for buffers in finding.unused for name in _leaves(buffers))}"]
        if finding.unused
        else []
    )
    for program in finding.over_budget[:1]:
        parts.append(
            f"{program.name} peaks at {format_bytes(program.memory.peak)}, over {format_bytes(program.budget)}"
        )
    if finding.copying:
        parts.append(f"copied by a program: {some(leaf for program in finding.copying for leaf in program.leaves)}")
    return "; ".join(parts)


def _leaves(unused: Unused) -> tuple[str, ...]:
    """The leaves, where their types tell them."""
    return unused.leaves if 0 < len(unused.leaves) <= unused.count else (unused.type,)


def message(nodeid: str, finding: Finding) -> str:
    """The failure of a test, in rows."""
    return lay_out(f"nnx watch: {headline(finding)}", nodeid, _rows(finding))


def _rows(finding: Finding) -> Iterator[Row]:
    yield from _leftover_rows(finding.after)
    if finding.before:
        yield "", "there before the call of the test: a fixture, a teardown, an import or an earlier test left it"
        yield from _leftover_rows(finding.before)
    for advice in dict.fromkeys(filter(None, map(_hint, (*finding.after, *finding.before)))):
        yield "hint", advice
    yield from _unused_rows(finding.unused)
    yield from _over_budget_rows(finding.over_budget)
    yield from _copying_rows(finding.copying)
    yield (
        "see",
        f"@pytest.mark.{MARKER} on a test of this module names the nesting that breaks it, and the nearest one that holds",
    )


def _leftover_rows(leftovers: Iterable[Leftover]) -> Iterator[Row]:
    leftovers = [*leftovers]
    for leftover in leftovers[:SHOWN]:
        if leftover.tracer:
            yield "leaked", f"{leftover.path}   {leftover.holder} {leftover.type}   <- {leftover.tracer}"
        else:
            yield (
                "pinned",
                f"{leftover.path}   {leftover.holder} {leftover.type}, made in a trace that has ended: flax refuses to write it",
            )
        if leftover.line:
            yield "", f"created at {leftover.line}"
    if len(leftovers) > SHOWN:
        yield "", f"and {len(leftovers) - SHOWN} more"


def _unused_rows(unused: Iterable[Unused]) -> Iterator[Row]:
    unused = [*unused]
    for buffers in unused[:SHOWN]:
        which = f"{buffers.count} of " if len(buffers.leaves) > buffers.count else ""
        yield "donated", f"{buffers.type}   {which}{some(buffers.leaves) or 'which no local variable holds'}"
    if len(unused) > SHOWN:
        yield "", f"and {len(unused) - SHOWN} more"
    for line in dict.fromkeys(buffers.line for buffers in unused if buffers.line):
        yield "", f"to the program called at {line}, which has no output of that type for the buffer"
    for advice in dict.fromkeys(map(_cure, unused)):
        yield "hint", advice


def _cure(buffers: Unused) -> str:
    return hints.other_dtype(buffers.type.partition("[")[0], buffers.new) if buffers.new else hints.hint("not returned")


def _over_budget_rows(programs: tuple[Program, ...]) -> Iterator[Row]:
    for program in programs[:1]:
        split = program.memory
        yield (
            "peak",
            (
                f"{format_bytes(split.peak)} of {program.name}, memory_budget {format_bytes(program.budget)}: arguments"
                f" {format_bytes(split.arguments)} + outputs {format_bytes(split.outputs)} + temporaries"
                f" {format_bytes(split.temporaries)} - aliased {format_bytes(split.aliased)}"
            ),
        )
        yield "", _compiled(program)
    if len(programs) > 1:
        yield "", f"and {len(programs) - 1} more over the budget"


def _copying_rows(programs: tuple[Program, ...]) -> Iterator[Row]:
    for program in programs[:SHOWN]:
        yield (
            "copied",
            (
                f"{some(program.leaves)}: temporaries of {program.name} hold {format_bytes(program.copied)} of it once more,"
                f" {program.copied / program.state:.2f} copies of the state"
            ),
        )
        yield "", _compiled(program)
    if len(programs) > SHOWN:
        yield "", f"and {len(programs) - SHOWN} more programs"


def _compiled(program: Program) -> str:
    there = f"compiled at {program.line}" if program.line else "compiled by a library"
    return there + (f", for the fixture {program.fixture}" if program.fixture else "")


def _hint(leftover: Leftover) -> str:
    if not leftover.tracer:
        return hints.hint("pinned")
    plain = leftover.holder in hints.PLAIN and not leftover.keeper
    if plain and leftover.place == "module":  # which holds for a module that was captured, too
        return hints.hint("plain value, captured", path=leftover.path, holder=leftover.holder)
    leak = Leak(
        leftover.path, leftover.holder, "", leftover.type, leftover.line, "", leftover.place, keeper=leftover.keeper
    )
    return hints.tracer_left(TracerLeft(leftover.path, leak=leak))


def summary(looked: int, partly: int, kinds: Iterable[str], missing: Iterable[str]) -> str:
    """``30 tests watched: 1 left tracers behind``, and what is ``missing``."""
    kinds = [*kinds]
    words = {
        "tracers": "left tracers behind",
        "pinned": "left Variables of an ended trace behind",
        "donation": "donated for nothing",
        "budget": "compiled programs over the budget",
        "copies": "compiled programs that copy the state",
    }
    counts = [f"{kinds.count(kind)} {text}" for kind, text in words.items() if kind in kinds]
    text = f"{looked} test{'' if looked == 1 else 's'} watched: {', '.join(counts) or 'nothing was left behind'}"
    text += f"; {partly} looked at in part, they reach too much" if partly else ""
    return "; ".join([text, *filter(None, missing)])


class Unmarked(NamedTuple):
    """A test that calls a module outside of any transform: its id without parameters, the line that begins it once it is marked, what it calls, and where."""

    test: str
    definition: str
    type: str
    place: str


def definition(function: FunctionType) -> str:
    """The line that begins a test once it takes the fixture: ``def test_block(nnx_wrap, ...):``."""
    code = function.__code__
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    instance = [name for name in arguments[:1] if name == "self"]
    others = ["..."] if len(arguments) > len(instance) else []
    return f"def {function.__name__}({', '.join([*instance, 'nnx_wrap', *others])}):"


def to_mark(tests: Sequence[Unmarked], *, all_: bool) -> Iterator[str]:
    """The first of the tests that could be marked, or ``all_``, and the lines that mark the first."""
    if not tests:
        return
    call = "calls" if len(tests) == 1 else "call"
    yield f"{counted(len(tests), 'test')} {call} a module outside of any transform, and could be checked under nestings:"
    shown = tests if all_ else tests[:FEW]
    yield from (f"  {test.test}  calls {test.type} at {test.place}" for test in shown)
    if len(tests) > len(shown):
        yield f"  and {len(tests) - len(shown)} more, see -v"
    first = tests[0]
    line = first.place.rpartition(":")[2]
    yield (
        f"To mark {first.test}, put the marker above it, let it take nnx_wrap, and wrap the module before line {line}"
        " (model: the name of yours):"
    )
    yield from (f"    @pytest.mark.{MARKER}", f"    {first.definition}", "        model = nnx_wrap(model)")
