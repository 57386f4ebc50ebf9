"""Expected failures: which nestings an entry covers, what it excuses, and which entries did not come true.

Pure functions over outcomes: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from pytest_nnxcheck.core.catalogue import MODES, invariant_names, layer_names, rows_of, styles_of
from pytest_nnxcheck.core.nesting import UN_NESTED, Layer, Nesting
from pytest_nnxcheck.core.text import Unreadable, counted, one_of

if TYPE_CHECKING:
    # Late: its dataclasses take a tenth of the time that loading the plugin does.
    from pytest_nnxcheck.core.outcome import Outcome

EXAMPLE = "{'memory': 'why', 'jit > scan': 'a link'}"


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """A failure that is known: of an invariant, or of every nesting that holds these layers one right after the other.

    What is idle (`Transform.idle`) may stand in between: it keeps no layer from failing inside another. A layer without a style stands for the transform in any style, a key without a mode for every mode of flax. ``origin`` words the
    place where the entry stands, ``table`` is the table of a file.
    """

    key: str
    reason: str
    origin: str = "expected_failures"
    table: str = ""

    @classmethod
    def parse(cls, key: object, reason: object) -> ExpectedFailure:
        """Read one entry. Raises `Unreadable` with the nearest valid word."""
        if not isinstance(key, str):
            raise Unreadable(f"expected failure {key!r} is no text, write {EXAMPLE}")
        if not isinstance(reason, str) or not reason.strip():
            raise Unreadable(f"expected failure {key!r} has the reason {reason!r}, write why it fails")
        try:
            return cls(_normalize(key), reason.strip())
        except Unreadable as error:
            raise Unreadable(f"expected failure {key!r} names no known invariant or nesting: {error}") from None

    @property
    def invariant(self) -> str:
        """The invariant that is expected to break; empty for a nesting."""
        return self._words if self._words in invariant_names() else ""

    @property
    def mode(self) -> str:
        """The mode of flax that the entry is about; empty where it is about all."""
        mode, colon, _ = self.key.partition(": ")
        return mode if colon else ""

    @property
    def _words(self) -> str:
        return self.key.rpartition(": ")[2]

    def nesting(self, style: str = "argument") -> Nesting | None:
        """The nesting that the entry names, in this style where it names none; none for an invariant."""
        if self.invariant:
            return None
        return Nesting(tuple(_layer(word, style) for word in self._layers()), self.mode or MODES[0])

    def in_mode(self, nesting: Nesting) -> bool:
        """Whether the entry is about the mode of this nesting."""
        return self.mode in ("", nesting.mode)

    def covers(self, nesting: Nesting) -> bool:
        """Whether the entry is about this nesting; an invariant is, under each in which it is asserted."""
        if not self.in_mode(nesting):
            return False
        if self.invariant:
            compiled = bool(nesting.layers) and nesting.layers[0].row.compiles
            return compiled or not any(row.compiled for row in rows_of([self.invariant]))
        words = self._layers()
        if not words:
            return not nesting.layers
        return any(_begin(nesting.layers[start:], words) for start in range(len(nesting)))

    def is_exactly(self, nesting: Nesting) -> bool:
        """Whether the entry names this nesting and none around it."""
        return not self.invariant and len(self._layers()) == len(nesting) and self.covers(nesting)

    def _layers(self) -> list[str]:
        return [] if self._words == UN_NESTED else self._words.split(" > ")

    def __str__(self) -> str:
        return f"{self.key!r} ({self.reason})"


def _layer(word: str, style: str) -> Layer:
    if "[" in word:
        return Layer.parse(word)
    styles = styles_of(word)
    return Layer(word, style if style in styles else styles[0])


def _fits(word: str, layer: Layer) -> bool:
    return layer == Layer.parse(word) if "[" in word else layer.transform == word


def _begin(layers: tuple[Layer, ...], words: list[str]) -> bool:
    """Whether the layers begin with those that the words name; idle ones in between are passed over."""
    named = 0
    for layer in layers:
        if named < len(words) and _fits(words[named], layer):
            named += 1
        elif not layer.row.idle:
            break
    return named == len(words)


def _normalize(key: str) -> str:
    """The key in one spelling. Raises `Unreadable`."""
    mode, colon, rest = key.partition(":")
    if colon and ":" in rest:
        raise Unreadable(f"{key.strip()!r} names two modes")
    if colon:
        return f"{one_of('mode', mode.strip(), MODES)}: {_normalize(rest)}"
    word = key.strip()
    if word in invariant_names():
        return word
    if word and not set(word) & set(">["):
        one_of("word", word, (*invariant_names(), *layer_names(), UN_NESTED))
    Nesting.parse(word)
    return " > ".join("".join(part.split()) for part in word.split(">"))


def parse(value: object) -> tuple[ExpectedFailure, ...]:
    """Read entries from a mapping of keys to reasons. Raises `Unreadable`."""
    if isinstance(value, tuple) and all(isinstance(entry, ExpectedFailure) for entry in value):
        return value
    if not isinstance(value, Mapping):
        raise Unreadable(f"expected_failures={value!r} is no mapping of keys to reasons, write {EXAMPLE}")
    return add_up([ExpectedFailure.parse(key, reason) for key, reason in value.items()])


def add_up(*sources: Iterable[ExpectedFailure]) -> tuple[ExpectedFailure, ...]:
    """The entries of all sources, the weakest first: a later one wins where the keys are the same."""
    return tuple({entry.key: entry for source in sources for entry in source}.values())


def excuse(outcome: Outcome, entries: Iterable[ExpectedFailure]) -> Outcome:
    """The outcome of a nesting that failed, less what was expected of it; the same where nothing was.

    What an invariant excuses is not counted for a nesting: an entry of it that nothing else breaks is one too many.
    """
    entries = tuple(entries)
    broken = {violation.invariant for violation in outcome.violations}
    by_invariant = [entry for entry in entries if entry.invariant in broken and entry.in_mode(outcome.nesting)]
    others = tuple(v for v in outcome.violations if v.invariant not in {entry.invariant for entry in by_invariant})
    is_excused = bool(outcome.violations) and not others
    by_nesting = [entry for entry in entries if not (is_excused or entry.invariant) and entry.covers(outcome.nesting)]
    used = [*by_invariant, *by_nesting]
    if not used:
        return outcome
    keys = tuple(dict.fromkeys([*outcome.expected, *(entry.key for entry in used)]))
    reasons = "; ".join(f"{entry.reason} ({entry.key})" for entry in used)
    if is_excused or by_nesting:
        notes = (*outcome.notes, *([outcome.reason] if outcome.reason else []))
        return replace(outcome, verdict="expected", reason=reasons, notes=notes, expected=keys)
    return replace(outcome, violations=others, notes=(*outcome.notes, f"expected to fail: {reasons}"), expected=keys)


class Tally(NamedTuple):
    """What the nestings that an entry covers did: those in which it came true, that held, and all others that ran or were refused."""

    entry: ExpectedFailure
    failed: int
    held: int
    others: int

    @property
    def matched(self) -> bool:
        """Whether the entry is about anything that ran, or that flax refused."""
        return bool(self.failed or self.held or self.others)

    @property
    def passed(self) -> bool:
        """Whether nothing failed that was expected to: an unexpected pass."""
        return bool(self.held and not self.failed)


def tally(entry: ExpectedFailure, outcomes: Iterable[Outcome], invariants: Iterable[str]) -> Tally:
    """Count what the covered nestings did; none is covered by an invariant that is not asked for."""
    is_asserted = not entry.invariant or entry.invariant in invariants
    covered = [outcome for outcome in outcomes if is_asserted and entry.covers(outcome.nesting)]
    failed = sum(entry.key in outcome.expected for outcome in covered)
    held = sum(outcome.verdict == "held" for outcome in covered)
    return Tally(entry, failed, held, len(covered) - failed - held)


def unexpected_passes(
    entries: Iterable[ExpectedFailure],
    outcomes: Iterable[Outcome],
    invariants: Iterable[str],
    replayed: Nesting | None = None,
) -> tuple[str, ...]:
    """A line for each entry that did not come true.

    One nesting alone says nothing of an entry that names others as well. An entry of a file may be for other tests: where it
    matches nothing in this one, that is not this test's fault.
    """
    outcomes = tuple(outcomes)
    judged = [entry for entry in entries if replayed is None or entry.is_exactly(replayed)]
    tallies = [tally(entry, outcomes, invariants) for entry in judged]
    return tuple(_line(count) for count in tallies if count.passed or not (count.matched or count.entry.table))


def _line(count: Tally) -> str:
    entry, held = count.entry, count.held
    if not count.passed:
        return f"expected failure {entry} matches no nesting that ran, take the entry out of {entry.origin}"
    return f"expected failure {entry} did not happen: {counted(held, 'nesting')} held, take the entry out of {entry.origin}"
