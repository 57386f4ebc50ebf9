"""Expected failures: the nestings that an entry covers, the violations that it excuses, and the entries that did not come true.

Pure functions over outcomes: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_nnxcheck.core.catalogue import MODES, invariant_names, layer_names, rows_of, styles_of
from pytest_nnxcheck.core.nesting import UN_NESTED, Layer, Nesting
from pytest_nnxcheck.core.text import Unreadable, counted, one_of

if TYPE_CHECKING:
    # Late: its dataclasses take a tenth of the time that loading the plugin does.
    from pytest_nnxcheck.core.outcome import Outcome

EXAMPLE = "{'memory': 'why', 'jit > scan': 'a link'}"


@dataclass(frozen=True, slots=True)
class ExpectedFailure:
    """A known failure: of an invariant, or of every nesting with these layers directly after one another.

    A layer without a style is the transform in any style, a key without a mode is about every mode of flax.
    """

    key: str
    """An invariant, or layers. A layer without a style is the transform in any style; a key without a mode is for every mode of flax."""
    reason: str
    origin: str = "expected_failures"
    """The place where the entry is written, in words."""
    table: str = ""
    """Its table, where it is in a file."""

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
    def mode(self) -> str:
        """The mode of flax that the entry is about; empty where it is about all."""
        return self.key.rpartition(": ")[0]

    @property
    def invariant(self) -> str:
        """The invariant that is expected to break; empty for a nesting."""
        word = self.key.rpartition(": ")[2]
        return word if word in invariant_names() else ""

    @property
    def _layers(self) -> list[str]:
        words = self.key.rpartition(": ")[2]
        return [] if words == UN_NESTED else words.split(" > ")

    def nesting(self, style: str = "argument") -> Nesting | None:
        """The nesting that the entry names, with this style where it names none; `None` for an invariant."""
        if self.invariant:
            return None
        return Nesting(tuple(_layer(word, style) for word in self._layers), self.mode or MODES[0])

    def in_mode(self, nesting: Nesting) -> bool:
        """True if the entry is about the mode of this nesting."""
        return self.mode in ("", nesting.mode)

    def covers(self, nesting: Nesting) -> bool:
        """True if the entry is about this nesting; an entry of an invariant is where the invariant is asserted."""
        if not self.in_mode(nesting):
            return False
        if self.invariant:
            compiled = bool(nesting.layers) and nesting.layers[0].row.compiles
            return compiled or not any(row.compiled for row in rows_of([self.invariant]))
        words = self._layers
        if not words:
            return not nesting.layers
        return any(_begin(nesting.layers[start:], words) for start in range(len(nesting)))

    def is_exactly(self, nesting: Nesting) -> bool:
        """True if the entry names this nesting and none around it."""
        return not self.invariant and len(self._layers) == len(nesting) and self.covers(nesting)

    def __str__(self) -> str:
        return f"{self.key!r} ({self.reason})"


def _layer(word: str, style: str) -> Layer:
    if "[" in word:
        return Layer.parse(word)
    styles = styles_of(word)
    return Layer(word, style if style in styles else styles[0])


def _begin(layers: tuple[Layer, ...], words: list[str]) -> bool:
    """True if the layers begin with those that the words name."""
    named = 0
    for layer in layers:
        if named < len(words) and words[named] in (layer.transform, f"{layer.transform}[{layer.style}]"):
            named += 1
        # An idle layer (`Transform.idle`) keeps no layer from failing inside another.
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
    """Take the expected failures out of the outcome of a nesting that failed; the same outcome where there are none."""
    entries = [entry for entry in entries if entry.in_mode(outcome.nesting)]
    broken = {violation.invariant for violation in outcome.violations}
    used = [entry for entry in entries if entry.invariant in broken]
    others = tuple(v for v in outcome.violations if v.invariant not in {entry.invariant for entry in used})
    is_excused = bool(outcome.violations) and not others
    # An entry for a nesting counts only where no entry for an invariant excuses the nesting already: else the user has one entry too many.
    if not is_excused:
        by_nesting = [entry for entry in entries if not entry.invariant and entry.covers(outcome.nesting)]
        used, is_excused = [*used, *by_nesting], bool(by_nesting)
    if not used:
        return outcome
    keys = tuple(dict.fromkeys([*outcome.expected, *(entry.key for entry in used)]))
    reasons = "; ".join(f"{entry.reason} ({entry.key})" for entry in used)
    if is_excused:
        notes = (*outcome.notes, *([outcome.reason] if outcome.reason else []))
        return replace(outcome, verdict="expected", reason=reasons, notes=notes, expected=keys)
    return replace(outcome, violations=others, notes=(*outcome.notes, f"expected to fail: {reasons}"), expected=keys)


def covered(entry: ExpectedFailure, outcomes: Iterable[Outcome], invariants: Iterable[str]) -> list[Outcome]:
    """The outcomes that the entry is about; none where it names an invariant that is not asserted."""
    is_asserted = not entry.invariant or entry.invariant in invariants
    return [outcome for outcome in outcomes if is_asserted and entry.covers(outcome.nesting)]


def unexpected_passes(
    entries: Iterable[ExpectedFailure],
    outcomes: Iterable[Outcome],
    invariants: Iterable[str],
    replayed: Nesting | None = None,
) -> Iterator[str]:
    """A line for each entry that did not come true; of a replay only for those that name its nesting."""
    outcomes = tuple(outcomes)
    for entry in entries:
        if replayed is not None and not entry.is_exactly(replayed):
            continue
        about = covered(entry, outcomes, invariants)
        held = sum(outcome.verdict == "held" for outcome in about)
        remedy = f"take the entry out of {entry.origin}"
        if held and not any(entry.key in outcome.expected for outcome in about):
            yield f"expected failure {entry} did not happen: {counted(held, 'nesting')} passed, {remedy}"
        # An entry of a file may be for other tests of its table.
        elif not about and not entry.table:
            yield f"expected failure {entry} matches no nesting that ran, {remedy}"
