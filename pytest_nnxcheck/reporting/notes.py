"""The sentences of what is told of a nesting beside its violations: why it cannot take the call, and notes. Made of the data alone; nothing reads them back."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_nnxcheck.core import notes as data
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.nesting import Misfit, MisfitKind
from pytest_nnxcheck.core.outcome import LostBuffer
from pytest_nnxcheck.core.text import format_bytes, some
from pytest_nnxcheck.reporting import hints

# --- why a nesting cannot take the call

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
    "no float input": "the call takes no floating point array, and with the module captured grad differentiates by nothing else",
    "no parameter": "the state holds no floating point nnx.Param to differentiate by",
    "no float output": "the call returns no floating point array to differentiate",
    "no derivative": "the call cannot be differentiated: {other}",
    "no graph updates": "{of} needs flax's graph updates, which this mode lacks: the functional style works in every mode",
    "hidden arrays": "the call returns a {of} that holds arrays, which no transform hands out: return a tuple, a list, a dict or a dataclass",
    "own jit": "a jitted function that {of} keeps has captured what {of} holds, and goes on with that whatever it holds"
    " by now: hand the module to the jitted function as an argument",
    "no nnx.shard_map": "flax {of} has no nnx.shard_map",
    "no rule": "jax {of} cannot do this: {other}",
    "branch in a loop": "jax {of} cannot differentiate a branch in a loop for this call",
}
"""What stands in braces is filled in. Where a layer cannot take the call, that is the subject of the sentence."""


def of_misfit(misfit: Misfit) -> str:
    """Why a nesting cannot take the call, with the layer that cannot."""
    return f"{misfit.layer or ''} {reason(misfit)}".lstrip()


def reason(misfit: Misfit) -> str:
    """The same without the layer."""
    branches, filled = misfit.branches, {"of": misfit.of, "other": misfit.other}
    carries = "hands on the state where it skips the call" if branches else "carries the state"
    what = "metadata" if misfit.kind == "relabelled" else "types"
    keeps = f"{carries}, and {f'its branches return the same {what}' if branches else f'a carry keeps its {what}'}"
    return MISFITS[misfit.kind].format(**filled, types=misfit.types, carries=carries, keeps=keeps)


# --- notes


def texts(notes: Iterable[data.Note]) -> tuple[str, ...]:
    """The sentences of notes, in their order."""
    return tuple(text for note in notes for text in of_note(note))


def of_note(note: data.Note) -> tuple[str, ...]:
    """The sentences of a note; of what explains a failure also what to write instead."""
    match note:
        case data.Fact():
            listed = {"some": some(note.names), "all": ", ".join(note.names)}
            there, here = note.peaks or (0, 1)
            listed |= {"times": f"{there / here:.2f}", "peaks": f"{format_bytes(there)} and {format_bytes(here)}"}
            return (FACTS[note.kind].format(**listed, of=note.of, count=note.count),)
        case data.BufferRetyped():
            return (f"{note.path}   {note.type}   {retyped(note)}, {PLACES[note.place]}",)
        case data.InMappedFile():
            lie = f"{some(note.paths)} of {note.name} {'lies' if len(note.paths) == 1 else 'lie'}"
            instead = "XLA cannot reuse a buffer of NumPy's, so that the first donated step keeps both; write jnp.array(value) where it is loaded"
            return (f"{lie} in a memory-mapped file ({note.file}): {instead}",)
        case data.StateAdded():
            loops = all(layer.row.loop or layer.row.axis for layer in note.layers)
            kinds = "loop" if loops else "loop, branch or custom rule"
            layers = ", ".join(map(str, note.layers))
            return (f"the call adds {', '.join(note.paths)}, which no {kinds} can carry: argument {layers} left out",)
    return explanation(note)


def explanation(cause: data.Explanation) -> tuple[str, ...]:
    """What has to do with a failure, and what to write instead."""
    match cause:
        case Leak():
            return (
                f"tracer left in {cause.path}: {cause.type}" + (f", created at {cause.line}" if cause.line else ""),
            )
        case data.CapturedBy():
            nodes = ", ".join(map(str, cause.nodes))
            by = f"{cause.transform} at {cause.line}" if cause.transform else f"the call, {cause.line},"
            return (f"{by} captured {nodes}; {hints.captured_by(cause.transform, cause.nodes)}",)
        case data.MergedVariables():
            whose = f"nnx.merge at {cause.line} takes over {some(cause.paths)} of its {cause.node} from another trace"
            return (f"{whose}; {hints.hint('merged')}",)
        case data.Mapped():
            return (f"{cause.layer} maps {some(cause.names, 5)}, and broadcasts the rest",)
        case data.RaisedUnNested():
            return (f"un-nested already: {cause.text}",)
        case data.ValueAsked():
            return (hints.hint("value"),)
        case str():
            return (cause,)


def retyped(leaf: data.BufferRetyped | LostBuffer) -> str:
    """What a donated leaf has become, where its dtype or its shape is another."""
    return f"{'an output is' if leaf.output else 'became'} {leaf.new}: {leaf.cause} changed"


PLACES: dict[data.BufferPlace, str] = {
    "same": "in the same buffer",
    "another": "in the buffer of another leaf",
    "new": "in a new buffer: an output of the call took its own",
}

FACTS: dict[data.FactKind, str] = {
    "partly abstract": "{some} has no values, though the rest of {of} has: the call is traced, and never run",
    "abstract": "{all} not asserted: the state or the inputs are abstract, and nothing was run",
    "raises un-nested": "{all} not asserted: the same calls raise un-nested, {of}",
    "raises without jit": "{all} inside the call not asserted: with jax.disable_jit it raises {of}",
    "adds state": "{all} not asserted: the call adds state, or takes some away, so that the next one is another",
    "added, functional": "parity of {some} not asserted: the call adds it, and a functional layer hands out the state that was there before",
    "attributes, functional": "parity does not compare {some} where a layer is functional: the call sets a plain Python attribute, and such a"
    " layer hands out the state alone",
    "other draws": "parity of outputs not asserted under vmap: {some} is {of}, whose draws are others in a batch",
    "decided by rounding": "rounding decides {some}: inputs a few roundings away move the un-nested result as far",
    "decided by fusion": "rounding decides {some}: where XLA fuses no operations, the same program gives the values of the un-nested call",
    "many equations": "parity inside {of} not asserted: it makes {count:.0f} operations, which takes minutes without jit",
    "number": "{some} is a Python {of} now, no array: jax.checkpoint outside of a jit hands a constant out as it is",
    "in another buffer": "{some} took another leaf's buffer",
    "in memory of NumPy": "{some} lies in the memory of {of}, an array of NumPy: XLA cannot reuse it, so that the first donated step keeps both; write"
    " jnp.array(value), which copies, where it is made",
    "on all devices": "{some} lay on one device, and the program spreads it over all",
    "in a new buffer": "{some} came back in a new buffer: an output of the call took a donated one",
    "leaked": "tracers remain in {some}: the invariants do not name tracers, so that this fails nothing, and no values are compared",
    "made anew": "the body makes its objects anew for each nesting, and no two have an equal {some}: a jit that meets both is traced and compiled"
    " again; where your own code makes them again, in each epoch say, make that once, outside, and hand it in",
    "left in merged": "{of} left tracers in {some} of the module merged inside; they died with it",
    "inner donations": "{count} donated operands of a jit inside the call: the outer jit drops that in silence",
    "not moved": "{some} did not move under {of}: the un-nested call changes it",
    "walked in part": "tracers looked for in part: {some} reaches more than {count:,} objects, or one that cannot be read",
    "mode closed": "flax takes the call in no nesting of its {some} mode ({of})",
    "untrained": "{of} steps its optimizer, and leaves {some} as they are: it trains a copy of the model",
    "in one array": "called without a jit, {of} leaves {all} in one array (pairs: {count}): a jit that donates both is refused from then on; hand"
    " over a copy, jax.tree.map(jnp.copy, ...)",
    "not put back": "{some} could not be put back: what a nesting left there is met by the next",
    "peak on target": "the un-nested peak on {some} is {times} times the CPU's: {peaks}",
    "left out on target": "left out on {all}: {of}",
    "nothing on target": "no program was compiled for {all}: {of}",
    "asks for devices": "{of} is asked while the call is traced, and answers with what jax has here: on {all} another branch may run",
}
