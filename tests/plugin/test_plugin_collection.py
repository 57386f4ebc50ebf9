"""What is refused at collection, and where settings come from: marker, command line, ini file."""

import subprocess
import sys
from pathlib import Path

import pytest

BAD_MARKERS = {
    "@marked(memory_buget='2x')": "unknown setting 'memory_buget', did you mean 'memory_budget'?",
    "@marked(transforms='jit,scna')": "unknown transform 'scna', did you mean 'scan'?",
    "@marked(styles=['closur'])": "unknown style 'closur', did you mean 'closure'?",
    "@marked(memory_budget='5MBfoo')": "memory_budget='5MBfoo' is not a size, write bytes such as '512MiB'",
    "@marked(memory_budget=-1)": "memory_budget=-1 is not a size",
    "@marked(memory_budget='0x')": "memory_budget='0x' is out of range",
    "@marked(memory_budget=float('nan'))": "memory_budget=nan is not a size",
    "@marked(max_depth=0)": "max_depth=0 is not a whole number of at least 1",
    "@marked(expected_failures={'memry': 'x'})": "expected failure 'memry' names no known invariant or nesting: unknown word 'memry', did you mean 'memory'?",
    "@marked(expected_failures={'vmap > scna': 'x'})": "expected failure 'vmap > scna' names no known invariant or nesting: unknown transform 'scna', did you mean 'scan'?",
    "@marked(expected_failures={'memory': ''})": "expected failure 'memory' has the reason '', write why it fails",
    "@marked(expected_failures='known.toml')": "expected_failures='known.toml' is no mapping of keys to reasons, write {'memory': 'why',",
    "@marked('tracers')": "'tracers' has no name, write keyword arguments such as memory_budget='2x'",
    "@marked(nesting='jit')": "nesting='jit' is for the command line, --nnx-nesting",
}


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_a_bad_marker_is_a_collection_error_with_file_and_line(run_inner, workers):
    result = run_inner("\n@marked(max_depth=0)\ndef test_x(nnx_wrap): pass\n", workers, subprocess=True)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["nnx_invariants marker at test_inner.py:5: max_depth=0 is not a whole number of at least 1"]
    )
    assert "Traceback" not in result.stdout.str() + result.stderr.str()
    assert "INTERNALERROR" not in result.stdout.str()


@pytest.mark.parametrize("marker, message", BAD_MARKERS.items())
def test_bad_markers(run_inner, marker, message):
    result = run_inner(f"{marker}\ndef test_x(nnx_wrap): pass\n")
    result.assert_outcomes(errors=1)
    assert f"nnx_invariants marker at test_inner.py:4: {message}" in result.stdout.str()


def test_a_bad_marker_on_a_class_or_a_module_names_that_place(run_inner):
    result = run_inner("\n\n@marked(max_depth=0)\nclass TestX:\n    def test_x(self, nnx_wrap): pass\n")
    result.stdout.fnmatch_lines(["nnx_invariants marker at test_inner.py:6: *"])
    result = run_inner("pytestmark = [marked(max_depth=0)]\ndef test_x(nnx_wrap): pass\n")
    result.stdout.fnmatch_lines(["nnx_invariants marker at test_inner.py: max_depth=0 *"])


def test_the_marker_without_the_fixture(run_inner):
    result = run_inner("@marked\ndef test_x(tmp_path): pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["test_inner.py:4: test_x is marked nnx_invariants but does not use nnx_wrap, so nothing *"]
    )


def test_the_fixture_without_the_marker(run_inner):
    result = run_inner("def test_x(nnx_wrap): pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["test_inner.py:4: test_x uses nnx_wrap but is not marked, add @pytest.mark.nnx_invariants"]
    )


def test_the_fixture_may_come_through_another_one(run_inner):
    source = """
@pytest.fixture(scope="module")
def model(nnx_wrap):
    return nnx_wrap(Model())

@marked
def test_x(model):
    assert model(1) == 1

def test_plain(): pass
"""
    run_inner(source).assert_outcomes(passed=2)


def test_a_marker_that_a_conftest_adds_later_counts(run_inner):
    source = (
        "@pytest.fixture\ndef model(nnx_wrap): return nnx_wrap(Model())\ndef test_x(model):\n    assert model(1) == 1\n"
    )
    mark = "import pytest\ndef pytest_collection_modifyitems(items):\n    for item in items: item.add_marker(pytest.mark.nnx_invariants(%s))\n"
    run_inner(source, conftest=mark % "").assert_outcomes(passed=1)
    result = run_inner(source, conftest=mark % "max_depth=0")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nnx_invariants marker at test_inner.py:6: max_depth=0 is not *"])


@pytest.mark.parametrize("body", ["async def test_x(nnx_wrap): pass", "async def test_x(nnx_wrap): yield"])
def test_async_tests_are_refused(run_inner, body):
    result = run_inner(f"@marked\n{body}\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["test_inner.py:4: test_x is async, and nnx_invariants cannot await it for each nesting: *"]
    )


@pytest.mark.parametrize("where", ["class", "method", "module"])
def test_unittest_test_cases_are_refused(run_inner, where):
    marks = {name: "@marked" if name == where else "" for name in ("class", "method")}
    module = "pytestmark = marked" if where == "module" else ""
    source = f"import unittest\n{module}\n{marks['class']}\nclass X(unittest.TestCase):\n    {marks['method']}\n    def test_x(self): pass\n"
    result = run_inner(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_inner.py:*: X is a unittest.TestCase, which takes no fixtures as arguments, *"])


def test_an_unmarked_test_case_is_left_alone(run_inner):
    run_inner("import unittest\nclass X(unittest.TestCase):\n    def test_x(self): pass\n").assert_outcomes(passed=1)


def test_marker_over_command_line_over_ini(run_inner, pytester):
    source = """
from pytest_nnxcheck.plugin.marker import SETTINGS
@marked(transforms="jit", memory_budget="2x", max_depth=1)
def test_marker(nnx_wrap, request):
    s = request.node.stash[SETTINGS]
    assert (s.transforms, s.max_depth, s.shortcuts, str(s.memory_budget)) == (("jit",), 1, "off", "2x")
    nnx_wrap(Model())(1)
@marked
def test_options(nnx_wrap, request):
    s = request.node.stash[SETTINGS]
    assert (s.transforms, s.max_depth, s.shortcuts, str(s.memory_budget)) == (("scan", "vmap"), 2, "off", "3x")
    nnx_wrap(Model())(1)
"""
    pytester.makeini(
        "[pytest]\nnnx_transforms = remat\nnnx_max_depth = 4\nnnx_shortcuts = off\nnnx_memory_budget = 3x\n"
    )
    run_inner(source, "--nnx-transforms=scan,vmap", "--nnx-max-depth=2").assert_outcomes(passed=2)


def test_the_nearest_marker_wins_field_by_field(run_inner):
    source = """
pytestmark = marked(max_depth=1, max_examples=1, sweep="probes")
@marked(max_depth=2, max_examples=2)
class TestX:
    @marked(max_depth=3)
    def test_x(self, nnx_wrap, request):
        from pytest_nnxcheck.plugin.marker import SETTINGS
        s = request.node.stash[SETTINGS]
        assert (s.max_depth, s.max_examples, s.sweep, s.donate) == (3, 2, "probes", "state")
        nnx_wrap(Model())(1)
"""
    run_inner(source).assert_outcomes(passed=1)


@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n2", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "option, message",
    [
        (
            "--nnx-memory-budget=5MBfoo",
            "option --nnx-memory-budget: memory_budget='5MBfoo' is not a size, write bytes such as '512MiB'*",
        ),
        ("--nnx-nesting=jit > scna", "option --nnx-nesting: unknown transform 'scna', did you mean 'scan'?"),
        ("--override-ini=nnx_max_depth=zero", "ini option nnx_max_depth*zero*"),
        ("--override-ini=nnx_styles=closur", "ini option nnx_styles*: unknown style 'closur', did you mean 'closure'?"),
    ],
)
def test_a_bad_option_stops_the_run_before_it_starts(run_inner, option, message, workers):
    result = run_inner("def test_x(): pass\n", option, workers, subprocess=True)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert "Traceback" not in result.stderr.str()


LOAD = (
    "import pytest_nnxcheck.plugin.hooks, sys; {}; print(*sorted({{'jax', 'flax', 'hypothesis'}} & set(sys.modules)))"
)


def loaded(statement):
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LOAD.format(statement)], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_loading_the_plugin_imports_nothing_heavy():
    assert loaded("pass") == []


def test_loading_the_plugin_takes_of_the_package_what_it_needs_and_no_more():
    root = Path(__file__).parents[2]
    statement = "import sys, pytest; before = {*sys.modules}; import pytest_nnxcheck.plugin.hooks; print(*{*sys.modules} - before)"
    done = subprocess.run([sys.executable, "-c", statement], cwd=root, capture_output=True, text=True, check=True)
    new = {*done.stdout.split()}
    assert {name.split(".")[1] for name in new if name.startswith("pytest_nnxcheck.")} == {"core", "plugin"}
    assert not new & {"unittest", "asyncio", "pytest_nnxcheck.core.outcome", "pytest_nnxcheck.core.evidence"}


def test_the_test_above_can_fail():
    assert "hypothesis" in loaded("import pytest_nnxcheck.api")
