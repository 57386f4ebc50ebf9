"""Values that the forward part of a program makes and its backward part reads, by the user's line: they are in memory from one to the other."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_nnxcheck.compat import graph, staging
from pytest_nnxcheck.compat.arrays import describe, nbytes
from pytest_nnxcheck.compat.staging import CALLS, REMATS, SCAN
from pytest_nnxcheck.core.peak import FLOOR
from pytest_nnxcheck.core.text import at_line, format_bytes, near
from pytest_nnxcheck.jaxprs import flow


@dataclass(frozen=True, slots=True)
class SavedLine:
    """The values of one line that the forward part of a program makes and the backward part reads. Bytes of one device."""

    line: str
    """The user's ``path:line``, that of the loop for values that a loop stacks; empty where jax kept none."""
    bytes: int
    """The sum of all values."""
    kept: int
    """The bytes that `jax.checkpoint` saves too: what remats take, what scans carry, and what goes into each run of a line that runs several times."""
    types: tuple[str, ...]
    """The types of the arrays."""
    scanned: bool
    """True if a scan stacks them, one for each of its steps."""
    largest: int = 0
    """The bytes of the largest remat, for values that remats compute again; 0 for others. One remat needs its values, and the next can wait."""
    repeated: bool = False
    """True if the line runs several times: in a loop, or called from several places."""
    handed: int = 0
    """As advice: the bytes of all that goes into the call and comes out of it."""

    def words(self) -> str:
        more = f"more than state, inputs and outputs together, {format_bytes(self.handed)}"
        if self.largest:
            why, cure = (
                "several remats compute their values again at once",
                "run the blocks in a scan, which holds those of one",
            )
        elif self.scanned:
            why, cure = (
                "the steps of a scan save it for the backward pass",
                "wrap its body in nnx.remat, or let the policy save less",
            )
        else:
            why = "a line that runs several times saves it for the backward pass"
            cure = "put the line under nnx.remat, and where XLA then computes all of it again at once, the loop into a scan"
        return f"{format_bytes(self.bytes)}: {why}, {more}; {cure}{at_line(self.line)}"


@dataclass(eq=False, slots=True)
class Value:
    """A value of the forward part."""

    aval: Any
    eqn: Any
    """The equation with the user's lines of the value."""
    kept: bool
    """True if a `jax.checkpoint` around what makes it saves it too."""
    scanned: bool
    made_of: Sequence[Value]
    """The values that what makes it takes."""
    saved: bool = False
    """True if the backward part takes it."""

    @property
    def line(self) -> str:
        """The user's ``path:line``; empty where jax kept none."""
        frames = graph.frames_of_call(self.eqn)
        return near(f"{frames[0][0]}:{frames[0][1]}") if frames else ""

    @property
    def source(self) -> Any:
        """The place that the equation is from: what one call of a library's jitted function makes is from one place."""
        return self.eqn.source_info

    @property
    def operation(self) -> tuple[Any, ...]:
        """The same for two equations from different places if the program came to one operation twice."""
        return self.source.traceback, self.eqn.primitive.name


def saved(jaxpr: Any) -> tuple[SavedLine, ...]:
    """The values that an open jaxpr saves for its backward part, by line, the largest first; those of remats, and of each loop, apart from the rest."""
    lines: list[SavedLine] = []
    for root in (jaxpr, *bodies(jaxpr)):
        remats = [
            forward_values(staging.open_jaxpr(eqn.params["jaxpr"]), lambda eqn: not graph.is_recomputed(eqn))
            for eqn in remats_in(root)
        ]
        lines += [
            *by_line([forward_values(root, graph.is_backward)], of_remats=False),
            *by_line(remats, of_remats=True),
        ]
    return tuple(sorted(lines, key=lambda line: -line.bytes))


def bodies(jaxpr: Any) -> Iterator[Any]:
    """The jaxprs of the loops and branches inside a jaxpr, whose values are new in each step."""
    for eqn in flow.all_equations(jaxpr):
        if eqn.primitive.name not in CALLS:
            yield from flow.inner_jaxprs(eqn)


def remats_in(jaxpr: Any) -> Iterator[Any]:
    """The differentiated remats of a jaxpr, and of the calls in it."""
    for eqn in jaxpr.eqns:
        if eqn.params.get("differentiated"):
            yield eqn
        elif (inner := flow.called(eqn)) is not None:
            yield from remats_in(inner)


def forward_values(jaxpr: Any, is_backward: Any) -> list[Value]:
    """The values that equations of the forward part make, in their order."""
    values: dict[int, Value] = {}
    made: list[Value] = []
    by_remats: dict[Value, bool] = {}
    for eqn in flow.inlined(jaxpr).eqns:
        own = [values[id(var)] for var in eqn.invars if id(var) in values]
        if is_backward(eqn):
            for value in own:
                value.saved = True
                by_remats[value] = by_remats.get(value, True) and eqn.primitive.name in REMATS
            continue
        kept, of_scan = carried(eqn), eqn.primitive.name == SCAN
        for number, (var, operand) in enumerate(zip(eqn.outvars, flow.handed_through(eqn), strict=True)):
            if operand is None:
                made.append(Value(var.aval, eqn, number in kept, of_scan, own))
                values[id(var)] = made[-1]
            elif id(eqn.invars[operand]) in values:
                values[id(var)] = values[id(eqn.invars[operand])]
    for value, kept_by_remats in by_remats.items():
        value.kept |= kept_by_remats
    return made


def carried(eqn: Any) -> frozenset[int]:
    """The numbers of the outputs of a scan that stack what it carries from step to step."""
    if eqn.primitive.name != SCAN:
        return frozenset()
    consts, carry = staging.scan_layout(eqn)
    sources = flow.sources(staging.open_jaxpr(eqn.params["jaxpr"]))
    return frozenset(k for k, source in enumerate(sources) if k >= carry and source in range(consts, consts + carry))


def by_line(groups: Sequence[Sequence[Value]], *, of_remats: bool) -> Iterator[SavedLine]:
    """The saved values of each line; those of a remat are a group."""
    lines: dict[tuple[str, bool], list[tuple[int, Value]]] = {}
    for group, values in enumerate(groups):
        for value in values:
            if value.saved:
                lines.setdefault((value.line, value.scanned), []).append((group, value))
    for (line, scanned), found in lines.items():
        size: dict[int, int] = {}
        for group, value in found:
            size[group] = size.get(group, 0) + nbytes(value.aval)
        total, kept = sum(size.values()), {value for _, value in found if value.kept}
        repeated = scanned or runs_again([value for _, value in found])
        if repeated and not scanned and not of_remats and total >= FLOOR:
            kept |= into_runs(line, groups[0])
        yield SavedLine(
            line,
            total,
            sum(nbytes(value.aval) for value in kept),
            tuple(dict.fromkeys(describe(value.aval) for _, value in found)),
            scanned,
            max(size.values()) if of_remats else 0,
            repeated,
        )


def into_runs(line: str, values: Sequence[Value]) -> set[Value]:
    """The values that go into the runs of a line, and that nothing else saves. A remat of the line saves them.

    A run ends where the line comes back to an operation that it has made, in the order of the program.
    """
    runs: dict[Value, int] = {}
    run, made = 0, dict[Any, Any]()
    for value in values:
        if value.line == line:
            if made.setdefault(value.operation, value.source) is not value.source:
                run, made = run + 1, {value.operation: value.source}
            runs[value] = run
    operands = {(value, operand) for value in runs for operand in value.made_of}
    return {
        operand
        for value, operand in operands
        if runs.get(operand) != runs[value] and (operand in runs or not operand.saved)
    }


def runs_again(values: Sequence[Value]) -> bool:
    """True if the line of these values runs several times: it has several stacks, or a frame of one is in a loop of Python that makes an operation again."""
    stacks = {graph.frames_of_call(value.eqn) for value in values}
    again = len({value.operation for value in values}) < len({(value.operation, id(value.source)) for value in values})
    return len(stacks) > 1 or (again and any(line in loop_lines(file) for stack in stacks for file, line in stack))


@functools.lru_cache(maxsize=256)
def loop_lines(file: str) -> frozenset[int]:
    """The lines of a file that are in a loop or a comprehension; none if it cannot be read."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    lines = set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.For() | ast.AsyncFor() | ast.While():
                lines.update(range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1))
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return frozenset(lines)
