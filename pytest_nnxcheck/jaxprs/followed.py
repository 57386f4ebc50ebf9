"""Follow values through a traced program: `follow` names a value, and `Followed` says which outputs hold it, and which are made of it.

A value is held where it comes by moves alone: as it is, converted, in another shape, as a part of a larger array; the mean over rows of a batch is one
too. `jax.ad_checkpoint.checkpoint_name` gives a value its name, which every transform of jax keeps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pytest_nnxcheck.compat.arrays import is_array
from pytest_nnxcheck.compat.staging import (
    COND,
    COPIES,
    GATHER,
    JOINS,
    PARTS,
    SCAN,
    SELECT,
    WHILE,
    open_jaxpr,
    scan_layout,
)
from pytest_nnxcheck.jaxprs.flow import CONVERTED, inner_jaxprs

__tracebackhide__ = True  # pytest shows the frames of the user, not these

PREFIX = "nnxcheck "
"""The start of the names that `follow` gives; those of the user are left alone."""

FIRST = COPIES | CONVERTED | PARTS | {GATHER, "transpose", "rev", "device_put", "random_wrap", "random_unwrap", "pvary"}
MOVES: dict[str, slice] = {
    **dict.fromkeys(FIRST, slice(1)),
    **dict.fromkeys(JOINS | {"pad"}, slice(None)),
    "dynamic_update_slice": slice(2),
    "scatter": slice(0, 3, 2),
    SELECT: slice(1, None),
}
"""The operands whose elements an operation moves into its result."""

SUM = "sum"
"""An entry in the contents of the sum over an axis, beside those of its operand: divided by a number it is a mean."""
SUMS, SCALES = frozenset({"reduce_sum", "psum", "psum2", "psum_invariant"}), frozenset({"div", "mul"})

Contents = frozenset[Any]
"""The values that a variable holds: inputs and computed values, by the id of their variable, and names."""
NOTHING: Contents = frozenset()


def without_names(contents: Contents) -> Contents:
    """The contents without the names of values: a part of an array that goes by a name inside a loop is that part still."""
    return frozenset(item for item in contents if item == SUM or not isinstance(item, str))


def follow(value: Any, name: str) -> Any:
    """The value with a name on each array in it. A number of Python stays one: code may branch on it."""
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, PREFIX + name) if is_array(leaf) else leaf, value)


@dataclass(slots=True)
class Followed:
    """The named values of an open jaxpr."""

    values: dict[str, list[Contents]] = field(default_factory=dict)
    """The contents of each, in terms of the jaxpr that names it: one for each array."""
    made_of: dict[str, set[str]] = field(default_factory=dict)
    """The named values that go into each of them."""
    outputs: list[Contents] = field(default_factory=list)
    """The contents of each output of the whole program, named values among them."""

    @classmethod
    def of(cls, jaxpr: Any) -> Followed:
        """Read an open jaxpr, and those inside of it."""
        followed = cls()
        followed.outputs, _ = followed.read(jaxpr, [NOTHING] * len(jaxpr.invars))
        return followed

    def read(self, jaxpr: Any, given: Iterable[Contents]) -> tuple[list[Contents], list[Contents]]:
        """The contents of the outputs of a jaxpr, in terms of its inputs, and the names that go into them; ``given`` are those that go into the inputs."""
        held: dict[int, Contents] = {id(var): frozenset((id(var),)) for var in jaxpr.invars}
        made: dict[int, Contents] = {id(var): names for var, names in zip(jaxpr.invars, given, strict=True)}
        named: dict[str, list[Contents]] = {}
        for eqn in jaxpr.eqns:
            holds = [held_by(var, held) for var in eqn.invars]
            names = [made.get(id(var), NOTHING) for var in eqn.invars]
            name = name_of(eqn)
            if name:
                self.made_of.setdefault(name, set()).update(names[0])
                names = [names[0] | {name}]
            for var, (contents, into) in zip(eqn.outvars, self.results(eqn, holds, names), strict=True):
                held[id(var)], made[id(var)] = contents, into
            if name:
                named.setdefault(name, []).append(held[id(eqn.outvars[0])])
        self.values |= named
        outputs = [held_by(var, held) for var in jaxpr.outvars]
        # From here on outwards a value that is held whole goes by its name.
        outputs = [
            contents.union(name for name, values in named.items() if any(value <= contents for value in values))
            for contents in outputs
        ]
        return outputs, [made.get(id(var), NOTHING) for var in jaxpr.outvars]

    def results(self, eqn: Any, holds: list[Contents], names: list[Contents]) -> list[tuple[Contents, Contents]]:
        """The contents of the results of an equation, and the names that go into them."""
        bodies = bodies_of(eqn)
        if not bodies:
            into = NOTHING.union(*names)
            return [(moved(eqn, holds) or frozenset((id(var),)), into) for var in eqn.outvars]
        skipped = len(eqn.invars) - len(bodies[0].invars)
        found = [self.read_body(body, eqn, holds[skipped:], names[skipped:]) for body in bodies]
        condition = NOTHING.union(*names[:skipped])
        return [
            (NOTHING.union(*(contents for contents, _ in ways)), condition.union(*(into for _, into in ways)))
            for ways in zip(*found, strict=True)
        ]

    def read_body(
        self, body: Any, eqn: Any, holds: list[Contents], names: list[Contents]
    ) -> list[tuple[Contents, Contents]]:
        """The same for a jaxpr that an equation runs; a later step of a loop gets what the one before handed on."""
        outputs, into = self.read(body, names)
        here = {id(var): contents for var, contents in zip(body.invars, holds, strict=True)}

        def outside(contents: Contents) -> Contents:
            return NOTHING.union(*(here.get(item, (item,)) for item in contents))

        if carried := carries(eqn):
            for output, number in carried.items():
                names[number] |= into[output]
                here[id(body.invars[number])] |= outside(outputs[output])
            outputs, into = self.read(body, names)
        return [*zip(map(outside, outputs), into, strict=True)]


def moved(eqn: Any, holds: list[Contents]) -> Contents:
    """The contents that an equation moves into its results; nothing where it computes."""
    name = eqn.primitive.name
    if name in SUMS:
        return frozenset((SUM,)).union(*holds)
    if name in SCALES and SUM in holds[0] and not eqn.invars[1].aval.shape:
        return holds[0]
    return NOTHING.union(*holds[MOVES[name]]) if name in MOVES else NOTHING


def name_of(eqn: Any) -> str:
    """The name that `follow` gave with an equation; empty for any other."""
    name = str(eqn.params["name"]) if eqn.primitive.name == "name" else ""
    return name.removeprefix(PREFIX) if name.startswith(PREFIX) else ""


def bodies_of(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs, whose inputs are its last operands and whose outputs are its results; none where they are not."""
    found = [*inner_jaxprs(eqn)]
    if eqn.primitive.name == WHILE:
        found = [open_jaxpr(eqn.params["body_jaxpr"])]
    elif eqn.primitive.name != COND:
        found = found[:1]
    skipped = {COND: 1, WHILE: eqn.params.get("cond_nconsts", 0)}.get(eqn.primitive.name, 0)
    given, made = len(eqn.invars) - skipped, len(eqn.outvars)
    return found if all((len(body.invars), len(body.outvars)) == (given, made) for body in found) else []


def carries(eqn: Any) -> Mapping[int, int]:
    """The outputs of a loop's body that its next step gets, each with the number of that input."""
    if eqn.primitive.name == SCAN:
        consts, carry = scan_layout(eqn)
        return {number: consts + number for number in range(carry)}
    consts = eqn.params.get("body_nconsts", 0)
    return {number: consts + number for number in range(len(eqn.outvars))} if eqn.primitive.name == WHILE else {}


def held_by(var: Any, held: Mapping[int, Contents]) -> Contents:
    """The contents of a variable; nothing for a number in the program."""
    return NOTHING if hasattr(var, "val") else held.get(id(var), frozenset((id(var),)))
