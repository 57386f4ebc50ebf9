"""Writes of a part that are guarded as a whole: the program chooses between an array with a row written and the array without it.

Both may be in memory then: ``where(p, x.at[i].set(row), x)``, a write in one branch of a `jax.lax.cond`, a `jax.lax.while_loop` under `jax.vmap`,
which selects all that it carries in each step for the elements that are done. A masked row needs one: ``x.at[i].set(where(p, row, x[i]))``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_nnxcheck.compat import graph, staging
from pytest_nnxcheck.compat.arrays import describe, nbytes
from pytest_nnxcheck.compat.staging import COND, SCAN, SELECT, UPDATES, WHILE
from pytest_nnxcheck.core.text import at_line, format_bytes
from pytest_nnxcheck.jaxprs import flow


@dataclass(frozen=True, slots=True)
class GuardedWrite:
    """A choice between an array with a part written and the same array without."""

    line: str
    """The user's ``path:line`` of the choice; empty where jax kept none."""
    type: str
    bytes: int
    array: int
    """The array that it is a version of: the number of the program's input, or a negative number for one that the program makes."""
    mapped_loop: bool
    """True if a loop makes the choice, since its condition has an axis."""

    def words(self) -> str:
        why, cure = "a choice between an array with a part written and the array without holds both", "mask the row"
        if self.mapped_loop:
            why = "a loop under vmap selects in each step all that it carries, though it writes a part"
            cure = "write one loop for the batch, which runs until the last is done, and mask the row"
        return f"{format_bytes(self.bytes)} {self.type}: {why}; {cure}: {MASKED}{at_line(self.line)}"


MASKED = "x.at[i].set(jnp.where(p, row, x[i]))"


class Version(NamedTuple):
    """An array, as far as writes of parts go."""

    array: int
    """One number for all versions of an array: that of the program's input, or a negative one."""
    written: bool


class Choices:
    """The guarded writes that are found in a program, and its arrays."""

    def __init__(self) -> None:
        self.found: dict[GuardedWrite, None] = {}
        self._numbers = itertools.count(-1, -1)

    def array(self) -> Version:
        """An array that the program makes."""
        return Version(next(self._numbers), written=False)


def guarded(jaxpr: Any) -> tuple[GuardedWrite, ...]:
    """The guarded writes of an open jaxpr, and of those inside it, each once."""
    choices = Choices()
    versions(jaxpr, [Version(number, written=False) for number in range(len(jaxpr.invars))], choices)
    return (*choices.found,)


def versions(jaxpr: Any, operands: Sequence[Version], choices: Choices) -> list[Version]:
    """The versions that an open jaxpr returns for those that it takes."""
    jaxpr = flow.inlined(jaxpr)
    known = dict(zip(map(id, jaxpr.invars), operands, strict=True))
    for eqn in jaxpr.eqns:
        own = [known.get(id(var)) or choices.array() for var in eqn.invars]
        for var, cases in zip(eqn.outvars, alternatives(eqn, own, choices), strict=True):
            if len({case.array for case in cases}) != 1:
                known[id(var)] = choices.array()
                continue
            version = known[id(var)] = Version(cases[0].array, any(case.written for case in cases))
            if len({case.written for case in cases}) > 1:
                line, mapped = graph.equation_line(eqn), eqn.primitive.name == WHILE
                choices.found[GuardedWrite(line, describe(var.aval), nbytes(var.aval), version.array, mapped)] = None
    return [known.get(id(var)) or choices.array() for var in jaxpr.outvars]


def alternatives(eqn: Any, own: Sequence[Version], choices: Choices) -> Iterator[Sequence[Version]]:
    """The versions that each output of an equation is one of; none if it is a new array."""
    name, params = eqn.primitive.name, eqn.params
    if name in UPDATES:
        yield [Version(own[0].array, written=True)]
    elif name == SELECT:
        yield own[1:]
    elif name == COND:
        branches = (versions(staging.open_jaxpr(branch), own[1:], choices) for branch in params["branches"])
        yield from zip(*branches, strict=True)
    elif name == WHILE:
        first, before = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        chooses = bool(params["cond_jaxpr"].out_avals[0].shape)
        # In the body the carry is as yet unwritten: whether one step writes is the question.
        carry = [version._replace(written=False) for version in own[before:]]
        after = versions(staging.open_jaxpr(params["body_jaxpr"]), [*own[first:before], *carry], choices)
        for old, begins, ends in zip(own[before:], carry, after, strict=True):
            yield [begins, ends] if chooses else [ends._replace(written=old.written or ends.written)]
    elif name == SCAN:
        consts, carry_end = staging.scan_layout(eqn)[0], sum(staging.scan_layout(eqn))
        sliced = [choices.array() for _ in own[carry_end:]]
        after = versions(staging.open_jaxpr(params["jaxpr"]), [*own[:carry_end], *sliced], choices)
        carried = carry_end - consts
        yield from ([ends] for ends in after[:carried])
        yield from ([] for _ in after[carried:])
    else:
        yield from ([] if k is None else [own[k]] for k in flow.handed_through(eqn))
