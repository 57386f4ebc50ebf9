"""The notes of a report: each explains a failure, or states a fact that no invariant judges, as data that words itself.

Pure data: nothing here imports jax, flax, hypothesis or pytest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from pytest_nnxcheck.core.facts import ArrayType
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.text import format_bytes, some


class Worded(Protocol):
    """Data that says itself in one sentence."""

    def words(self) -> str:
        """The sentence; with advice, if it explains a failure."""


Note = Worded | str
"""A note. Reports print a text, such as the exception that the call raised, as it is."""


def texts(notes: Iterable[Note]) -> tuple[str, ...]:
    """The sentences of notes, in their order."""
    return tuple(note if isinstance(note, str) else note.words() for note in notes)


# --- what explains a failure


class CapturedNode(NamedTuple):
    """A graph node that a function captured."""

    name: str
    """The name by which it is captured; empty where it is the function itself."""
    type: str
    is_argument: bool = True
    """True if the transforms of flax take it as it is."""

    def __str__(self) -> str:
        return f"{self.name} ({self.type})" if self.name else self.type


@dataclass(frozen=True, slots=True)
class CapturedBy:
    """A transform inside the call, or around it, whose function captured graph nodes."""

    transform: str
    """Empty where the call itself captured them."""
    line: str
    nodes: tuple[CapturedNode, ...]
    leaks: bool = False
    """True if one of them held tracers when the call was over."""

    def words(self) -> str:
        nodes = ", ".join(map(str, self.nodes))
        by = f"{self.transform} at {self.line}" if self.transform else f"the call, {self.line},"
        return f"{by} captured {nodes}; {captured_by(self.transform, self.nodes)}"


ANY = "*"
"""Any transform that has no advice of its own."""

HAND_ON = {
    ANY: "pass the module as an argument: nnx.{transform}(f)({modules}, x)",
    **dict.fromkeys(
        ("vmap", "vectorize"),
        "pass the module as an argument: nnx.vmap(f, in_axes=(None, 0))(model, x), where f only reads it; what it writes"
        " has an axis of its own: nnx.split_rngs for rngs, in_axes=nnx.StateAxes(...) for the rest",
    ),
    **dict.fromkeys(
        ("custom_jvp", "custom_vjp"),
        "hand the state of graphdef, state = nnx.split(model) to f, which calls nnx.merge(graphdef, state) and returns"
        " the new nnx.state beside the result; nnx.update(model, state) writes it back",
    ),
    "eval_shape": "pass the module as an argument: nnx.eval_shape(f, {modules}, x)",
    **{
        name: f"pass the module as a further argument, after the one to differentiate: nnx.{name}(f)(x, {{modules}})"
        for name in ("grad", "value_and_grad")
    },
    "checkpoint": "pass the module as an argument: nnx.remat(f)({modules}, x)",
    "while_loop": "pass the module in the loop's carry: nnx.while_loop(cond, body, ({modules}, x))",
    "fori_loop": "pass the module in the loop's carry: nnx.fori_loop(0, n, body, ({modules}, x))",
    "scan": "pass the module in the scan's carry: nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)",
    "map": "scan with the module in the carry: nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)",
    "cond": "pass the module as an operand: nnx.cond(pred, f, g, {modules}, x)",
    "switch": "pass the module as an operand: nnx.switch(index, branches, {modules}, x)",
    "shard_map": "pass the state of nnx.split to jax.shard_map, with nnx.merge in its body",
    **{
        name: "let f call a copy and hand its state out beside the result, copy = nnx.clone(model) and then"
        f" return copy(x), nnx.state(copy), under jax.{name} with has_aux=True; nnx.update(model, state) writes it back"
        for name in ("jvp", "vjp", "linearize", "jacfwd", "jacrev", "hessian")
    },
    "": "hand the module to the call as an argument: wrap f, and call it as f({modules}, x)",
}
"""The change to make where a transform captured a module, by the name of the transform; without a name it is that of the call."""

MODULES = "model"
"""The name in an advice of the module that somebody is to hand in."""


def captured_by(name: str, nodes: Sequence[CapturedNode] = ()) -> str:
    """Advice to hand the graph nodes that it captured to a transform of the user's own code; without a name, to the call itself."""
    names = dict.fromkeys(node.name.rpartition(".")[2] if node.is_argument else "" for node in nodes)
    modules = ", ".join(names) if len(names) > 1 and all(names) else MODULES
    return HAND_ON.get(name, HAND_ON[ANY]).format(transform=name, modules=modules)


@dataclass(frozen=True, slots=True)
class MergedVariables:
    """An `nnx.merge` inside the call that took over the Variables of another trace, which flax refuses to write."""

    line: str
    node: str
    paths: tuple[str, ...]
    """The paths of the Variables in the node."""

    def words(self) -> str:
        whose = f"nnx.merge at {self.line} takes over {some(self.paths)} of its {self.node} from another trace"
        return f"{whose}; {COPY_MERGED}"


COPY_MERGED = (
    "write nnx.merge(..., copy=True): without it the module has the Variables of the state itself, which cannot be written here;"
    " hand nnx.state(copy) out beside the result, under jax.grad with has_aux=True, and write it back with nnx.update(model, state), or what the copy"
    " changes is lost"
)


@dataclass(frozen=True, slots=True)
class Mapped:
    """The state and the inputs that a layer gives an axis; it broadcasts the rest."""

    layer: Layer
    names: tuple[str, ...]

    def words(self) -> str:
        return f"{self.layer} maps {some(self.names, 5)}, and broadcasts the rest"


@dataclass(frozen=True, slots=True)
class RaisedUnNested:
    """The exception that the call raises without a nesting, in one line."""

    text: str

    def words(self) -> str:
        return f"un-nested already: {self.text}"


@dataclass(frozen=True, slots=True)
class ValueAsked:
    """Python asked for a value that is traced: by an ``if``, a ``range``, an index."""

    numbers: tuple[str, ...] = ()
    """The Variables whose numbers it asked for, where these are all; the call changes none of them."""

    def words(self) -> str:
        if not self.numbers:
            return NO_VALUES
        one = len(self.numbers) == 1
        plain, value = ("a plain attribute", "its value") if one else ("plain attributes", "their values")
        return f"keep {some(self.numbers)} as {plain}: a trace has no value of a Variable, and Python asks for {value}"


NO_VALUES = (
    "a trace has no values: for an if on one write jnp.where or nnx.cond, for a loop that ends on one nnx.while_loop, for a slice"
    " jax.lax.dynamic_slice, for a mask as index jnp.where, and jnp where np is; what depends on shapes alone is computed with math or np"
)


# --- facts that nothing judges

FactKind = Literal[
    "abstract", "partly abstract", "left by eval_shape", "raises un-nested", "raises without jit", "adds state", "added, functional", "attributes, functional", "other draws",
    "decided by rounding", "decided by fusion", "many equations", "number",
    "values are kept", "converted", "in another buffer", "in memory of NumPy", "on all devices", "in a new buffer", "left in merged", "inner donations", "not moved",
    "walked in part", "not put back", "mode closed", "untrained", "in one array",
    "peak on target", "left out on target", "nothing on target", "asks for devices", "answered", "on targets alone", "leaked", "made anew", "lost in copies", "beside references", "nothing in references", "written twice",
]  # fmt: skip


FACTS: dict[FactKind, str] = {
    "partly abstract": "{some} has no values, though the rest of {of} has: the call is traced, and never run",
    "left by eval_shape": "{some} has a tracer of nnx.eval_shape: the constructor keeps an array there outside of the module's Variables, and"
    " this call does not read it",
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
    "values are kept": "{all} not asserted: with {of} jax keeps the old values of donated arrays",
    "converted": "{some} is converted to a type that no promotion of types gives: nothing of its old type comes back, so that its buffer cannot be reused",
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
    "asks for devices": "{of} once, and the code keeps the answer, which is the CPU's: on {all} another branch may run",
    "answered": "{of}: answered {all}",
    "on targets alone": "judged on {all} alone, since this CPU cannot lower the program: {of}",
}
"""The sentences of facts; `Fact.words` fills in the braces."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact about leaves, places, subjects, invariants or targets."""

    kind: FactKind
    names: tuple[str, ...] = ()
    of: str = ""
    """A type, a layer, a nesting or what is raised, in one line."""
    count: float = 0
    peaks: tuple[int, int] | None = None
    """Two figures to compare, in bytes a device: that of the target, and the CPU's."""
    of_call: bool = False
    """True if it is about the call, whatever its nesting: it is reported once."""

    def words(self) -> str:
        there, here = self.peaks or (0, 1)
        return FACTS[self.kind].format(
            some=some(self.names),
            all=", ".join(self.names),
            of=self.of,
            count=self.count,
            times=f"{there / here:.2f}",
            peaks=f"{format_bytes(there)} and {format_bytes(here)}",
        )


BufferPlace = Literal["same", "another", "new"]
"""A buffer: the leaf's own, that of another leaf, or a new one."""

PLACES: dict[BufferPlace, str] = {
    "same": "in the same buffer",
    "another": "in the buffer of another leaf",
    "new": "in a new buffer: an output of the call took its own",
}
"""The place of the new value of a donated leaf."""


def retyped(cause: str, new: ArrayType | None, *, output: bool) -> str:
    """The new type of a donated leaf whose dtype or shape changed."""
    return f"its {cause} changed: {'an output is' if output else 'it became'} {new}"


def other_dtype(old: str, new: str, line: str = "") -> str:
    """Advice for a value that has become of another type."""
    # Cast back, an integer would lose its fraction, and there is no cast to `None`.
    whole = old.startswith(("int", "uint", "bool", "NoneType"))
    if whole and new.startswith(("float", "bfloat", "complex")):
        return f"make it {new} where it is made first: {old} does not hold what is stored there"
    return f"cast the new value back to {old} before it is stored or returned{line}"


@dataclass(frozen=True, slots=True)
class BufferRetyped:
    """A donated leaf of another dtype or shape, whose buffer was not lost."""

    path: str
    type: ArrayType
    new: ArrayType
    """Its type after the call."""
    cause: str
    output: bool
    """True if the new value is an output, for an input."""
    place: BufferPlace

    def words(self) -> str:
        changed = retyped(self.cause, self.new, output=self.output)
        return f"{self.path}   {self.type}   {changed}, {PLACES[self.place]}"


@dataclass(frozen=True, slots=True)
class InMappedFile:
    """Leaves of a subject that lie in a memory-mapped file."""

    paths: tuple[str, ...]
    name: str
    file: str

    def words(self) -> str:
        lie = f"{some(self.paths)} of {self.name} {'lies' if len(self.paths) == 1 else 'lie'}"
        instead = "XLA cannot reuse a buffer of NumPy's, so that the first donated step keeps both; write jnp.array(value) where it is loaded"
        return f"{lie} in a memory-mapped file ({self.file}): {instead}"


@dataclass(frozen=True, slots=True)
class StateAdded:
    """The state that the call adds, and the layers that cannot carry it."""

    paths: tuple[str, ...]
    layers: tuple[Layer, ...]

    def words(self) -> str:
        loops = all(layer.row.loop or layer.row.axis for layer in self.layers)
        kinds = "loop" if loops else "loop, branch or custom rule"
        layers = ", ".join(map(str, self.layers))
        return f"the call adds {', '.join(self.paths)}, which no {kinds} can carry: argument {layers} left out"
