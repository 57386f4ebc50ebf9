"""The sweep of a whole check: in which order it runs, where it stops, what breaks then, and that it says what was not run."""

import re

import jax.numpy as jnp
import pytest
from checking import flat, nnx_wrap
from fake_engine import Model, has
from flax import nnx
from healthy import FLAX

from pytest_nnxcheck import check
from pytest_nnxcheck.core.settings import DEFAULTS, EFFORTS, merge
from pytest_nnxcheck.reporting import report
from pytest_nnxcheck.runner import hypothesis_test, strategies
from pytest_nnxcheck.runner.run import Run

several_modes = pytest.mark.skipif(FLAX < (0, 12, 7), reason="flax before 0.12.7 has one mode")

PROBES = ["eval_shape[closure]", "eval_shape[jax_closure]"]
SWEEP = 1 + len([*strategies.sweep(DEFAULTS)])
"""Nestings of the default sweep, and the un-nested call."""


def ran(found):
    """What ran, in order, without what was ruled out."""
    return [str(outcome.nesting) for outcome in found.outcomes if not outcome.reason.startswith("not run: ")]


def captures(nesting):
    return nesting.captures


def exactly(*texts):
    return lambda nesting: str(nesting) in texts


@pytest.mark.usefixtures("fake")
class TestOrder:
    @pytest.mark.parametrize("effort", EFFORTS)
    def test_the_un_nested_call_the_sweep_of_the_effort_and_then_draws_which_repeat(self, effort):
        found = check(Model(), 1, effort=effort)
        settings = merge({"effort": effort})
        swept = ["un-nested", *map(str, strategies.sweep(settings))]
        assert (found.ok, found.not_run) == (True, 0)
        assert ran(found)[: len(swept)] == swept
        drawn = ran(found)[len(swept) :]
        assert settings.max_examples / 2 <= len({*drawn} - {*swept}) == len(drawn) <= settings.max_examples
        assert ran(check(Model(), 1, **EFFORTS[effort])) == ran(found)

    def test_only_layers_that_fit_are_in_chains(self):
        found = check(Model(adds_state=True), 1, max_examples=0)
        several = [text for text in ran(found) if text.count(" > ") > 1]
        assert several == ["jit > remat > remat > eval_shape", "jit > eval_shape > eval_shape > remat"]


SINGLES = ["un-nested", *map(str, strategies.sweep(merge({"sweep": "singles"})))]
*_, LAST = map(str, strategies.sweep(DEFAULTS))
STOPS = {  # what is checked, the last nesting that runs, and how many ran by then
    "the un-nested call": (Model(tracers=lambda nesting: True), "un-nested", 1),
    "jit raises": (Model(failed=has("jit")), "jit", 4),
    "another single raises": (Model(failed=exactly("remat")), SINGLES[-1], len(SINGLES)),
    "closures raise": (Model(failed=captures), LAST, SWEEP),
    "flax rejects": (Model(rejected=exactly("jit[closure]", "jit > call_first", "scan")), LAST, SWEEP),
    **{
        single: (
            Model(tracers=exactly(single, "while_loop[jax_closure]", "jit > scan")),
            single,
            SINGLES.index(single) + 1,
        )
        for single in ("jit", "scan", "while_loop", "vmap[functional]")
    },
}


@pytest.mark.usefixtures("fake")
class TestStop:
    @pytest.mark.parametrize("model, last, count", STOPS.values(), ids=STOPS)
    def test_after_the_plainest_single_that_breaks(self, model, last, count):
        found = check(model, 1, max_examples=0)
        assert (ran(found)[-1], len(ran(found)), found.not_run) == (last, count, SWEEP - count)

    def test_closures_at_the_plainest_that_breaks_and_nothing_else(self):
        """On flax 0.10 every captured module leaks that the call changes: what breaks where it is handed over stayed unseen."""
        held, leaky = check(Model(), 1, max_examples=0), Model(tracers=captures)
        found = check(leaky, 1, max_examples=0)
        assert str(found.broken[0].nesting) == "jit[closure]"
        handed = [str(outcome.nesting) for outcome in held.outcomes if not outcome.nesting.captures]
        assert [text for text in ran(found) if "closure" not in text] == handed
        assert [text for text in ran(found) if "closure" in text] == [*PROBES, "jit[closure]"]
        assert found.not_run == 12 - 3

    def test_what_is_handed_over_stops_closures_too(self):
        found = check(Model(tracers=captures, memory=has("scan")), 1, max_examples=0)
        assert [text for text in ran(found) if "closure" in text] == PROBES
        assert ran(found)[-1] == "scan"

    def test_at_a_probe_in_its_place(self):
        found = check(Model(tracers=exactly("eval_shape[closure]", "scan[closure]")), 1)
        assert [str(outcome.nesting) for outcome in found.broken] == ["scan[closure]", "eval_shape[closure]"]

    def test_another_single_that_raises_lets_the_singles_end(self):
        found = check(Model(failed=exactly("remat"), tracers=exactly("while_loop[closure]")), 1)
        assert str(found.broken[0].nesting) == "while_loop[closure]"

    def test_what_is_expected_to_fail_stops_nothing(self):
        known = {"scan": "known", "jit > vmap": "known"}
        found = check(Model(tracers=has("scan"), failed=has("jit", "vmap")), 1, expected_failures=known, max_examples=0)
        assert "jit > scan > scan > vmap" in ran(found)
        assert not any(outcome.verdict == "violated" for outcome in found.outcomes)

    def test_a_draw_that_breaks_leaves_nothing(self):
        deep = lambda nesting: len(nesting) > 1 and nesting.layers[0].transform != "jit"  # noqa: E731
        found = check(Model(tracers=deep), 1, max_examples=50)
        assert len(ran(found)) > SWEEP
        assert found.broken
        assert found.not_run == 0


@pytest.mark.usefixtures("fake")
class TestSmallest:
    @pytest.mark.parametrize(
        "rule, smallest",
        [
            (has("jit", "scan", "vmap"), "jit > scan > vmap"),
            (has("scan", "vmap"), "scan > vmap"),
            (has("vmap", "vmap"), "vmap > vmap"),
            (has("jit", "while_loop", "eval_shape"), "jit > while_loop > eval_shape"),
            (has("jit", "call_first"), "jit > call_first"),
            (has("jit", "eval_shape", "remat"), "jit > eval_shape > remat"),
            (exactly("jit > scan > remat > while_loop"), "jit > scan > remat > while_loop"),
        ],
    )
    @pytest.mark.parametrize("kind", ["tracers", "failed"])
    @pytest.mark.parametrize("going_on", ["off", "on"])
    def test_a_chain_is_answered_by_what_breaks_in_it(self, rule, smallest, kind, going_on):
        found = check(Model(**{kind: rule}), 1, all=going_on)
        bad = [outcome for outcome in found.outcomes if outcome.verdict in {"violated", "failed"}]
        assert str(min(bad, key=lambda outcome: outcome.nesting.plainness).nesting) == smallest
        assert re.search(rf"nesting     {re.escape(smallest)}(   |\n)", str(found))

    def test_by_a_plainer_pair_that_is_not_in_the_chain(self):
        first = "jit > scan > scan > vmap"
        found = check(Model(tracers=exactly(first, "jit > while_loop", "while_loop > scan")), 1)
        assert [str(outcome.nesting) for outcome in found.broken] == ["jit > while_loop", first]

    def test_another_exception_is_no_answer_to_a_violation(self):
        found = check(Model(tracers=has("jit", "scan"), failed=exactly("jit > jit", "jit > remat")), 1)
        assert str(found.broken[0].nesting) == "jit > scan"

    def test_what_is_ruled_out_is_no_answer(self):
        rule = lambda nesting: len(nesting) > 1 and "vmap" in str(nesting)  # noqa: E731
        found = check(Model(tracers=rule, adds_state=True, rejected=exactly("eval_shape[closure]")), 1, max_examples=40)
        assert all(outcome.nesting.layers[-1].style != "closure" for outcome in found.broken)
        assert not any(str(layer) == "vmap" for outcome in found.broken for layer in outcome.nesting.layers)

    def test_nothing_is_looked_for_beyond_what_is_known_to_break(self):
        rule = has("jit", "scan")
        once = check(Model(tracers=rule), 1)
        on = check(Model(tracers=rule), 1, all="on")
        # Of the pairs the same ones run, though more chains break.
        pairs = [text for text in ran(once) if text.count(" > ") == 1]
        assert [text for text in ran(on) if text.count(" > ") == 1] == pairs
        assert len(on.broken) > len(once.broken)

    @several_modes
    def test_in_the_mode_that_broke(self):
        found = check(Model(tracers=lambda n: n.mode == "tree" and has("jit", "scan")(n)), 1, modes="graph,tree")
        assert str(found.broken[0].nesting) == "tree: jit > scan"
        assert found.modes == {"graph": "held", "tree": "violated"}


@pytest.mark.usefixtures("fake")
class TestNamed:
    """What a failure is named after, where several invariants break, and what is told beside it."""

    def test_the_most_serious_comes_before_the_smallest(self):
        found = check(Model(memory=exactly("jit"), tracers=exactly("eval_shape[closure]")), 1)
        assert str(found).startswith("nnx invariant broken: tracers")
        assert "\n  nesting     eval_shape[closure] " in str(found)
        assert "\n  also broken memory, smallest: jit\n              memory is broken\n" in str(found)
        assert [str(outcome.nesting) for outcome in found.broken] == ["eval_shape[closure]", "jit"]
        assert str(report.head(found).shown) == "eval_shape[closure]"
        assert (found.shown, found.violations) == (found.broken[0], found.broken[0].violations)

    def test_of_one_invariant_the_smallest(self):
        found = check(Model(memory=has("jit", "scan")), 1)
        assert "\n  nesting     jit > scan " in str(found)
        assert "also broken" not in str(found)

    def test_what_breaks_where_the_module_is_handed_over_is_told_beside_a_closure(self):
        found = check(Model(tracers=lambda nesting: captures(nesting) or has("jit", "scan")(nesting)), 1)
        assert "\n  nesting     jit[closure] " in str(found)
        assert "\n  also broken tracers, smallest: jit > scan, and 1 more\n" in str(found)

    def test_memory_of_a_chain_is_told_beside_a_closure_that_leaks(self):
        found = check(Model(tracers=captures, memory=has("jit", "scan"), donation=has("jit", "vmap")), 1, all="on")
        assert str(found).startswith("nnx invariant broken: tracers")
        also = [line.split(",")[0] for line in str(found).splitlines() if "also broken" in line]
        assert also == ["  also broken donation", "  also broken memory"]
        healthy = check(Model(tracers=captures), 1)
        assert "also broken" not in str(healthy)
        properties = dict(report.properties(report.head(found)))
        assert properties["nnx_violated"] == len(found.broken) > 12

    def test_a_rejection_that_fails_comes_after_what_broke(self):
        found = check(Model(memory=exactly("jit > call_first"), rejected=exactly(*PROBES)), 1, on_rejection="fail")
        assert "\n  nesting     jit > call_first\n" in str(found)


BREAKERS = {
    "un-nested": Model(tracers=lambda nesting: True),
    "jit": Model(memory=has("jit")),
    "jit raises": Model(failed=has("jit")),
    "single": Model(tracers=has("vmap[functional]")),
    "single raises": Model(failed=has("vmap")),
    "pair": Model(donation=has("jit", "vmap")),
    "pair raises": Model(failed=has("scan", "remat")),
    "adds state": Model(adds_state=True, tracers=has("remat")),
    "closures": Model(tracers=captures),
    "closures and a chain": Model(tracers=captures, memory=has("jit", "scan")),
    "refused": Model(rejected=has("eval_shape[closure]"), tracers=exactly("scan[functional]")),
    "healthy": Model(),
}


@pytest.mark.usefixtures("fake")
class TestNotRun:
    @pytest.mark.parametrize("settings", [{}, {"effort": "quick"}, {"effort": "thorough"}, {"max_depth": 2}], ids=str)
    @pytest.mark.parametrize("name", BREAKERS)
    def test_it_is_what_all_would_run(self, name, settings):
        stopped = check(BREAKERS[name], 1, **settings)
        whole = check(BREAKERS[name], 1, all="on", **settings)
        assert whole.not_run == 0
        assert stopped.not_run == len({*ran(whole)} - {*ran(stopped)})
        assert (stopped.not_run > 0) == (not stopped.ok) == (not whole.ok)

    @several_modes
    def test_of_every_mode(self):
        found = check(Model(tracers=lambda n: n.mode == "graph" and has("jit")(n)), 1, modes="graph,tree")
        assert found.not_run == SWEEP - 4
        both = check(Model(tracers=has("jit")), 1, modes="graph,tree")
        assert both.not_run == 2 * (SWEEP - 4)

    def test_the_message_and_the_properties_say_it(self):
        found = check(Model(memory=has("jit")), 1)
        left = SWEEP - 4
        assert found.not_run == left
        counted = f"1 failed, 3 passed; {left} more not run, --nnx-all runs them"
        assert f"tried 4 nestings: {counted}" in flat(str(found))
        assert dict(report.properties(report.head(found)))["nnx_not_run"] == left
        assert report.summary_of(report.head(found)).startswith(
            f"4 nestings: 1 failed, 3 passed, {left} not run; worst peak "
        )


@several_modes
def test_a_call_that_adds_state_is_noted_before_the_mode_that_its_body_closes():
    class Sows(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.hidden = nnx.Intermediate(x)
            return self.linear(x)

    def body():
        per_kind = nnx.StateAxes({...: None})  # no input axes in tree mode
        y = nnx_wrap(Sows())(jnp.ones((2, 3)))
        nnx.vmap(lambda model, x: x, in_axes=(per_kind, 0))(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), y)

    settings = merge({"modes": ("tree",), "transforms": ("jit", "scan")})
    run = Run(settings)
    hypothesis_test.build(body, run, ())()
    added, closed = run.report().notes
    assert added == "the call adds model.hidden, which no loop can carry: argument scan left out"
    assert closed.startswith("no nesting takes the call in the tree mode")
