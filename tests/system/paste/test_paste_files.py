"""The file of a program to paste: its name, its folder, the places in it that the reader must fill in."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from healthy import FLAX
from pasted_programs import run_fresh, run_programs, told

from pytest_nnxcheck import Layer
from pytest_nnxcheck.invariants.advice import MemoryWasted
from pytest_nnxcheck.invariants.tracers import StateTouched
from pytest_nnxcheck.paste.program import file_name
from pytest_nnxcheck.paste.usage import literal

# --- how a test is written


HOLE = """
class Odd:
    def __init__(self):
        self.n = 2

KEPT = []

@pytest.fixture
def handle(handle, tmp_path):
    try:
        yield object()
    finally:
        print("closed with a", type(jnp).__name__)

@marked
def test_hole(nnx_wrap, handle, capsys):
    nnx_wrap(lambda model, x: KEPT.append(model(x)))(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
"""


def test_what_cannot_be_written_is_a_marked_place(inner, pytester):
    conftest = "import pytest\n\n@pytest.fixture\ndef handle():\n    return 1\n"
    result = inner(HOLE, "--nnx-nesting", "jit", conftest=conftest)
    ((_, _, program),) = told(result.stdout.str()).values()
    text = (pytester.path / program).read_text("utf-8")
    assert "overridden_handle = FILL_IN  # overridden_handle was a Fixture" in text, "a fixture that overrides another"
    done = run_fresh(pytester.path / program)
    assert done.returncode == 1
    assert "overridden_handle = FILL_IN" in done.stderr, "the last line of its traceback asks for it"
    assert "capsys = FILL_IN  # capsys was a CaptureFixture" in text
    (pytester.path / "filled.py").write_text(text.replace("= FILL_IN", "= None"), "utf-8")
    done = run_fresh(pytester.path / "filled.py")
    assert "AssertionError: nnx invariant broken: tracers" in done.stderr
    assert "closed with a module" in done.stdout, "a fixture is closed before the modules that it needs are gone"


def test_the_program_of_the_page_on_failures_has_forty_lines_beside_the_test(pytester, inner_args):
    page = (Path(__file__).parents[3] / "docs/failures.md").read_text("utf-8")
    pytester.makepyfile(page.partition("```python\n")[2].partition("```")[0])
    result = pytester.runpytest_inprocess(*inner_args, "-p", "no:randomly", "--nnx-nesting", "jit")
    ((_, _, program),) = told(result.stdout.str()).values()
    text = (pytester.path / program).read_text("utf-8")
    before, _, after = re.split(r"^# --- the (?:test|layers) .*\n", text, flags=re.MULTILINE)
    assert sum(bool(line.strip()) and not line.startswith("#") for line in (before + after).splitlines()) <= 40
    assert "the program holds 2.00 extra copies of its state" in run_fresh(pytester.path / program).stderr


KEPT = """
KEPT = []

class Keeps(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, scale=1.0):
        KEPT.append(self.linear(x) * scale)
        return x

@marked
def test_by_keyword(nnx_wrap):
    nnx_wrap(Keeps())(jnp.ones((2, 4)), scale=jnp.ones(()))

@marked
def test_by_keyword_alone(nnx_wrap):
    nnx_wrap(lambda model, *, x: model(x))(Keeps(), x=jnp.ones((2, 4)))

@marked
@pytest.mark.parametrize("width", [4, pytest.param(4, id="four")])
@pytest.mark.parametrize("f, dtype", [(jnp.tanh, jnp.float32), (lambda x: x, "float32")])
def test_lists(nnx_wrap, width, f, dtype):
    nnx_wrap(lambda model, x: f(model(x)))(Keeps(), jnp.ones((2, width), dtype))
"""


def test_arguments_are_written_by_name_and_from_several_lists(inner, pytester):
    result = inner(KEPT, "--nnx-nesting", "jit")
    programs = [pytester.path / program for _, _, program in told(result.stdout.str()).values()]
    assert len(programs) == 6
    for kind, text in run_programs(programs).values():
        assert (kind, text.splitlines()[1:]) == ("AssertionError", ["  tracers remain in KEPT[0]"])


RESTORES = """
KEPT = []

class Restores(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        old = self.linear.kernel[...]
        self.linear.kernel[...] = old / jnp.linalg.norm(old @ x.sum(0))
        KEPT.append(self.linear(x))
        self.linear.kernel[...] = old
        return x

@marked
def test_restores(nnx_wrap):
    nnx_wrap(Restores())(jnp.ones((2, 4)))
"""


@pytest.mark.skipif(FLAX < (0, 12), reason="earlier flax takes no value by index")
def test_a_call_that_is_tried_again_with_mapped_leaves_is_written_once(inner, pytester):
    result = inner(RESTORES, "--nnx-nesting", "vmap")
    ((_, _, program),) = told(result.stdout.str()).values()
    assert "not in range(0, 1)" in (pytester.path / program).read_text("utf-8")
    assert "nnx invariant broken: tracers" in run_fresh(pytester.path / program).stderr


# --- where it lies


KILLED = """
import os, signal

class Kills(nnx.Module):
    def __init__(self, how, rngs):
        self.how = how
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        if isinstance(x, jax.core.Tracer):
            {how}
        return self.linear(x)

@marked
def test_kill(nnx_wrap):
    nnx_wrap(Kills("", nnx.Rngs(0)))(jnp.ones((2, 4)))

@marked
def test_kill_when_it_runs(nnx_wrap):
    def forward(model, x):
        return jax.pure_callback(lambda y: {how}, jax.ShapeDtypeStruct((), jnp.float32), x) if isinstance(x, jax.core.Tracer) else x

    nnx_wrap(forward)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
"""


@pytest.mark.parametrize("test", ["test_kill", pytest.param("test_kill_when_it_runs", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "how, code",
    [
        ("os._exit(9)", 9),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -9, marks=pytest.mark.full),
    ],
)
def test_a_nesting_that_kills_the_process_leaves_its_program(inner, pytester, how, code, test):
    result = inner(KILLED.replace("{how}", how), "-k", test + " and not " + test + "_", subprocess=True)
    assert result.ret == code
    (path,) = pytester.path.glob(".pytest_cache/d/nnxcheck/*/*.py")
    assert "written before the nesting ran" in path.read_text("utf-8")
    assert run_fresh(path).returncode == code


LEAK = """
KEPT = []

@marked
def test_leak(nnx_wrap):
    nnx_wrap(lambda model, x: KEPT.append(model(x)))(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))

@marked
def test_fine(nnx_wrap):
    nnx_wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))(jnp.ones((2, 4)))
"""


def test_a_program_goes_once_its_nesting_holds(inner, pytester):
    for source, count in ((LEAK, 1), (LEAK.replace("KEPT.append(model(x))", "model(x)"), 0)):
        inner(source, "--nnx-nesting", "jit")
        assert len([*pytester.path.glob(".pytest_cache/d/nnxcheck/*/*.py")]) == count


@pytest.mark.parametrize("file", ["nnxcheck", "nnxcheck/test_inner.py-test_leak-*"])
def test_a_place_that_cannot_be_written_costs_no_run(inner, pytester, file):
    inner(LEAK, "--nnx-nesting", "jit")
    (place,) = pytester.path.glob(f".pytest_cache/d/{file}")
    shutil.rmtree(place)
    place.touch()
    result = inner(LEAK, "--nnx-nesting", "jit", "-W", "always")
    result.assert_outcomes(failed=1, passed=1, warnings=result.parseoutcomes()["warnings"])
    result.stdout.re_match_lines([r"E         program     not written: \w+Error: .*"])
    (line,) = [
        at
        for at, text in enumerate((pytester.path / "test_inner.py").read_text().splitlines(), 1)
        if "def test_leak" in text
    ]
    told = [
        text
        for text in result.outlines
        if "the programs to paste of test_inner.py::test_leak cannot be written" in text
    ]
    assert told
    assert all(re.match(rf".*/test_inner.py:({line}|{line - 1}): ProgramWarning: ", text) for text in told), (
        "a line of the test"
    )
    result.stdout.fnmatch_lines(["E       nnx invariant broken: tracers"])


def test_a_warning_that_is_an_error_costs_no_run_either(inner, pytester):
    (pytester.path / ".pytest_cache/d").mkdir(parents=True)
    (pytester.path / ".pytest_cache/d/nnxcheck").touch()
    result = inner(LEAK, "--nnx-nesting", "jit", "-W", "error:the programs to paste")
    result.assert_outcomes(failed=1, passed=1)


def test_a_path_with_spaces_is_quoted_in_the_command(inner, pytester):
    result = inner(LEAK, "--nnx-nesting", "jit", "-o", "cache_dir=a b'ü")
    ((_, _, program),) = told(result.stdout.str()).values()
    text = (pytester.path / program).read_text("utf-8")
    command = next(line for line in text.splitlines() if line.startswith("#   program "))
    assert shlex.split(command.removeprefix("#   program ")) == ["python", program]
    assert "nnx invariant broken: tracers" in run_fresh(pytester.path / program).stderr


def test_file_names_are_short_safe_and_each_its_own():
    names = [
        file_name(text) for text in ("a/b::c[x]", "a/b::c(x)", "x" * 1000, "x" * 1001, "ü\n\0", "\ud800", "..", "")
    ]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", name) and name not in (".", "..") for name in names)


def test_what_no_program_can_look_for_has_none():
    """The advice on memory is words about the un-nested call; that an ``eval_shape`` writes a value, its guard alone sees."""
    assert (
        [*MemoryWasted("", advice=()).look(None)]
        == [*StateTouched("model.w", layer=Layer("eval_shape")).look(None)]
        == []
    )


@pytest.mark.parametrize("value", [{1, 2}, range])
def test_a_literal_reads_back_as_the_same_value_or_there_is_none(value):
    assert eval(literal(value) or "range") == value
    assert literal(object()) == ""
