"""What a pasted program is made of beside the layers: it takes a call apart, runs its nesting once, and keeps what it left.

Nothing of the plugin calls these functions. Those that a program needs are copied into it, with all they name (see `own_source`), so they
use jax, flax and the standard library, and of this package only what can be copied along. They are the short form of `subject`, `transforms`
and `engine.observe`: what a program needs to know of a call beforehand (`Facts`) was found by those.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.core.observation import Leaf
from pytest_nnxcheck.inspection.pointers import read_leaf
from pytest_nnxcheck.reproducer.runtime.taken_apart import Call, copied
from pytest_nnxcheck.transforms.layer import Plan, Program, stack

__tracebackhide__ = True  # pytest shows the frames of the user, not these


@dataclass(frozen=True)
class Facts:
    """What is known of one call: paths of the state that it changes, of what it writes and restores, and of what a gradient is taken by;
    by layer the shapes of what is inside it; the numbers of the donated inputs, and with them those of the outputs that are their new values; leaves of an
    optimizer that must change; whether random numbers differ in a batch; and the user's name of the object that a method is called on.
    """

    changed: frozenset[Any] = frozenset()
    restored: frozenset[Any] = frozenset()
    parameters: frozenset[Any] = frozenset()
    shapes: Any = ()
    donated: tuple[int, ...] = ()
    returned: tuple[tuple[int, int], ...] = ()
    updated: tuple[str, ...] = ()
    drawn: bool = False
    owner: str = ""


@dataclass(frozen=True)
class Setup:
    """The nesting: ``nest(call, plans)`` puts the layers around a call, ``runs`` runs them, ``un_nest`` takes their axes off the output.

    ``inside`` says of each layer how many leading axes those inside it take off the inputs, ``axes`` how many all of them do;
    ``root`` how many arguments of the outermost jit are state, None where the outermost layer is no jit.
    """

    runs: Callable[..., Any]
    nest: Callable[..., Program]
    un_nest: Callable[[Any], Any]
    inside: tuple[int, ...] = ()
    axes: int = 0
    root: int | None = None
    donate: str = "state"
    place: Callable[[Any], Any] = lambda tree: tree


@dataclass
class Ran:
    """What one run of the nesting left: its copy of the state, the output or the exception, and the program that its jit compiled."""

    call: Call
    facts: Facts
    setup: Setup
    state: Any
    output: Any = None
    error: Exception | None = None
    tracers: list[tuple[str, Any]] = field(default_factory=list)
    touched: list[str] = field(default_factory=list)
    compiled: list[Any] = field(default_factory=list)
    before: list[Leaf] = field(default_factory=list)
    after: dict[str, Leaf] = field(default_factory=dict)
    reused: set[int] = field(default_factory=set)


def shape(text: str) -> Any:
    """The abstract array of ``float32[8,64]``."""
    dtype, _, sizes = text.rstrip("]").partition("[")
    kinds = ("threefry2x32", "rbg", "unsafe_rbg") if dtype.startswith("key<") else ()
    keys = {key.name: key for key in (jax.random.key(0, impl=kind).dtype for kind in kinds)}
    kind = keys[dtype] if keys else jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(tuple(int(size) for size in sizes.split(",") if size), kind)


# --- a call, taken apart


# --- copies


# --- the run


def run(call: Call, facts: Facts, setup: Setup) -> Ran:
    """Run the nesting on a copy of the state: what it donates must not be the user's own array."""
    state, inputs = setup.place(copied(call.state)), tuple(map(jnp.copy, setup.place(stacked(call.inputs, setup.axes))))
    ran = Ran(call, facts, setup, state)
    program = setup.nest(call.program, make_plans(ran, root_jit(ran)))
    ran.before = [read_leaf(*leaf) for leaf in donated_leaves(ran, inputs)]
    try:
        with warnings.catch_warnings(), compat.quick_compiles():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            ran.output = jax.block_until_ready(program(state, *inputs))
    except Exception as error:  # noqa: BLE001 - the call may raise anything
        ran.error = error
        return ran
    read_what_came_back(ran, read_leaf)
    return ran


def read_what_came_back(ran: Ran, read: Callable[[str, Any], Leaf]) -> None:
    """The state after the run, the outputs that are new values of donated inputs, and the buffers of all of them."""
    call, leaves = ran.call, jax.tree.leaves(ran.output)
    ran.after = {call.path(path): read(call.path(path), value) for path, value in compat.raw_leaves(ran.state)}
    plain = [leaf for _, value in compat.attributes(ran.state) for leaf in jax.tree.leaves(value)]
    arrays = [*leaves, *(leaf for leaf in plain if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct))]
    came_back = [*ran.after.values(), *(read("", leaf) for leaf in arrays)]
    ran.reused = {pointer for leaf in came_back for pointer in leaf.pointers}
    if not (ran.before and ran.facts.returned):
        return
    # Which leaf of the output is the call's own is asked of their numbers: taking axes off the arrays would copy them.
    numbers = [np.full((1,) * ran.setup.axes, number) for number in range(len(leaves))]
    own = jax.tree.leaves(ran.setup.un_nest(jax.tree.unflatten(jax.tree.structure(ran.output), numbers)))
    for number, place in ran.facts.returned:
        ran.after[call.input_names[number]] = read("output", leaves[own[place].item()])


def stacked(inputs: Any, axes: int) -> Any:
    """Inputs with a leading axis for every scan, vmap and first call."""
    for _ in range(axes):
        inputs = stack(inputs)
    return inputs


def first_of(tree: Any) -> Any:
    """The first element of the leading axis of every leaf."""

    def first_of_leaf(leaf: Any) -> Any:
        abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if abstract else leaf[0]

    return jax.tree.map(first_of_leaf, tree)


def registered(transform: Callable[..., Any]) -> Callable[[Program, Plan], Program]:
    """The layer of a transform of the user's own."""

    def make(f: Program, _plan: Plan) -> Program:
        def layer(state: Any, *inputs: Any) -> Any:
            return transform(f)(state, *inputs)

        return layer

    return make


def make_plans(ran: Ran, jit: Callable[..., Program]) -> list[Plan]:
    """What each layer must know, from the outermost inwards."""
    return [make_plan(ran, number, jit) for number in range(len(ran.setup.inside))]


def make_plan(ran: Ran, number: int, jit: Callable[..., Program]) -> Plan:
    facts = ran.facts
    return Plan(
        changed=lambda path, _: tuple(path) in facts.changed,
        written=lambda path, _: tuple(path) in facts.changed | facts.restored,
        subject=ran.call.program,
        element=lambda leaf: leaf[(0,) * ran.setup.inside[number]],
        shapes=None,
        empty=lambda: jax.tree.map(compat.zeros, facts.shapes[number]),
        parameters=lambda path, _: tuple(path) in facts.parameters,
        jit=jit if number == 0 else lambda wrapper, f: wrapper(f),
        unchanged=lambda state: unchanged(ran, state),
        graph_updates=compat.mode_flags()[1],
    )


@contextlib.contextmanager
def unchanged(ran: Ran, state: Any) -> Iterator[None]:
    """Note what ``eval_shape`` puts into the state, which must be nothing."""
    before = dict(compat.raw_leaves(state))
    yield
    after = dict(compat.raw_leaves(state))
    paths = sorted(before.keys() | after.keys(), key=str)
    ran.touched += [ran.call.path(path) for path in paths if before.get(path) is not after.get(path)]


def compiled_of(lowered: Any) -> Any:
    return lowered.compile(compiler_options=compat.compiler_options())


def root_jit(ran: Ran) -> Callable[..., Program]:
    """The jit of the outermost layer: it donates, keeps unused parameters, and shows what it compiled."""

    def show(compiled: Any, _arguments: Any, _lowered: Any) -> None:
        ran.compiled.append(compiled)

    options = {"abstract": False, "keep_unused": True}
    return lambda wrapper, f: compat.staged(wrapper, f, compiled_of, show, **options, **root_options(ran))


def root_options(ran: Ran) -> dict[str, Any]:
    """What the outermost jit donates."""
    states = ran.setup.root or 0
    donated: tuple[int, ...] = (0,) if states and ran.setup.donate != "none" else ()
    donated += tuple(states + number for number in ran.facts.donated)
    return {"donate_argnums": donated} if donated else {}


def donated_leaves(ran: Ran, inputs: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Names and values of what the outermost jit donates."""
    if ran.setup.root is None or ran.setup.donate == "none":
        return []
    leaves = [(path, value) for path, value in compat.raw_leaves(ran.state) if ran.setup.root]
    if ran.setup.root == 2:
        leaves = [(path, value) for path, value in leaves if tuple(path) in ran.facts.changed]
    named = [(ran.call.path(path), value) for path, value in leaves]
    return named + [(ran.call.input_names[number], inputs[number]) for number in ran.facts.donated]


def finish(ran: Ran) -> Any:
    """Give the user's own objects what the run left in its copy, and the output its structure."""
    put_back(ran.call.state, ran.state)
    return ran.call.rebuild(ran.setup.un_nest(ran.output))


def put_back(mine: Any, copy: Any) -> None:
    values = dict(compat.raw_leaves(copy))
    nodes = {tuple(path): node for path, node in compat.iter_graph(mine)}
    for path, variable in compat.variables(mine):
        real = isinstance(values.get(path), jax.ShapeDtypeStruct) and isinstance(
            compat.variable_value(variable), jax.Array
        )
        if path in values and not real:
            compat.set_variable_value(variable, values[path])
    for path, node in compat.iter_graph(copy):
        own = nodes.get(tuple(path))
        if own is None or isinstance(node, nnx.Variable) or not hasattr(node, "__dict__"):
            continue
        for name, value in vars(node).items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if name not in vars(own) or (plain and vars(own)[name] != value):
                setattr(own, name, value)
        for name in [name for name in vars(own) if name not in vars(node)]:
            delattr(own, name)
