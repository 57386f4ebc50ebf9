"""Tests that call a module outside of any transform: ``--nnx-watch`` names them, ``--nnx-mark-candidates`` writes a marked test for each."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from candidates import CONFTEST, DECORATED, DEFINED, GAPS, GAPS_OF_MARKS, HEAD, MARKS, NONE, OTHER, SURE, WRITTEN

needs_monitoring = pytest.mark.skipif(sys.version_info < (3, 12), reason="calls are watched from Python 3.12 on")


@pytest.fixture
def watch(pytester, inner_args):
    pytester.makeconftest(CONFTEST)

    def run(source, *args, file="test_suite.py"):
        pytester.makepyfile(**{Path(file).stem: HEAD + source})
        quiet = ("-p", "no:randomly", "-p", "no:cacheprovider")
        return pytester.runpytest_inprocess(*inner_args, *quiet, "--nnx-watch", *args)

    return run


@pytest.fixture
def marked(pytester, inner_args):
    """Run the new file: as little as a marked test can."""

    def run(*files):
        few = ("--nnx-transforms=jit", "--nnx-styles=argument", "--nnx-sweep=probes", "--nnx-max-examples=0")
        return pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly", "-p", "no:cacheprovider", *few, *files)

    return run


def gaps(pytester):
    """Why tests of the new file are left to the author."""
    written = (pytester.path / "test_marked.py").read_text()
    return [line.partition("; ")[2] for line in written.splitlines() if line.startswith("# ")]


@pytest.mark.slow
@needs_monitoring
def test_the_tests_that_call_a_module_are_named(watch):
    result = watch(SURE + NONE)
    result.stdout.fnmatch_lines(
        [
            "10 tests watched: nothing was left behind",
            (
                "6 tests call a module outside of any transform, to be marked with nnx_invariants:"
                " test_suite.py::TestNet::test_method, test_suite.py::test_built, test_suite.py::test_fixtures, ..."
            ),
        ]
    )


@needs_monitoring
def test_all_of_them_with_v(watch):
    watch(SURE, "-v").stdout.fnmatch_lines(
        ["6 tests call a module *:", "  test_suite.py::TestNet::test_method", "*", "  test_suite.py::test_rows?3?"]
    )


@pytest.mark.slow
@needs_monitoring
def test_a_marked_test_for_each_is_written_and_passes(watch, marked, pytester):
    result = watch(SURE + NONE, "--nnx-mark-candidates", "test_marked.py")
    result.stdout.fnmatch_lines(["test_marked.py was written: read it before you keep it"])
    assert (pytester.path / "test_marked.py").read_text() == WRITTEN
    marked("test_marked.py").assert_outcomes(passed=6)


@needs_monitoring
def test_a_call_through_decorators_is_the_tests_own_and_no_test_is_imported(watch, marked, pytester):
    """Checkers of types put decorators around every ``__call__``; a class of tests at the top would be collected once more."""
    watch(DECORATED, "--nnx-mark-candidates=test_marked.py")
    assert (pytester.path / "test_marked.py").read_text().splitlines()[2:] == [
        "import jax.numpy as jnp",
        "import pytest",
        "from flax import nnx",
        "from test_suite import Checked",
        "",
        "",
        "# test_suite.py::NetTest::test_checked calls Checked in line 39 of test_suite.py",
        "@pytest.mark.nnx_invariants",
        "def test_checked(nnx_wrap):",
        "    from test_suite import NetTest",
        "    assert nnx_wrap(Checked(nnx.Rngs(0)))(jnp.ones((NetTest.ROWS, 4))) is not None",
    ]
    marked("test_marked.py").assert_outcomes(passed=1)


@needs_monitoring
def test_the_page_shows_what_is_written_for_its_suite(pytester, inner_args):
    page = (Path(__file__).parents[3] / "docs" / "watch.md").read_text()
    (suite,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    shown, _ = re.findall(r"```py\n(.*?)```", page, re.DOTALL)
    pytester.makepyfile(test_net=suite)
    pytester.runpytest_inprocess(
        *inner_args,
        "-p",
        "no:randomly",
        "-p",
        "no:cacheprovider",
        "--nnx-watch",
        "--nnx-mark-candidates=test_marked.py",
    )
    assert (pytester.path / "test_marked.py").read_text().partition("\n\n")[2] == shown


@needs_monitoring
def test_what_is_not_certain_is_left_to_the_author_and_fails_until_it_is_written(watch, marked, pytester):
    watch(GAPS, "--nnx-mark-candidates=test_marked.py")
    assert gaps(pytester) == [
        "its fixture mine would not be there",
        "line 38 needs the instance of the test",
        "it is decorated with nothing",
        "the test does not call it itself",
        "the call comes after, or in, the block in line 23",
    ]
    result = marked("test_marked.py")
    result.assert_outcomes(failed=5)
    result.stdout.fnmatch_lines(
        ["*NotImplementedError: write here how the model is built, and call it: nnx_wrap(model)(x)"]
    )


@needs_monitoring
def test_the_marks_of_class_and_file_come_along(watch, marked, pytester):
    watch(MARKS, "--nnx-mark-candidates=test_marked.py")
    written = (pytester.path / "test_marked.py").read_text()
    outer = ["@pytest.mark.usefixtures('build')", "@pytest.mark.filterwarnings('ignore:none such')"]
    of_class = "@pytest.mark.parametrize(('rows', 'more'), [(1, 2), (3, 4)])"
    tests = [test.splitlines()[1:-2] for test in written.split("\n\n\n")[1:]]
    assert tests[0] == ["@pytest.mark.nnx_invariants", of_class, *outer]
    assert tests[3][:3] == ["@pytest.mark.nnx_invariants", *outer]
    marked("test_marked.py").assert_outcomes(passed=5)


@needs_monitoring
def test_what_stands_around_a_test_may_be_a_gap_and_what_cannot_be_marked_is_not_named(watch, pytester):
    result = watch(GAPS_OF_MARKS, "--nnx-mark-candidates=test_marked.py", "-v")
    assert gaps(pytester) == [
        "line 55 needs the instance of the test",
        "its setup_method would not be run",
        "its setup_class would not be run",
        "its class or its file has the mark skipif",
        "map calls it",
        "map calls it",
        "sorted calls it",
    ]
    result.stdout.fnmatch_lines(["6 tests call a module outside of any transform, to be marked with nnx_invariants:"])
    result.stdout.no_fnmatch_line("  test_suite.py::NetTest::test_case")


@needs_monitoring
def test_an_async_test_is_not_named_and_its_gap_says_why(watch, pytester):
    pytester.makeconftest(
        """
        import asyncio
        import inspect
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            if inspect.iscoroutinefunction(pyfuncitem.obj):
                asyncio.run(pyfuncitem.obj())
                return True
        """
    )
    source = "async def test_async():\n    assert Net(nnx.Rngs(0))(jnp.ones((2, WIDTH))).ndim == 2\n"
    result = watch(source, "--nnx-mark-candidates=test_marked.py")
    assert "; it is async, which a marked test cannot be\n" in (pytester.path / "test_marked.py").read_text()
    result.stdout.no_fnmatch_line("*outside of any transform, to be marked*")


@needs_monitoring
def test_a_class_that_the_test_defines_comes_along(watch, marked, pytester):
    watch(DEFINED, "--nnx-mark-candidates=test_marked.py")
    written = (pytester.path / "test_marked.py").read_text()
    assert "    assert nnx_wrap(Double())(batch).shape == both(batch).shape\n" in written
    marked("test_marked.py").assert_outcomes(passed=1)


@needs_monitoring
def test_two_files_that_mean_different_things_by_a_name(watch, marked, pytester):
    pytester.makepyfile(test_other=HEAD + OTHER)
    watch(SURE, "--nnx-mark-candidates=test_marked.py")
    written = (pytester.path / "test_marked.py").read_text()
    assert "def test_built_2(nnx_wrap):\n    from test_suite import Net\n    model = Net(nnx.Rngs(0))\n" in written
    assert (
        "# test_suite.py::test_fixtures calls Net in line 28 of test_suite.py; net means something else in another"
        in written
    )
    marked("test_marked.py").assert_outcomes(passed=4, failed=3)


@needs_monitoring
@pytest.mark.parametrize(
    "args, reason",
    [
        ([], "write the new file into the folder of test_suite.py"),
        (["--import-mode=importlib"], "with --import-mode=importlib *"),
    ],
)
def test_a_file_that_could_not_import_the_tests_says_so(watch, pytester, args, reason):
    folder = "" if args else "other/"
    (pytester.path / "other").mkdir()
    watch(
        "def test_it():\n    Net(nnx.Rngs(0))(jnp.ones((1, 4)))\n",
        *args,
        f"--nnx-mark-candidates={folder}test_marked.py",
    )
    written = (pytester.path / folder / "test_marked.py").read_text()
    pytest.LineMatcher(written.splitlines()).fnmatch_lines(
        [f"# test_suite.py::test_it *; Net cannot be imported: {reason}"]
    )


@pytest.mark.parametrize(
    "name, reason",
    [
        ("test_suite.py", "test_suite.py is there, and stays as it is: move it, or name another file"),
        ("marked.txt", "'marked.txt' is no file of Python, write 'tests/test_marked.py'"),
        ("nowhere/test_marked.py", "nowhere/test_marked.py cannot be written (*"),
    ],
)
def test_a_file_that_cannot_be_written_stops_the_run_before_it_starts(watch, pytester, name, reason):
    result = watch(SURE, f"--nnx-mark-candidates={name}")
    result.stderr.fnmatch_lines([f"*option --nnx-mark-candidates: {reason}"])
    assert (pytester.path / "test_suite.py").read_text().strip() == (HEAD + SURE).strip()


@pytest.mark.parametrize("args", [[], ["--nnx-watch=off"]])
def test_the_option_asks_for_watch_mode(pytester, inner_args, args):
    pytester.makepyfile(test_suite=HEAD + SURE)
    result = pytester.runpytest_inprocess(*inner_args, *args, "--nnx-mark-candidates=test_marked.py")
    result.stderr.fnmatch_lines(["*option --nnx-mark-candidates: no test is watched, add --nnx-watch"])


def test_no_file_is_written_for_nothing(watch, pytester):
    result = watch("def test_nothing():\n    pass\n", "--nnx-mark-candidates=test_marked.py")
    result.stdout.fnmatch_lines(["test_marked.py was not written: *"])
    assert not (pytester.path / "test_marked.py").exists()


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="calls are watched from Python 3.12 on")
def test_python_that_sees_no_calls_says_so(watch):
    result = watch(SURE, "--nnx-mark-candidates=test_marked.py")
    result.stdout.fnmatch_lines(["test_marked.py was not written: *calls of modules, are watched from Python 3.12 on"])
