"""Peak memory stays within its bound, and no program holds a second copy of its state."""

from __future__ import annotations

from dataclasses import dataclass

from pytest_nnxcheck.compat.arrays import nbytes
from pytest_nnxcheck.core.evidence import FLOOR
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.observation import Buffer, Memory, Observation
from pytest_nnxcheck.core.outcome import Finding, Kind, Violation
from pytest_nnxcheck.core.setting_values import Budget
from pytest_nnxcheck.core.text import format_bytes
from pytest_nnxcheck.inspection.buffers import state_copies
from pytest_nnxcheck.invariants import hints
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.transforms.compose import differentiated, factor, kept, maps_written

ASKED = "memory_budget"

DEFAULT_FACTOR = 2
"""Of the expected peak. No healthy model of 48 passed 1.18 of it in 1131 nested programs, on any version."""

COPY_SHARE = 0.75
"""Of the state's bytes: healthy models copy half of theirs at most (a donated kernel that is still read)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What a nesting should cost, and what it may: bytes a device. ``origin`` says where the budget comes from."""

    expected: int
    budget: int
    origin: str
    default: bool


def expected_peak(profile: Profile, baseline: Memory, nesting: Nesting) -> int:
    """``R + (s-1)(i+o) + s(T+i+o+c)``: the un-nested program, and for each element of the axes one more call.

    R is resident (arguments + outputs - aliased) and T temporary bytes of the un-nested jit, i and o its input and output
    bytes, c the bytes of state that the call changes, s the product of the axes. Calibrated on 48 healthy models. Under ``vmap`` c counts
    what the call writes and restores too, where it has to be mapped.

    Under ``grad`` the un-nested program is that of the gradient, o counts the gradients, and the steps of a differentiated loop
    multiply the second s: each leaves behind what the backward pass needs of it.
    """
    return peak_of(profile, baseline, nesting, factor(nesting), kept(nesting))


def on_top(profile: Profile, baseline: Memory, nesting: Nesting) -> int:
    """What the nesting's own axes and steps must hold on top of one call: nothing for ``jit``, ``remat`` and ``while_loop``."""
    return expected_peak(profile, baseline, nesting) - peak_of(profile, baseline, nesting, 1, 1)


def peak_of(profile: Profile, baseline: Memory, nesting: Nesting, elements: int, calls: int) -> int:
    """The expected peak for so many elements of the axes, and so many calls that keep their temporaries."""
    resident = baseline.arguments + baseline.outputs - baseline.aliased + baseline.constants
    output = profile.output_bytes + gradient_bytes(nesting, profile)
    if profile.devices > 1:
        output = max(baseline.outputs - profile.changed_bytes, 0)
    call = profile.input_bytes + output
    written = profile.changed_bytes + profile.restored_bytes * maps_written(nesting)
    return resident + (elements - 1) * call + calls * (baseline.temporaries + call + written)


def gradient_bytes(nesting: Nesting, profile: Profile) -> int:
    """Bytes of the gradients that one call returns: those of the parameters, or of the inputs where the module is captured."""
    sizes = {True: profile.input_bytes, False: sum(map(nbytes, profile.gradients))}
    return sum(sizes[layer.captures] for layer in nesting.layers if layer.row.pair == "gradients")


def bound(observation: Observation, profile: Profile, baseline: Memory, budget: Budget | None) -> Bound:
    """The bound of a nesting: the user's budget, else twice the expected peak plus 64 KiB. Bytes bound one call."""
    expected = expected_peak(profile, baseline, observation.nesting)
    if budget is None:
        return Bound(
            expected,
            DEFAULT_FACTOR * expected + FLOOR,
            f"{DEFAULT_FACTOR}x the expected peak + 64 KiB, the default",
            True,
        )
    if budget.bytes is not None:
        more = on_top(profile, baseline, observation.nesting)
        origin = (
            f"{ASKED} {format_bytes(budget.bytes)} + {format_bytes(more)} for the nesting's own axes" if more else ASKED
        )
        return Bound(expected, budget.bytes + more, origin, False)
    return Bound(expected, round((budget.factor or 0) * expected), f"{budget} the expected peak", False)


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
    """The totals; where the bytes are is told by `pytest_nnxcheck.story`."""
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
