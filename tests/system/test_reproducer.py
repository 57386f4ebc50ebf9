"""The program to paste fails in the same way as the test, in an interpreter that has neither this plugin nor pytest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pytest_nnxcheck import check, register_transform
from pytest_nnxcheck.core import catalogue
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import merge
from pytest_nnxcheck.reproducer.files import Programs, ProgramWarning, file_name, own_transforms

TESTS = Path(__file__).parents[1]
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytest", "_pytest", "hypothesis", "pytest_nnxcheck"):
            raise ModuleNotFoundError(f"{name} is not for pasted programs")
sys.meta_path.insert(0, Block())
"""
RUN_ALL = (
    BLOCK
    + """
import contextlib, io, json, runpy
for path in sys.argv[1:]:
    before = list(sys.path)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(path, run_name="__main__")
        found = ["", ""]
    except BaseException as error:
        found = [type(error).__name__, str(error)]
    sys.path[:] = before
    print(json.dumps([path, *found]), flush=True)
"""
)
RUN_ONE = BLOCK + "import runpy\nrunpy.run_path(sys.argv[1], run_name='__main__')"


def run_programs(paths):
    """{path: (type, text) of the exception that it ended with}, all in one fresh interpreter."""
    paths = list(map(str, paths))
    command = [sys.executable, "-W", "ignore", "-c", RUN_ALL, *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(paths), done.stderr
    return {Path(path): (kind, text) for path, kind, text in found}


def run_fresh(path):
    """One program in an interpreter of its own."""
    command = [sys.executable, "-W", "ignore", "-c", RUN_ONE, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def told(result):
    """What the messages of a run say: {test: (exception or invariant, first path, program)}."""
    found = {}
    text = "\n".join(result.outlines).partition("= short test summary info =")[0]
    for block in re.split(r"^_{3,} .* _{3,}$", text, flags=re.MULTILINE)[1:]:
        lines = [line[1:].strip() for line in block.splitlines() if line.startswith("E ")]
        program = next((line.split(maxsplit=1)[1] for line in lines if re.match(r"program  ", line)), "")
        test = re.search(r"replay +pytest '?(\S+?::.+?)'? --nnx", block)
        broken = re.search(r"nnx invariant broken: (\w+)", block)
        leaf = re.search(r"^E +(?:leaked|donation) +(\S+)", block, re.MULTILINE)
        if test:
            kind = broken[1] if broken else lines[0].partition(":")[0].rpartition(".")[2]
            found[test[1]] = (kind, leaf[1] if leaf and broken else "", program)
    return found


@pytest.fixture
def inner(pytester, inner_args, monkeypatch):
    """Run a suite with the real engine in this process."""

    def run(source, *args, name="test_inner", conftest="", subprocess=False):
        monkeypatch.setenv("PYTHONPATH", str(TESTS.parent))
        pytester.makeconftest(conftest)
        head = f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport jax\nimport jax.numpy as jnp\nimport pytest\nfrom flax import nnx\n"
        pytester.makepyfile(**{name: head + "marked = pytest.mark.nnx_invariants\n" + source})
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start(*inner_args, "-p", "no:randomly", "--nnx-max-examples", "0", *args)

    return run


def same(result, directory, count):
    """Run the programs of all messages, and hold them against these. Returns what was told."""
    found = told(result)
    assert len(found) == count, result.stdout.str()
    paths = {test: directory / program for test, (_, _, program) in found.items()}
    assert all(path.is_file() for path in paths.values()), found
    ended = run_programs(paths.values())
    for test, (kind, leaf, _) in found.items():
        raised, text = ended[paths[test]]
        if raised == "AssertionError" and kind != raised:
            assert text.splitlines()[0] == f"nnx invariant broken: {kind}", (test, text)
            assert leaf in text, (test, leaf, text)
        else:
            assert raised == kind, (test, text)
    return found


LINES = {"tracers": 150, "donation": 150, "memory": 250}
"""How long the program of a test of ten lines may be."""
NOT_PLAIN = ("shared", "viewed", "dropped_update", "abstract")
"""What the short form of a program does not look for."""

CORPUS = """
import reports
from healthy import FLAX, rngs
from leaky import LEAKY, KeepsLastSetInInit, case

@marked
@pytest.mark.parametrize("name", sorted(name for name, twins in LEAKY.items() if FLAX >= twins.since))
def test_leak(nnx_wrap, name):
    made = LEAKY[name].leaky()
    nnx_wrap(made.subject)(*made.args)

@marked
@pytest.mark.skipif(FLAX < (0, 12), reason="earlier flax carries the value out")
def test_set_in_init(nnx_wrap):
    made = case(KeepsLastSetInInit)
    nnx_wrap(made.subject)(*made.args)

@marked
def test_4871(nnx_wrap):
    nnx_wrap(reports.call_twice)(reports.ScanOverRemat(rngs()), *reports.inputs_scan_over_remat())

@marked
@pytest.mark.parametrize("remat, scan", [(True, False), (True, True)])
def test_4819(nnx_wrap, remat, scan):
    nnx_wrap(reports.autoregressive_decode)(reports.report_4819(rngs(), remat, scan), *reports.inputs_4819())

@marked
@pytest.mark.parametrize("step", [reports.step_other_dtype, reports.step_drops_one])
def test_step(nnx_wrap, step):
    nnx_wrap(step)(reports.Pair(100))

@marked(donate="all")
@pytest.mark.parametrize("step", [reports.arrays_step_other_dtype, reports.arrays_step_drops_one])
def test_arrays(nnx_wrap, step):
    nnx_wrap(step)(jnp.arange(100, dtype=jnp.float32), jnp.ones(100))

@marked(donate="none", memory_budget=3 * 64 * 4096)
def test_926(nnx_wrap):
    nnx_wrap(reports.ten_convolutions)(*reports.inputs_926())

@marked(memory_budget="0.5x")
def test_a_multiple(nnx_wrap):
    nnx_wrap(nnx.Linear(64, 64, rngs=rngs()))(jnp.ones((2, 64)))

WEIGHTS = jnp.ones((200, 200))

@marked
def test_captured(nnx_wrap):
    nnx_wrap(lambda model, x: model(x) @ WEIGHTS)(nnx.Linear(4, 200, rngs=rngs()), jnp.ones((2, 4)))

@marked
def test_shared(nnx_wrap):
    pair = reports.Pair(100)
    pair.b = nnx.Param(pair.a[...])
    nnx_wrap(reports.step_in_place)(pair)

@marked
def test_viewed(nnx_wrap):
    import numpy as np

    pair = reports.Pair(1000)
    pair.kept = frozenset([Box(np.asarray(pair.a[...]))])
    nnx_wrap(reports.step_in_place)(pair)

class Box:
    def __init__(self, value):
        self.value = value

def update_a_copy(model, optimizer, x):
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
    copy = nnx.clone(optimizer)
    copy.update(*((gradients,) if FLAX < (0, 11) else (model, gradients)))

@marked
def test_dropped_update(nnx_wrap):
    import optax

    model = nnx.Linear(4, 4, rngs=rngs())
    nnx_wrap(update_a_copy)(model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), jnp.ones((2, 4)))

@marked
def test_abstract(nnx_wrap):
    model = nnx.eval_shape(lambda: reports.ScanOverRemat(rngs()))
    nnx_wrap(reports.call_twice)(model, jax.ShapeDtypeStruct((4, 128), jnp.float32))

@marked
def test_abstract_dtype(nnx_wrap):
    def step(pair):
        reports.step_other_dtype(pair)

    nnx_wrap(step)(nnx.eval_shape(lambda: reports.Pair(100)))
"""


def test_every_violation_of_a_jit_fails_in_the_same_way(inner, pytester):
    result = inner(CORPUS, "--nnx-nesting", "jit")
    count = result.parseoutcomes()["failed"]
    assert count >= 20
    found = same(result, pytester.path, count)
    assert {kind for kind, _, _ in found.values()} >= {"tracers", "memory", "donation"}
    lengths = {}
    for test, (kind, _, program) in found.items():
        text = (pytester.path / program).read_text()
        assert text.startswith(f"# nnx invariant broken: {kind}\n# test: {test}\n# nesting: jit\n") or kind not in LINES
        if not any(name in test for name in NOT_PLAIN) and kind in LINES:
            lengths[test] = (text.count("\n"), LINES[kind])
    assert len(lengths) >= 14
    assert {test: lines for test, (lines, most) in lengths.items() if lines > most} == {}


LONG = """
import reports

class Keeps(nnx.Module):
    kept = []

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x, *keys):
        y = self.linear(x)
        Keeps.kept.append(y)
        return (y, *keys)

class Trainer:
    def step(self, model, x):
        return model(x)

def of_state(graphdef):
    return lambda state, x: nnx.merge(graphdef, state)(x)

def gives_the_module(model, x):
    model(x)
    return model

X = jnp.ones((2, 4))

@marked
@pytest.mark.skipif(not hasattr(nnx, "cached_partial"), reason="this flax has none")
def test_cached(nnx_wrap):
    nnx_wrap(nnx.cached_partial(lambda model, x: model(x), Keeps()))(X)

@marked
def test_state(nnx_wrap):
    graphdef, state = nnx.split(Keeps())
    nnx_wrap(of_state(graphdef))(state, X)

@marked
def test_keys(nnx_wrap):
    nnx_wrap(Keeps())(X, jax.random.key(0))

@marked
def test_module(nnx_wrap):
    nnx_wrap(gives_the_module)(Keeps(), X)

@marked
def test_method(nnx_wrap):
    nnx_wrap(Trainer().step)(Keeps(), X)
"""


@pytest.mark.parametrize(
    "nesting", ["jit > while_loop", pytest.param("jit[functional] > scan", marks=pytest.mark.full)]
)
def test_a_call_that_is_not_plain_has_the_long_form_and_fails_in_the_same_way(inner, pytester, nesting):
    result = inner(LONG, "--nnx-nesting", nesting)
    found = same(result, pytester.path, result.parseoutcomes()["failed"])
    assert {kind for kind, _, _ in found.values()} == {"tracers"}
    mended = [pytester.path / program for _, _, program in found.values()]
    for path in mended:
        path.write_text(path.read_text().replace("Keeps.kept.append(y)", "pass"))
    assert {path: how for path, how in run_programs(mended).items() if how != ("", "")} == {}


MENDED = {
    ".leaky()": ".healthy()",
    "import step_other_dtype": "import step_in_place as step_other_dtype",
    "import arrays_step_other_dtype": "import arrays_step as arrays_step_other_dtype",
    "WEIGHTS = jnp.ones((200, 200))": "WEIGHTS = jnp.ones((200, 1))",
}


def test_the_program_of_a_violation_ends_well_when_the_code_is_mended(inner, pytester):
    result = inner(CORPUS, "--nnx-nesting", "jit", "-k", "test_leak or other_dtype or test_captured")
    found = told(result)
    paths = [pytester.path / program for _, _, program in found.values()]
    for path in paths:
        text = path.read_text()
        for old, new in MENDED.items():
            text = text.replace(old, new)
        assert text != path.read_text(), path
        path.write_text(text)
    ended = run_programs(paths)
    assert {path: how for path, how in ended.items() if how != ("", "")} == {}


PARITY = """
from healthy import rngs

def broadcasts(model, xs):
    return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)

def differentiates(model, xs):
    return nnx.grad(lambda model, xs: broadcasts(model, xs).sum())(model, xs)

def carries(model, xs):
    axes = (nnx.Carry, 0)
    return nnx.scan(lambda model, x: (model, model(x)), in_axes=axes, out_axes=axes)(model, xs)[1]

@marked(invariants="parity")
@pytest.mark.parametrize("run", [broadcasts, differentiates])
def test_drops(nnx_wrap, run):
    nnx_wrap(run)(nnx.BatchNorm(8, rngs=rngs()), jnp.arange(48.0).reshape(2, 3, 8))

@marked(invariants="parity")
def test_holds(nnx_wrap):
    nnx_wrap(carries)(nnx.BatchNorm(8, rngs=rngs()), jnp.arange(48.0).reshape(2, 3, 8))
"""


def test_what_parity_finds_fails_in_the_same_way(inner, pytester):
    result = inner(PARITY, "--nnx-nesting", "un-nested")
    result.assert_outcomes(failed=2, passed=1)
    assert {kind for kind, _, _ in same(result, pytester.path, 2).values()} == {"parity"}


NESTED = """
import reports
from healthy import rngs

class Counts(nnx.Module):
    seen = []

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        y = self.linear(x)
        Counts.seen.append(y)
        return y

@marked(transforms="jit,remat,scan,vmap,while_loop,eval_shape,fori_loop,cond,grad,call_first,iterate_while_loop", sweep="singles")
def test_nested(nnx_wrap):
    nnx_wrap(Counts(nnx.Rngs(0)))(jnp.ones((2, 4)))
"""


@pytest.mark.parametrize(
    "nesting",
    [
        "scan",
        "jit > grad > scan",
        *(
            pytest.param(other, marks=pytest.mark.full)
            for other in (
                "jit > vmap[functional] > remat",
                "jit[functional] > while_loop > call_first",
                "cond[functional] > fori_loop",
                "jit > iterate_while_loop > remat",
            )
        ),
    ],
)
def test_other_nestings_fail_in_the_same_way(inner, pytester, nesting):
    same(inner(NESTED, "--nnx-nesting", nesting), pytester.path, 1)


HEALTHY = """
from leaky import LEAKY
from healthy import HEALTHY
import reports

@marked
@pytest.mark.parametrize("name", sorted(LEAKY))
def test_twin(nnx_wrap, name):
    made = LEAKY[name].healthy()
    nnx_wrap(made.subject)(*made.args)

@marked
@pytest.mark.parametrize("name", ["batch_norm_train", "dropout"])
def test_model(nnx_wrap, name):
    made = HEALTHY[name]()
    nnx_wrap(made.subject)(*made.args)

@marked
def test_step(nnx_wrap):
    pair = reports.Pair(100)
    step = nnx_wrap(reports.step_in_place)
    step(pair)
    step(pair)
    assert float(pair.b[...][0]) >= 4

@marked
def test_abstract(nnx_wrap):
    y = nnx_wrap(nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=nnx.Rngs(0))))(jax.ShapeDtypeStruct((2, 4), jnp.float32))
    assert y.shape == (2, 4)
"""


@pytest.mark.parametrize(
    "nesting",
    [
        "vmap > remat[functional]",
        *(
            pytest.param(other, marks=pytest.mark.full)
            for other in ("jit", "un-nested", "jit[functional] > scan > while_loop")
        ),
    ],
)
def test_the_program_of_a_healthy_twin_ends_well(inner, pytester, monkeypatch, nesting):
    monkeypatch.setattr(Programs, "end", lambda self, outcomes: None)  # which removes them
    inner(HEALTHY, "--nnx-nesting", nesting).assert_outcomes(passed=14)
    paths = sorted(pytester.path.glob(".pytest_cache/d/nnxcheck/*/*.py"))
    assert len(paths) >= 14
    ended = run_programs(paths)
    assert {path: found for path, found in ended.items() if found != ("", "")} == {}


def test_programs_of_nestings_that_hold_are_removed(inner, pytester):
    inner(HEALTHY, "-k", "test_abstract", "--nnx-sweep", "singles").assert_outcomes(passed=1)
    assert [*pytester.path.glob(".pytest_cache/d/nnxcheck/*/*.py")] == []


# --- how a test is written


FORMS = """
import dataclasses
import enum
from hypothesis import given, settings
from hypothesis import strategies as st

KEPT = []
split = stack = run = Facts = None  # names that our own part of the program has too

class Kind(enum.Enum):
    TANH = "tanh"

@dataclasses.dataclass(frozen=True)
class Config:
    width: int = 4
    kind: Kind = Kind.TANH

class Größe(nnx.Module):
    def __init__(self, config, rngs):
        self.linear = nnx.Linear(config.width, config.width, rngs=rngs)

    def __call__(self, x):
        KEPT.append(self.linear(x))
        return KEPT[-1]

@pytest.fixture
def config():
    return Config()

@pytest.fixture
def model(config):
    yield Größe(config, nnx.Rngs(0))

@pytest.fixture(params=[4], ids=["four"])
def x(request):
    return jnp.arange(2.0 * request.param).reshape(2, request.param)

@marked
def test_fixtures(nnx_wrap, model, x):
    nnx_wrap(model)(x)

@marked
@pytest.mark.parametrize("config, make", [(Config(4), lambda: nnx.Rngs(0))])
def test_parameters(nnx_wrap, config, make):
    nnx_wrap(Größe(config, make()))(jnp.ones((2, config.width)))

@marked
@given(rows=st.integers(1, 3))
@settings(max_examples=2)
def test_drawn(nnx_wrap, rows):
    nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((rows, 4)))

@marked
class TestClass:
    width = 4

    def setup_method(self):
        self.config = Config(self.width)

    def helper(self):
        return Größe(self.config, nnx.Rngs(0))

    def test_method(self, nnx_wrap):
        nnx_wrap(self.helper())(jnp.ones((2, self.width)))

    def test_other(self, nnx_wrap):
        pytest.skip("not the one")

@marked
@pytest.mark.parametrize("text", ["a\\nb", "'\\"\\"\\"", "\\\\", "ünï\\u2028", "{x} %s"])
def test_hostile(nnx_wrap, text):
    y = nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((2, 4)))
    assert text

@marked
def test_twice(nnx_wrap):
    first = nnx_wrap(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    y = first(jnp.ones((2, 4)))
    nnx_wrap(lambda model, y: KEPT.append(model(y)))(nnx.BatchNorm(8, rngs=nnx.Rngs(0)), y)

@marked
def test_own_assertion(nnx_wrap):
    assert nnx_wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))(jnp.ones((2, 4))).sum() > 100, "too small"

@marked
def test_only_nested(nnx_wrap):
    def forward(model, x):
        y = model(x)
        if isinstance(y, jax.core.Tracer):
            raise KeyError("no tracers here")
        return y

    nnx_wrap(forward)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
"""


def test_every_form_of_a_test_can_be_written(inner, pytester):
    result = inner(FORMS, "--nnx-nesting", "jit[functional] > scan", name="test_größe")
    failed = result.parseoutcomes()["failed"]
    assert failed == 12, result.stdout.str()
    same(result, pytester.path, failed)


HOLE = """
class Odd:
    def __init__(self):
        self.n = 2

KEPT = []

@pytest.fixture
def handle(tmp_path):
    return object()

@marked
def test_hole(nnx_wrap, handle, capsys):
    nnx_wrap(lambda model, x: KEPT.append(model(x)))(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
"""


def test_what_cannot_be_written_is_a_marked_place(inner, pytester):
    result = inner(HOLE, "--nnx-nesting", "jit")
    ((_, _, program),) = told(result).values()
    text = (pytester.path / program).read_text("utf-8")
    assert "capsys = FILL_IN  # capsys was a CaptureFixture" in text
    done = run_fresh(pytester.path / program)
    assert done.returncode == 1
    assert "fill in capsys" in done.stderr
    assert "Traceback" not in done.stderr
    (pytester.path / "filled.py").write_text(text.replace("capsys = FILL_IN", "capsys = None"), "utf-8")
    assert "AssertionError: nnx invariant broken: tracers" in run_fresh(pytester.path / "filled.py").stderr


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
    assert "written before it ran" in path.read_text("utf-8")
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


@pytest.mark.parametrize("file", ["nnxcheck", f"nnxcheck/{file_name('test_inner.py::test_leak')}"])
def test_a_place_that_cannot_be_written_costs_no_run(inner, pytester, file):
    place = pytester.path / ".pytest_cache/d" / file
    place.parent.mkdir(parents=True)
    place.touch()
    result = inner(LEAK, "--nnx-nesting", "jit", "-W", "always")
    result.assert_outcomes(failed=1, passed=1, warnings=result.parseoutcomes()["warnings"])
    result.stdout.re_match_lines([r"E         program     not written: \w+Error: .*"])
    assert "the programs to paste of test_inner.py::test_leak cannot be written" in result.stdout.str()
    result.stdout.fnmatch_lines(["E       nnx invariant broken: tracers *"])


def test_a_warning_that_is_an_error_costs_no_run_either(inner, pytester):
    (pytester.path / ".pytest_cache/d").mkdir(parents=True)
    (pytester.path / ".pytest_cache/d/nnxcheck").touch()
    result = inner(LEAK, "--nnx-nesting", "jit", "-W", f"error::{ProgramWarning.__module__}.{ProgramWarning.__name__}")
    result.assert_outcomes(failed=1, passed=1)


def test_without_the_cache_it_lies_in_a_temporary_folder(inner, tmp_path, monkeypatch):
    import tempfile

    from pytest_nnxcheck.plugin import cache

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache._temporary.cache_clear()
    result = inner(LEAK, "--nnx-nesting", "jit", "-p", "no:cacheprovider")
    cache._temporary.cache_clear()
    ((_, _, program),) = told(result).values()
    assert Path(program).is_relative_to(tmp_path)
    assert Path(program).is_file()


def test_a_path_with_spaces_is_quoted_in_the_command(inner, pytester):
    result = inner(LEAK, "--nnx-nesting", "jit", "-o", "cache_dir=a b'ü")
    ((_, _, program),) = told(result).values()
    text = (pytester.path / program).read_text("utf-8")
    command = next(line for line in text.splitlines() if line.startswith("# run:")).removeprefix("# run:    python ")
    import shlex

    assert shlex.split(command) == [program]
    assert "nnx invariant broken: tracers" in run_fresh(pytester.path / program).stderr


def test_file_names_are_short_safe_and_each_its_own():
    names = [
        file_name(text) for text in ("a/b::c[x]", "a/b::c(x)", "x" * 1000, "x" * 1001, "ü\n\0", "\ud800", "..", "")
    ]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]{1,80}", name) and name not in (".", "..") for name in names)


# --- outside pytest


SCRIPT = """
import jax.numpy as jnp
from flax import nnx
from pytest_nnxcheck import check, register_transform

KEPT = []

def keep(model, x):
    KEPT.append(model(x))

def main(width):
    return check(keep, nnx.Linear(width, width, rngs=nnx.Rngs(0)), jnp.ones((2, width)), nesting="jit")

report = check(keep, nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), nesting="scan")
print(report.program())
print("#" * 9)
print(main(4).program())
print("#" * 9)
print(check(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)), nesting="scan").program() == "")
"""


def test_a_check_in_a_script_gives_the_program_as_text(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-W", "ignore", "script.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={**__import__("os").environ, "PYTHONPATH": str(TESTS.parent)},
    )
    *programs, none = done.stdout.split("#########\n")
    paths = [tmp_path / f"program_{number}.py" for number in range(len(programs))]
    for path, text in zip(paths, programs, strict=True):
        path.write_text(text)
    for _, text in run_programs(paths).values():
        assert text.startswith("nnx invariant broken: tracers\n  leaked KEPT[0]")
    assert none.strip() == "True"


def test_a_check_whose_source_cannot_be_had_has_places_to_fill_in():
    from leaky import LEAKY

    made = LEAKY["class_attribute"].leaky()
    scope = {"check": check, "made": made}
    exec("report = check(made.subject, *made.args, nesting='jit')", scope)
    text = scope["report"].program()
    assert "model = FILL_IN  # model was a TracksLargest" in text
    assert "from leaky import TracksLargest" in text
    assert scope["report"].program(scope["report"].outcomes[0]) == text
    assert Nesting.parse("jit") in scope["report"].programs


def test_only_transforms_of_one_s_own_that_a_nesting_may_have_are_written():
    before = dict(catalogue.REGISTERED)
    try:
        register_transform("mine")(mine)
        assert own_transforms(merge({"transforms": ("jit",)})) == []
        assert own_transforms(merge({"transforms": ("jit", "mine")})) == [mine]
        assert own_transforms(merge({"nesting": Nesting.parse("jit > mine")})) == [mine]
    finally:
        catalogue.REGISTERED.clear()
        catalogue.REGISTERED.update(before)


def mine(f):
    return f
