"""Expected failures: what an entry covers and excuses, and what `check` makes of it."""

from itertools import combinations

import pytest
from fake_engine import RUNS, Checked, Model, has
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck import Layer, Nesting, Outcome, UnexpectedPass, Violation, assert_invariants, check
from pytest_nnxcheck.core import expected_failures
from pytest_nnxcheck.core.catalogue import INVARIANTS, STYLES, TRANSFORMS
from pytest_nnxcheck.core.errors import NestingExcused
from pytest_nnxcheck.core.expected_failures import ExpectedFailure, covered, excuse, unexpected_passes
from pytest_nnxcheck.core.settings import merge
from pytest_nnxcheck.core.text import Unreadable
from pytest_nnxcheck.reporting import report
from pytest_nnxcheck.runner.execution import Execution
from pytest_nnxcheck.runner.run import Run

LAYERS = st.builds(Layer, st.sampled_from(TRANSFORMS), st.sampled_from(STYLES))
NESTINGS = st.lists(LAYERS, max_size=4).map(lambda layers: Nesting(tuple(layers)))
NAMED = st.lists(LAYERS, min_size=1, max_size=3).map(lambda layers: Nesting(tuple(layers)))


def entry(key, reason="why"):
    return ExpectedFailure.parse(key, reason)


def broken(nesting, *invariants):
    violations = tuple(Violation(invariant, f"{invariant} is broken") for invariant in invariants)
    return Outcome(Nesting.parse(nesting), "violated", violations)


@pytest.mark.parametrize(
    "key, covered, not_covered",
    [
        ("scan", ["scan", "jit > scan", "scan[closure]", "vmap > scan[functional] > jit"], ["jit", "un-nested"]),
        ("scan[functional]", ["scan[functional]", "jit > scan[functional]"], ["scan", "scan[closure]"]),
        ("scan[argument]", ["scan", "jit > scan"], ["scan[functional]"]),
        ("vmap > scan", ["vmap > scan", "jit > vmap[closure] > scan"], ["scan > vmap", "vmap > jit > scan", "vmap"]),
        ("vmap > scan", ["vmap > remat > eval_shape > scan"], ["vmap > remat", "vmap > remat > vmap > remat"]),
        ("jit>scan[ closure ]", ["jit > scan[closure]", "jit[closure] > scan[closure] > jit"], ["jit > scan"]),
        ("un-nested", ["un-nested"], ["jit"]),
        ("call_first", ["jit > call_first"], ["jit"]),
        ("tracers", ["un-nested", "vmap", "jit > scan"], []),
        ("memory", ["jit", "jit[closure] > scan"], ["un-nested", "scan > jit"]),
        ("donation", ["jit"], ["un-nested", "vmap"]),
        ("jit > scan", ["tree: jit > scan", "graph: vmap > jit > scan"], ["tree: jit"]),
        (" tree:jit>scan", ["tree: jit > scan"], ["jit > scan", "graph: jit > scan", "tree: scan > jit"]),
        ("tree: un-nested", ["tree: un-nested"], ["un-nested", "tree: jit"]),
        ("tree: memory", ["tree: jit"], ["jit", "graph: jit", "tree: un-nested"]),
    ],
)
def test_what_an_entry_covers(key, covered, not_covered):
    assert [text for text in covered if not entry(key).covers(Nesting.parse(text))] == []
    assert [text for text in not_covered if entry(key).covers(Nesting.parse(text))] == []


@given(NAMED, NESTINGS)
def test_a_nesting_is_covered_only_where_its_layers_stand_together(wanted, nesting):
    """Said again, without the code under test: they are among the layers in this order, and what they pass over is idle."""
    layers = nesting.layers

    def stand_together(chosen):
        passed_over = [layers[at] for at in range(chosen[0], chosen[-1]) if at not in chosen]
        return all(layer.transform in {"remat", "eval_shape"} for layer in passed_over)

    places = (chosen for chosen in combinations(range(len(layers)), len(wanted)) if chosen)
    covered = any(tuple(layers[at] for at in chosen) == wanted.layers and stand_together(chosen) for chosen in places)
    key = " > ".join(f"{layer.transform}[{layer.style}]" for layer in wanted.layers)
    assert entry(key).covers(nesting) == covered
    assert entry(key).nesting() == wanted
    assert entry(key).is_exactly(nesting) == (wanted == nesting)


BAD = {
    "memry": "'memry' names no known invariant or nesting: unknown word 'memry', did you mean 'memory'?",
    "scna": "unknown word 'scna', did you mean 'scan'?",
    "unnested": "unknown word 'unnested', did you mean 'un-nested'?",
    "zzz": "unknown word 'zzz', write one of tracers, updates, memory, donation, recompilation, finite, parity, jit, ",
    "vmap > scna": "'vmap > scna' names no known invariant or nesting: unknown transform 'scna', did you mean 'scan'?",
    "treee: jit": "unknown mode 'treee', did you mean 'tree'?",
    "tree: graph: jit": "'tree: graph: jit' names two modes",
    "jit > memory": "unknown transform 'memory'",
}


@pytest.mark.parametrize("key, text", BAD.items())
def test_a_key_that_names_nothing(key, text):
    with pytest.raises(Unreadable) as caught:
        entry(key)
    assert text in str(caught.value)


@pytest.mark.slow
@given(st.text(max_size=12) | st.text(alphabet="jit scan>[]", max_size=12))
def test_any_text_is_a_key_or_an_error(key):
    try:
        first = entry(key)
    except Unreadable as error:
        told = str(error)
    else:
        told = repr(key)
        assert entry(first.key) == first
    assert repr(key) in told


@pytest.mark.parametrize("reason", ["", "  ", 3, None, True, ["x"]])
def test_a_reason_is_needed(reason):
    with pytest.raises(Unreadable, match=r"expected failure 'memory' has the reason .*, write why it fails"):
        entry("memory", reason)


@pytest.mark.parametrize("value", ["memory", ["memory"], 3, None])
def test_what_is_no_mapping(value):
    with pytest.raises(Unreadable, match=r"is no mapping of keys to reasons, write \{'memory': 'why'"):
        expected_failures.parse(value)


def test_an_invariant_excuses_its_own_violations_and_a_nesting_everything_under_it():
    both, failed = (
        broken("scan", "tracers", "memory"),
        Outcome(Nesting.parse("scan"), "failed", reason="TypeError: carry"),
    )
    left = excuse(both, [entry("memory", "known")])
    assert (left.verdict, [v.invariant for v in left.violations]) == ("violated", ["tracers"])
    assert (left.expected, left.notes) == (("memory",), ("expected to fail: known (memory)",))
    named = excuse(both, [entry("memory", "known"), entry("tracers", "too")])
    assert (named.verdict, named.violations) == ("expected", both.violations)
    assert named.reason == "known (memory); too (tracers)"
    excused = excuse(failed, [entry("scan", "known")])
    assert (excused.verdict, excused.reason, excused.notes) == ("expected", "known (scan)", ("TypeError: carry",))
    assert excuse(failed, [entry("memory"), entry("tracers")]) == failed
    assert excuse(both, [entry("scan"), entry("memory")]).expected == ("memory", "scan")


def test_what_an_invariant_excuses_is_not_counted_for_a_nesting():
    entries = [entry("jit > scan"), entry("memory")]
    excused = excuse(broken("jit > scan", "memory"), entries)
    assert (excused.verdict, excused.expected) == ("expected", ("memory",))
    assert [*unexpected_passes(entries, [excused], INVARIANTS)] == []
    (line,) = unexpected_passes(entries[:1], [excused, Outcome(Nesting.parse("vmap > jit > scan"), "held")], INVARIANTS)
    assert line.startswith("expected failure 'jit > scan' (why) did not happen: 1 nesting passed")


@given(
    st.sets(st.sampled_from(INVARIANTS), min_size=1),
    NESTINGS,
    st.sets(st.sampled_from([*INVARIANTS, "scan", "jit > scan", "un-nested", "vmap[closure]"])),
)
def test_nothing_is_excused_that_no_entry_names(invariants, nesting, keys):
    outcome = broken(str(nesting), *sorted(invariants))
    entries = [entry(key) for key in sorted(keys)]
    excused = excuse(outcome, entries)
    whole = any(not one.invariant and one.covers(nesting) for one in entries)
    assert (excused.verdict == "expected") == (whole or invariants <= keys)
    if excused.verdict == "violated":
        assert {violation.invariant for violation in excused.violations} == invariants - keys


def test_what_did_not_happen():
    held, rejected = (
        Outcome(Nesting.parse(text), verdict) for text, verdict in (("scan", "held"), ("jit", "rejected"))
    )
    lines = unexpected_passes(
        [entry("scan"), entry("jit"), entry("vmap"), entry("tracers")], [held, rejected], INVARIANTS
    )
    assert tuple(lines) == (
        "expected failure 'scan' (why) did not happen: 1 nesting passed, take the entry out of expected_failures",
        "expected failure 'vmap' (why) matches no nesting that ran, take the entry out of expected_failures",
        "expected failure 'tracers' (why) did not happen: 1 nesting passed, take the entry out of expected_failures",
    )


def test_an_entry_is_judged_by_what_was_asserted_and_ran():
    held = Outcome(Nesting.parse("jit > scan"), "held")
    assert covered(entry("memory"), [held], ["tracers"]) == []
    assert covered(entry("memory"), [held], ["memory"]) == [held]
    entries = [entry("memory"), entry("scan"), entry("vmap"), entry("jit > scan")]
    (line,) = unexpected_passes(entries, [held], INVARIANTS, replayed=held.nesting)
    assert line.startswith("expected failure 'jit > scan' (why) did not happen: 1 nesting passed")


@pytest.mark.usefixtures("fake")
class TestCheck:
    def test_a_known_failure_is_fine(self):
        model = Model(memory=has("jit"), failed=has("vmap", "scan"))
        found = check(model, 1, expected_failures={"memory": "jax#926", "vmap > scan": "flax#1234"})
        assert found.ok
        assert str(found).startswith(f"{len(RUNS)} nestings: ")
        assert " expected to fail; worst peak" in str(found)
        told = {str(o.nesting): (o.verdict, o.reason) for o in found.outcomes}
        assert told["jit"] == ("expected", "jax#926 (memory)")
        assert told["vmap > scan"] == ("expected", "flax#1234 (vmap > scan)")
        assert told["scan"] == ("held", "")
        assert report.head(found).counts["expected"] > 12
        assert_invariants(model, 1, expected_failures={"memory": "jax#926", "vmap > scan": "flax#1234"})

    def test_an_unexpected_pass_fails(self):
        found = check(Model(), 1, expected_failures={"memory": "jax#926"})
        assert not found.ok
        assert str(found).startswith("nnx expected failure 'memory' (jax#926) did not happen: ")
        with pytest.raises(UnexpectedPass, match=r"nnx expected failure 'memory' \(jax#926\) did not happen"):
            assert_invariants(Model(), 1, expected_failures={"memory": "jax#926"})

    @pytest.mark.parametrize("settings", [{}, {"sweep": "probes"}, {"max_examples": 0}])
    def test_a_named_nesting_runs_whatever_is_drawn(self, settings):
        named = "vmap > remat > scan[functional]"
        model = Model(failed=has("vmap", "remat", "scan[functional]"))
        assert check(model, 1, expected_failures={named: "x"}, **settings).ok
        assert named in RUNS

    @pytest.mark.parametrize("settings", [{"transforms": "jit"}, {"max_depth": 1}, {"styles": "functional"}])
    def test_the_settings_bound_what_is_named(self, settings):
        found = check(Model(), 1, expected_failures={"vmap > scan[closure]": "x"}, max_examples=0, **settings)
        assert "vmap > scan[closure]" not in RUNS
        (line,) = found.unexpected
        assert line.startswith("nnx expected failure 'vmap > scan[closure]' (x) matches no nesting that ran, ")

    def test_a_loop_that_cannot_carry_added_state_runs_where_it_is_named(self):
        known = {"scan[argument]": "sow"}
        found = check(Model(adds_state=True, failed=has("scan")), 1, expected_failures=known, max_examples=0)
        assert found.ok
        assert [text for text in RUNS if "scan" in text.split(" > ")] == ["scan"]
        assert found.notes == (
            "the call adds model.hidden, which no loop can carry: argument vmap, while_loop left out",
        )

    def test_a_rejection_that_fails_can_be_expected(self):
        scan, vmap = Model(rejected=has("scan[closure]")), Model(rejected=has("vmap[closure]"))
        known = {"expected_failures": {"scan[closure]": "flax refuses"}, "max_examples": 0}
        assert check(scan, 1, on_rejection="fail", **known).ok
        assert check(scan, 1, **known).ok
        assert not check(vmap, 1, on_rejection="fail", **known).ok

    def test_un_nested(self):
        assert check(Model(tracers=lambda nesting: not nesting.layers), 1, expected_failures={"un-nested": "x"}).ok
        with pytest.raises(TypeError, match="carry"):
            check(Model(failed=lambda nesting: not nesting.layers), 1, expected_failures={"tracers": "x"})

    def test_a_call_that_raises_un_nested_is_the_users_own_whatever_it_leaves_behind(self):
        run = Run(merge({"expected_failures": expected_failures.parse({"tracers": "x"})}))
        error = TypeError("mine")
        un_nested, jit = (
            Execution(run.executor, None, Nesting.parse(text), run.settings) for text in ("un-nested", "jit")
        )
        with pytest.raises(TypeError, match="mine"):
            un_nested.settle(Checked(None, broken("jit", "tracers"), error))
        assert [o.verdict for o in un_nested.outcomes.values()] == ["failed"]
        with pytest.raises(NestingExcused):
            jit.settle(Checked(None, broken("jit", "tracers"), error))

    def test_a_note_does_not_say_that_the_un_nested_call_passed(self):
        model = Model(tracers=lambda nesting: not nesting.layers, failed=has("vmap"))
        with pytest.raises(TypeError) as caught:
            assert_invariants(model, 1, expected_failures={"un-nested": "x"})
        assert "un-nested, the same test body did not pass either" in caught.value.__notes__[0]
