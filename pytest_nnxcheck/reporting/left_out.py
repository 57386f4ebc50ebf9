"""Why nestings are left out, in words: a layer that cannot take the call, a style that flax refuses, and what follows for other nestings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pytest_nnxcheck.core.nesting import Layer, Misfit, MisfitKind, Nesting
from pytest_nnxcheck.core.outcome import Outcome

MISFITS: dict[MisfitKind, str] = {
    "backwards": "grad cannot go backwards through a while_loop: its number of steps is not known beforehand",
    "inside itself": "{of}",
    "retyped": "{keeps}: the call makes {of}, which is {types[0]}, a {types[1]}",
    "retyped, twice": "makes the call twice, and the first makes {of}, which is {types[0]}, a {types[1]}",
    "relabelled": "{keeps}: the call turns {types[0]} of {of} from {types[1]} into {types[2]}",
    "added": "{carries}, and the call adds {of} to it",
    "removed": "{carries}, and the call takes {of} out of it",
    "replaced": "{carries}, and the call puts another Variable in place of {of}, where it could assign to its value",
    "attributes set": "compares the modules before and after a step, and the call sets attributes that are no arrays",
    "sharded leaf": "puts the state whole on each device, and {of} is sharded over several",
    "no float input": "the call takes no floating point array, and with the module captured grad has nothing else to differentiate",
    "no parameter": "the state holds no floating point nnx.Param to differentiate by",
    "no float output": "the call returns no floating point array to differentiate",
    "no derivative": "the call cannot be differentiated: {other}",
    "no graph updates": "{of} needs flax's graph updates, which this mode lacks: the functional style works in every mode",
    "hidden arrays": "the call returns a {of} that holds arrays, which no transform hands out: return a tuple, a list, a dict or a dataclass",
    "own jit": "a jitted function that {of} keeps has captured what {of} holds, and goes on with that whatever it holds"
    " by now: hand the module to the jitted function as an argument",
    "no nnx.shard_map": "flax {of} has no nnx.shard_map",
    "refused": "{of} cannot do this: {other}",
    "reference carried": "{carries}, and jax takes no reference in a carry, such as {of}",
    "in references": "not supported in references: {other}",
    "platform": "this CPU cannot lower the program ({other}): {of}",
    "branch in a loop": "jax {of} cannot differentiate a branch in a loop for this call",
}
"""The reasons; code fills in the braces. Where a layer cannot take the call, it is the subject of the sentence."""


def of_misfit(misfit: Misfit) -> str:
    """Why a nesting cannot take the call, with the layer that cannot."""
    return f"{misfit.layer or ''} {reason(misfit)}".lstrip()


def reason(misfit: Misfit) -> str:
    """The same without the layer."""
    carries = "hands on the state where it skips the call" if misfit.branches else "carries the state"
    what = "metadata" if misfit.kind == "relabelled" else "types"
    keeps = f"{carries}, and {'its branches return the same' if misfit.branches else 'a carry keeps its'} {what}"
    return MISFITS[misfit.kind].format(
        of=misfit.of, other=misfit.other, types=misfit.types, carries=carries, keeps=keeps
    )


def layers_left_out(outcomes: Iterable[Outcome]) -> list[str]:
    """One note for each reason: ``scan, while_loop left out: each carries the state, ...``."""
    misfits: dict[Misfit, dict[Nesting, Misfit]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.nesting.plainness):
        if outcome.misfit is not None:
            misfits.setdefault(outcome.misfit, {})[outcome.nesting] = outcome.misfit
    notes = []
    for same in misfits.values():
        shown = [nesting for nesting in same if len(nesting) == 1] or [*same][:1]
        first = same[shown[0]]
        subject = "each" if len(shown) > 1 else "it"
        is_of_layer = first.layer is not None and len(shown[0]) == 1
        sentence = f"{subject} {reason(first)}" if is_of_layer else of_misfit(first)
        notes.append(f"{', '.join(map(str, shown))} left out: {sentence}")
    return notes


def not_run(layer: Layer, *, left_out: bool) -> str:
    """Why a nesting with a layer that cannot work was not run."""
    return f"not run: {layer} is left out" if left_out else f"not run: {layer.style} is refused"


def refused_styles(outcomes: Mapping[str, Outcome]) -> list[str]:
    """One note for each reason for which flax refused styles: by style the outcome of its probe."""
    reasons: dict[str, list[str]] = {}
    for style, outcome in outcomes.items():
        reasons.setdefault(outcome.reason, []).append(style)
    return [
        f"{', '.join(styles)} refused by this flax, as for every module that a call changes, or hands to a transform of its own: "
        f"{outcomes[styles[0]].nesting} raises {reason}; drawn no more"
        for reason, styles in reasons.items()
    ]
