"""No tracers remain in the state, the module, the code of the subject, or anything reachable from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from pytest_nnxcheck.core.catalogue import FURTHER, TRANSFORMS, InvariantRow
from pytest_nnxcheck.core.facts import Leak
from pytest_nnxcheck.core.nesting import Layer
from pytest_nnxcheck.core.notes import HAND_ON, Note, captured_by
from pytest_nnxcheck.core.outcome import Finding, InProgram, Moment, Violation, Words, uncounted
from pytest_nnxcheck.core.text import Row

if TYPE_CHECKING:
    from pytest_nnxcheck.engine.ran import Ran

ROW = InvariantRow("tracers", order=10, severity=10, default=True, error="TracerResidue")


def judge(ran: Ran) -> Iterator[Finding | Note]:
    """Judge the tracers that leaked; those that died with an inner module are no violation, unless they killed the program.

    Where none leaked, judge the leaves that an ``eval_shape`` touched. Where it touched none, judge the user's own Variables that an ended trace made.
    """
    # Late: a run that is watched loads the findings below, and must not load jax.
    from pytest_nnxcheck.compat import graph, refusals

    seen = ran.observation
    yield from dict.fromkeys(HandedToMock(each.path, each.line) for each in seen.recorded)
    leaks = seen.dropped if refusals.is_tracer_error(seen.error) and not seen.leaks else seen.leaks
    if leaks:
        yield from (TracerLeft(leak.path, leak=leak, has_data=graph.has_data()) for leak in leaks)
    elif seen.mutated:
        yield from (StateTouched(path, layer=layer) for layer, path in seen.mutated)
    else:
        yield from (MadeInEndedTrace(path, type=type_) for path, type_ in ran.call.originals.pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracerLeft(Finding):
    """A tracer that outlived its trace."""

    leak: Leak
    has_data: bool = False
    """True if the installed flax has `nnx.data`."""

    def rows(self) -> list[Row]:
        """Its holder, and the line that made it."""
        leak = self.leak
        row = ("leaked", f"{leak.path}   {leak.kind} {leak.type} in {leak.holder}")
        return [row, ("", leak.where)] if leak.where else [row]

    def words(self, others: Sequence[Finding] = ()) -> Words:
        when, un_nested = "", "the call itself, un-nested"
        if self.leak.before:
            when, un_nested = ", before the call", "a transform before the call"
        shown = [self, *others][: self.SHOWN]
        rows = [row for each in shown for row in each.rows()] + uncounted(others[self.SHOWN - 1 :])
        paths = ", ".join(each.path for each in shown[:2])
        leaked_by = ("leaked by", self.leak.layer or un_nested)
        return Words(f"tracers remain in {paths}{when}", [*rows, leaked_by], self.cure())

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield (
            ("first", f"{self.leak.type!r} in living_tracers().values()")
            if self.leak.before
            else ("search", self.leak.type)
        )

    def cure(self) -> str:
        """By the holder, and by the layer that leaked it; empty where no advice is certain."""
        leak, path = self.leak, self.path
        if leak.holder in WITH_OWN_CURE:
            return WITH_OWN_CURE[leak.holder].format(path=path)
        if leak.place == "returned":
            return CURES["kept by what is returned"].format(path=path)
        if leak.keeper and (is_plain(leak) or leak.holder in IN_FUNCTIONS):
            cause = "kept function, outside" if leak.outside else "kept function"
            return CURES[cause].format(path=leak.keeper)
        if is_plain(leak):
            return plain_value(leak, has_data=self.has_data)
        if leak.holder in OUTLIVING:
            return outlives(article(leak.holder))
        if leak.holder == "frame":
            return outlives("an exception, whose traceback has the frame")
        if not leak.layer:
            return ""
        if leak.captured:
            name = Layer.parse(leak.layer).transform
            known = name in HAND_ON or name in (*TRANSFORMS, *FURTHER)
            return captured_by(name) if known else f"{name} should hand the module on as an argument of f"
        if leak.outside:
            return outlives("what is no part of the module")
        return CURES["plain value, State"].format(path=path) if leak.place == "module" and self.has_data else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeInEndedTrace(Finding):
    """A Variable that flax refuses to write."""

    type: str
    """The type of the Variable and of its value."""

    def sentence(self) -> str:
        return f"{self.path} was made in a trace that has ended: flax refuses every write to it"

    def rows(self) -> list[Row]:
        return [("pinned", f"{self.path}   {self.type}")]

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield "first", f"refuses_writes(state, {call.keys(self.path)})"

    def cure(self) -> str:
        return "build it outside of the transform, or hand it out as an output of nnx.jit or nnx.eval_shape, which make it anew"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTouched(Finding):
    """A leaf that a layer changed, though it only asks for shapes."""

    layer: Layer

    def sentence(self) -> str:
        return f"{self.layer.transform} changed {self.path}"

    def rows(self) -> list[Row]:
        return [("changed", self.path)]

    def last_rows(self) -> Iterable[Row]:
        return [("leaked by", str(self.layer))]


@dataclass(frozen=True, slots=True)
class HandedToMock:
    """A mock that keeps a tracer as the record of a test, since it was handed one, or one was set on it: a note."""

    path: str
    """The name by which it was called, or the attribute that was set."""
    line: str = field(compare=False)
    """The line that made the tracer; the same note under every nesting."""
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        made = f" (made at {self.line})" if self.line else ""
        return (
            f"a mock keeps a tracer in {self.path}{made}: what it replaces gets one too under any transform, where float() of it"
            " raises; hand the value out of the call, or write jax.debug.callback"
        )


# --- the change to make, by what holds a tracer

NNX_CONTAINERS = ("nnx.List", "nnx.Dict")
PLAIN = ("attribute", "list", "dict", "tuple", "set", "deque", "array", *NNX_CONTAINERS)
IN_FUNCTIONS = ("closure", "default argument")
OUTLIVING = ("cached property", "generator", "cache", "global", "class attribute", *IN_FUNCTIONS, "context variable")

CURES = {
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
    "kept function": "keep the value in an nnx.Variable that __init__ makes: a function in {path} captured it, and outlives the trace",
    "kept function, outside": "do not keep in {path} a function that captured an array made under a transform: it outlives the trace",
}
WITH_OWN_CURE = {
    "cached property": "make it a property, or compute it in __init__ and keep it in an nnx.Variable: functools.cached_property keeps"
    " what the first trace computes in {path}",
    "metadata": "keep the value in an nnx.Variable of its own: {path}, of another one, goes out of no transform",
    "generator": "hand in what it yields as an argument, or draw keys from an nnx.Rngs of the module: {path} is a local variable of a"
    " generator, which keeps what the first trace made",
    "input": "let the transform that made {path} return it: what it keeps in another way has no value outside of it",
    "reference": "write into the reference that is there, variable[...] = value, and hand nnx.update no arrays for it: in place it keeps its buffer",
}
"""By a holder that tells enough; code fills in the braces of both tables."""


def outlives(holder: str) -> str:
    """Advice for what is kept where no transform reaches."""
    return f"do not keep arrays made under a transform in {holder}: it outlives the trace"


def is_plain(leak: Leak) -> bool:
    """True if a plain Python value holds the tracer, and that is not the value of a Variable."""
    return leak.holder in PLAIN and leak.place != "variable"


def plain_value(leak: Leak, *, has_data: bool) -> str:
    """Advice for a tracer in a plain Python value, by where that is."""
    if leak.outside:
        return outlives(f"{article(leak.holder)} outside of the module")
    cause = "plain value, data" if has_data else "plain value"
    if leak.place == "object":
        cause = "plain object"
    elif leak.holder in NNX_CONTAINERS:
        cause = "plain value, nnx container"
    elif leak.captured:
        cause = "plain value, captured"
    elif leak.holder != "attribute":
        cause = "plain value, container"
    return CURES[cause].format(path=leak.path, holder=leak.holder)


def article(noun: str) -> str:
    """``a list``, ``an attribute``."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def asks_to_hand_on(violation: Violation) -> bool:
    """True if the advice is to hand the module to a layer that captured it."""
    leaks = [finding.leak for finding in violation.findings[:1] if isinstance(finding, TracerLeft)]
    return any(not is_plain(leak) and leak.holder not in OUTLIVING and leak.captured for leak in leaks)
