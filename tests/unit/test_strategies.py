"""The sweep and the draws: the nestings that a check runs, what is never drawn, what a failure shrinks to."""

from itertools import pairwise, product

import fake_engine
import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from pytest_nnxcheck import Layer, Nesting, check
from pytest_nnxcheck.core.catalogue import FURTHER, STYLES, TRANSFORMS, layer_names, styles_of
from pytest_nnxcheck.core.nesting import impossible
from pytest_nnxcheck.core.settings import DEFAULTS, merge
from pytest_nnxcheck.runner import strategies
from pytest_nnxcheck.runner.strategies import Exclusions

quiet = settings(database=None, derandomize=True, max_examples=2000, suppress_health_check=list(HealthCheck))
every_layer = st.sampled_from(
    [Layer(transform, style) for transform in layer_names() for style in styles_of(transform)]
)
some = st.builds(
    merge,
    st.fixed_dictionaries(
        {
            "transforms": st.lists(st.sampled_from(layer_names()), min_size=1, unique=True).map(tuple),
            "styles": st.lists(st.sampled_from(STYLES), min_size=1, unique=True).map(tuple),
            "max_depth": st.integers(1, 4),
        }
    ),
)
known = st.builds(
    Exclusions,
    refused=st.frozensets(st.sampled_from(STYLES[2:])),
    adds_state=st.booleans(),
    swept=st.integers(-1, 1),
    unfit=st.frozensets(every_layer, max_size=5),
)


@pytest.fixture(autouse=True)
def _no_engine(fake):
    """Verdicts by rule: a call takes no time."""


def run(model=None, **settings):
    """The nestings that a check runs, as text, in their order, without the un-nested call."""
    report = check(model or fake_engine.Model(), 1, **{"max_examples": 0, **settings})
    return [str(outcome.nesting) for outcome in report.outcomes[1:]]


# --- the sweep


def test_the_default_sweep():
    swept = run()
    assert len({*swept}) == len(swept)
    assert swept[:2] == ["eval_shape[closure]", "eval_shape[jax_closure]"]
    singles, chains = swept[: swept.index("jit > call_first")], swept[swept.index("jit > call_first") + 1 :]
    assert singles[2:8] == ["jit", "remat", "scan", "vmap", "while_loop", "eval_shape"]
    assert {*singles} == {str(Layer(transform, style)) for transform in TRANSFORMS for style in STYLES}
    layers = [chain.split(" > ") for chain in chains]
    assert {chain[0] for chain in layers} == {"jit"}
    side_by_side = [pair for chain in layers for pair in pairwise(chain[1:])]
    assert sorted(side_by_side) == sorted(product(TRANSFORMS[1:], repeat=2))


def test_each_sweep_has_what_the_smaller_ones_have():
    probes, singles, short, chains, pairs = (
        run(sweep=name) for name in ("probes", "singles", "short", "chains", "pairs")
    )
    assert singles[: len(probes)] == probes
    assert chains[: len(singles) + 1] == [*singles, "jit > call_first"]
    assert short == [*singles, "jit > call_first", "jit > remat > scan > vmap", "jit > while_loop > eval_shape"]
    assert pairs == chains + [f"{outer} > {inner}" for outer in TRANSFORMS for inner in TRANSFORMS]


FEW = {"transforms": "jit,scan", "styles": "argument"}


@pytest.mark.parametrize(
    "given, expected",
    [
        ({**FEW, "sweep": "singles"}, ["jit", "scan"]),
        ({**FEW, "max_depth": 1}, ["jit", "scan"]),
        ({**FEW, "sweep": "probes", "styles": "closure"}, ["jit[closure]"]),
        ({"styles": "functional", "transforms": "scan"}, ["scan[functional]"]),
        ({"styles": "functional", "transforms": "jit"}, ["jit[functional]", "jit[functional] > call_first"]),
        ({"transforms": "call_first"}, ["call_first"]),
        (
            {"transforms": "scan,call_first", "styles": "argument", "sweep": "pairs"},
            ["scan", "call_first", "scan > scan", "scan > call_first", "call_first > scan", "call_first > call_first"],
        ),
        (
            {"transforms": "while_loop,grad", "styles": "argument", "sweep": "pairs"},
            ["while_loop", "grad", "while_loop > while_loop", "while_loop > grad"],
        ),
        ({"transforms": "custom_vjp", "styles": "functional,closure", "max_depth": 1}, ["custom_vjp[functional]"]),
        # An expected failure is named in a style that its layers have.
        (
            {"transforms": "jit,custom_vjp", "styles": "closure", "expected_failures": {"custom_vjp": "x"}},
            ["jit[closure]"],
        ),
    ],
)
def test_sweep_follows_the_settings(given, expected):
    assert run(**given) == expected


def test_chains_are_of_the_plainest_style_that_hands_the_state_over():
    def chains(styles):
        return [text for text in run(styles=styles) if " > " in text]

    as_argument, as_state = chains("argument"), chains("functional")
    assert as_state[1] == "jit[functional] > scan[functional] > scan[functional] > vmap[functional]"
    assert chains("argument,functional,closure") == as_argument
    assert chains("closure,functional") == chains("functional,closure") == as_state
    assert chains("closure,jax_closure") == []


def test_an_expected_failure_may_be_as_deep_as_a_chain():
    def is_run(nesting):
        model = fake_engine.Model(memory=lambda run: str(run) == nesting)
        return nesting in run(model, effort="quick", max_examples=0, expected_failures={nesting: "x"})

    assert is_run("jit > scan > scan > vmap")
    assert not is_run("jit > scan > scan > vmap > vmap")


def test_a_remat_under_grad_has_something_to_be_compared_with():
    for depth, wanted in ((1, False), (2, True), (3, True)):
        swept = run(transforms="jit,remat,grad", max_depth=depth)
        assert ("jit > grad" in swept, "jit > grad > remat" in swept) == (wanted, wanted)
    assert not any("grad" in text for text in run())


# --- the draws


@given(some, known, st.data())
def test_what_is_drawn_can_work(chosen, exclusions, data):
    nesting = data.draw(strategies.nestings(chosen, lambda mode: exclusions))
    assert len(nesting) <= chosen.max_depth
    for index, layer in enumerate(nesting.layers):
        captured = any(outer.captures for outer in nesting.layers[:index])
        assert layer.transform in chosen.transforms or chosen.transforms == ("call_first",)
        assert layer.style not in exclusions.refused
        assert layer.style in chosen.styles or layer.transform == "call_first"
        assert layer.transform == "call_first" or not (captured and layer.style == "argument")
        assert not (exclusions.adds_state and layer.style == "argument" and layer.row.fixes_state)
        assert layer not in exclusions.unfit or layer.transform == "call_first"
        assert layer.style in styles_of(layer.transform)
    assert not impossible(nesting)


@pytest.mark.parametrize(
    "exclusions, text, made",
    [
        (Exclusions(), "scan[closure] > jit", "scan[closure] > jit[functional]"),
        (Exclusions(), "scan[closure] > call_first > jit", "scan[closure] > call_first > jit[functional]"),
        (Exclusions(), "jit > scan[jax_closure]", "jit > scan[jax_closure]"),
        (Exclusions(adds_state=True), "jit > scan > vmap[closure]", "jit > scan[functional] > vmap[closure]"),
        (Exclusions(unfit=frozenset({Layer("grad")})), "jit > grad > scan", "jit > grad[functional] > scan"),
        (Exclusions(), "jit > grad > scan > while_loop > remat", "jit > grad > scan > remat"),
        (Exclusions(), "grad[closure] > vmap > grad", "grad[closure] > vmap[functional]"),
        (Exclusions(), "while_loop > grad > fori_loop", "while_loop > grad > fori_loop"),
    ],
)
def test_layers_that_cannot_work_become_functional(exclusions, text, made):
    assert str(strategies.workable(Nesting.parse(text), DEFAULTS, exclusions)) == made


def test_without_functional_they_capture_too_or_are_left_out():
    plain = merge({"styles": ("argument", "closure")})
    made = strategies.workable(Nesting.parse("scan[closure] > jit"), plain, Exclusions())
    assert str(made) == "scan[closure] > jit[closure]"
    assert str(strategies.workable(Nesting.parse("jit > scan"), plain, Exclusions(adds_state=True))) == "jit"


@pytest.mark.parametrize(
    "given, exclusions",
    [
        ({"transforms": ("shard_map",), "styles": ("argument", "functional")}, Exclusions(swept=1, unfit=frozenset({Layer("shard_map"), Layer("shard_map", "functional")}))),
        ({"styles": ("closure",)}, Exclusions(frozenset({"closure"}), swept=1)),
    ],
    ids=["no style makes it fit", "every style is refused"],
)  # fmt: skip
def test_where_no_layer_can_be_drawn_it_is_the_un_nested_call(given, exclusions):
    drawn = strategies.nestings(merge(given), lambda mode: exclusions)
    assert find(drawn, lambda nesting: True, settings=quiet) == Nesting()


@pytest.mark.parametrize(
    "given, draws",
    [({}, True), ({"max_examples": 0}, False), ({"max_depth": 1}, False), ({"max_depth": 1, "sweep": "probes"}, True)],
)
def test_nothing_is_drawn_where_the_sweep_had_all(given, draws):
    few = {"transforms": "jit,scan", "styles": "argument", "max_examples": 9, **given}
    assert (len(run(**few)) > len(run(**few | {"max_examples": 0}))) == draws


def test_every_further_layer_is_drawn():
    drawn = run(transforms=",".join(("jit", *FURTHER)), max_examples=150)
    layers = {str(layer) for text in drawn for layer in Nesting.parse(text).layers}
    assert layers >= {str(Layer(transform, style)) for transform in FURTHER for style in styles_of(transform)}


def subsequence(*words):
    def rule(nesting):
        layers = iter(nesting.layers)
        return all(any(word == layer.transform for layer in layers) for word in words)

    return rule


def simpler(nesting):
    """The nesting without one of its layers, or with one layer in a plainer style."""
    for index, layer in enumerate(nesting.layers):
        outer, inner = nesting.layers[:index], nesting.layers[index + 1 :]
        yield Nesting(outer + inner)
        for style in STYLES[: STYLES.index(layer.style)]:
            yield Nesting((*outer, Layer(layer.transform, style), *inner))


@pytest.mark.parametrize(
    "rule",
    [
        subsequence("vmap", "scan"),
        subsequence("while_loop"),
        lambda nesting: any(layer.captures for layer in nesting.layers),
        lambda nesting: Layer("scan", "jax_closure") in nesting.layers,
        lambda nesting: len(nesting) == 3,
        lambda nesting: "functional" in str(nesting) and "remat" in str(nesting),
        lambda nesting: sum(layer.captures for layer in nesting.layers) > 1,
    ],
)
def test_shrinks_until_no_layer_can_go_and_no_style_be_plainer(rule):
    found = find(strategies.nestings(DEFAULTS, lambda mode: Exclusions(swept=1)), rule, settings=quiet)
    assert [str(other) for other in simpler(found) if len(other) > 1 and rule(other)] == []


def test_a_style_that_is_refused_is_drawn_no_more():
    refused = fake_engine.Model(rejected=lambda nesting: any(layer.captures for layer in nesting.layers))
    swept = run(refused, styles="argument,closure")
    drawn = run(refused, styles="argument,closure", max_examples=30)[len(swept) :]
    assert drawn
    assert not any("[closure]" in text for text in drawn)


@pytest.mark.slow
def test_every_mode_is_drawn_but_those_that_are_closed():
    three = merge({"modes": ("graph", "graph_no_updates", "tree")})
    known = {"graph": Exclusions(closed=True), "graph_no_updates": Exclusions(swept=1), "tree": Exclusions(swept=1)}
    drawn = strategies.nestings(three, known.get)
    assert str(find(drawn, lambda nesting: True, settings=quiet)) == "graph_no_updates: jit > jit"
    assert str(find(drawn, lambda nesting: nesting.mode == "tree", settings=quiet)) == "tree: jit > jit"
    with pytest.raises(NoSuchExample):
        find(drawn, lambda nesting: nesting.mode == "graph", settings=settings(quiet, max_examples=100))
    closed = strategies.nestings(three, lambda mode: Exclusions(closed=True))
    assert find(closed, lambda nesting: True, settings=quiet) == Nesting(mode="graph")
