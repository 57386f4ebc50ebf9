"""The modes of flax: which there are, which nestings run in them, what is said of them, and that the mode of the process comes back."""

from __future__ import annotations

import re

import flax
import jax
import pytest
from checking import FEW, has_modes
from fake_engine import RUNS, Model
from flax import nnx
from healthy import FLAX

from pytest_nnxcheck import TracerResidue, assert_invariants, check
from pytest_nnxcheck.compat import flax_modes
from pytest_nnxcheck.core.catalogue import MODES
from pytest_nnxcheck.core.errors import SettingError


def in_mode(*modes):
    return lambda nesting: nesting.mode in modes


# --- which modes there are -----------------------------------------------------------------------------------------------


def test_the_modes_of_the_installed_flax():
    assert flax_modes.modes() == (MODES if FLAX >= (0, 12, 7) else ("current", "graph"))


@has_modes
@pytest.mark.parametrize(
    "mode, flags", [("graph", (True, True)), ("graph_no_updates", (True, False)), ("tree", (False, False))]
)
def test_a_mode_is_set_for_a_while(mode, flags):
    with pytest.raises(KeyError), flax_modes.flax_mode(mode):
        assert flax_modes.mode_flags() == flags
        raise KeyError
    assert flax_modes.mode_flags() == (True, True)


@has_modes
def test_the_current_mode_is_the_one_that_flax_is_set_to():
    with nnx.set_graph_mode(False):
        with flax_modes.flax_mode("current"):
            assert flax_modes.mode_flags() == (False, False)
        with flax_modes.flax_mode("graph"):
            assert flax_modes.mode_flags() == (True, True)
        assert flax_modes.mode_flags() == (False, False)


@has_modes
def test_what_was_jitted_in_one_mode_is_traced_anew_in_another():
    seen = []

    @jax.jit
    def jitted(x):
        seen.append(flax_modes.mode_flags()[0])
        return x

    for mode in ("graph", "tree", "graph", "tree"):
        with flax_modes.flax_mode(mode):
            jitted(1.0)
    assert seen == [True, False]


@pytest.mark.skipif(FLAX >= (0, 12, 7), reason="flax 0.12.7 has all modes")
def test_a_mode_that_this_flax_lacks(pytester, inner_args):
    version = re.escape(flax.__version__)
    wanted = rf"mode 'tree' is not one of flax {version}, which has current, graph: write one of these, or install a newer flax"
    with pytest.raises(SettingError, match=rf"^check\(\.\.\., modes=\.\.\.\): {wanted}"):
        check(Model(), 1, modes="graph,tree")
    with pytest.raises(SettingError, match=rf"^check\(\.\.\., nesting=\.\.\.\): {wanted}"):
        check(Model(), 1, nesting="tree: jit")
    test = "import pytest\n@pytest.mark.nnx_invariants{}\ndef test_x(nnx_wrap):\n    1 / 0\n"
    for marker, ini, options, source in (
        ("(modes='tree')", "", (), "nnx_invariants marker at test_x.py:2"),
        ("", "", ("--nnx-modes=graph,tree",), "option --nnx-modes"),
        ("", "", ("--nnx-nesting=tree: jit",), "option --nnx-nesting"),
        ("", "nnx_modes = tree", (), r"ini option nnx_modes \(tox.ini\)"),
    ):
        pytester.makepyfile(test_x=test.format(marker))
        pytester.makeini(f"[pytest]\n{ini}\n")
        result = pytester.runpytest_inprocess(*inner_args, *options)
        result.assert_outcomes(failed=1)
        result.stdout.re_match_lines([rf"{source}: {wanted}"])
        result.stdout.no_fnmatch_line("*Traceback*")
        result.stdout.no_fnmatch_line("*plugin.py*")


# --- which nestings run, with the engine of fake_engine.py ---------------------------------------------------------------


@has_modes
@pytest.mark.usefixtures("fake")
class TestRun:
    def test_every_mode_is_swept(self):
        report = check(Model(), 1, modes="graph,tree", max_examples=0)
        assert report.modes == {"graph": "held", "tree": "held"}
        assert [text for text in RUNS if "tree" in text] == [
            text.replace("graph", "tree") for text in RUNS if "graph" in text
        ]
        assert len(RUNS) == 80
        assert str(report).endswith("; modes: graph passed, tree passed")

    def test_the_draws_are_shared_among_the_modes(self):
        check(Model(), 1, modes="graph,graph_no_updates,tree", sweep="probes", max_examples=30)
        drawn = RUNS[9:]
        assert len(drawn) <= 30
        assert {text.partition(":")[0] for text in drawn} == {"graph", "graph_no_updates", "tree"}

    def test_a_violation_shrinks_to_the_first_mode_that_breaks(self):
        settings = {"modes": "graph,graph_no_updates,tree", "sweep": "probes", "max_examples": 100}

        def smallest(*modes):
            rule = in_mode(*modes)
            return str(check(Model(tracers=lambda n: rule(n) and len(n) > 1), 1, **settings).broken[0].nesting)

        assert smallest("graph", "graph_no_updates", "tree") == "graph: jit > jit"
        assert smallest("tree") == "tree: jit > jit"

    def test_a_violation_says_what_every_mode_did(self):
        model = Model(
            tracers=lambda n: n.mode == "tree" and "scan" in str(n), failed=lambda n: str(n).startswith("tree: vmap")
        )
        with pytest.raises(TracerResidue) as caught:
            assert_invariants(model, 1, modes="graph,tree", all="on", **FEW)
        rows = str(caught.value).splitlines()
        assert rows[1].startswith("  nesting     tree: scan")
        at = next(number for number, row in enumerate(rows) if row.startswith("  modes"))
        assert rows[at:] == [
            "  modes       graph passed   7 passed",
            "              tree failed   1 failed, 1 raised, 5 passed; smallest tree:",
            "              scan",
            "  replay      check(..., nesting='tree: scan')",
        ]

    def test_a_call_that_raises_in_one_mode_does_not_stop_the_others(self):
        for raising, held in (("graph", "tree"), ("tree", "graph")):
            RUNS.clear()
            report = check(Model(failed=in_mode(raising)), 1, modes="tree,graph", **FEW)
            assert report.modes == {raising: "failed", held: "held"}
            assert not report.ok
            assert [text for text in RUNS if raising in text] == [f"{raising}: un-nested"]

    def test_a_closure_that_one_mode_refuses_is_drawn_in_the_others(self):
        model = Model(rejected=lambda n: n.mode == "graph" and any(layer.captures for layer in n.layers))
        check(model, 1, modes="graph,tree", max_examples=60)
        run = [text for text in RUNS if "closure" in text]
        assert [text for text in run if "graph" in text] == [
            "graph: eval_shape[closure]",
            "graph: eval_shape[jax_closure]",
        ]
        assert len([text for text in run if "tree" in text]) > 12

    @pytest.mark.parametrize(
        "nesting, modes, runs",
        [
            ("tree: jit", "graph", ["tree: jit"]),
            ("jit", "graph,tree", ["graph: jit", "tree: jit"]),
            ("tree: un-nested", "current", ["tree: un-nested"]),
        ],
    )
    def test_a_replayed_nesting_names_its_mode_or_runs_in_all(self, nesting, modes, runs):
        check(Model(), 1, nesting=nesting, modes=modes)
        assert RUNS == runs


# --- what the user sees --------------------------------------------------------------------------------------------------

TWINS = """
@marked
def test_survives(nnx_wrap):
    nnx_wrap(Model())(1)

@marked
def test_breaks(nnx_wrap):
    nnx_wrap(Model(tracers=lambda nesting: nesting.mode == "tree" and len(nesting) > 1))(1)
"""


@pytest.mark.slow
@has_modes
def test_which_modes_a_model_survives_is_one_command(run_inner, pytester):
    result = run_inner(TWINS, "--nnx-modes", "graph,tree", "--junitxml=out.xml")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.re_match_lines(
        [
            r"E +nesting +tree: jit > jit +the smallest of 2 that fail",
            r"E +tried +6\d nestings: 2 failed, \d+ passed; \d+ more not run,",
            r"E +--nnx-all runs them",
            r"E +modes +graph passed   \d+ passed",
            r"E +tree failed   2 failed, 26 passed; smallest tree:",
            r"E +jit > jit",
            r"E +replay +pytest test_inner.py::test_breaks --nnx-modes graph,tree --nnx-nesting 'tree: jit > jit'",
            r"test_inner.py::test_breaks .*; modes: graph passed, tree failed",
            r"test_inner.py::test_survives .*; modes: graph passed, tree passed",
        ]
    )
    assert 'name="nnx_modes" value="graph passed, tree failed"' in (pytester.path / "out.xml").read_text()


@has_modes
def test_the_mode_of_the_process_comes_back(run_inner):
    source = """
from flax import nnx
from pytest_nnxcheck.compat import flax_modes

@pytest.fixture(autouse=True, params=[True, False])
def flags(request):
    with nnx.set_graph_mode(request.param):
        before = flax_modes.mode_flags()
        yield
        assert flax_modes.mode_flags() == before

@marked
@pytest.mark.parametrize("rule", ["tracers", "failed", "rejected"])
def test_x(nnx_wrap, rule):
    nnx_wrap(Model(**{rule: lambda nesting: nesting.mode == "tree"}))(1)
"""
    run_inner(source, "--nnx-modes=graph,tree", "--nnx-sweep=singles").assert_outcomes(failed=6)
