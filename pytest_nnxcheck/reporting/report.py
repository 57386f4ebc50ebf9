"""The report of a check, its text and its record: the message of a failure, the line of a test, counts and worst cases of its outcomes.

The text is an interface: it is tested. Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.catalogue import JIT, MODES, InvariantRow, rows_of, severity
from pytest_nnxcheck.core.chips import parse_target
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.nesting import UN_NESTED, Nesting
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.outcome import Outcome, Verdict, Violation
from pytest_nnxcheck.core.peak import default_budget
from pytest_nnxcheck.core.setting_values import least_bytes, least_multiple
from pytest_nnxcheck.core.text import Row, counted, fill, format_bytes, lay_out, row, some
from pytest_nnxcheck.reporting import memory_breakdown, target_rows, violations
from pytest_nnxcheck.reporting.records import ExpectedRecord, Head, NestingRecord, Record, made, plain

BROKEN = "nnx invariant broken"
REFUSED = "nnx nesting not supported by flax"
REFUSED_MODE = "nnx mode not supported by flax"
NOTHING = "nnx nothing was checked"

_REASONS = {"failed": "raised", "rejected": "reason"}
"""Labels of the row that says why a nesting has its verdict."""

LONGEST_PROGRAM = 256 * 1024
"""Characters of a program to paste that a record takes in; a longer file is named by its path alone."""

_REPEATED = (
    "the body runs many times with the same fixtures: if it depends on randomness, or on what it has left in tmp_path, make it repeat itself;"
    " the nesting may not be the cause"
)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one check. ``str(report)`` is the message of a failure, or one line if nothing failed."""

    outcomes: tuple[Outcome, ...]
    """One outcome for each nesting, in the order in which they ran."""
    settings: table.Settings
    """The settings of the check."""
    notes: tuple[str, ...] = ()
    """Facts that no invariant judges, and layers that were left out, with the reason."""
    test_id: str = ""
    """The node id of the test; empty outside of pytest."""
    argument: str = ""
    """The argument of pytest that selects the test, in the folder where the run started."""
    options: str = ""
    """The options of pytest that a replay needs."""
    programs: Mapping[Nesting, str] = field(default_factory=dict, compare=False, repr=False)
    """The programs to paste, as text, by nesting."""
    not_run: int = 0
    """The number of nestings that did not run because an earlier one failed."""
    advice: tuple[str, ...] = ()
    """Advice on memory that the un-nested call could save."""
    un_nested: tuple[Row, ...] = ()
    """Rows of text on the memory of the un-nested call."""
    without_arrays: tuple[str, ...] = ()
    """The subjects that are called with no module and no array."""

    def program(self, outcome: Outcome | None = None) -> str:
        """Return the program that shows an outcome without the plugin, as text; empty if there is none.

        If no outcome is given, the program is that of ``shown``.
        """
        shown = outcome or self.shown
        return self.programs.get(shown.nesting, "") if shown else ""

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The outcomes that violate an invariant, sorted by the most serious invariant, then by the smallest nesting."""
        return tuple(sorted((o for o in self.outcomes if o.verdict == "violated"), key=lambda outcome: outcome.rank))

    @property
    def violations(self) -> tuple[Violation, ...]:
        """The violations of the first outcome in ``broken``; empty if every invariant held."""
        return self.broken[0].violations if self.broken else ()

    @property
    def shown(self) -> Outcome | None:
        """The outcome that the message shows: the first in ``broken``, else the smallest nesting that raised."""
        return next(iter(self.broken or _by_plainness(self.outcomes, "failed")), None)

    @property
    def ok(self) -> bool:
        """True if the ``verdict`` is ``held``: something was checked, no nesting failed, and each expected failure happened."""
        return self.verdict == "held"

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all nestings; ``failed`` also if an expected failure did not happen, or nothing ran."""
        worst = of_mode(list(self.outcomes))
        if not self.outcomes or self.unexpected:
            return "violated" if worst == "violated" else "failed"
        refused = any(outcome.verdict == "rejected" and not outcome.unfit for outcome in self.outcomes)
        strict = refused and self.settings.on_rejection == "fail"
        bad = strict or nothing_checked(self.outcomes) or "rejected" in self.modes.values()
        return "rejected" if bad and worst == "held" else worst

    @property
    def unexpected(self) -> tuple[str, ...]:
        """A line for each expected failure that did not happen."""
        settings = self.settings
        lines = expected_failures.unexpected_passes(
            settings.expected_failures, self.outcomes, settings.invariants, replayed=settings.nesting
        )
        return tuple(f"nnx {line}" for line in lines)

    @property
    def lacks(self) -> dict[str, Lack]:
        """The invariants that no nesting could have broken, each with the thing that was lacking; empty if a nesting failed, since others may not have run."""
        if not self.outcomes or any(outcome.verdict in ("violated", "failed") for outcome in self.outcomes):
            return {}
        asserted = {name for outcome in self.outcomes for name in outcome.asserted}
        rows = [row for row in rows_of(self.settings.invariants) if row.name not in asserted]
        found = {row.name: lack(row, self) for row in rows}
        if "arrays" in found.values():
            return dict.fromkeys(found, "arrays")
        return {name: lacking for name, lacking in found.items() if lacking is not None}

    @property
    def not_asserted(self) -> dict[str, str]:
        """The same with the reasons in words."""
        return {name: LACKS[lacking][0].format(donate=self.settings.donate) for name, lacking in self.lacks.items()}

    @property
    def modes(self) -> dict[str, Verdict]:
        """The worst verdict in each mode of flax that nestings ran in; ``rejected`` if flax refuses the call in that mode."""
        return {mode: of_mode(outcomes) for mode, outcomes in by_mode(self.outcomes).items()}

    def __str__(self) -> str:
        return message(self, self.shown) if self.shown else "\n".join([*self.unexpected, head(self).summary])


Lack = Literal["arrays", "platform", "program", "donated", "compared", "un-nested", "ended"]
"""A thing that no nesting had, so that an invariant could not break."""

LACKS: dict[Lack, tuple[str, str]] = {
    "arrays": (
        "the call gets no array, in a module or beside it, and computes nothing with jax",
        "wrap a module, or a function that takes one, and call that with arrays: nnx_wrap(model)(x)",
    ),
    "platform": ("this CPU cannot lower the program", "name a target that can, with --nnx-target"),
    "program": ("no nesting has an outer jit", "add jit to the transforms, or tracers to the invariants"),
    "donated": (
        "no program donates a buffer (donate is {donate})",
        "donate what the call changes, or add tracers to the invariants",
    ),
    "compared": ("no values were compared", "call it with arrays that have values, or add tracers to the invariants"),
    "un-nested": ("the un-nested call was not run", "run it too: nesting='un-nested', or no nesting by name"),
    "ended": ("no nesting ran to its end", "name other transforms, or add tracers to the invariants"),
}
"""The reason in words, and what to write instead."""


def lack(row: InvariantRow, report: Report) -> Lack | None:
    """The thing that no nesting had for an invariant; `None` where the settings say that nothing is donated, beside other invariants."""
    held = [outcome.nesting.layers for outcome in report.outcomes if outcome.verdict != "rejected"]
    if row.name == "donation" and report.settings.donate == "none":
        return "donated" if report.settings.invariants == (row.name,) else None
    if row.compiled and any(outcome.misfit and outcome.misfit.kind == "platform" for outcome in report.outcomes):
        return "platform"
    if row.compiled and not any(layers and layers[0].row.compiles for layers in held):
        return "program"
    if row.name == "donation":
        return "donated"
    if row.values or row.runs:
        return "compared"
    if row.name == "updates" and held and all(held):
        return "un-nested"
    return "arrays" if held else "ended"


def nothing_asserted(report: Report) -> str:
    """Why no invariant could have been broken, and what to write instead; empty if one could, or if flax refuses every nesting, which has its own reason."""
    refused = all(outcome.verdict == "rejected" for outcome in report.outcomes)
    if not report.lacks or refused or any(outcome.asserted or outcome.expected for outcome in report.outcomes):
        return ""
    reasons = (f"{names} cannot be broken, {why}" for why, names in in_words(report.not_asserted).items())
    cures = dict.fromkeys(LACKS[lack][1] for lack in report.lacks.values())
    return f"{NOTHING}: {'; '.join(reasons)}: {'; '.join(cures)}"


def unjudged_target(report: Report) -> str:
    """Why a named target judged no program, where ``target_strict`` asks for that, and what to write instead; else empty."""
    if report.settings.target_strict == "off" or not report.ok:
        return ""
    found = [on for outcome in report.outcomes if outcome.evidence for on in outcome.evidence.targets]
    chips = {parse_target(on.target).chip for on in found if not on.left_out}
    missed = [word for word in report.settings.target if parse_target(word).chip not in chips]
    if not missed:
        return ""
    reasons = dict.fromkeys(on.left_out for on in found if on.left_out)
    why = "; ".join(reasons) or "no nesting was compiled for it, add jit to the transforms"
    return f"{NOTHING} on {' and '.join(missed)}: {why}: mend that, or leave this test out with target=[] in its marker"


def in_words(not_asserted: Mapping[str, str]) -> dict[str, str]:
    """The reasons why invariants were not asserted, each with their names."""
    names: dict[str, list[str]] = {}
    for name, why in not_asserted.items():
        names.setdefault(why, []).append(name)
    return {why: " and ".join(filter(None, [", ".join(of[:-1]), of[-1]])) for why, of in names.items()}


def _by_plainness(outcomes: Iterable[Outcome], verdict: str) -> tuple[Outcome, ...]:
    return tuple(sorted((o for o in outcomes if o.verdict == verdict), key=lambda outcome: outcome.nesting.plainness))


def rejected_modes(report: Report) -> str:
    """The text on modes in which flax rejects the call; empty if there are none.

    A test that names a mode asks whether the call works in it.
    """
    rejected = [mode for mode, verdict in report.modes.items() if verdict == "rejected"]
    if not rejected:
        return ""
    head = f"{REFUSED_MODE}: {', '.join(rejected)}"
    shown = next(o for o in report.outcomes if o.nesting.mode == rejected[0] and o.by_mode)
    rows = [("modes", _mode_lines(report)), ("replay", replay(report, shown.nesting))]
    return lay_out(head, report.test_id, rows)


def modes_note(report: Report) -> str:
    """The note on the user's exception that says what every mode did; empty where none was named."""
    return row("modes", _mode_lines(report)) if _shows_modes(report) else ""


def _mode_lines(report: Report) -> str:
    """One line for each mode that nestings ran in: what it did, and the smallest nesting that it broke."""
    lines = []
    for mode, outcomes in by_mode(report.outcomes).items():
        verdict = of_mode(outcomes)
        if verdict == "rejected":
            lines.append(f"{mode} {VERDICTS[verdict]}   {rejection(outcomes)}")
            continue
        smallest = "" if verdict == "held" else f"; smallest {_by_plainness(outcomes, verdict)[0].nesting}"
        lines.append(
            f"{mode} {VERDICTS[verdict]}   {counts(Counter(outcome.verdict for outcome in outcomes))}{smallest}"
        )
    return "\n".join(lines)


def message(report: Report, outcome: Outcome) -> str:
    """The text for one broken, failed or rejected nesting, with what the others did."""
    return lay_out(headline(outcome), report.test_id, _rows(report, outcome))


def headline(outcome: Outcome) -> str:
    """The first line: the invariant that broke, or what else is the matter."""
    if outcome.violations:
        return f"{BROKEN}: {outcome.violations[0].invariant}"
    return f"nnx nesting raised: {outcome.nesting}" if outcome.verdict == "failed" else f"{REFUSED}: {outcome.nesting}"


def in_short(outcome: Outcome) -> str:
    """The headline for pytest's short summary, which cuts its lines: the invariant, and at once the leaf or the bytes."""
    if not outcome.violations:
        return headline(outcome)
    first = outcome.violations[0]
    return f"nnx {first.invariant}: {violations.place(first, outcome.evidence)}"


def _rows(report: Report, outcome: Outcome) -> Iterator[Row]:
    yield "nesting", f"{outcome.nesting}{of_those(report, outcome)}"
    yield from found_rows(outcome)
    yield from outcome.explained
    if report.settings.nesting is None:
        yield "tried", tried(report)
    yield from (("note", note) for note in outcome.notes)
    yield from (("also broken", text) for text in _also_broken(report, outcome))
    yield from (("also raised", f"{o.nesting}: {o.reason:.100}") for o in _other_failures(report, outcome))
    if _shows_modes(report):
        yield "modes", _mode_lines(report)
    if outcome.program:
        yield "program", outcome.program
    yield "replay", replay(report, outcome.nesting)


def found_rows(outcome: Outcome) -> Iterator[Row]:
    """The broken invariants of a nesting, or the reason why it was rejected or failed."""
    if outcome.reason:
        yield _REASONS.get(outcome.verdict, outcome.verdict), outcome.reason
    for violation in outcome.violations:
        yield violation.invariant, violation.summary
        if violation.hint:
            yield "hint", violation.hint
        yield from violation.details


def _shows_modes(report: Report) -> bool:
    return any(outcome.nesting.mode != MODES[0] for outcome in report.outcomes)


def _also_broken(report: Report, shown: Outcome) -> Iterator[str]:
    """One line for each invariant that only other nestings broke, with the smallest of them; beside a captured module, for each that others broke."""
    shown_invariants = {violation.invariant for violation in shown.violations}
    broken = _by_plainness(report.outcomes, "violated")
    for invariant in sorted(report.settings.invariants, key=severity):
        found = [(o.nesting, v.summary) for o in broken for v in o.violations if v.invariant == invariant]
        if invariant in shown_invariants:
            found = [each for each in found if shown.nesting.captures and not each[0].captures]
        if found:
            more = f", and {len(found) - 1} more" if found[1:] else ""
            yield f"{invariant}, smallest: {found[0][0]}{more}\n{found[0][1]}"


def _other_failures(report: Report, shown: Outcome) -> list[Outcome]:
    """The smallest nesting of each further type of exception."""
    kinds = {shown.error: shown} if shown.verdict == "failed" else {}
    for outcome in _by_plainness(report.outcomes, "failed"):
        kinds.setdefault(outcome.error, outcome)
    return [outcome for outcome in kinds.values() if outcome is not shown]


def tried(report: Report) -> str:
    """``41 nestings: 1 failed, 31 passed, 9 not supported by flax; 3 more not run, --nnx-all runs them``."""
    left = f"; {report.not_run} more not run, --nnx-all runs them" if report.not_run else ""
    return f"{counted(len(report.outcomes), 'nesting')}: {counts(kinds(report.outcomes))}{left}"


def of_those(report: Report, outcome: Outcome) -> str:
    """``   the smallest of 3 that fail``, where others do as well; or that it was replayed."""
    if report.settings.nesting is not None:
        return "   replayed, no other was run"
    verb = {"violated": "fail", "failed": "raise"}.get(outcome.verdict, "")
    alike = sum(other.verdict == outcome.verdict for other in report.outcomes)
    return f"   the smallest of {alike} that {verb}" if verb and alike > 1 else ""


def failed_note(report: Report, outcome: Outcome, *, own: bool) -> str:
    """The note on the user's exception: its causes, and the nesting, which nothing else in the traceback names.

    ``own`` says that the body of the test raised it, not the call. Un-nested, without a known cause, there is nothing to say.
    """
    rows = [] if own else [("note", note) for note in outcome.notes]
    rest = _un_nested(report, outcome.nesting)
    if rest:
        rows.insert(0, ("nesting", f"{outcome.nesting}   {rest}"))
        if own and report.settings.nesting is None:
            rows.append(("", _REPEATED))
        rows += [("program", outcome.program)] if outcome.program else []
        rows.append(("replay", replay(report, outcome.nesting)))
    return "\n".join(row(*each) for each in rows)


def fault_note(place: str) -> str:
    """The note on an exception that is our own fault, raised at a place of this package."""
    return row(
        "note",
        f"a fault of pytest-nnxcheck, and not of your code: it was raised at {place}; please report it, with this test",
    )


def explained_note(outcome: Outcome | None) -> str:
    """The note on the user's exception that says what was found around its nesting; empty if nothing was."""
    return "\n".join(row(*each) for each in outcome.explained) if outcome is not None else ""


def _un_nested(report: Report, nesting: Nesting) -> str:
    """The end of the same test body un-nested, in the same mode; for an un-nested call, another mode in which it passed."""
    bare = [o for o in report.outcomes if not o.nesting.layers]
    if nesting.layers:
        in_mode = [o.verdict == "held" for o in bare if o.nesting.mode == nesting.mode]
        if not in_mode:
            return f"the {UN_NESTED} call was not run"
        return f"{UN_NESTED}, the same test body {'passed' if in_mode[0] else 'did not pass either'}"
    held = [o.nesting for o in bare if o.verdict == "held"]
    return f"{held[0]}, the same test body passed" if held else ""


def replay(report: Report, nesting: Nesting) -> str:
    """The command, or the call, that runs this nesting and no other."""
    if not report.argument:
        return f"check(..., nesting={str(nesting)!r})"
    return command(report, "--nnx-nesting", str(nesting))


def command(report: Report, *options: str) -> str:
    """The command that runs the test again, with further options."""
    words = ["pytest", shlex.quote(report.argument), report.options, shlex.join(options)]
    return " ".join(filter(None, words))


# --- counts and worst cases ---

VERDICTS = {
    "violated": "failed",
    "failed": "raised",
    "held": "passed",
    "expected": "expected to fail",
    "rejected": "not supported by flax",
    "unfit": "left out",
}
"""Kinds of verdicts as people read them, the worst first."""


def kinds(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Count the outcomes of each kind."""
    return Counter(kind(outcome.verdict, unfit=outcome.unfit) for outcome in outcomes)


def kind(verdict: str, *, unfit: bool) -> str:
    """The verdict; what was rejected because a layer cannot take the call counts as ``unfit``."""
    return "unfit" if unfit and verdict == "rejected" else verdict


def word(outcome: Outcome) -> str:
    """The verdict as people read it."""
    return VERDICTS[kind(outcome.verdict, unfit=outcome.unfit)]


def counts(of: Mapping[str, int]) -> str:
    """``1 failed, 31 passed``: the verdicts that occur, the worst first."""
    return ", ".join(f"{of[verdict]} {word}" for verdict, word in VERDICTS.items() if of.get(verdict))


def nothing_checked(outcomes: Iterable[Outcome]) -> bool:
    """True if in one of the modes flax rejected every nesting that has a layer."""
    nested = [outcome for outcome in outcomes if outcome.nesting.layers]
    checked = {outcome.nesting.mode for outcome in nested if outcome.verdict != "rejected"}
    return any(outcome.nesting.mode not in checked for outcome in nested)


def worst_peak(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The outcome whose peak is the largest part of its budget, or just the largest."""

    def height(outcome: Outcome) -> tuple[float, int]:
        """The part of its budget, then its bytes."""
        return (outcome.peak or 0) / (outcome.budget or math.inf), outcome.peak or 0

    return max((outcome for outcome in outcomes if outcome.peak is not None), key=height, default=None)


def least_budgets(report: Report) -> tuple[str, ...]:
    """The smallest multiple of the expected peak, and the smallest size, that every program is within, rounded; none unless the test passes by its memory.

    Bytes bound the plain call: a nesting with further layers, and its programs on targets, are over them only where they are over the default as well.
    """
    held = [outcome for outcome in report.outcomes if outcome.verdict == "held"]
    programs = [program for outcome in held for program in outcome.peaks]
    if not report.ok or "memory" not in report.settings.invariants or not all(map(all, programs)) or not programs:
        return ()
    sizes = []
    for outcome in held:
        on_targets = [on.peak or 0 for on in outcome.evidence.targets] if outcome.evidence else []
        for peak, expected in outcome.peaks:
            most = default_budget(expected) if len(outcome.nesting) > 1 else 0
            sizes += [each for each in (peak, *on_targets) if each > most]
    return (least_multiple(programs), *([least_bytes(max(sizes))] if sizes else []))


def at_the_peak(outcomes: Iterable[Outcome]) -> str:
    """Say what is in memory at the worst peak of a plain jit."""
    known = [outcome for outcome in outcomes if outcome.evidence and outcome.evidence.ledger]
    worst = worst_peak(outcome for outcome in known if len(outcome.nesting) == 1)
    return f"{memory_breakdown.in_words(worst.evidence.ledger)} ({worst.nesting})" if worst and worst.evidence else ""


def worst_of_targets(targets: Iterable[OnTarget]) -> tuple[OnTarget, ...]:
    """The worst program on each target, with the seconds of all programs there: one that does not fit, then that with the largest part of the limit."""
    programs: dict[str, list[OnTarget]] = {}
    for on in targets:
        programs.setdefault(on.target, []).append(on)
    return tuple(replace(max(of, key=_badness), seconds=sum(on.seconds for on in of)) for of in programs.values())


def _badness(on: OnTarget) -> tuple[bool, bool, bool, float]:
    """Sort key: programs that do not fit last, before them those that may not, and those that were compiled, by the part of the limit that they use."""
    return not on.fits, on.may_not_fit, not on.left_out, (on.peak or 0) / (on.limit or math.inf)


_RANK = ("held", "rejected", "expected", "failed", "violated")
"""Verdicts of several calls under one nesting, the worst last."""


def keep_worst(outcomes: dict[Nesting, Outcome], outcome: Outcome) -> None:
    """Keep the worst verdict of a nesting, and its highest peak."""
    earlier = outcomes.get(outcome.nesting)
    outcomes[outcome.nesting] = outcome if earlier is None else worse(earlier, outcome)


def worse(old: Outcome, new: Outcome) -> Outcome:
    """The outcome of two calls under one nesting: the worse verdict, the higher peak, the notes of both."""
    worst = max(old, new, key=lambda outcome: _RANK.index(outcome.verdict))
    measured = worst_peak([old, new]) or worst
    notes = tuple(dict.fromkeys([*old.notes, *new.notes]))
    keys = tuple(dict.fromkeys([*old.expected, *new.expected]))
    # The evidence of a violation is what the message tells of.
    shown = worst.evidence if worst.violations else measured.evidence
    if targets := worst_of_targets(on for each in (old, new) if each.evidence for on in each.evidence.targets):
        shown = replace(shown or Evidence(), targets=targets)
    seconds = old.seconds + new.seconds
    asserted = tuple(dict.fromkeys([*old.asserted, *new.asserted]))
    return replace(
        worst,
        asserted=asserted,
        peak=measured.peak,
        budget=measured.budget,
        peaks=(*old.peaks, *new.peaks),
        notes=notes,
        expected=keys,
        evidence=shown,
        seconds=seconds,
    )


# --- by mode of flax


def by_mode(outcomes: Iterable[Outcome]) -> dict[str, list[Outcome]]:
    """The outcomes of each mode, in the order in which they ran."""
    outcomes_of: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        outcomes_of.setdefault(outcome.nesting.mode, []).append(outcome)
    return outcomes_of


def of_mode(outcomes: list[Outcome]) -> Verdict:
    """The verdict on a mode: the worst one; ``rejected`` where flax does not take the call."""
    bad: tuple[Verdict, ...] = ("violated", "failed")
    worst = next((word for word in bad if any(outcome.verdict == word for outcome in outcomes)), None)
    return worst or ("rejected" if rejection(outcomes) else "held")


def closes_mode(outcome: Outcome) -> bool:
    """True if flax refused, for its mode, the call itself or its plain jit: no nesting can run in that mode."""
    layers = [(layer.transform, layer.captures) for layer in outcome.nesting.layers]
    return is_refused_by_mode(outcome) and layers in ([], [(JIT, False)])


def is_refused_by_mode(outcome: Outcome) -> bool:
    """True if flax refused the nesting because its mode cannot do it."""
    return outcome.by_mode and outcome.verdict == "rejected"


def rejection(outcomes: list[Outcome]) -> str:
    """Why flax does not take the call in a mode; empty if it does. What a closure keeps from flax proves nothing."""
    without_closure = [o for o in outcomes if o.nesting.layers and not o.nesting.captures]
    refused = [outcome for outcome in outcomes if is_refused_by_mode(outcome)]
    final = [outcome for outcome in refused if closes_mode(outcome)]
    if final or (refused and all(outcome.verdict == "rejected" for outcome in without_closure)):
        return (final or refused)[0].reason
    return ""


# --- the record of a test --------------------------------------------------------------------------------------------------


def record(
    report: Report, folder: Path | None = None, *, drawn: Collection[Nesting] = (), whole: bool = True
) -> Record:
    """The record of a report; the paths of programs start from ``folder``. What pytest knows of the test is left empty.

    Unless ``whole``, it has no nestings.
    """
    nestings = (
        _nesting(report, outcome, folder, drawn=outcome.nesting in drawn) for outcome in report.outcomes if whole
    )
    message = "" if report.ok or not report.outcomes else str(report)
    return Record(replace(head(report), message=plain(message)), tuple(nestings))


def head(report: Report) -> Head:
    """The part of the record on the test as a whole."""
    settings, worst = report.settings, worst_peak(report.outcomes)
    expected = (
        ExpectedRecord(
            entry.key,
            entry.reason,
            entry.table,
            len(expected_failures.covered(entry, report.outcomes, settings.invariants)),
            sum(entry.key in outcome.expected for outcome in report.outcomes),
        )
        for entry in settings.expected_failures
    )
    found = Head(
        report.test_id,
        verdict=report.verdict if report.outcomes else "",
        counts=kinds(report.outcomes),
        not_run=report.not_run,
        peak=worst.peak if worst else None,
        budget=worst.budget if worst else None,
        peak_nesting=str(worst.nesting) if worst else "",
        budgets=least_budgets(report),
        holds=at_the_peak(report.outcomes),
        modes=report.modes,
        shown=str(report.shown.nesting) if report.shown else "",
        settings={name: _shown(getattr(settings, name)) for name in table.names("check")},
        options=report.options,
        expected_failures=tuple(expected),
        targets=worst_of_targets(
            on for outcome in report.outcomes if outcome.evidence for on in outcome.evidence.targets
        ),
        not_asserted=report.not_asserted,
        without_arrays=report.without_arrays,
        notes=report.notes,
        advice=report.advice,
        un_nested_peak=report.un_nested,
        seconds=sum(outcome.seconds for outcome in report.outcomes),
    )
    leaked = {violation.invariant for violation in report.violations} == {"tracers"}
    return made(Head, plain(replace(found, summary=summary_of(found, with_peak=not leaked))))


def _shown(value: object) -> str:
    if isinstance(value, tuple) and not all(isinstance(word, str) for word in value):
        return ", ".join(map(str, value))
    return table.show(value)


def _nesting(report: Report, outcome: Outcome, folder: Path | None, *, drawn: bool) -> NestingRecord:
    told, measured = plain(outcome), plain(outcome.evidence or Evidence())
    told["expected_failures"], measured["expected_peak"] = told.pop("expected"), measured.pop("expected")
    more = {
        "nodeid": report.test_id,
        "nesting": str(outcome.nesting),
        "mode": outcome.nesting.mode,
        "layers": [str(layer) for layer in outcome.nesting.layers],
        "word": word(outcome),
        "story": memory_breakdown.rows(outcome.evidence or Evidence()),
        "program_text": _program(outcome.program, folder),
        "replay": replay(report, outcome.nesting),
        "drawn": drawn,
    }
    return made(NestingRecord, {**plain(more), **told, **measured})


def _program(shown: str, folder: Path | None) -> str:
    """The text of a program to paste; empty where there is none, or no file that can be read."""
    if not shown or folder is None:
        return ""
    try:
        text = (folder / shown).read_text(encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError):
        return ""
    return text if len(text) <= LONGEST_PROGRAM else ""


def properties(head: Head) -> list[tuple[str, str | int]]:
    """The head as flat pairs for JUnit's XML."""
    pairs = {
        "nnx_verdict": head.verdict or None,
        "nnx_nestings": sum(head.counts.values()),
        **{f"nnx_{each}": head.counts.get(each, 0) for each in VERDICTS if each != "unfit"},
        "nnx_unfit": head.counts.get("unfit"),
        "nnx_not_run": head.not_run or None,
        "nnx_peak": head.peak,
        "nnx_peak_nesting": head.peak_nesting or None,
        "nnx_budget": head.budget,
        "nnx_targets": target_rows.brief(head.targets) or None,
        "nnx_target_seconds": target_seconds(head) or None,
        "nnx_expected_failures": came_true(head) or None,
        "nnx_modes": modes_of(head) or None,
        "nnx_advice": "\n".join(head.advice) or None,
        "nnx_notes": "\n".join(head.notes) or None,
    }
    return [(name, value) for name, value in pairs.items() if value is not None]


def came_true(head: Head) -> str:
    """The expected failures that happened, ``'memory' (jax#926): 16 nestings``."""
    happened = [each for each in head.expected_failures if each.happened]
    return "; ".join(f"{each.key!r} ({each.reason}): {counted(each.happened, 'nesting')}" for each in happened)


def target_seconds(head: Head) -> str:
    """The time that each compiler of a target took."""
    return ", ".join(f"{on.target} {on.seconds:.1f} s" for on in head.targets if not on.left_out)


def modes_of(head: Head) -> str:
    """The verdict on each mode of flax, ``graph passed, tree raised``; empty where none was named."""
    if list(head.modes) in ([], [MODES[0]]):
        return ""
    return ", ".join(f"{mode} {VERDICTS[verdict]}" for mode, verdict in head.modes.items())


def summary_of(head: Head, *, with_peak: bool = True) -> str:
    """One line: nestings run, their verdicts, the worst peak against its budget (it explains no leak), whether the programs fit their targets."""
    text = "interrupted after " if head.outcome == "interrupted" else ""
    text += f"{counted(sum(head.counts.values()), 'nesting')}: {counts(head.counts) or 'none finished'}"
    text += f", {head.not_run} not run" if head.not_run else ""
    if with_peak and head.peak is not None:
        budget = f", budget {format_bytes(head.budget)}" if head.budget is not None else ""
        text += f"; worst peak {format_bytes(head.peak)} ({head.peak_nesting}){budget}"
    text += f"; {target_rows.brief(head.targets, why=True)}" if head.targets else ""
    for why, names in in_words(head.not_asserted).items():
        text += f"; {names} not asserted: {why}"
    if head.without_arrays:
        text += f"; called with no module and no array: {some(head.without_arrays)}"
    return text + (f"; modes: {modes_of(head)}" if modes_of(head) else "")


def not_passed(heads: Collection[Head]) -> str:
    """``2 of 5 tests failed, 1 interrupted``; empty where pytest counts nothing against any."""
    stopped = sum(head.outcome == "interrupted" for head in heads)
    failed = sum(not head.passed for head in heads) - stopped
    of = counted(len(heads), "test")
    if failed:
        return f"{failed} of {of} failed" + (f", {stopped} interrupted" if stopped else "")
    return f"{stopped} of {of} interrupted" if stopped else ""


def in_terminal(head: Head, width: int, *, verbose: bool) -> str:
    """The line of a test in the terminal; with -v its notes below it."""
    text = f"{head.nodeid}  {head.summary}"
    if not verbose:
        what = [name for name, found in (("notes", head.notes), ("advice on memory", head.advice)) if found]
        return text + (f"; -v shows {' and '.join(what)}" if what else "")
    budgets = " or ".join(f'"{each}"' for each in head.budgets)
    for label, said in (
        ("expected to fail", came_true(head)),
        ("compiled for targets", target_seconds(head)),
        *(said for each in head.targets for said in target_rows.program(each)),
        ("passes with memory_budget", budgets),
        ("holds at its peak", head.holds if head.passed else ""),
    ):
        text += f"\n    {label}: {said}" if said else ""
    # Filled to the width of the terminal, a line of a note each.
    lines = [line for piece in head.notes for line in piece.splitlines()]
    lines += [f"advice: {line}" for piece in head.advice for line in piece.splitlines()]
    return "\n".join([text, *(fill(line, max(width, 40), "    ", "      ") for line in lines)])
