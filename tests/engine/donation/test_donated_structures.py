"""Donated inputs in generated structures: returned in any order and place they are kept, and exactly the one that is lost is named.

The examples give buffers to outputs as XLA does, by type, but in any order.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_nnxcheck.compat.arrays import array_type
from pytest_nnxcheck.core.facts import ArrayType, Leaf, Move, Observation
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.invariants.donation import lost_leaves
from pytest_nnxcheck.subject.profile import keys, new_values

# No two types have as many bytes, nor has one of them as many in bfloat16: newer XLA would give away any buffer that fits.
TYPES = [((3,), jnp.float32), ((5,), jnp.int32), ((7, 11), jnp.float32), ((), jnp.float32)]
SPARE = ((13,), jnp.float32)


@dataclasses.dataclass
class Box:
    a: Any = None
    b: Any = None
    c: Any = None


jax.tree_util.register_dataclass(Box, data_fields=["a", "b", "c"], meta_fields=[])


CONTAINERS = {
    "tuple": tuple,
    "list": list,
    "dict": lambda parts: dict(zip("kvw", parts, strict=False)),
    "dataclass": lambda parts: Box(*parts),
}


@st.composite
def nested(draw, items, depth=3):
    """A structure of `CONTAINERS` with these items in their order, and None in some places."""
    if len(items) == 1 and (not depth or draw(st.booleans())):
        return items[0]
    if not depth:
        return tuple(items)
    first, second = sorted(draw(st.tuples(*[st.integers(0, len(items))] * 2)))
    groups = [items[:first], items[first:second], items[second:]]
    parts = [draw(nested(group, depth - 1)) if group else None for group in groups]
    return CONTAINERS[draw(st.sampled_from(sorted(CONTAINERS)))](parts)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A call: numbers of ``TYPES`` in the structure of the donated input, which input each leaf of the output is made of (-1: of none),
    and the input that is ``forgotten`` or ``retyped``.
    """

    types: list[int]
    cache: Any
    output: Any
    forgotten: int | None
    retyped: int | None

    @property
    def at_fault(self):
        return {number for number in (self.forgotten, self.retyped) if number is not None}


@st.composite
def plans(draw, fault):
    types = draw(st.lists(st.sampled_from(range(len(TYPES))), min_size=1, max_size=5))
    numbers = list(range(len(types)))
    at_fault = draw(st.sampled_from(numbers))
    returned = draw(st.permutations([n for n in numbers if fault != "forgotten" or n != at_fault]))
    spare = draw(st.lists(st.integers(0, len(returned)), max_size=2))
    for place in spare:
        returned.insert(place, -1)
    assume(returned)
    return Plan(
        types,
        draw(nested(numbers)),
        draw(nested(returned)),
        at_fault if fault == "forgotten" else None,
        at_fault if fault == "retyped" else None,
    )


def is_number(leaf):
    return isinstance(leaf, int)


def new_type(plan, number):
    shape, dtype = TYPES[plan.types[number]] if number >= 0 else SPARE
    return shape, jnp.bfloat16 if number == plan.retyped else dtype


def abstract(shape, dtype):
    return array_type(jax.ShapeDtypeStruct(shape, dtype))


def named(tree, root):
    """(name, number) of the leaves, as the engine names them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_number)
    return [(root + jax.tree_util.keystr(path), number) for path, number in leaves]


def lost_by(plan, order, known):
    """The inputs that are named, where XLA gives buffers away in this order."""
    inputs = {number: (name, abstract(*TYPES[plan.types[number]])) for name, number in named(plan.cache, "cache")}
    outputs = [(name, abstract(*new_type(plan, number)), number) for name, number in named(plan.output, "")]
    before = {number: Leaf(name, kind, None, (number + 1,)) for number, (name, kind) in inputs.items()}
    free = random.Random(order).sample(sorted(before), len(before))
    after = []
    for place, (name, kind, _) in enumerate(outputs):
        donor = next((number for number in free if before[number].type == kind), None)
        free = [number for number in free if number != donor]
        after.append(Leaf(f"output{name}", kind, None, (100 + place if donor is None else donor + 1,)))
    origins = [frozenset({number} - {-1}) for _, _, number in outputs] if known else ()
    pairs = new_values(inputs, [(name, kind) for name, kind, _ in outputs], origins)
    came_back = {inputs[number][0]: after[place] for number, place in pairs.items()}
    held = {pointer for leaf in after for pointer in leaf.pointers}
    moves = tuple(Move(leaf, came_back.get(leaf.path)) for leaf in before.values())
    lost = {leaf.path for leaf in lost_leaves(Observation(Nesting(), None, moves=moves, reused=frozenset(held)))}
    return {number for number, (name, _) in inputs.items() if name in lost}


ORDERS = st.integers(0, 1000)


@pytest.mark.slow
@given(plan=plans(None), order=ORDERS, known=st.booleans())
def test_what_is_returned_in_any_order_and_place_is_kept(plan, order, known):
    assert lost_by(plan, order, known) == set()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["forgotten", "retyped"])
@given(data=st.data(), order=ORDERS)
def test_exactly_the_one_that_is_lost_is_named(fault, data, order):
    plan = data.draw(plans(fault))
    assert lost_by(plan, order, known=True) == plan.at_fault


# --- names and types, one by one


def f32(*shape):
    return ArrayType("float32", shape)


def pairs(inputs, outputs, origins=()):
    found = new_values(dict(enumerate(inputs)), outputs, origins)
    return {inputs[number][0]: outputs[place][0] for number, place in found.items()}


KEYS = [("cache[0]", f32(3, 4)), ("cache[1]", f32(3, 4))]
ALIKE = [("cache['a']", f32(3)), ("cache['b']", f32(3))]
MATCHES = {
    "a token that comes first has the last key of the first array": (
        KEYS,
        [("[0]", f32(4)), ("[1][0]", f32(3, 4)), ("[1][1]", f32(3, 4))],
        (),
        {"cache[0]": "[1][0]", "cache[1]": "[1][1]"},
    ),
    "a number for a name is no match by itself": (KEYS, [("[0]", f32(4)), ("[1]", f32(3, 4))], (), {"cache[1]": "[1]"}),
    "an array that grows is known by its place": (
        [("cache[0]", f32(3, 4)), ("cache.k", f32(3, 4))],
        [("[0]", f32()), ("[1][0]", f32(2, 4, 4)), ("[1].k", f32(9))],
        (),
        {"cache[0]": "[1][0]", "cache.k": "[1].k"},
    ),
    "as deep as in a tuple comes first": (
        KEYS[:1],
        [("[0]", f32(3, 4)), ("[1][0]", f32(3, 4))],
        (),
        {"cache[0]": "[1][0]"},
    ),
    "names alone": (ALIKE, [("['a']", f32(3)), ("['b']", f32(3))], (), {"cache['a']": "['a']", "cache['b']": "['b']"}),
    "what goes into an output tells more than its name": (
        ALIKE,
        [("['a']", f32(3)), ("['b']", f32(3))],
        [frozenset({1}), frozenset({0})],
        {"cache['a']": "['b']", "cache['b']": "['a']"},
    ),
    "made of another input": (ALIKE[:1], [("['b']", f32(3))], [frozenset({5})], {}),
    "set to zeros": (ALIKE[:1], [("['a']", f32(3))], [frozenset()], {"cache['a']": "['a']"}),
}


@pytest.mark.parametrize("name", MATCHES)
def test_the_best_match_over_all_outputs_counts(name):
    inputs, outputs, origins, expected = MATCHES[name]
    assert pairs(inputs, outputs, origins) == expected


def test_the_steps_of_a_path_are_whole_whatever_a_key_holds():
    assert keys("opt_state[0].mu['kernel']") == ["[0]", ".mu", "['kernel']"]
    assert keys("""cache['a]b'].x["it's"][2]""") == ["['a]b']", ".x", '["it\'s"]', "[2]"]
