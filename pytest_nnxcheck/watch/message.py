"""The message of a test that left something behind, and the last lines of a watched run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pytest_nnxcheck.core.outcome import uncounted
from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.core.text import Row, counted, lay_out, some
from pytest_nnxcheck.invariants.tracers import CURES, PLAIN, MadeInEndedTrace, TracerLeft
from pytest_nnxcheck.watch.leftovers import Leftover

KINDS: dict[type[Leftover], tuple[str, str, str]] = {
    TracerLeft: ("tracers", "tracers in ", "left tracers behind"),
    MadeInEndedTrace: ("pinned", "Variables of a trace that has ended: ", "left Variables of an ended trace behind"),
}
"""The name of each kind of finding, and the words for it in the headline of a test and in the last line of a run."""


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The findings of one test."""

    before: tuple[Leftover, ...] = ()
    """Findings that were there before its call."""
    added: tuple[Leftover, ...] = ()
    """Findings that its call added."""

    def __bool__(self) -> bool:
        return bool(self.before or self.added)

    def named(self) -> dict[str, list[str]]:
        """The names in each kind of findings, as a headline has them."""
        named: dict[str, list[str]] = {}
        for kind, (word, *_) in KINDS.items():
            found = [finding for finding in (*self.added, *self.before) if type(finding) is kind]
            if found:
                named[word] = [finding.path for finding in found[: kind.SHOWN]]
        return named


def headline(left: LeftBehind) -> str:
    """One line: ``tracers in model.last, model.log[0]``."""
    begins = {word: text for word, text, _ in KINDS.values()}
    return "; ".join(f"{begins[word]}{some(names)}" for word, names in left.named().items())


def message(nodeid: str, left: LeftBehind) -> str:
    """The failure of a test, in rows."""
    return lay_out(f"nnx watch: {headline(left)}", nodeid, _rows(left))


def _rows(left: LeftBehind) -> Iterator[Row]:
    yield from _told(left.added)
    if left.before:
        yield "", "there before the call of the test: a fixture, a teardown, an import or an earlier test left it"
        yield from _told(left.before)
    marked = f"@pytest.mark.{MARKER} on a test of this module"
    yield "see", f"{marked} names the smallest failing nesting, and similar ones that pass"


def _told(findings: Sequence[Leftover]) -> Iterator[Row]:
    """The rows of findings, kind by kind: the first of each, a count of the others, then last rows and hints, each once."""
    for kind in KINDS:
        found = [finding for finding in findings if type(finding) is kind]
        shown = found[: kind.SHOWN]
        yield from (row for finding in shown for row in finding.rows())
        yield from uncounted(found[len(shown) :])
        yield from dict.fromkeys(row for finding in found for row in finding.last_rows())
        yield from (("hint", cure) for cure in dict.fromkeys(map(_cure, found)) if cure)


def _cure(finding: Leftover) -> str:
    if isinstance(finding, TracerLeft) and finding.leak.holder in PLAIN and not finding.leak.keeper:
        leak = finding.leak
        if leak.place == "module":  # which holds for a module that was captured, too
            return CURES["plain value, captured"].format(path=leak.path, holder=leak.holder)
    return finding.cure()


def summary(looked: int, partly: int, kinds: Sequence[str], missing: Iterable[str]) -> str:
    """``30 tests watched: 1 left tracers behind``, and what is ``missing``."""
    counts = [f"{kinds.count(kind)} {text}" for kind, _, text in KINDS.values() if kind in kinds]
    nothing = "no test left a tracer behind" if looked else f"tests marked with {MARKER} are checked instead"
    text = f"{counted(looked, 'test')} watched: {', '.join(counts) or nothing}"
    text += f"; {partly} checked in part: they reach too many objects" if partly else ""
    return "; ".join([text, *filter(None, missing)])
