"""What is refused at collection, and where settings come from: marker, command line, ini file."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = "import pytest, unittest\nmarked = pytest.mark.nnx_invariants\n"
REFUSED = {  # a file that starts in line 3, and what is said of it
    "@marked(max_depth=0)\ndef test_x(nnx_wrap): pass": "nnx_invariants marker at {file}:3: max_depth=0 is not a whole number of at least 1",
    "\n@marked(max_depth=0)\nclass TestX:\n    def test_x(self, nnx_wrap): pass": "nnx_invariants marker at {file}:4: max_depth=0 is not *",
    "pytestmark = [marked(max_depth=0)]\ndef test_x(nnx_wrap): pass": "nnx_invariants marker at {file}: max_depth=0 is not *",
    "@marked('tracers')\ndef test_x(nnx_wrap): pass": "nnx_invariants marker at {file}:3: 'tracers' has no name, write keyword arguments such as memory_budget='2x'",
    "@marked(nesting='jit')\ndef test_x(nnx_wrap): pass": "nnx_invariants marker at {file}:3: nesting='jit' is for the command line, --nnx-nesting",
    "@marked\ndef test_x(tmp_path): pass": "{file}:3: test_x is marked nnx_invariants but does not use nnx_wrap, so nothing *",
    "def test_x(nnx_wrap): pass": "{file}:3: test_x uses nnx_wrap but is not marked, add @pytest.mark.nnx_invariants",
    "@marked\nasync def test_x(nnx_wrap): pass": "{file}:3: test_x is async, and nnx_invariants cannot await it for each nesting: *",
    "@marked\nasync def test_x(nnx_wrap): yield": "{file}:3: test_x is async, and nnx_invariants cannot await it for each nesting: *",
    "@marked\nclass X(unittest.TestCase):\n    def test_x(self): pass": "{file}:3: X is a unittest.TestCase, which takes no fixtures as arguments, *",
    "class X(unittest.TestCase):\n    @marked\n    def test_x(self): pass": "{file}:3: X is a unittest.TestCase, which takes no *",
    "pytestmark = marked\nclass X(unittest.TestCase):\n    def test_x(self): pass": "{file}:4: X is a unittest.TestCase, which takes no *",
}


def test_what_is_refused_is_a_collection_error_with_file_and_line(run_inner, pytester):
    files = {f"test_{number:02}": HEAD + source for number, source in enumerate(REFUSED)}
    pytester.makepyfile(**files)
    result = run_inner(
        "class X(__import__('unittest').TestCase):\n    def test_x(self): pass\n", "--continue-on-collection-errors"
    )
    result.assert_outcomes(errors=len(REFUSED), passed=1)
    result.stdout.fnmatch_lines(
        [line.format(file=f"{name}.py") for name, line in zip(files, REFUSED.values(), strict=True)]
    )
    assert "Traceback" not in result.stdout.str()


ADDS = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.nnx_invariants(%s), append=False)
"""
UNMARKED = (
    "@pytest.fixture\ndef model(nnx_wrap): return nnx_wrap(Model())\ndef test_x(model):\n    assert model(1) == 1\n"
)
MARKED = "@marked(max_examples=0)\ndef test_x(nnx_wrap):\n    assert nnx_wrap(Model())(1) == 1\n    assert {*RUNS} <= {'un-nested', 'jit', 'jit > call_first'}\n"


@pytest.mark.parametrize(
    "source, good, bad, message",
    [
        (UNMARKED, "", "max_depth=0", "nnx_invariants marker at test_inner.py:6: max_depth=0 is not *"),
        (
            MARKED,
            "transforms='jit', styles='argument'",
            "transformz='jit'",
            "* unknown setting 'transformz', did you mean *",
        ),
    ],
    ids=["unmarked", "marked"],
)
def test_a_marker_that_a_conftest_adds_later_counts(run_inner, source, good, bad, message):
    run_inner(source, conftest=ADDS % good).assert_outcomes(passed=1)
    result = run_inner(source, conftest=ADDS % bad)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([message])


def test_the_nearest_marker_wins_field_by_field_over_command_line_and_ini_file(run_inner, pytester):
    source = """
from pytest_nnxcheck.plugin.marker import SETTINGS
def settings(request):
    s = request.node.stash[SETTINGS]
    return s.transforms, s.max_depth, s.max_examples, s.shortcuts, str(s.memory_budget)
@marked(transforms="jit", memory_budget="2x", max_depth=1, max_examples=1)
class TestX:
    @marked(max_depth=3)
    def test_marker(self, nnx_wrap, request):
        assert settings(request) == (("jit",), 3, 1, "off", "2x")
        nnx_wrap(Model())(1)
@marked
def test_options(nnx_wrap, request):
    assert settings(request) == (("scan", "vmap"), 2, 3, "off", "3x")
    nnx_wrap(Model())(1)
"""
    ini = "nnx_transforms = remat\nnnx_max_depth = 4\nnnx_shortcuts = off\nnnx_memory_budget = 3x\n"
    pytester.makeini(f"[pytest]\n{ini}")
    run_inner(source, "--nnx-transforms=scan,vmap", "--nnx-max-depth=2").assert_outcomes(passed=2)


@pytest.mark.slow
def test_pytest_does_not_rewrite_what_the_plugin_loads(pytester):
    source = """
import importlib.machinery, sys
def test_x():
    modules = [m for name, m in sys.modules.items() if name.startswith("pytest_nnxcheck.")]
    rewritten = [m.__name__ for m in modules if type(m.__loader__) is not importlib.machinery.SourceFileLoader]
    assert len(modules) > 5 and {*rewritten} <= {"pytest_nnxcheck.plugin"}  # which sees to the others
"""
    pytester.makepyfile(source)
    pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider").assert_outcomes(passed=1)


HEAVY = {"jax", "flax", "hypothesis", "unittest", "asyncio", "difflib"}


def loaded(statement):
    """The modules that a statement loads beside those of pytest."""
    program = f"import sys, pytest; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    command, root = [sys.executable, "-c", program], Path(__file__).parents[3]
    return {*subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.split()}


def test_loading_the_plugin_takes_of_the_package_what_it_needs_and_nothing_heavy():
    new = loaded("import pytest_nnxcheck.plugin.hooks")
    assert {name.split(".")[1] for name in new if name.startswith("pytest_nnxcheck.")} == {"core", "plugin"}
    assert not new & HEAVY
    assert not new & {f"pytest_nnxcheck.core.{name}" for name in ("outcome", "facts", "nesting")}


@pytest.mark.slow
def test_the_test_above_can_fail():
    assert "hypothesis" in loaded("import pytest_nnxcheck.api")
