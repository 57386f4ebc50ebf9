"""The message of a test that left something behind, and the last lines of a watched run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple, TypeVar

from pytest_nnxcheck.core.notes import other_dtype
from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.core.text import Row, counted, format_bytes, lay_out, some
from pytest_nnxcheck.invariants.tracers import CURES, PLAIN, TracerLeft
from pytest_nnxcheck.reporting.memory_breakdown import formula
from pytest_nnxcheck.watch.leftovers import Leftover
from pytest_nnxcheck.watch.programs import UnusedBuffers, WastefulProgram

T = TypeVar("T")

SHOWN, FEW = 6, 3
"""The number of findings of a kind in a message, and of tests to mark at the end of a run."""

_KINDS = {
    "tracers": ("tracers in ", "left tracers behind"),
    "pinned": ("Variables of a trace that has ended: ", "left Variables of an ended trace behind"),
    "donation": ("donated for nothing: ", "donated for nothing"),
    "budget": ("", "compiled programs over the budget"),
    "copies": ("copied by a program: ", "compiled programs that copy the state"),
}
"""The words of each kind in the headline of a test, and in the last line of a run."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The leftovers of one test."""

    before: tuple[Leftover, ...] = ()
    """Leftovers that were there before its call."""
    after: tuple[Leftover, ...] = ()
    """Leftovers that its call added."""
    unused: tuple[UnusedBuffers, ...] = ()
    """The buffers that were donated for nothing."""
    programs: tuple[WastefulProgram, ...] = ()
    """Programs that hold too much memory."""

    def __bool__(self) -> bool:
        return bool(self.before or self.after or self.unused or self.programs)

    @property
    def over_budget(self) -> list[WastefulProgram]:
        return [program for program in self.programs if program.budget]

    @property
    def copying(self) -> list[WastefulProgram]:
        return [program for program in self.programs if program.copied]

    def named(self) -> dict[str, list[str]]:
        """The names of each kind of leftovers, as a headline has them."""
        leftovers = (*self.after, *self.before)
        peaks = [
            f"{program.name} peaks at {format_bytes(program.memory.peak)}, over {format_bytes(program.budget)}"
            for program in self.over_budget
        ]
        names = {
            "tracers": [leftover.path for leftover in leftovers if isinstance(leftover, TracerLeft)],
            "pinned": [leftover.path for leftover in leftovers if not isinstance(leftover, TracerLeft)],
            "donation": [name for buffers in self.unused for name in _leaves(buffers)],
            "budget": peaks[:1],
            "copies": [leaf for program in self.copying for leaf in program.leaves],
        }
        return {kind: of_kind for kind, of_kind in names.items() if of_kind}


def headline(left: LeftBehind) -> str:
    """One line: ``tracers in model.last, model.log[0]``."""
    return "; ".join(f"{_KINDS[kind][0]}{some(names)}" for kind, names in left.named().items())


def _leaves(unused: UnusedBuffers) -> tuple[str, ...]:
    """The leaves, where their types tell them."""
    return unused.leaves if 0 < len(unused.leaves) <= unused.count else (unused.type,)


def message(nodeid: str, left: LeftBehind) -> str:
    """The failure of a test, in rows."""
    return lay_out(f"nnx watch: {headline(left)}", nodeid, _rows(left))


def _rows(left: LeftBehind) -> Iterator[Row]:
    yield from _first(left.after, _leftover_rows)
    if left.before:
        yield "", "there before the call of the test: a fixture, a teardown, an import or an earlier test left it"
        yield from _first(left.before, _leftover_rows)
    yield from _each_once("hint", map(_hint, (*left.after, *left.before)))
    yield from _first(left.unused, _unused_rows)
    lines = [buffers.line for buffers in left.unused if buffers.line]
    called = (f"to the program called at {line}, which has no output of that type for the buffer" for line in lines)
    yield from _each_once("", called)
    yield from _each_once("hint", map(_cure, left.unused))
    yield from _first(left.over_budget, _over_budget_rows, shown=1, more="more over the budget")
    yield from _first(left.copying, _copying_rows, more="more programs")
    yield (
        "see",
        f"@pytest.mark.{MARKER} on a test of this module names the smallest failing nesting, and similar ones that pass",
    )


def _first(
    items: Sequence[T], rows: Callable[[T], Iterator[Row]], shown: int = SHOWN, more: str = "more"
) -> Iterator[Row]:
    """The rows of the first items, and how many are left out."""
    for item in items[:shown]:
        yield from rows(item)
    if len(items) > shown:
        yield "", f"and {len(items) - shown} {more}"


def _each_once(label: str, texts: Iterable[str]) -> Iterator[Row]:
    return ((label, text) for text in dict.fromkeys(filter(None, texts)))


def _leftover_rows(leftover: Leftover) -> Iterator[Row]:
    if isinstance(leftover, TracerLeft):
        yield from leftover.rows()
    else:
        where = f"{leftover.path}   {leftover.type}"
        yield "pinned", f"{where}, made in a trace that has ended: flax refuses to write it"


def _unused_rows(buffers: UnusedBuffers) -> Iterator[Row]:
    which = f"{buffers.count} of " if len(buffers.leaves) > buffers.count else ""
    yield "donated", f"{buffers.type}   {which}{some(buffers.leaves) or 'no local variable holds it'}"


def _cure(buffers: UnusedBuffers) -> str:
    if buffers.new:
        return other_dtype(buffers.type.partition("[")[0], buffers.new)
    from pytest_nnxcheck.invariants.donation import (
        NOT_RETURNED,  # late: it loads jax, which a run that donates has loaded
    )

    return NOT_RETURNED


def _over_budget_rows(program: WastefulProgram) -> Iterator[Row]:
    # Without the constants, which nobody has named here: their bytes are unknown.
    terms = formula({name: size for name, size in program.memory.parts.items() if name != "constants"})
    peak, budget = format_bytes(program.memory.peak), format_bytes(program.budget)
    yield "peak", f"{peak} of {program.name}, memory_budget {budget}: {terms}"
    yield "", _compiled(program)


def _copying_rows(program: WastefulProgram) -> Iterator[Row]:
    held = f"temporaries of {program.name} hold {format_bytes(program.copied)} of it a second time"
    copies = program.copied / program.state
    yield "copied", f"{some(program.leaves)}: {held}, {copies:.2f} copies of the state"
    yield "", _compiled(program)


def _compiled(program: WastefulProgram) -> str:
    there = f"compiled at {program.line}" if program.line else "compiled by a library"
    return there + (f", for the fixture {program.fixture}" if program.fixture else "")


def _hint(leftover: Leftover) -> str:
    if not isinstance(leftover, TracerLeft):
        return leftover.cure()
    leak = leftover.leak
    plain = leak.holder in PLAIN and not leak.keeper
    if plain and leak.place == "module":  # which holds for a module that was captured, too
        return CURES["plain value, captured"].format(path=leak.path, holder=leak.holder)
    return leftover.cure()


def summary(looked: int, partly: int, kinds: Sequence[str], missing: Iterable[str]) -> str:
    """``30 tests watched: 1 left tracers behind``, and what is ``missing``."""
    counts = [f"{kinds.count(kind)} {text}" for kind, (_, text) in _KINDS.items() if kind in kinds]
    nothing = "nothing was left behind" if looked else f"tests marked with {MARKER} are checked instead"
    text = f"{counted(looked, 'test')} watched: {', '.join(counts) or nothing}"
    text += f"; {partly} checked in part: they reach too many objects" if partly else ""
    return "; ".join([text, *filter(None, missing)])


class Unmarked(NamedTuple):
    """A test that calls a module outside of any transform."""

    test: str
    """Its id, without parameters."""
    definition: str
    """The line that would begin it if it were marked."""
    type: str
    """The class of the module."""
    place: str
    """``path:line`` of the call."""


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
