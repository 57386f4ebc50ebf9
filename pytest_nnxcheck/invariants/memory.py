"""Peak memory stays within its bound, and no program holds a second copy of its state."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.evidence import FLOOR, Advice, Bound
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.notes import Fact, FactKind
from pytest_nnxcheck.core.observation import Buffer, Memory, Observation
from pytest_nnxcheck.core.outcome import (
    ConstantsCaptured,
    Figures,
    Finding,
    MemoryWasted,
    PeakCause,
    PeakOverBudget,
    StateCopied,
    Violation,
)
from pytest_nnxcheck.inspection.buffers import state_copies
from pytest_nnxcheck.invariants.case import Case, Judgement
from pytest_nnxcheck.invariants.donation import displaced_leaves
from pytest_nnxcheck.subject.profile import Profile
from pytest_nnxcheck.transforms.compose import differentiated

SLICED = frozenset({"dynamic-update-slice"})
"""Of what a copy goes through: written slice by slice."""

COPY_SHARE = 0.75
"""Of the state's bytes: healthy models copy half of theirs at most (a donated kernel that is still read)."""


def judge(case: Case) -> Judgement:
    """The bound, and what breaks none but is advised against where the settings make that a violation."""
    if case.bound is None:
        return Judgement()
    advised = case.advice()  # whatever breaks: reports have the figures of the un-nested call that it is made of
    findings = memory(case, case.bound) or wasted(advised)
    return Judgement((Violation("memory", findings=findings),) if findings else ())


def wasted(advice: tuple[Advice, ...]) -> tuple[Finding, ...]:
    """What advice on the un-nested call says is broken."""
    return (MemoryWasted(advice=advice),) if advice else ()


def memory(case: Case, bound: Bound) -> tuple[Finding, ...]:
    """What breaks the bound; with the default bound also copies of the state and captured constants."""
    observation, profile, used = case.observation, case.profile, case.observation.memory
    if used is None:
        return ()
    findings: list[Finding] = []
    copies = copied_state(case, used)
    size = 0 if saves_residuals(observation.nesting) else sum(buffer.bytes for buffer in copies)
    figures = Figures(used.split, bound, profile.state_bytes, profile.devices, cause(case, copies))
    if used.peak > bound.budget:
        findings.append(PeakOverBudget(figures=figures))
    if bound.default and too_many(size, profile):
        findings.append(StateCopied(figures=figures, bytes=size))
    if bound.default and captures(observation, profile):
        own = replace(figures, cause=captured_cause(profile))
        findings.append(ConstantsCaptured(figures=own, bytes=profile.constant_bytes))
    return tuple(findings)


def too_many(size: int, profile: Profile) -> bool:
    """Whether copies of this size are a second copy of the state."""
    return size >= max(COPY_SHARE * profile.state_bytes, FLOOR)


def saves_residuals(nesting: Nesting) -> bool:
    """Whether a loop or a branch is differentiated: of what it carries or is handed it saves all that the backward pass needs, parameters included.

    That is how jax differentiates a generated one, whatever the module; XLA of jax 0.12 copies nothing for a branch. The peak is judged, its copies are not.
    """
    return any(row.loop == "counted" or row.branches for row in differentiated(nesting))


def copies_not_judged(case: Case) -> tuple[Fact, ...]:
    """Notes on copies of the state that are not judged."""
    observation, used = case.observation, case.observation.memory
    if used is None:
        return ()
    kinds: dict[FactKind, tuple[Buffer, ...]] = {
        "copies of a loop": copied_state(case, used) if saves_residuals(observation.nesting) else (),
        **inserted(case, used),
    }
    return tuple(
        Fact(kind, count=size / case.profile.state_bytes)
        for kind, those in kinds.items()
        if too_many(size := sum(copy.bytes for copy in those), case.profile)
    )


def captures(observation: Observation, profile: Profile) -> bool:
    """Whether the call captures constants worth telling that are the user's: a generated closure captures the state by construction."""
    return not observation.nesting.captures and profile.constant_bytes >= FLOOR


def copied_state(case: Case, used: Memory) -> tuple[Buffer, ...]:
    """Buffers that are a whole state leaf again, but for those that XLA inserts for leaves which it widens, that are only written, or made anew."""
    copies = all_copies(case, used)
    excused = [copy for those in inserted(case, used).values() for copy in those]
    return tuple(copy for copy in copies if copy not in excused)


def inserted(case: Case, used: Memory) -> dict[FactKind, tuple[Buffer, ...]]:
    """The copies that no line of the user's asks for, by the first reason why XLA inserts them."""
    copies = all_copies(case, used)
    read_first = of_leaves(case, copies, case.written.read_first)
    reasons: dict[FactKind, tuple[Buffer, ...]] = {
        "copies of XLA": widened(used, copies),
        "copies of what is overwritten": of_leaves(case, copies, case.written.overwritten),
        "copies of what is made anew": of_leaves(case, copies, case.written.remade),
        "copies of what is read first": () if not read_first or compat.barriers_order() else read_first,
    }
    reason = {id(copy): kind for kind, those in reversed(reasons.items()) for copy in those}
    return {kind: tuple(copy for copy in those if reason[id(copy)] == kind) for kind, those in reasons.items()}


def all_copies(case: Case, used: Memory) -> tuple[Buffer, ...]:
    """Outputs only count where the state is donated, so that they need not exist.

    Where an output that the call computes took the buffer of a leaf, that output or the leaf must be new, whatever the call does: so many leaves of its
    type as there are such outputs.
    """
    observation = case.observation
    copies = state_copies(used, range(len(observation.parameters)))
    temporaries = tuple(copy for copy in copies if copy.kind == "temporary")
    if temporaries == copies or not observation.moves:
        return temporaries
    displaced, computed = displaced_leaves(observation), Counter(case.profile.computed)
    types = {move.before.path: move.before.type for move in observation.moves}
    counted = []
    for copy in copies:
        leaf = observation.parameters[copy.parameters[0]]
        if copy.kind == "output" and leaf in displaced and computed[types[leaf]]:
            computed[types[leaf]] -= 1
        else:
            counted.append(copy)
    return tuple(counted)


def widened(used: Memory, copies: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    """The copies that XLA for the CPU inserts: it makes a leaf of 16 bit floats anew in float32, and writes both, of which one must not be the leaf.

    A cache in bfloat16 that is written in place and then read, say: no line of the user's copies it, and an accelerator does not. What a loop copies
    slice by slice is the loop's.
    """
    wide = {
        buffer.shape.removeprefix("float32")
        for buffer in used.buffers
        if buffer.kind == "temporary" and buffer.operation == "convert" and buffer.inserted
    }
    narrow = {f"{kind}{shape}" for kind in ("bfloat16", "float16") for shape in wide}
    return tuple(copy for copy in inserted_whole(copies) if copy.shape in narrow)


def of_leaves(case: Case, copies: tuple[Buffer, ...], leaves: frozenset[str]) -> tuple[Buffer, ...]:
    """The copies that XLA inserts of some leaves.

    Those of which the call writes a part, and reads nothing that was there before, as of a cache, decoded into: XLA before jax 0.7 needs the
    old values, since it computes the write once more inside of each reader. And those that get another value as a whole, by a branch, a shift or
    a choice of each element: it reads the old values while it writes the new ones into the same buffer, and without donation the output would
    be that second buffer. And those of which it reads the old values before it writes a part, where nothing tells XLA so. Where something needs
    the old values beside the new ones, that is the user's.
    """
    names = case.observation.parameters
    return tuple(copy for copy in inserted_whole(copies) if {names[number] for number in copy.parameters} <= leaves)


def inserted_whole(copies: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
    """The copies that XLA inserted, in one piece."""
    return tuple(copy for copy in copies if copy.kind == "temporary" and copy.inserted and not SLICED & {*copy.through})


def cause(case: Case, copies: tuple[Buffer, ...]) -> PeakCause:
    """Why the peak is what it is, where that is known: a scan that writes its parameters back, constants that could be arguments, leaves that are
    returned as well, a read that could come before a write.
    """
    observation, profile = case.observation, case.profile
    if profile.rewritten and any(not copy.updated for copy in copies):
        if not profile.remat_in_scan:
            return "scan writes back"
        return "scan writes back, remat" if compat.remat_updates_can_be_off() else "scan writes back, checkpoint"
    if captures(observation, profile):
        return captured_cause(profile)
    if copies and all(copy.kind == "output" for copy in copies):
        return "returned"
    ordered = copies and of_leaves(case, copies, case.written.read_first) == copies
    if ordered and compat.barriers_order():
        return "read, then written"
    return "mapped branch" if profile.branches and not copies and broadcasts_for_map(observation) else ""


def broadcasts_for_map(observation: Observation) -> bool:
    """Whether a vmap repeats something large for each of its elements: of a branch that is chosen by a mapped value, jax runs all, and repeats what they use."""
    used = observation.memory.buffers if observation.memory else ()
    repeats = (buffer for buffer in used if buffer.kind == "temporary" and "broadcast" in buffer.operation)
    return any(layer.row.axis == "elements" for layer in observation.nesting.layers) and any(
        buffer.bytes >= FLOOR for buffer in repeats
    )


def captured_cause(profile: Profile) -> PeakCause:
    """Whether the user's code keeps one of the captured constants, or the call made them all itself."""
    return "captured constant" if any(constant.name for constant in profile.captured) else "constant of the call"
