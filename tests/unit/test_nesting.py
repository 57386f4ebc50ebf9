"""Layers and nestings as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck import Layer, Nesting
from pytest_nnxcheck.core.catalogue import MODES, layer_names, styles_of
from pytest_nnxcheck.core.nesting import impossible
from pytest_nnxcheck.core.text import Unreadable

layers = st.sampled_from([Layer(transform, style) for transform in layer_names() for style in styles_of(transform)])
any_nesting = st.builds(Nesting, st.lists(layers, max_size=5).map(tuple), st.sampled_from(MODES))


@given(any_nesting)
def test_text_round_trips(nesting):
    assert Nesting.parse(str(nesting)) == nesting
    assert eval(repr(nesting)) == nesting


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("un-nested", "un-nested"),
        (" jit ", "jit"),
        ("jit>scan[ closure ]", "jit > scan[closure]"),
        ("jit[argument] > remat", "jit > remat"),
        ("jit > call_first > scan[jax_closure]", "jit > call_first > scan[jax_closure]"),
        ("tree:jit>scan", "tree: jit > scan"),
        (" graph_no_updates :  un-nested ", "graph_no_updates: un-nested"),
        ("current: jit", "jit"),
    ],
)
def test_spellings(text, canonical):
    assert str(Nesting.parse(text)) == canonical


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "an empty nesting, write 'un-nested' or layers such as 'jit > scan[closure]'"),
        ("jit >", "'' is not a layer"),
        ("jit scan", "'jit scan' is not a layer"),
        ("scan[closure", "is not a layer"),
        ("scna", "unknown transform 'scna', did you mean 'scan'?"),
        ("un-nestd", "unknown transform 'un-nestd', did you mean 'un-nested'?"),
        ("zzz", "unknown transform 'zzz', write one of jit, remat,"),
        ("jit > scan[closur]", "unknown style 'closur', did you mean 'closure'?"),
        ("scan[]", "unknown style ''"),
        ("treee: jit", "unknown mode 'treee', did you mean 'tree'?"),
        (": jit", "unknown mode '', write one of current, graph, graph_no_updates, tree, ref"),
        ("tree:", "an empty nesting, write 'un-nested' or layers such as 'jit > scan[closure]'"),
        ("tree: graph: jit", "'graph: jit' is not a layer"),
        ("call_first[functional]", "call_first has no styles, write 'call_first'"),
        ("custom_vjp[closure]", "custom_vjp has no style 'closure', write 'custom_vjp' or 'custom_vjp[functional]'"),
        ("jit > foriloop", "unknown transform 'foriloop', did you mean 'fori_loop'?"),
    ],
)
def test_bad_text_says_what_to_write(text, message):
    with pytest.raises(Unreadable) as caught:
        Nesting.parse(text)
    assert message in str(caught.value)


def test_plainness_orders_by_modes_then_layers_then_styles_then_transforms():
    texts = [
        "un-nested",
        "jit",
        "scan",
        "jit[functional]",
        "jit > jit",
        "jit > scan",
        "scan > jit",
        "jit > jit[closure]",
        "jit > jit > jit",
        "graph: un-nested",
        "graph_no_updates: jit > jit",
        "tree: un-nested",
    ]
    nestings = [Nesting.parse(text) for text in texts]
    assert [nesting.plainness for nesting in nestings] == sorted({nesting.plainness for nesting in nestings})


@given(any_nesting, st.data())
def test_taking_a_layer_away_is_plainer(nesting, data):
    if nesting.layers:
        index = data.draw(st.integers(0, len(nesting) - 1))
        fewer = Nesting(nesting.layers[:index] + nesting.layers[index + 1 :], nesting.mode)
        assert fewer.plainness < nesting.plainness


@given(any_nesting)
def test_what_jax_cannot_run_stays_so_whatever_is_around_it(nesting):
    names = [layer.transform for layer in nesting.layers]
    under = names[names.index("grad") + 1 :] if "grad" in names else []
    assert bool(impossible(nesting)) == (not {"while_loop", "grad"}.isdisjoint(under) or names.count("shard_map") > 1)
