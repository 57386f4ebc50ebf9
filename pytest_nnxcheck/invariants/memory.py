"""Peak memory stays within its bound, and no program holds a second copy of its state."""

from __future__ import annotations

from pytest_nnxcheck.core.evidence import FLOOR
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.observation import Buffer, Memory, Observation
from pytest_nnxcheck.core.outcome import Finding, Kind, Violation
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.inspection.buffers import state_copies
from pytest_nnxcheck.invariants import hints
from pytest_nnxcheck.invariants.bound import Bound
from pytest_nnxcheck.invariants.case import Case, Judgement
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.transforms.compose import differentiated

COPY_SHARE = 0.75
"""Of the state's bytes: healthy models copy half of theirs at most (a donated kernel that is still read)."""


def judge(case: Case) -> Judgement:
    """The bound, and what breaks none but is advised against where the settings make that a violation."""
    if case.bound is None:
        return Judgement()
    return Judgement(memory(case.observation, case.profile, case.bound) or wasted(case.advice()))


def wasted(advice: tuple[str, ...]) -> tuple[Violation, ...]:
    """The violation that advice on the un-nested call makes."""
    if not advice:
        return ()
    rows = tuple(("advice", text) for text in advice)
    summary = "the un-nested call spends memory that it need not"
    return (Violation("memory", summary, rows, findings=(Finding("memory wasted"),)),)


def memory(observation: Observation, profile: Profile, limit: Bound) -> tuple[Violation, ...]:
    """Violations of the bound; with the default bound also copies of the state and captured constants."""
    used = observation.memory
    if used is None:
        return ()
    found: dict[Kind, str] = {}
    copies = copied_state(observation, used)
    size = 0 if saves_steps(observation.nesting) else sum(buffer.bytes for buffer in copies)
    if used.peak > limit.budget:
        found["peak over budget"] = f"peak {format_bytes(used.peak)} is over the budget of {format_bytes(limit.budget)}"
    if limit.default and too_many(size, profile):
        found["state copied"] = (
            f"the program holds {size / profile.state_bytes:.1f} more copies of its state at the peak"
        )
    if limit.default and captures(observation) and profile.constant_bytes >= FLOOR:
        found["constants captured"] = f"the call captures {format_bytes(profile.constant_bytes)} of constants"
    if not found:
        return ()
    summary, *others = found.values()
    rows = [("", text) for text in others]
    return (
        Violation(
            "memory",
            summary,
            (*rows, *details(profile, used, limit)),
            hint(observation, profile, copies),
            tuple(map(Finding, found)),
        ),
    )


def too_many(size: int, profile: Profile) -> bool:
    """Whether copies of this size are a second copy of the state."""
    return size >= max(COPY_SHARE * profile.state_bytes, FLOOR)


def saves_steps(nesting: Nesting) -> bool:
    """Whether a loop is differentiated: of what it carries it saves all that the backward pass needs of a step, parameters included.

    That is how jax differentiates a generated loop, whatever the module. The peak is judged, its copies are not.
    """
    return any(row.loop == "counted" for row in differentiated(nesting))


def saved_state(observation: Observation, profile: Profile) -> tuple[str, ...]:
    """A note on copies of the state that are not judged."""
    if observation.memory is None or not saves_steps(observation.nesting):
        return ()
    size = sum(buffer.bytes for buffer in copied_state(observation, observation.memory))
    if not too_many(size, profile):
        return ()
    return (
        f"{size / profile.state_bytes:.1f} copies of the state not judged: the differentiated loop saves it for each step",
    )


def captures(observation: Observation) -> bool:
    """Whether constants of the program are the user's: a generated closure captures the state by construction."""
    return not any(layer.captures for layer in observation.nesting.layers)


def copied_state(observation: Observation, used: Memory) -> tuple[Buffer, ...]:
    """Buffers that are a whole state leaf again; outputs only count where the state is donated, so that they need not exist."""
    copies = state_copies(used, range(len(observation.parameters)))
    return copies if observation.moves else tuple(buffer for buffer in copies if buffer.kind == "temporary")


def details(profile: Profile, used: Memory, limit: Bound) -> list[tuple[str, str]]:
    """The totals; the report says where the bytes are."""
    parts = {
        "arguments": used.arguments,
        "outputs": used.outputs,
        "temporaries": used.temporaries,
        "constants": used.constants,
    }
    split = " + ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
    rows = [
        ("peak", f"{format_bytes(used.peak)} = {split} - aliased {format_bytes(used.aliased)}"),
        ("budget", f"{format_bytes(limit.budget)} ({limit.origin})"),
        ("expected", f"{format_bytes(limit.expected)}   state {format_bytes(profile.state_bytes)}"),
    ]
    if profile.devices > 1:
        rows.append(("devices", f"{profile.devices}, the bytes are those of one"))
    return rows


def hint(observation: Observation, profile: Profile, copies: tuple[Buffer, ...]) -> str:
    """What to change, where the cause is known: a scan that writes its parameters back, constants that could be arguments."""
    if copies and profile.rewritten:
        return hints.scan_cure(profile.remat_in_scan)
    if captures(observation) and profile.constant_bytes >= FLOOR:
        return hints.hint("captured constant")
    return ""
