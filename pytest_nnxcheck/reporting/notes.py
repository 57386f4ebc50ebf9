"""The sentences of notes: facts that nothing judges, and causes of failures. Made of the data alone; no code reads them back."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_nnxcheck.core import notes as data
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.outcome import LostBuffer
from pytest_nnxcheck.core.text import format_bytes, some
from pytest_nnxcheck.reporting import hints

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
    "in another buffer": "the new value of {some} is in the donated buffer of another leaf: nothing is lost",
    "in memory of NumPy": "{some} lies in the memory of {of}, an array of NumPy: XLA cannot reuse it, so that the first donated step keeps both; write"
    " jnp.array(value), which copies, where it is made",
    "on all devices": "{some} lay on one device, and the program spreads it over all",
    "in a new buffer": "{some} came back in a new buffer: an output of the call took a donated one",
    "leaked": "tracers remain in {some}: the invariants do not name tracers, so that this fails nothing, and no values are compared",
    "made anew": "the body makes its objects anew for each nesting, and no two have an equal {some}: a jit that meets both is traced and compiled"
    " again; where your own code makes them again, in each epoch say, make that once, outside, and hand it in",
    "lost in copies": "the call loses its writes to {some}: a transform of flax inside of it writes to a copy of the reference; as an array it is updated",
    "beside references": "donation of {some} asserted where a layer is functional: jax donates no argument that holds references as well",
    "nothing in references": "nothing of {of} is in references: none of its arguments has a Variable with an array",
    "written twice": "a gradient runs the rematerialized code of {some} again, writes its references once more, and differentiates that run: read and write"
    " them outside, or make them with jax.new_ref(value, kind='no_grad_no_remat')",
    "left in merged": "{of} left tracers in {some} of the module merged inside; they died with it",
    "inner donations": "{count} donated operands of a jit inside the call: the outer jit drops that in silence",
    "not moved": "{some} did not move under {of}: the un-nested call changes it",
    "walked in part": "tracers looked for in part: {some} reaches more than {count:,} objects, or one that cannot be read",
    "mode closed": "no nesting takes the call in the {some} mode ({of})",
    "untrained": "{of} steps its optimizer, and leaves {some} as they are: it trains a copy of the model",
    "in one array": "called without a jit, {of} leaves {all} in one array (pairs: {count}): a jit that donates both is refused from then on; hand"
    " over a copy, jax.tree.map(jnp.copy, ...)",
    "not put back": "{some} could not be put back: the next nesting meets what this one wrote there",
    "peak on target": "the un-nested peak on {some} is {times} times the CPU's: {peaks}",
    "left out on target": "not checked on {all}: {of}",
    "nothing on target": "no program was compiled for {all}: {of}",
    "asks for devices": "{of} is asked while the call is traced, and answers with what jax has here: on {all} another branch may run",
}
"""The sentences of facts; `of_note` fills in the braces."""

PLACES: dict[data.BufferPlace, str] = {
    "same": "in the same buffer",
    "another": "in the buffer of another leaf",
    "new": "in a new buffer: an output of the call took its own",
}
"""The place of the new value of a donated leaf."""


def texts(notes: Iterable[data.Note]) -> tuple[str, ...]:
    """The sentences of notes, in their order."""
    return tuple(map(of_note, notes))


def of_note(note: data.Note) -> str:
    """The sentence of a note; with advice, if the note explains a failure."""
    match note:
        case data.Fact():
            there, here = note.peaks or (0, 1)
            return FACTS[note.kind].format(
                some=some(note.names),
                all=", ".join(note.names),
                of=note.of,
                count=note.count,
                times=f"{there / here:.2f}",
                peaks=f"{format_bytes(there)} and {format_bytes(here)}",
            )
        case data.BufferRetyped():
            return f"{note.path}   {note.type}   {retyped(note)}, {PLACES[note.place]}"
        case data.InMappedFile():
            lie = f"{some(note.paths)} of {note.name} {'lies' if len(note.paths) == 1 else 'lie'}"
            instead = "XLA cannot reuse a buffer of NumPy's, so that the first donated step keeps both; write jnp.array(value) where it is loaded"
            return f"{lie} in a memory-mapped file ({note.file}): {instead}"
        case data.StateAdded():
            loops = all(layer.row.loop or layer.row.axis for layer in note.layers)
            kinds = "loop" if loops else "loop, branch or custom rule"
            layers = ", ".join(map(str, note.layers))
            return f"the call adds {', '.join(note.paths)}, which no {kinds} can carry: argument {layers} left out"
    return explanation(note)


def explanation(cause: data.Explanation) -> str:
    """The sentence of a cause of a failure, with advice."""
    match cause:
        case Leak():
            return f"tracer left in {cause.path}: {cause.type}" + (f", created at {cause.line}" if cause.line else "")
        case data.CapturedBy():
            nodes = ", ".join(map(str, cause.nodes))
            by = f"{cause.transform} at {cause.line}" if cause.transform else f"the call, {cause.line},"
            return f"{by} captured {nodes}; {hints.captured_by(cause.transform, cause.nodes)}"
        case data.MergedVariables():
            whose = f"nnx.merge at {cause.line} takes over {some(cause.paths)} of its {cause.node} from another trace"
            return f"{whose}; {hints.hint('merged')}"
        case data.Mapped():
            return f"{cause.layer} maps {some(cause.names, 5)}, and broadcasts the rest"
        case data.RaisedUnNested():
            return f"un-nested already: {cause.text}"
        case data.ValueAsked():
            return hints.hint("value")
        case str():
            return cause


def retyped(leaf: data.BufferRetyped | LostBuffer) -> str:
    """The new type of a donated leaf whose dtype or shape changed."""
    return f"its {leaf.cause} changed: {'an output is' if leaf.output else 'it became'} {leaf.new}"
