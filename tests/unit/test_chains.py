"""Chains: every ordered pair of layers once side by side, in few chains that jax can run, and the same ones every time."""

from collections import Counter
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck import Layer, Nesting
from pytest_nnxcheck.core.catalogue import CALL_FIRST, FURTHER, TRANSFORMS, layer_names, styles_of
from pytest_nnxcheck.core.nesting import impossible
from pytest_nnxcheck.runner import strategies

PLAINEST = [Layer(transform) for transform in (*TRANSFORMS, CALL_FIRST, *FURTHER)]
EVERY = [Layer(transform, style) for transform in layer_names() for style in styles_of(transform)]
SUBSETS = st.lists(st.sampled_from(PLAINEST), unique=True) | st.lists(st.sampled_from(EVERY), unique=True, max_size=8)
LONGEST = st.integers(2, 4)
IDLE = {"remat", "eval_shape"}
INNER = [Layer(transform) for transform in TRANSFORMS if transform != "jit"]


def side_by_side(made):
    return Counter(pair for chain in made for pair in pairwise(chain))


def possible(layers):
    """Said again, without the code under test: every ordered pair, less those that jax refuses."""
    return {pair for pair in product(layers, repeat=2) if not impossible(Nesting(pair))}


@given(SUBSETS, LONGEST)
def test_every_pair_stands_side_by_side_once(layers, longest):
    made = list(strategies.cover_pairs(layers, longest))
    assert side_by_side(made) == dict.fromkeys(possible(layers), 1)
    assert all(2 <= len(chain) <= longest for chain in made)
    assert not any(impossible(Nesting(chain)) for chain in made)
    assert made == list(strategies.cover_pairs(list(layers), longest))


@given(SUBSETS.filter(bool), LONGEST)
def test_not_many_more_chains_than_pairs_need(layers, longest):
    made = list(strategies.cover_pairs(layers, longest))
    idle = sum(layer.transform in IDLE for layer in layers)
    # A ring has one chain for each of its pairs, and one for each idle layer in between; a chain of the rest is cut short only where its walk
    # ends: where jax runs everything, once for each layer at most.
    ring = (len(layers) - idle) * (1 + idle)
    if len(possible(layers)) == len(layers) ** 2:
        assert len(made) <= ring + -(-(len(layers) ** 2) // (longest - 1)) + len(layers)


@given(SUBSETS, st.integers(3, 4))
def test_chains_with_an_idle_layer_share_few_programs(layers, longest):
    made = list(strategies.cover_pairs(layers, longest))
    compiled = {tuple(layer for layer in chain if layer.transform not in IDLE) for chain in made}
    without = {chain for chain in made if not any(layer.transform in IDLE for layer in chain)}
    if len(possible(layers)) == len(layers) ** 2:
        assert compiled - without <= {()}


def test_what_jax_refuses_is_in_no_chain():
    loop, grad, remat = map(Layer, ("while_loop", "grad", "remat"))
    made = list(strategies.cover_pairs([loop, grad, remat], 4))
    assert {*side_by_side(made)} == {*product([loop, grad, remat], repeat=2)} - {(grad, loop), (grad, grad)}
    # Side by side each of two steps may be fine, and the whole may not.
    assert not any(grad in chain[: chain.index(loop)] for chain in made if loop in chain)


@given(SUBSETS, st.integers(1, 4))
def test_short_chains_hold_each_layer_once(layers, longest):
    made = list(strategies.cover_layers(layers, longest))
    assert [layer for chain in made for layer in chain] == layers
    assert all(0 < len(chain) <= longest for chain in made)
    assert not any(impossible(Nesting(chain)) for chain in made)


@given(st.lists(st.sampled_from(EVERY), max_size=4), st.sampled_from(["current", "tree"]))
def test_parts_are_what_is_left_of_a_nesting(layers, mode):
    whole = Nesting(tuple(layers), mode)
    made = list(strategies.parts(whole))
    assert made == sorted({*made}, key=lambda part: part.plainness)
    assert whole in made or not layers or impossible(whole)
    for part in made:
        rest = iter(layers)
        assert all(layer in rest for layer in part.layers), "in another order"
        assert part.layers
        assert part.mode == mode
        assert not impossible(part)
    for layer in layers:
        assert Nesting((layer,), mode) in made
