"""Writes of a call reach the caller's state, and its reads come from there: a jit, a gradient or a merge works on a copy of a module.

Judged of the un-nested call, by its one trace: a nesting is made of copies itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.compat import flax_modes, graph
from pytest_nnxcheck.core.catalogue import InvariantRow
from pytest_nnxcheck.core.facts import Path
from pytest_nnxcheck.core.notes import Note
from pytest_nnxcheck.core.outcome import Finding, InProgram, Moment, Words
from pytest_nnxcheck.core.text import Row, at_line, some
from pytest_nnxcheck.engine.ran import Ran
from pytest_nnxcheck.jaxprs import flow
from pytest_nnxcheck.subject.copies import Read, Write
from pytest_nnxcheck.values.effects import inexact

__tracebackhide__ = True  # pytest shows the frames of the user, not these

ROW = InvariantRow("updates", order=15, severity=15, default=True, error="UpdateLost")

TWINS = {
    "jax.jit": "nnx.jit(f)({model}, x)",
    "jax.checkpoint": "nnx.remat(f)({model}, x)",
    "jax.grad": "nnx.grad(f)({model}, x)",
    "jax.value_and_grad": "nnx.value_and_grad(f)({model}, x)",
    "jax.lax.cond": "nnx.cond(pred, f, g, {model}, x)",
    "jax.lax.switch": "nnx.switch(index, branches, {model}, x)",
    "jax.lax.while_loop": "nnx.while_loop(cond, body, ({model}, x))",
    "jax.lax.fori_loop": "nnx.fori_loop(0, n, body, ({model}, x))",
    **dict.fromkeys(
        ("jax.lax.scan", "jax.lax.map"),
        "nnx.scan(f, in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))({model}, xs)",
    ),
}
"""By a transform of jax the call of flax that hands back what its function writes to the module that it is handed. Others have none: `nnx.map` is no
transform, and `nnx.vmap` refuses a write to a module without an axis."""

STACKS = ("jax.vmap", "jax.lax.map")
"""Transforms that return a state with one more axis."""


def handed_back(transform: str, model: str) -> str:
    """Advice to hand the writes of a function under a transform of jax back; of the call itself where that is empty."""
    returned = f"return nnx.state(copy), and nnx.update({model}, state) with it"
    if transform in STACKS:
        row = f"nnx.update({model}, jax.tree.map(lambda leaf: leaf[0], state))"
        returned = f"return nnx.state(copy), which {transform} stacks, and {row} with one row of it, or with the mean of statistics"
    if transform not in TWINS:
        return returned
    twin = TWINS[transform].format(model=model)
    return f"write {twin} instead of {transform}: the transform of flax hands back what f writes to {model} itself, not to an nnx.merge of it; or {returned}"


def asserts(ran: Ran) -> bool:
    """True for the un-nested call, which is judged for all nestings."""
    return not ran.observation.nesting.layers


def judge(ran: Ran) -> Iterator[Finding | Note]:
    """Judge the writes that no one gets, and the reads of the caller's own Variables past the arguments; counts of random numbers alone are a note."""
    if ran.observation.nesting.layers:
        return
    path, profile = ran.call.subject.path, ran.profile
    written = sorted(profile.lost_writes, key=lambda write: write.random)
    if written and all(write.random for write in written):
        yield SameDraws(tuple(path(write.path) for write in written), written[0].line, written[0].transform)
    else:
        yield from (WriteLost(path(write.path), write=write) for write in written)
    yield from (ReadStale(path(read.path), read=read) for read in profile.stale_reads)
    if forward := tuple(ran.call.once("written forward", lambda: written_forward(ran))):
        yield ParametersWritten(tuple(path(written) for written, _ in forward), forward[0][1])
    if profile.unwatched:
        yield CopiesUnwatched(profile.unwatched)


def written_forward(ran: Ran) -> list[tuple[Path, str]]:
    """The parameters that a forward call writes, each with the line.

    A forward call returns what it makes of an input with axes, computes no gradient and steps no optimizer. It writes a parameter on purpose if that is a
    new value of another leaf or input (a gradient, the parameters that it averages), or is made of random numbers or of a flag that the state keeps.
    """
    subject, profile = ran.call.subject, ran.profile
    program, state, jaxpr = profile.program, profile.state, profile.program.jaxpr
    wanted = profile.training.parameters & state.changed
    # The count of an optimizer is an integer of the state, a stream of random numbers has a count as well.
    if jaxpr is None or not wanted or profile.training.differentiates:
        return []
    given = [var.aval for var in jaxpr.invars]
    batch = sum(1 << n for n, aval in enumerate(given) if n >= len(state.paths) and aval.shape and not is_key(aval))
    chosen = sum(1 << n for n, aval in enumerate(given) if is_key(aval) or not (aval.shape or inexact(aval)))
    steps = {(*path, "step") for path, node in flax_modes.iter_graph(subject.state) if isinstance(node, nnx.Optimizer)}
    made_of, over = flow.origins(jaxpr), flow.new_values(jaxpr)
    if steps & state.changed or not any(bits & batch for bits in made_of[: len(profile.output.types)]):
        return []
    found = []
    for number, path in enumerate(state.paths):
        result = program.rewritten.get(number)
        if path in wanted and result is not None and not (over[result] & ~(1 << number) or made_of[result] & chosen):
            maker, _ = flow.uses(jaxpr).maker.get(id(jaxpr.outvars[result]), (None, 0))
            found.append((path, graph.equation_line(maker) if maker is not None else ""))
    return found


def is_key(aval: Any) -> bool:
    """True for the type of a key of random numbers: a typed one, or an array of unsigned integers."""
    return bool(jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) or aval.dtype == jnp.uint32)


@dataclass(frozen=True, slots=True)
class ParametersWritten:
    """Parameters that a forward call writes: a note."""

    paths: tuple[str, ...]
    line: str
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        at = f" at {self.line}" if self.line else ""
        return (
            f"the call writes {some(self.paths)} (Param){at}, and computes no gradient: an evaluation changes the model, and what a checkpoint holds; keep"
            " statistics in a Variable of another kind, as nnx.BatchStat, and use a weight that is computed without storing it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteLost(Finding):
    """A Variable of the caller's that keeps its value, though the call writes to a copy of it that no one gets."""

    write: Write

    def words(self, others: Sequence[Finding] = ()) -> Words:
        """One row for each line that writes, with all that it writes."""
        of_line: dict[str, list[str]] = {}
        writes = [self, *(other for other in others if isinstance(other, WriteLost))]
        for each in writes:
            of_line.setdefault(each.where(), []).append(each.path)
        rows: list[Row] = [("lost", f"{some(paths, 4)}   {where}") for where, paths in of_line.items()]
        rows += [row for other in others if not isinstance(other, WriteLost) for row in other.rows()]
        paths = some([each.path for each in writes], 2)
        kept = (
            "keeps its value: the call writes to a copy of it"
            if len(writes) == 1
            else "keep their values: the call writes to copies of them"
        )
        return Words(f"{paths} {kept}", rows, self.cure())

    def rows(self) -> list[Row]:
        return [("lost", f"{self.path}   {self.where()}")]

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        yield "first", f"is_handed_on(program, state, inputs, {call.keys(self.path)})"

    def where(self) -> str:
        """The line that writes, and what made the copy."""
        write = self.write
        made_by = f"{write.transform} at {write.called_at}" if write.called_at else write.transform or "the call"
        return f"written{f' at {write.line},' if write.line else ''} in a copy that {made_by} makes"

    def cure(self) -> str:
        model = root_of(self.path)
        return f"{handed_back(self.write.transform, model)}; a copy that is meant to be dropped is made by nnx.clone({model})"


def root_of(path: str) -> str:
    """The argument that a path starts at."""
    return re.split(r"[.\[]", path)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStale(Finding):
    """A Variable of the caller's that the call reads past its arguments: a jit keeps the value of its first call for ever."""

    read: Read

    def sentence(self) -> str:
        return f"{self.path} is read past the arguments: a jit keeps the value of its first call, and no gradient reaches it"

    def rows(self) -> list[Row]:
        at = f"read at {self.read.line}, " if self.read.line else "read "
        return [("stale", f"{self.path}   {at}by way of {self.read.holder}")]

    def look(self, call: InProgram) -> Iterator[tuple[Moment, str]]:
        if call.value(self.path):
            yield "first", f"is_constant(program, state, inputs, {call.keys(self.path)})"

    def cure(self) -> str:
        return (
            "every transform works on a copy of the module, and what a function captured is the module that it was made with: read it through self, or hand"
            " it to the function as an argument; an array that is meant to stay as it was is copied, jnp.copy(value)"
        )


@dataclass(frozen=True, slots=True)
class SameDraws:
    """Counts of random streams that only copies move on: a note."""

    paths: tuple[str, ...]
    line: str
    transform: str
    """The transform of jax that made the copy; empty for the call itself."""
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        return (
            f"every call draws the same random numbers: {some(self.paths)} is counted in a copy alone{at_line(self.line)}; for others each time"
            f" {handed_back(self.transform, root_of(self.paths[0]))}"
        )


@dataclass(frozen=True, slots=True)
class CopiesUnwatched:
    """A call whose copies of Variables cannot be told apart by marks: a note."""

    error: str
    """The exception that it raises with the marks, in one line."""
    of_call: ClassVar[bool] = True

    def words(self) -> str:
        return (
            "updates asserted in part: writes to copies are seen by a mark in the metadata of the Variables, and with the mark this call raises"
            f" {self.error}"
        )
