"""Read facts from a jaxpr: outputs that are inputs, dependencies of outputs, users of variables, operations.

A leaf that is rewritten with its own value (an inner `nnx.scan` or `nnx.remat` does that) is not changed: counting it would
excuse the very copies of google/flax#4871.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from typing import Any
from weakref import WeakKeyDictionary

import jax.numpy as jnp

from pytest_nnxcheck.compat import staging
from pytest_nnxcheck.compat.arrays import is_ref, is_ref_type, nbytes
from pytest_nnxcheck.compat.graph import called_by, equation_line, is_cast, is_jit_of_library
from pytest_nnxcheck.compat.staging import CALLS, COND, COPIES, REMATS, RESHAPES, SCAN, WHILE

# --- jaxprs and equations inside a jaxpr ---------------------------------------------------------------------------------


def jaxprs_of(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters, open or closed as they are."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(staging.open_jaxpr(item), "eqns"):
                yield item


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters, open."""
    return map(staging.open_jaxpr, jaxprs_of(eqn))


def all_jaxprs(closed: Any) -> Iterator[Any]:
    """A closed jaxpr and every jaxpr inside it, with their constants where they have any."""
    yield closed
    for eqn in staging.open_jaxpr(closed).eqns:
        for inner in jaxprs_of(eqn):
            yield from all_jaxprs(inner)


def all_equations(closed: Any) -> Iterator[Any]:
    """The equations of a jaxpr, and of every jaxpr inside it."""
    return (eqn for jaxpr in all_jaxprs(closed) for eqn in staging.open_jaxpr(jaxpr).eqns)


def called(eqn: Any) -> Any:
    """The jaxpr that an equation calls with its own operands; None if it does something else."""
    inner = next(inner_jaxprs(eqn), None) if eqn.primitive.name in CALLS else None
    return inner if inner is not None and len(inner.invars) == len(eqn.invars) else None


_inlined: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def inlined(jaxpr: Any) -> Any:
    """The open jaxpr with the equations of a call in the place of the call, as XLA compiles it; itself where it calls nothing.

    Loops, branches and remats of a backward part stay. The equations of a jitted function of a library have the lines of the call.
    """
    if not any(is_inlined(eqn) for eqn in jaxpr.eqns):
        return jaxpr
    if jaxpr not in _inlined:
        equations = list[Any]()
        variables = _inline(jaxpr, {}, equations, lambda eqn: eqn)
        outvars = [variables.get(id(var), var) for var in jaxpr.outvars]
        _inlined[jaxpr] = jaxpr.replace(eqns=equations, outvars=outvars)
    return _inlined[jaxpr]


def is_inlined(eqn: Any) -> bool:
    """True if an equation calls a jaxpr that XLA sees through: it does not through what computes values again."""
    return called(eqn) is not None and not eqn.params.get("differentiated")


def _inline(jaxpr: Any, variables: dict[int, Any], equations: list[Any], named: Callable[[Any], Any]) -> dict[int, Any]:
    """Append the equations of a jaxpr, each as ``named`` gives it, with ``variables`` in the place of its own, by their ids. Gives all that took a place."""
    for eqn in jaxpr.eqns:
        operands = [variables.get(id(var), var) for var in eqn.invars]
        if is_inlined(eqn):
            inner, call = called(eqn), named(eqn)
            of_inner = dict(zip(map(id, inner.invars), operands, strict=True))
            inside = _inline(
                inner, of_inner, equations, functools.partial(called_by, call, is_jit_of_library(eqn, inner))
            )
            results = [inside.get(id(var), var) for var in inner.outvars]
        else:
            # Two calls of one function share its jaxpr, with all variables.
            results = [*map(copy.copy, eqn.outvars)]
            equations.append(named(eqn).replace(invars=operands, outvars=results))
        variables.update(zip(map(id, eqn.outvars), results, strict=True))
    return variables


# --- outputs that are inputs ------------------------------------------------------------------------------------------


Sources = tuple[int | None, ...]
"""The number of the input that each output is; None where it is computed."""


def sources(jaxpr: Any, copies: AbstractSet[str] = COPIES) -> Sources:
    """Follow every output of a jaxpr back to an input, through equations that hand on their operand. An unknown equation computes: the safe side."""
    input_of: dict[int, int] = {id(var): number for number, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for var, operand in zip(eqn.outvars, handed_through(eqn, copies), strict=True):
            origin = None if operand is None else input_of.get(id(eqn.invars[operand]))
            if origin is not None:
                input_of[id(var)] = origin
    return tuple(input_of.get(id(var)) for var in jaxpr.outvars)


def handed_through(eqn: Any, copies: AbstractSet[str] = COPIES) -> Sources:
    """The number of the operand that each output of an equation is; None where it is computed."""
    name = eqn.primitive.name
    nothing: Sources = (None,) * len(eqn.outvars)
    if name in copies:
        return tuple(range(len(eqn.outvars)))
    rule = RULES.get(name, of_call if name in CALLS else None)
    operands = rule(eqn, copies) if rule else nothing
    return operands if len(operands) == len(nothing) else nothing


def of_call(eqn: Any, copies: AbstractSet[str]) -> Sources:
    inner = called(eqn)
    return sources(inner, copies) if inner is not None else ()


def of_scan(eqn: Any, copies: AbstractSet[str]) -> Sources:
    """The sources of a scan: a carry that its body hands on is the operand; a stacked output that is the slice of a scanned input is that input."""
    body = sources(staging.open_jaxpr(eqn.params["jaxpr"]), copies)
    consts, carry = staging.scan_layout(eqn)
    kept = tuple(consts + k if body[k] == consts + k else None for k in range(carry))
    stacked = tuple(source if source is not None and source >= consts + carry else None for source in body[carry:])
    return kept + stacked


def of_while(eqn: Any, copies: AbstractSet[str]) -> Sources:
    body = sources(staging.open_jaxpr(eqn.params["body_jaxpr"]), copies)
    consts, before = eqn.params["body_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    return tuple(before + k if source == consts + k else None for k, source in enumerate(body))


def of_cond(eqn: Any, copies: AbstractSet[str]) -> Sources:
    branches = [sources(staging.open_jaxpr(branch), copies) for branch in eqn.params["branches"]]
    return tuple(
        origins[0] + 1 if origins[0] is not None and len(set(origins)) == 1 else None
        for origins in zip(*branches, strict=True)
    )


RULES: dict[str, Callable[[Any, AbstractSet[str]], Sources]] = {SCAN: of_scan, WHILE: of_while, COND: of_cond}


# --- inputs that go into an output ------------------------------------------------------------------------------------------


def origins(jaxpr: Any) -> tuple[int, ...]:
    """The inputs that go into each output, as bits of a number; an unknown equation mixes all its operands."""
    bits: dict[int, int] = {id(var): 1 << number for number, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        operands = [bits.get(id(var), 0) for var in eqn.invars]
        inner = called(eqn)
        if inner is not None:
            results = tuple(joined(operands, numbers) for numbers in origins(inner))
        else:
            results = (joined(operands, -1),) * len(eqn.outvars)
        bits.update((id(var), result) for var, result in zip(eqn.outvars, results, strict=True))
    return tuple(bits.get(id(var), 0) for var in jaxpr.outvars)


IN_PLACE = frozenset(("dynamic_update_slice", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max"))
"""Operations that put values into a part of their first operand."""
CONVERTED = frozenset(("convert_element_type", "reduce_precision"))
ELEMENTWISE = CONVERTED | frozenset(
    "abs add add_any and clamp div exp integer_pow log logistic max min mul neg not optimization_barrier or pow rem rsqrt select_n sharding_constraint sign"
    " sqrt square sub tanh xor".split()
)
"""Operations that make an element of the elements in its place."""


def new_values(jaxpr: Any, by: AbstractSet[str] = IN_PLACE | ELEMENTWISE) -> tuple[int, ...]:
    """The inputs that each output is a new value of, as bits of a number: it has their shape, and these operations alone are between the two."""
    bits: dict[int, int] = {id(var): 1 << number for number, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        operands = [bits.get(id(var), 0) for var in eqn.invars]
        inner, name = called(eqn), eqn.primitive.name
        results: tuple[int, ...] = (0,) * len(eqn.outvars)
        if inner is not None:
            results = tuple(joined(operands, numbers) for numbers in new_values(inner, by))
        elif name in by or name in COPIES:
            taken = [*enumerate(eqn.invars[:1] if name in IN_PLACE else eqn.invars)]
            results = tuple(
                joined(operands, sum(1 << k for k, operand in taken if operand.aval.shape == var.aval.shape))
                for var in eqn.outvars
            )
        bits.update((id(var), result) for var, result in zip(eqn.outvars, results, strict=True))
    return tuple(bits.get(id(var), 0) for var in jaxpr.outvars)


def joined(operands: list[int], numbers: int) -> int:
    """The bits of the operands whose own number is among the bits of ``numbers``."""
    return functools.reduce(operator.or_, (bits for k, bits in enumerate(operands) if numbers >> k & 1), 0)


def cast_first(jaxpr: Any, number: int) -> bool:
    """True if all that a jaxpr does with an input is to convert it to a wider type on purpose, in calls inside of it too."""

    def casts(eqn: Any, operands: list[int]) -> bool:
        if (inner := called(eqn)) is not None:
            return all(cast_first(inner, operand) for operand in operands)
        if eqn.primitive.name != "convert_element_type" or not is_cast(eqn):
            return False
        return bool(eqn.outvars[0].aval.dtype.itemsize > eqn.invars[0].aval.dtype.itemsize)

    takers = uses(jaxpr).taken([id(jaxpr.invars[number])])
    return bool(takers) and all(casts(eqn, operands) for eqn, operands in takers)


def retyped_at(jaxpr: Any, number: int, dtype: Any) -> Any:
    """The last equation before an output that has an operand of the old ``dtype``; None if there is none. Jaxprs inside are not searched."""
    made_by = uses(jaxpr).maker
    ahead, seen = [jaxpr.outvars[number]], set[int]()
    while ahead:
        eqn, _ = made_by.get(id(ahead.pop()), (None, 0))
        if eqn is None or id(eqn) in seen:
            continue
        seen.add(id(eqn))
        if any(getattr(var.aval, "dtype", None) == dtype for var in eqn.invars):
            return eqn
        ahead += eqn.invars
    return None


# --- who takes and who makes a variable --------------------------------------------------------------------------------


class Uses:
    """The equations of a jaxpr by the variables that they take or make."""

    # A step of a large model has thousands of equations, and hundreds of leaves are asked for.

    def __init__(self, jaxpr: Any) -> None:
        self.takers: defaultdict[int, list[Any]] = defaultdict(list)
        self.maker: dict[int, tuple[Any, int]] = {}
        self._through: dict[int, Sources] = {}
        self.order = {id(eqn): number for number, eqn in enumerate(jaxpr.eqns)}
        for eqn in jaxpr.eqns:
            for key in dict.fromkeys(map(id, eqn.invars)):
                self.takers[key].append(eqn)
            self.maker.update((id(var), (eqn, number)) for number, var in enumerate(eqn.outvars))

    def through(self, eqn: Any) -> Sources:
        """`handed_through`, cached."""
        if id(eqn) not in self._through:
            self._through[id(eqn)] = handed_through(eqn)
        return self._through[id(eqn)]

    def same(self, var: Any) -> list[int]:
        """The ids of a variable and of those that are handed through from it."""
        ids = [id(var)]
        for key in ids:
            for eqn in self.takers.get(key, ()):
                passed = zip(eqn.outvars, self.through(eqn), strict=True)
                ids += [id(out) for out, operand in passed if operand is not None and id(eqn.invars[operand]) == key]
        return ids

    def taken(self, ids: Iterable[int]) -> list[tuple[Any, list[int]]]:
        """The equations that take any of these variables, each with the numbers of the operands."""
        ids = frozenset(ids)
        eqns = {id(eqn): eqn for key in ids for eqn in self.takers.get(key, ())}
        return [(eqn, [k for k, var in enumerate(eqn.invars) if id(var) in ids]) for eqn in eqns.values()]


_uses: WeakKeyDictionary[Any, Uses] = WeakKeyDictionary()


def uses(jaxpr: Any) -> Uses:
    """The uses of variables in a jaxpr, gathered once."""
    if jaxpr not in _uses:
        _uses[jaxpr] = Uses(jaxpr)
    return _uses[jaxpr]


# --- effects and size of a program -------------------------------------------------------------------------------------------------


def constants(closed: Any) -> list[Any]:
    """The arrays that a jaxpr captured, each once."""
    constants = {id(const): const for jaxpr in all_jaxprs(closed) for const in staging.captured_values(jaxpr)}
    return [const for const in constants.values() if hasattr(const, "shape") and not is_ref(const)]


def donated_to_jits(jaxpr: Any) -> tuple[bool | None, ...]:
    """True for each input that a jit among the equations donates; None if no jit takes it."""
    by_input: dict[int, bool] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in CALLS:
            for var, donated in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False):
                by_input[id(var)] = donated or by_input.get(id(var), False)
    return tuple(by_input.get(id(var)) for var in jaxpr.invars)


def inner_donations(closed: Any) -> int:
    """The number of operands that inner jits donate. An outer jit drops these donations in silence."""
    jits = (eqn for eqn in all_equations(closed) if eqn.primitive.name in CALLS)
    return sum(sum(eqn.params.get("donated_invars", ())) for eqn in jits)


def calls_back(closed: Any) -> bool:
    """True if the program runs Python code or raises while it runs: `jax.pure_callback`, `jax.debug.print`, a check of checkify."""
    names = (eqn.primitive.name for eqn in all_equations(closed))
    return any("callback" in name or name in ("check", *PRINTS) for name in names)


PRINTS = frozenset(("debug_callback", "debug_print"))
"""`jax.debug.callback` and `jax.debug.print`, which give the program nothing. The second is of its own from jax 0.8 on."""


def without_prints(jaxpr: Any) -> Any:
    """The jaxpr without what only shows values while it runs, inside loops and calls too; as open or closed as it is. Itself where there is none."""
    gone = {effect for eqn in all_equations(jaxpr) if eqn.primitive.name in PRINTS for effect in eqn.effects}
    return _without_prints(jaxpr, gone) if gone else jaxpr


def _without_prints(jaxpr: Any, effects: set[Any]) -> Any:
    open_jaxpr = staging.open_jaxpr(jaxpr)
    if open_jaxpr is not jaxpr:
        return jaxpr.replace(jaxpr=_without_prints(open_jaxpr, effects))
    kept = [eqn.replace(effects=eqn.effects - effects) for eqn in jaxpr.eqns if eqn.primitive.name not in PRINTS]
    equations = [changed_inside(eqn, lambda inner: _without_prints(inner, effects)) for eqn in kept]
    return jaxpr.replace(eqns=equations, effects=jaxpr.effects - effects)


def moved_to_chip(jaxpr: Any) -> tuple[int, ...]:
    """The bytes of each array that a program moves to the memory of its chip, where it computes with what the host holds."""
    return tuple(nbytes(var.aval) for eqn in all_equations(jaxpr) for var in staging.moved_to_chip(eqn))


def changed_inside(eqn: Any, change: Callable[[Any], Any]) -> Any:
    """An equation with the jaxprs among its parameters changed; itself where there is none. A named tuple holds none, and cannot be made of a list."""
    if next(jaxprs_of(eqn), None) is None:
        return eqn

    def plain(value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(plain, value))
        return change(value) if hasattr(staging.open_jaxpr(value), "eqns") else value

    return eqn.replace(params={name: plain(value) for name, value in eqn.params.items()})


def branches(closed: Any) -> bool:
    """True if the program chooses between branches: `jax.lax.cond`, `nnx.switch`."""
    return any(eqn.primitive.name == COND for eqn in all_equations(closed))


def scans(closed: Any) -> Iterator[Any]:
    return (eqn for eqn in all_equations(closed) if eqn.primitive.name == SCAN)


def scans_references(closed: Any) -> bool:
    """True if a scan takes references apart: each of its steps gets a slice of them."""
    sliced = (var for scan in scans(closed) for var in scan.invars[sum(staging.scan_layout(scan)) :])
    return any(is_ref_type(var.aval) for var in sliced)


def writes_copies(closed: Any) -> bool:
    """True if the program copies a reference into another one, and writes that: so does a transform of flax's graph mode."""
    for jaxpr in all_jaxprs(closed):
        read, copies = set[int](), set[int]()
        for eqn in staging.open_jaxpr(jaxpr).eqns:
            name, taken = eqn.primitive.name, set(map(id, eqn.invars))
            if name == "get" or (name in RESHAPES and taken & read):  # a vmap broadcasts it
                read.update(map(id, eqn.outvars))
            elif name == "new_ref" and taken & read:
                copies.update(map(id, eqn.outvars))
            elif taken & copies and staging.writes_reference(eqn):
                return True
    return False


def writes_back(closed: Any) -> bool:
    """True if a scan stacks its stacked inputs anew, as they are: `nnx.scan` does that with the state that its body hands out."""
    stacked = (of_scan(scan, COPIES)[staging.scan_layout(scan)[1] :] for scan in scans(closed))
    return any(operand is not None for operands in stacked for operand in operands)


def remat_in_scan(closed: Any) -> bool:
    """True if the body of a scan holds a remat: `nnx.scan` then writes back all that `nnx.remat` hands out."""
    bodies = (all_equations(scan.params["jaxpr"]) for scan in scans(closed))
    return any(eqn.primitive.name in REMATS for body in bodies for eqn in body)


def written_twice(closed: Any) -> str:
    """The line of the first remat that a gradient runs a second time, and with it an update of a reference; empty if there is none.

    Jax 0.10 and 0.12 differentiate that second run. It does not write references of the kind ``no_grad_no_remat``. Where it writes what the
    first run saved, or what depends on no reference, it writes the same value again.
    """
    again = (eqn for eqn in all_equations(closed) if eqn.primitive.name in REMATS and eqn.params.get("differentiated"))
    updates = (eqn for eqn in again if staging.writes_reference(eqn, that_it_reads=True))
    return next((equation_line(eqn) or "a library" for eqn in updates), "")


def lowest_precision(closed: Any) -> float:
    """The largest ``eps`` that a program rounds by: that of its floating types, and that of the products of its chip; 0 without any."""
    programmed = [*all_equations(closed)]
    made = (var.aval for eqn in programmed for var in eqn.outvars)
    kinds = {aval.dtype for aval in made if hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.floating)}
    of_kinds = (float(jnp.finfo(kind).eps) for kind in kinds)  # type: ignore[no-untyped-call]
    return max((*of_kinds, *map(staging.rounding_of_product, programmed)), default=0.0)


def equations(closed: Any) -> int:
    """The number of equations that a program runs: every step of a scan counts, and one of a while loop."""
    return sum(
        1 + (eqn.params["length"] if eqn.primitive.name == SCAN else 1) * sum(map(equations, jaxprs_of(eqn)))
        for eqn in staging.open_jaxpr(closed).eqns
    )


def operations(closed: Any) -> int:
    """The number of different operations in a program. A call without a jit compiles each of them once, however often it runs."""
    every = all_equations(closed)
    return len({(eqn.primitive.name, *(str(var.aval) for var in eqn.invars)) for eqn in every})
