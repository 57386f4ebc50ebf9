"""The report of a check, and its text: the message of a failure, and one line a test in the terminal summary.

The text is an interface: it is tested. Nothing here imports pytest, hypothesis, jax or flax.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.catalogue import MODES, severity
from pytest_nnxcheck.core.nesting import UN_NESTED, Nesting
from pytest_nnxcheck.core.outcome import Outcome, Verdict, Violation
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.core.text import Row, counted, fill, format_bytes, lay_out, row
from pytest_nnxcheck.reporting import tally, target_rows, violations
from pytest_nnxcheck.reporting.tally import VERDICTS, counts, kinds, nothing_checked, worst_on_targets, worst_peak

BROKEN = "nnx invariant broken"
REFUSED = "nnx nesting not supported by flax"
REFUSED_MODE = "nnx mode not supported by flax"
NOTHING = "nnx nothing was checked"

_REASONS = {"failed": "raised", "rejected": "reason"}
"""Labels of the row that says why a nesting has its verdict."""

_RANDOM = "if the body depends on randomness, make it repeat itself: the nesting may not be the cause"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of one check. ``str(report)`` is the message of a failure, or one line if nothing failed."""

    outcomes: tuple[Outcome, ...]
    """One outcome for each nesting, in the order in which they ran."""
    settings: Settings
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
        worst = tally.of_mode(list(self.outcomes))
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
    def modes(self) -> dict[str, Verdict]:
        """The worst verdict in each mode of flax that nestings ran in; ``rejected`` if flax refuses the call in that mode."""
        return {mode: tally.of_mode(outcomes) for mode, outcomes in tally.by_mode(self.outcomes).items()}

    def __str__(self) -> str:
        return message(self, self.shown) if self.shown else "\n".join([*self.unexpected, summary(self)])


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
    for mode, outcomes in tally.by_mode(report.outcomes).items():
        verdict = tally.of_mode(outcomes)
        if verdict == "rejected":
            lines.append(f"{mode} {VERDICTS[verdict]}   {tally.rejection(outcomes)}")
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
            rows.append(("", _RANDOM))
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


def wrapped(lines: str, width: int, label: str = "") -> str:
    """Notes below the line of their test, each filled to the width of the terminal."""
    return "".join("\n" + fill(label + note, max(width, 40), "    ", "      ") for note in lines.splitlines())


def properties(report: Report) -> list[tuple[str, str | int]]:
    """The report as flat pairs: they cross to xdist's controller, and read well in JUnit's XML."""
    verdicts, worst, on = kinds(report.outcomes), worst_peak(report.outcomes), worst_on_targets(report.outcomes)
    came_true = [
        (entry, sum(entry.key in outcome.expected for outcome in report.outcomes))
        for entry in report.settings.expected_failures
    ]
    modes = (
        ", ".join(f"{mode} {VERDICTS[verdict]}" for mode, verdict in report.modes.items())
        if _shows_modes(report)
        else ""
    )
    seconds = ", ".join(f"{each.target} {each.seconds:.1f} s" for each in on if not each.left_out)
    pairs = {
        "nnx_verdict": report.verdict if report.outcomes else None,
        "nnx_nestings": len(report.outcomes),
        **{f"nnx_{verdict}": verdicts[verdict] for verdict in ("held", "violated", "failed", "rejected", "expected")},
        "nnx_unfit": verdicts["unfit"] or None,
        "nnx_not_run": report.not_run or None,
        "nnx_peak": worst.peak if worst else None,
        "nnx_peak_nesting": str(worst.nesting) if worst else None,
        "nnx_budget": worst.budget if worst else None,
        "nnx_targets": target_rows.brief(on) or None,
        "nnx_target_seconds": seconds if on else None,
        "nnx_expected_failures": "; ".join(f"{e}: {counted(n, 'nesting')}" for e, n in came_true if n) or None,
        "nnx_modes": modes or None,
        "nnx_advice": "\n".join(report.advice) or None,
        "nnx_notes": "\n".join(report.notes) or None,
    }
    return [(name, value) for name, value in pairs.items() if value is not None]


def summary(report: Report) -> str:
    """One line: nestings run, their verdicts, the worst peak against its budget, whether the programs fit their targets."""
    return summary_of(dict(properties(report)))


def summary_of(figures: Mapping[str, str | int]) -> str:
    """That line, from the flat pairs of a test report."""
    verdicts = {verdict: int(figures.get(f"nnx_{verdict}", 0)) for verdict in VERDICTS}
    total = int(figures["nnx_nestings"])
    text = f"{counted(total, 'nesting')}: {counts(verdicts) or 'none finished'}"
    text += f", {figures['nnx_not_run']} not run" if "nnx_not_run" in figures else ""
    if "nnx_peak" in figures:
        budget = f", budget {format_bytes(int(figures['nnx_budget']))}" if "nnx_budget" in figures else ""
        text += f"; worst peak {format_bytes(int(figures['nnx_peak']))} ({figures['nnx_peak_nesting']}){budget}"
    text += f"; {figures['nnx_targets']}" if "nnx_targets" in figures else ""
    text += f"; modes: {figures['nnx_modes']}" if "nnx_modes" in figures else ""
    return text
