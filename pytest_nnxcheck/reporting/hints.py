"""The advice for each known cause: the change to make.

A test follows each line of the table: it makes the change and sees the nesting hold. `does_not_fit` alone names ways that nobody tried. No hint is
better than a wrong one: a cause that is not here has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pytest_nnxcheck.core import facts, outcome
from pytest_nnxcheck.core.catalogue import FURTHER, TRANSFORMS
from pytest_nnxcheck.core.facts import Advice, ArrayType, Leak, Twice
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.notes import CapturedNode
from pytest_nnxcheck.core.outcome import Finding, TracerLeft, TypeMoved, ValueDiffers, Violation
from pytest_nnxcheck.core.peak import PeakCause
from pytest_nnxcheck.core.text import format_bytes, some
from pytest_nnxcheck.reporting.memory_breakdown import listed

TABLE = {
    "plain value": "keep the value in an nnx.Variable that __init__ makes: {path} is a plain Python {holder}, which no transform carries out",
    "plain value, data": "keep the value in an nnx.Variable that __init__ makes, or wrap it in nnx.data(...) where the attribute is set first:"
    " {path} is plain Python, which no transform carries out",
    "plain value, container": "keep the value in an nnx.Variable that __init__ makes, in place of the {holder}: {path} is plain Python, which"
    " no transform carries out",
    "plain value, nnx container": "put an nnx.Variable into the {holder} in __init__, and write the value into that: flax takes {path}, a bare"
    " array that was put there in a trace, for static",
    "plain value, captured": "keep the value in an nnx.Variable, and pass the module as an argument: {path} is a plain Python {holder}",
    "plain value, State": "wrap in nnx.data(...), where it is set first, what holds the nnx.State: {path} is in a plain Python value of the"
    " module, which no transform carries out",
    "plain object": "keep the value in an nnx.Variable of the module: {path} belongs to a plain Python object, which no transform"
    " carries out",
    "kept by what is returned": "make it with NumPy, which nothing traces, or keep the value in an nnx.Variable of what the call returns: {path} is plain Python,"
    " which keeps what the trace made",
    "input": "let the transform that made {path} return it: what it keeps in another way has no value outside of it",
    "kept function": "keep the value in an nnx.Variable that __init__ makes: a function in {path} captured it, and outlives the trace",
    "kept function, outside": "do not keep in {path} a function that captured an array made under a transform: it outlives the trace",
    "metadata": "keep the value in an nnx.Variable of its own: {path}, of another one, goes out of no transform",
    "cached property": "make it a property, or compute it in __init__ and keep it in an nnx.Variable: functools.cached_property keeps"
    " what the first trace computes in {path}",
    "outlives": "do not keep arrays made under a transform in {holder}: it outlives the trace",
    "generator": "hand in what it yields as an argument, or draw keys from an nnx.Rngs of the module: {path} is a local variable of a"
    " generator, which keeps what the first trace made",
    "pinned": "build it outside of the transform, or hand it out as an output of nnx.jit or nnx.eval_shape, which make it anew",
    "captured": "pass the module as an argument: nnx.{transform}(f)({modules}, x)",
    **{
        f"captured by {name}": "pass the module as an argument: nnx.vmap(f, in_axes=(None, 0))(model, x), where f only reads it; what it writes"
        " has an axis of its own: nnx.split_rngs for rngs, in_axes=nnx.StateAxes(...) for the rest"
        for name in ("vmap", "vectorize")
    },
    **{
        f"captured by {name}": "hand the state of graphdef, state = nnx.split(model) to f, which calls nnx.merge(graphdef, state) and returns"
        " the new nnx.state beside the result; nnx.update(model, state) writes it back"
        for name in ("custom_jvp", "custom_vjp")
    },
    "captured by eval_shape": "pass the module as an argument: nnx.eval_shape(f, {modules}, x)",
    **{
        f"captured by {name}": f"pass the module as a further argument, after the one to differentiate: nnx.{name}(f)(x, {{modules}})"
        for name in ("grad", "value_and_grad")
    },
    "captured by checkpoint": "pass the module as an argument: nnx.remat(f)({modules}, x)",
    "captured by while_loop": "pass the module in the loop's carry: nnx.while_loop(cond, body, ({modules}, x))",
    "captured by fori_loop": "pass the module in the loop's carry: nnx.fori_loop(0, n, body, ({modules}, x))",
    "captured by scan": "pass the module in the scan's carry: nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)",
    "captured by map": "scan with the module in the carry: nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)",
    "captured by cond": "pass the module as an operand: nnx.cond(pred, f, g, {modules}, x)",
    "captured by switch": "pass the module as an operand: nnx.switch(index, branches, {modules}, x)",
    "captured by shard_map": "pass the state of nnx.split to jax.shard_map, with nnx.merge in its body",
    **{
        f"captured by {name}": "let f call a copy and hand its state out beside the result, copy = nnx.clone(model) and then"
        f" return copy(x), nnx.state(copy), under jax.{name} with has_aux=True; nnx.update(model, state) writes it back"
        for name in ("jvp", "vjp", "linearize", "jacfwd", "jacrev", "hessian")
    },
    "captured by the call": "hand the module to the call as an argument: wrap f, and call it as f({modules}, x)",
    "captured by registered": "{transform} should hand the module on as an argument of f",
    "merged": "write nnx.merge(..., copy=True): without it the module has the Variables of the state itself, which cannot be written here;"
    " hand nnx.state(copy) out beside the result, under jax.grad with has_aux=True, and write it back with nnx.update(model, state), or what the copy"
    " changes is lost",
    "captured constant": "hand the captured arrays, or the module that holds them, to the function as an argument",
    "constant of the call": "make with jnp what NumPy makes in the call, or keep it in an nnx.Variable of the module: as a constant it is part of"
    " every program that is compiled",
    "scan writes back, remat": "inside your nnx.scan write nnx.remat(f, graph_updates=False): without that, nnx.remat returns every parameter as if it had changed, and nnx.scan copies them all",
    "scan over references": "read them by their index in the loop, reference[i]: jax.lax.scan over references copies them all, since it takes"
    " out the slice of each step and puts it back",
    "scan writes back": "scan with jax.lax.scan over the state of nnx.split, with nnx.merge in its body{checkpoint}: parameters go in and"
    " never come out",
    "mapped branch": "call every branch and choose among what they return, jnp.stack([f(x) for f in branches])[index]: where vmap maps the index it runs all"
    " of them anyway, and repeats the weights that they use for each element",
    "returned": "leave the state out of what the call returns: its caller has it in the module, and an output is an array of its own",
    "not donated": "donate {names} as well: with donate={donate!r} the nesting holds, at a peak of {peak}; in your own code"
    " nnx.jit(f, donate_argnames=...)",
    "shared": "give one of them an array of its own, jnp.copy(value); after nnx.clone too, which copies no array, and where an"
    " optimizer keeps the parameters: nnx.update(optimizer, jax.tree.map(jnp.copy, nnx.state(optimizer)))",
    "dropped": "update the optimizer that was passed in, or return the copy",
    "viewed": "copy the view: np.array(view), or drop it before the step",
    "dtype": "cast the new value back to {dtype} before it is stored or returned{line}",
    "other kind": "make it {dtype} where it is made first: {old} does not hold what is stored there",
    "reference": "write into the reference that is there, variable[...] = value, and hand nnx.update no arrays for it: in place it keeps its buffer",
    "reference lost": "write the transform with graph=False or graph_updates=False, or that of jax: nnx.remat, nnx.cond, nnx.vmap, nnx.scan and"
    " nnx.grad of flax's graph mode write to copies of the references",
    "reference twice": "read and write the reference outside of what jax.checkpoint makes again, or make it with jax.new_ref(value,"
    " kind='no_grad_no_remat'): a gradient runs the write a second time, and differentiates that run",
    "grows": "make it as long as it gets from the start, and write with jax.lax.dynamic_update_slice: a donated buffer keeps its size",
    "sharding": "give the new value the old sharding before it is stored: jax.lax.with_sharding_constraint(value, old)",
    "not returned": "return the new value of every donated array; do not donate an array that has none, a batch for example",
    "attribute dropped": "keep the value in an nnx.Variable. {path} is a plain Python attribute: a loop traces its body once, so that"
    " it changes once, and most other transforms lose the change",
    "flag dropped": "keep the flag in an nnx.Variable and choose with jnp.where, since no Python if can read it there: {path} is a plain"
    " Python bool: a loop traces its body once, so that it changes once, and most other transforms lose the change",
    "broadcast": "carry it: in_axes=(nnx.StateAxes({{{kind}: nnx.Carry, ...: None}}), 0), with the other axes that yours has, or nnx.Carry for"
    " the whole module",
    "attribute counted": "keep the value in an nnx.Variable: {path} is a plain Python attribute, and every value of it is compiled anew",
    "jit made anew": "make the jit once, outside of the call, at module level say, and hand it the same functions each time: a lambda or a partial that the"
    " call makes is another one in each call",
    "weak type": "make it an array of its type where it is made first, jnp.asarray(value, jnp.{dtype}): {path} was made of a Python number",
    "value": "a trace has no values: for an if on one write jnp.where or nnx.cond, for a loop that ends on one nnx.while_loop, for a slice"
    " jax.lax.dynamic_slice, for a mask as index jnp.where, and jnp where np is; what depends on shapes alone is computed with math or np",
    "jax transform": "a transform of jax updates a copy of a module: write nnx.jit(f)(model, x) instead of jax.jit(f)(model, x), and nnx.cond or"
    " nnx.switch instead of that of jax.lax",
}
"""Cause to advice; `hint` fills in the braces."""

MODULES = "model"
"""The name in an advice of the module that somebody is to hand in."""


def hint(cause: str, **filled: object) -> str:
    """The advice for a cause of the table."""
    return TABLE[cause].format(**{"modules": MODULES, **filled})


# --- tracers

NNX_CONTAINERS = ("nnx.List", "nnx.Dict")
PLAIN = ("attribute", "list", "dict", "tuple", "set", "deque", "array", *NNX_CONTAINERS)
IN_FUNCTIONS = ("closure", "default argument")
WITH_OWN_HINT = ("cached property", "metadata", "generator", "input", "reference")
OUTLIVING = ("cached property", "generator", "cache", "global", "class attribute", *IN_FUNCTIONS, "context variable")


def tracer_left(finding: TracerLeft) -> str:
    """Advice for a leaked tracer, by its holder and by the layer that leaked it; empty where none is certain."""
    leak, path = finding.leak, finding.path
    if leak.holder in WITH_OWN_HINT:
        return hint(leak.holder, path=path)
    if leak.place == "returned":
        return hint("kept by what is returned", path=path)
    if leak.keeper and (is_plain(leak) or leak.holder in IN_FUNCTIONS):
        return hint("kept function, outside" if leak.place == "outside" else "kept function", path=leak.keeper)
    if is_plain(leak):
        return plain_value(leak, has_data=finding.has_data)
    if leak.holder in OUTLIVING:
        return hint("outlives", holder=article(leak.holder))
    if leak.holder == "frame":
        return hint("outlives", holder="an exception, whose traceback has the frame")
    if not leak.layer:
        return ""
    if leak.captured:
        name = Layer.parse(leak.layer).transform
        is_known = f"captured by {name}" in TABLE or name in (*TRANSFORMS, *FURTHER)
        return captured_by(name) if is_known else hint("captured by registered", transform=name)
    if leak.place == "outside":
        return hint("outlives", holder="what is no part of the module")
    return hint("plain value, State", path=path) if leak.place == "module" and finding.has_data else ""


def is_plain(leak: Leak) -> bool:
    """True if a plain Python value holds the tracer, and that is not the value of a Variable."""
    return leak.holder in PLAIN and leak.place != "variable"


def plain_value(leak: Leak, *, has_data: bool) -> str:
    """Advice for a tracer in a plain Python value, by where that is."""
    if leak.place == "outside":
        return hint("outlives", holder=f"{article(leak.holder)} outside of the module")
    cause = "plain value, data" if has_data else "plain value"
    if leak.place == "object":
        cause = "plain object"
    elif leak.holder in NNX_CONTAINERS:
        cause = "plain value, nnx container"
    elif leak.captured:
        cause = "plain value, captured"
    elif leak.holder != "attribute":
        cause = "plain value, container"
    return hint(cause, path=leak.path, holder=leak.holder)


def asks_to_hand_on(violation: Violation) -> bool:
    """True if the advice is to hand the module to a layer that captured it."""
    leaks = [finding.leak for finding in violation.findings[:1] if isinstance(finding, TracerLeft)]
    return any(not is_plain(leak) and leak.holder not in OUTLIVING and leak.captured for leak in leaks)


def article(noun: str) -> str:
    """``a list``, ``an attribute``."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def captured_by(name: str, nodes: Sequence[CapturedNode] = ()) -> str:
    """Advice to hand the graph nodes that it captured to a transform of the user's own code; without a name, to the call itself."""
    names = dict.fromkeys(node.name.rpartition(".")[2] if node.is_argument else "" for node in nodes)
    modules = ", ".join(names) if len(names) > 1 and all(names) else MODULES
    cause = f"captured by {name or 'the call'}"
    return hint(cause if cause in TABLE else "captured", transform=name, modules=modules)


# --- donation


def buffer(finding: Finding) -> str:
    """Advice for the first finding of donation."""
    match finding:
        case outcome.SharedBuffer() | outcome.Orphaned():
            return hint("shared")
        case outcome.ViewedBuffer():
            return hint("viewed")
        case outcome.UpdateDropped():
            return hint("dropped")
        case outcome.LostBuffer(cause="dtype", type=old, new=new, line=line):
            return other_dtype(old.dtype, new.dtype if new else "", f": it changes at {line}" if line else "")
        case outcome.LostBuffer(cause="shape", type=old, new=new) if elements(new) > elements(old):
            return hint("grows")
        case outcome.LostBuffer(cause="sharding" | "not returned" | "reference" as cause):
            return hint(cause)
    return ""


def elements(type_: ArrayType | None) -> int:
    """The number of elements of an array of this type."""
    return math.prod(type_.shape or ()) if type_ else 0


def other_dtype(old: str, new: str, line: str = "") -> str:
    """Advice for a value that has become of another type."""
    # Cast back, an integer would lose its fraction, and there is no cast to `None`.
    whole = old.startswith(("int", "uint", "bool", "NoneType"))
    if whole and new.startswith(("float", "bfloat", "complex")):
        return hint("other kind", dtype=new, old=old)
    return hint("dtype", dtype=old, line=line)


# --- the other invariants


def peak(cause: PeakCause) -> str:
    """Advice for a peak."""
    if cause == "scan writes back, checkpoint":
        return hint("scan writes back", checkpoint=" under jax.checkpoint")
    return hint(cause, checkpoint="") if cause else ""


def does_not_fit(larger: Sequence[str]) -> str:
    """Ways to need less memory a device; none of them was tried."""
    slices = f", or shard over more devices: {', '.join(larger)}" if larger else ""
    return f"make the batch smaller, wrap the layers in nnx.remat so that their outputs are computed again{slices}"


def value(finding: ValueDiffers) -> str:
    """Advice for a value that differs; empty where no cure was tried."""
    match finding.cause:
        case "attribute" if finding.type in ("int", "float", "bool"):
            return hint("flag dropped" if finding.type == "bool" else "attribute dropped", path=finding.path)
        case "broadcast":
            return f"a layer that broadcasts the state (None) drops its updates, {hint('broadcast', kind=finding.variable)}"
        case "replaced":
            return hint("reference")
        case "reference":
            return hint("reference lost" if finding.label == "dropped" else "reference twice")
        case "copy":
            return hint("jax transform")
    return ""


def moved(finding: TypeMoved) -> str:
    """Advice for what a second call is traced again for; empty where no cure was tried."""
    old, new = (text.partition("[")[0] for text in (finding.before, finding.after))
    if finding.label == "attribute":
        return hint("attribute counted", path=finding.path) if finding.type in ("int", "float") else ""
    if finding.hardened:
        return hint("weak type", path=finding.path, dtype=new)
    return other_dtype(old, new) if old != new else ""


# --- advice on the memory of the un-nested call

COMES_FIRST = "value, read = jax.lax.optimization_barrier((value, read))"

TWICE: dict[Twice, str] = {
    "old and new at once": "needed beside its new value; keep only the old rows that are overwritten, or write row by row in a loop, and compute there what"
    f" needs both: {COMES_FIRST} puts the read first (jax 0.12 or newer)",
    "read, then written": f"read, and a part of it written in no order with that; read first, {COMES_FIRST}, then write into that value (jax 0.12"
    " or newer)",
    "stacked anew": "taken by a scan step by step, a part written, and stacked anew; carry the whole stack, and write into it in place",
    "joined": "joined into one array; keep them in one Variable, or take each of them separately",
    "cut and joined again": "cut and joined again; write into the whole, in place",
    "reordered": "in another order for a loop; run that with reverse=True, or put a step's part in order inside",
}
"""The ways in which all of a leaf is in memory once more, each with the change to make."""


def advice(piece: Advice) -> str:
    """The sentence of a piece of advice: what most authors would change in the un-nested call."""
    at = f" ({piece.line})" if piece.line else ""
    size = format_bytes(piece.bytes)
    match piece:
        case facts.Recast():
            cure = "cast it inside the loop, a step's part at a time" if piece.looped else f"keep it in {piece.dtype}"
            return f"{size} {piece.type}: all of {piece.name or 'an input'} once more in another dtype; {cure}{at}"
        case facts.HeldTwice():
            whose = listed(piece.names[0], piece.names[1:])
            return f"{size}: all of {whose} once more, {TWICE[piece.operation]}{at}"
        case facts.Saved():
            return (
                f"{size}, the largest part of the peak: {piece.steps} steps of a scan save it for the backward pass,"
                f" {format_bytes(piece.bytes // piece.steps)} each; wrap its body in nnx.remat, or let the policy save less{at}"
            )
        case facts.Stack():
            cure = (
                "and only one step is read; carry that one"
                if piece.read
                else "and nothing reads them; do not return them"
            )
            return f"{size} {piece.type}: a scan stacks its outputs, {cure}{at}"
        case facts.LargeLine():
            handed = format_bytes(piece.handed)
            what = f"one line holds more than state, inputs and outputs together, {handed}"
            return f"{size}, {piece.type} {piece.operation}: {what}{at}"
        case facts.Unused():
            return f"{size}: the call neither reads nor writes {some(piece.names)}; hand it only what it uses"
        case facts.NotDonated():
            why = f"{piece.function} is a jit that changes {' and '.join(piece.arguments)}, and does not donate that"
            return f"{size}: {why}: old and new lie side by side; write {piece.donate} in its {piece.jit}{at}"
