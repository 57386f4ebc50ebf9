"""The run of a pasted program whose state or inputs are abstract: it is compiled, or traced, and nothing is allocated.

Copied by `own_source`, as `long_form` is: the short form of `engine.abstract_run`.
"""

from __future__ import annotations

import re
from typing import Any

import jax
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.observation import Leaf
from pytest_nnxcheck.inspection.pointers import read_leaf
from pytest_nnxcheck.reproducer.runtime.long_form import (
    Facts,
    Ran,
    Setup,
    compiled_of,
    donated_leaves,
    make_plans,
    read_what_came_back,
    root_options,
)
from pytest_nnxcheck.reproducer.runtime.taken_apart import Call
from pytest_nnxcheck.reproducer.runtime.walk import remaining_tracers
from pytest_nnxcheck.subject.abstract_arrays import abstract_inputs, abstract_leaf, abstract_state
from pytest_nnxcheck.transforms.compose import stack as stack_leaf
from pytest_nnxcheck.transforms.layer import LENGTH, Program

__tracebackhide__ = True  # pytest shows the frames of the user, not these


def run_abstract(call: Call, facts: Facts, setup: Setup) -> Ran:
    """Compile the nesting, or trace it where its outermost layer is no jit that takes the state."""
    graphdef, leaves = compat.split(call.state)
    inputs = abstract_inputs(call.inputs)
    for _ in range(setup.axes):
        inputs = tuple(stack_leaf(leaf, LENGTH) for leaf in inputs)
    state, inputs = (
        setup.place(nnx.merge(graphdef, abstract_state(leaves))),
        tuple(map(abstract_leaf, setup.place(inputs))),
    )
    ran = Ran(call, facts, setup, state)
    addresses: dict[int, int] = {}
    kept: list[Any] = []

    def show(compiled: Any, arguments: Any, lowered: Any) -> Any:
        ran.compiled.append(compiled)
        made = abstract_outputs(compiled, lowered)
        parameters = jax.tree.leaves(arguments)
        aliased = aliases_of(compiled)
        addresses.update({id(leaf): number + 1 for number, leaf in enumerate(parameters)})
        for number, leaf in enumerate(jax.tree.leaves(made)):
            addresses[id(leaf)] = aliased.get(number, len(parameters) + number) + 1
        kept.extend([parameters, made])
        return made

    def jit(wrapper: Any, f: Program) -> Any:
        if not setup.root:
            return wrapper(f)
        return compat.staged(wrapper, f, compiled_of, show, abstract=True, keep_unused=True, **root_options(ran))

    def leaf_of(path: str, value: Any) -> Leaf:
        found = read_leaf(path, value)
        known = id(value) in addresses and value.size > 0
        return Leaf(found.path, found.type, found.sharding, (addresses[id(value)],) if known else ())

    program = setup.nest(call.program, make_plans(ran, jit))
    donated = donated_leaves(ran, inputs)
    try:
        ran.output = program(state, *inputs) if setup.root else traced(ran, program, inputs)
    except Exception as error:  # noqa: BLE001 - the call may raise anything
        ran.error = error
        return ran
    ran.before = [leaf_of(*leaf) for leaf in donated] if setup.root else []
    read_what_came_back(ran, leaf_of)
    return ran


def abstract_outputs(compiled: Any, lowered: Any) -> Any:
    """The outputs of a compiled program, each an object of its own."""
    infos, treedef = jax.tree.flatten(lowered.out_info)
    shardings = jax.tree.leaves(compiled.output_shardings)
    made = [
        abstract_leaf(jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding))
        for info, sharding in zip(infos, shardings, strict=True)
    ]
    return jax.tree.unflatten(treedef, made)


def aliases_of(compiled: Any) -> dict[int, int]:
    """The parameter whose buffer an output takes, as the first line of the compiled program says."""
    head = compiled.as_text().partition("\n")[0].partition("input_output_alias={")[2]
    return {int(output or 0): int(number) for output, number in re.findall(r"\{(\d*)\}: \((\d+), \{\}", head)}


def traced(ran: Ran, program: Program, inputs: tuple[Any, ...]) -> Any:
    """The abstract output of a program that is not compiled; tracers of traces that have ended are looked for inside."""
    graphdef, leaves = compat.split(ran.state)
    last: list[Any] = []

    def pure(leaves: Any, *inputs: Any) -> Any:
        module = nnx.merge(graphdef, leaves)
        arriving = [*inputs, *(value for _, value in compat.raw_leaves(module))]
        alive = [compat.trace_identity(leaf) for leaf in jax.tree.leaves(arriving) if compat.is_tracer(leaf)]
        keys = {compat.trace_key(trace) for trace in alive}
        try:
            out = program(module, *inputs)
        finally:
            found = remaining_tracers(ran.call.roots(module))
            ran.tracers += [each for each in found if compat.trace_key(compat.trace_identity(each[1])) not in keys]
        after = [] if ran.tracers else compat.raw_leaves(module)
        last[:] = [path for path, _ in after]
        return out, [value for _, value in after]

    out, values = jax.eval_shape(pure, leaves, *inputs)
    known = dict(zip(last, values, strict=True))
    for path, variable in compat.variables(ran.state):
        if path in known:
            compat.set_variable_value(variable, known[path])
    return out
