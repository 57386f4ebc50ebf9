"""The program to paste fails in the same way as the test, in an interpreter that has neither this plugin nor pytest."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from flax import nnx
from healthy import FLAX

from pytest_nnxcheck import check, register_transform
from pytest_nnxcheck.core import catalogue
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.settings import merge
from pytest_nnxcheck.reproducer.files import Programs, ProgramWarning, file_name, own_transforms

TESTS = Path(__file__).parents[2]
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
RUN_SUITES = """
import json, sys, pytest
for name, nesting in json.loads(sys.argv[1]):
    pytest.main([name, "--nnx-nesting", nesting, *sys.argv[2:]])
"""


def run_programs(paths):
    """{path: (type, text) of the exception that it ended with}, all in one fresh interpreter."""
    paths = list(map(str, paths))
    command = [sys.executable, "-W", "ignore", "-c", RUN_ALL, *paths]
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quick)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(paths), done.stderr
    return {Path(path): (kind, text) for path, kind, text in found}


def run_fresh(path):
    """One program in an interpreter of its own."""
    command = [sys.executable, "-W", "ignore", "-c", RUN_ONE, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def told(text):
    """What the messages of a run say: {test: (exception or invariant, first path, program)}."""
    found = {}
    text = re.sub(
        r"^=+ short test summary info =+$.*?(?=^=+ test session starts|\Z)", "", text, flags=re.MULTILINE | re.DOTALL
    )
    for block in re.split(r"^_{3,} .* _{3,}$", text, flags=re.MULTILINE)[1:]:
        lines = [line[1:].strip() for line in block.splitlines() if line.startswith("E ")]
        program = next((line.split(maxsplit=1)[1] for line in lines if re.match(r"program  ", line)), "")
        replay = re.search(r"replay +(pytest .+ --nnx.*)", block)
        broken = re.search(r"nnx invariant broken: (\w+)", block)
        leaf = re.search(r"^E +(?:leaked|pinned|donation) +(\S+)", block, re.MULTILINE)
        if replay:
            kind = broken[1] if broken else lines[0].partition(":")[0].rpartition(".")[2]
            found[shlex.split(replay[1])[1]] = (kind, leaf[1] if leaf and broken else "", program)
    return found


HEAD = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from healthy import FLAX, assign, rngs
import reports
marked = pytest.mark.nnx_invariants
"""


@pytest.fixture
def inner(pytester, inner_args):
    """Run a suite with the real engine in this process."""

    def run(source, *args, name="test_inner", conftest="", subprocess=False):
        pytester.makeconftest(conftest)
        pytester.makepyfile(**{name: HEAD + source})
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start(*inner_args, "-p", "no:randomly", "--nnx-max-examples", "0", *args)

    return run


# --- every way a program fails: what is broken, and the text that mends it

COUNTS = """
class Counts(nnx.Module):
    seen = []

    def __init__(self):
        self.linear = nnx.Linear(4, 4, rngs=rngs())

    def __call__(self, x):
        y = self.linear(x)
        Counts.seen.append(y)
        return y
"""
BROKEN = {
    "jit": """
from leaky import LEAKY, KeepsLastSetInInit, case

@marked
@pytest.mark.parametrize("name", ["class_attribute", "raises_afterwards", "variable_metadata"])
def test_leak(nnx_wrap, name):
    made = LEAKY[name].leaky()
    nnx_wrap(made.subject)(*made.args)

@marked
@pytest.mark.skipif(FLAX < (0, 12), reason="earlier flax carries the value out")
def test_set_in_init(nnx_wrap):
    made = case(KeepsLastSetInInit)
    nnx_wrap(made.subject)(*made.args)

@marked
def test_copies(nnx_wrap):
    nnx_wrap(reports.call_twice)(reports.ScanOverRemat(rngs()), *reports.inputs_scan_over_remat())

@marked
@pytest.mark.parametrize("remat, scan", [(True, False)])
def test_crash(nnx_wrap, remat, scan):
    nnx_wrap(reports.autoregressive_decode)(reports.report_4819(rngs(), remat, scan), *reports.inputs_4819())

@marked
@pytest.mark.parametrize("step", [reports.step_other_dtype, reports.step_drops_one])
def test_step(nnx_wrap, step):
    nnx_wrap(step)(reports.Pair(100))

@marked(donate="all")
@pytest.mark.parametrize("step", [reports.arrays_step_other_dtype, reports.arrays_step_drops_one])
def test_arrays(nnx_wrap, step):
    nnx_wrap(step)(jnp.arange(100, dtype=jnp.float32), jnp.ones(100))

def halves(pair):
    assign(pair.a, pair.a[...] + 1)
    assign(pair.b, pair.b[...][:50] * 2)

@marked
def test_shape(nnx_wrap):
    nnx_wrap(halves)(reports.Pair(100))

P = jax.sharding.PartitionSpec

def resharded(pair):
    mesh = pair.a[...].sharding.mesh if not isinstance(pair.a[...], jax.core.Tracer) else MESH
    assign(pair.a, jax.lax.with_sharding_constraint(pair.a[...] + 1, jax.sharding.NamedSharding(MESH, P(None, "x"))))

MESH = jax.sharding.Mesh(jax.devices(), ("x",))

@marked
def test_sharding(nnx_wrap):
    pair = reports.Pair(4)
    assign(pair.a, jax.device_put(jnp.ones((4, 8)), jax.sharding.NamedSharding(MESH, P("x"))))
    nnx_wrap(resharded)(pair)

SIZE = 64

@marked(memory_budget="18KiB")
def test_budget(nnx_wrap):
    nnx_wrap(nnx.Linear(SIZE, SIZE, rngs=rngs()))(jnp.ones((8, SIZE)))

@marked(memory_budget="0.5x")
def test_several(nnx_wrap):
    nnx_wrap(reports.step_other_dtype)(reports.Pair(5000))

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

def update_both(optimizer, x):
    gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(optimizer.model)
    copy = nnx.clone(optimizer)
    copy.update(gradients)

@marked
@pytest.mark.skipif(not hasattr(nnx, "ModelAndOptimizer"), reason="this flax has none")
def test_model_and_optimizer(nnx_wrap):
    import optax

    made = nnx.ModelAndOptimizer(nnx.Linear(4, 4, rngs=rngs()), optax.adam(1e-3), wrt=nnx.Param)
    nnx_wrap(update_both)(made, jnp.ones((2, 4)))

@marked
def test_abstract(nnx_wrap):
    model = nnx.eval_shape(lambda: reports.ScanOverRemat(rngs()))
    nnx_wrap(reports.call_twice)(model, jax.ShapeDtypeStruct((4, 128), jnp.float32))

@marked
def test_abstract_dtype(nnx_wrap):
    def step(pair):
        reports.step_other_dtype(pair)

    nnx_wrap(step)(nnx.eval_shape(lambda: reports.Pair(100)))

@marked
def test_abstract_update(nnx_wrap):
    import optax

    model = nnx.eval_shape(lambda: nnx.Linear(4, 4, rngs=rngs()))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(nnx.Linear(4, 4, rngs=rngs()), optax.adam(1e-3), wrt=nnx.Param))
    nnx_wrap(update_a_copy)(model, optimizer, jax.ShapeDtypeStruct((2, 4), jnp.float32))
""",
    "jit > remat": """
import dataclasses

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

class Owner:
    def __init__(self):
        self.model, self.scale, self.name = Keeps(), jnp.ones(4), "owner"

    def step(self, batch):
        (y,) = self.model(batch["x"] * self.scale)
        return Result(y, "done")

@dataclasses.dataclass
class Result:
    y: jax.Array
    text: str

class Batch(dict):
    pass

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

@marked
def test_owner(nnx_wrap):
    result = nnx_wrap(Owner().step)(Batch(x=X))
    assert isinstance(result.y, jax.Array) and result.text == "done"

@marked
def test_twice(nnx_wrap):
    y = nnx_wrap(nnx.Linear(4, 8, rngs=rngs()))(X)
    nnx_wrap(lambda model, y: Keeps.kept.append(model(y)))(nnx.BatchNorm(8, rngs=rngs()), y)
""",
    "jit > grad > scan": COUNTS
    + """
@marked(transforms="jit,scan,grad")
def test_nested(nnx_wrap):
    nnx_wrap(Counts())(jnp.ones((2, 4)))
""",
    "scan": COUNTS
    + """
@marked
def test_abstract_leak(nnx_wrap):
    nnx_wrap(nnx.eval_shape(Counts))(jax.ShapeDtypeStruct((2, 4), jnp.float32))

class Normed(nnx.Module):
    def __init__(self, mean):
        self.mean = mean

    def __call__(self, x):
        assign(self.mean, x.mean())
        return x

def smuggled():
    made = []
    jax.eval_shape(lambda: made.append(nnx.BatchStat(jnp.zeros(()))) or 0)
    assign_raw(made[0])
    return made[0]

def assign_raw(variable):
    for name in ("_raw_value", "raw_value"):
        if name in dir(variable):
            return object.__setattr__(variable, name, jnp.zeros(()))

@marked
@pytest.mark.skipif(FLAX < (0, 10, 7), reason="earlier flax takes a trace that has ended for the one that runs")
def test_pinned(nnx_wrap):
    nnx_wrap(Normed(smuggled()))(jnp.ones(4))
""",
    "un-nested": """
def broadcasts(model, xs):
    return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)

@marked(invariants="parity")
def test_drops(nnx_wrap):
    nnx_wrap(broadcasts)(nnx.BatchNorm(8, rngs=rngs()), jnp.arange(48.0).reshape(2, 3, 8))

def updates_a_copy(model, xs):
    return jax.jit(lambda model, xs: model(xs))(model, xs)

@marked(invariants="parity")
@pytest.mark.skipif(FLAX < (0, 12), reason="modules are pytrees from flax 0.12 on; before, jax refuses them")
def test_copy(nnx_wrap):
    nnx_wrap(updates_a_copy)(nnx.BatchNorm(8, rngs=rngs()), jnp.arange(24.0).reshape(3, 8))
""",
    "jit > adds": """
class Model(nnx.Module):
    def __init__(self):
        self.count, self.linear = nnx.Variable(jnp.zeros((), int)), nnx.Linear(4, 4, rngs=rngs())

    def __call__(self, x):
        assign(self.count, self.count[...] + 1)
        return self.linear(x)

@marked(invariants="parity", transforms="jit,adds")
def test_layer(nnx_wrap):
    nnx_wrap(Model())(jnp.ones((2, 4)))
""",
}
LAYER = """
import jax
from healthy import assign
from pytest_nnxcheck import register_transform

MORE = 1.0

@register_transform("adds")
def adds(f):
    def layer(state, *inputs):
        out = f(state, *inputs)
        assign(state.count, state.count[...] + int(MORE))
        return jax.tree.map(lambda leaf: leaf + MORE, out)

    return layer
"""
"""A layer that is wrong: of a conftest.py, which is read before the options are."""
KEPT = ("Keeps.kept.append(", "str(")
SEEN = ("Counts.seen.append(y)", "pass")
SCAN = (
    "return nnx.scan(lambda model, x: model(x), in_axes=(None, 0), out_axes=0)(model, xs)",
    "return nnx.scan(lambda model, x: (model, model(x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(model, xs)[1]",
)
MENDED = {
    "test_leak": (".leaky()", ".healthy()"),
    "test_set_in_init": ("case(KeepsLastSetInInit)", "__import__('leaky').LEAKY['dict'].healthy()"),
    "test_copies": ("reports.ScanOverRemat(rngs())", "reports.ScanOverRemat(rngs(), 'functional')"),
    "test_crash": ("remat=True, scan=False", "remat=False, scan=False"),
    "test_step[step_other_dtype]": ("import step_other_dtype", "import step_in_place as step_other_dtype"),
    "test_step[step_drops_one]": ("import step_drops_one", "import step_in_place as step_drops_one"),
    "test_arrays[arrays_step_other_dtype]": ("import arrays_step_other", "import arrays_step as arrays_step_other"),
    "test_arrays[arrays_step_drops_one]": ("import arrays_step_drops", "import arrays_step as arrays_step_drops"),
    "test_shape": ("[:50]", ""),
    "test_sharding": ('P(None, "x")', 'P("x")'),
    "test_budget": ("SIZE = 64", "SIZE = 8"),
    "test_several": ("(reports.step_other_dtype)(reports.Pair(5000))", "(reports.step_in_place)(reports.Pair(50))"),
    "test_captured": ("WEIGHTS = jnp.ones((200, 200))", "WEIGHTS = jnp.ones((200, 1))"),
    "test_shared": ("nnx.Param(pair.a[...])", "nnx.Param(pair.a[...] + 0)"),
    "test_viewed": ("np.asarray(", "np.array("),
    "test_dropped_update": ("nnx.clone(optimizer)", "optimizer"),
    "test_model_and_optimizer": ("nnx.clone(optimizer)", "optimizer"),
    "test_abstract": ("reports.ScanOverRemat(rngs())", "reports.ScanOverRemat(rngs(), 'functional')"),
    "test_abstract_dtype": ("reports.step_other_dtype", "reports.step_in_place"),
    "test_abstract_update": ("nnx.clone(optimizer)", "optimizer"),
    **dict.fromkeys(["test_cached", "test_state", "test_keys", "test_module", "test_method", "test_owner"], KEPT),
    "test_twice": ("Keeps.kept.append(model(y))", "model(y)"),
    "test_nested": SEEN,
    "test_abstract_leak": SEEN,
    "test_pinned": ("Normed(smuggled())", "Normed(nnx.BatchStat(jnp.zeros(())))"),
    "test_drops": SCAN,
    "test_copy": ("jax.jit(", "nnx.jit("),
    "test_layer": ("MORE = 1.0", "MORE = 0.0"),
}
"""By test the text of its program that is wrong, and what mends it."""


@dataclass(frozen=True)
class Shown:
    """A test that failed: what its message says, its program, and how that ended, and its mended twin."""

    kind: str
    leaf: str
    program: Path
    ended: tuple[str, str]
    mended: tuple[str, str]


@pytest.fixture(scope="module")
def shown(tmp_path_factory, inner_args):
    """{test: `Shown`} of all suites above: they run in one interpreter, and all programs in another."""
    folder = tmp_path_factory.mktemp("suites")
    names = [(f"test_{number}.py", nesting) for number, nesting in enumerate([*BROKEN, "jit[functional]"])]
    for (name, _), source in zip(names, [*BROKEN.values(), FORMS], strict=True):
        (folder / name).write_text(HEAD + source, "utf-8")
    (folder / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(TESTS)!r})\n{LAYER}", "utf-8")
    options = [*inner_args, "-p", "no:randomly", "--nnx-max-examples", "0", "--nnx-devices", "2", "-W", "ignore"]
    command = [sys.executable, "-c", RUN_SUITES, json.dumps(names), *options]
    done = subprocess.run(command, capture_output=True, cwd=folder, check=False)
    messages = told(done.stdout.decode())
    assert messages, done.stdout.decode()
    mended = {}
    for test, (_, _, program) in messages.items():
        if change := mend_of(test):
            text = (folder / program).read_text("utf-8")
            assert change[0] in text, (test, change)
            mended[test] = (folder / program).with_suffix(".mended.py")
            mended[test].write_text(text.replace(*change), "utf-8")
    ended = run_programs([*(folder / program for _, _, program in messages.values()), *mended.values()])
    return {
        test.partition("::")[2]: Shown(
            kind, leaf, folder / program, ended[folder / program], ended.get(mended.get(test), ("", "no twin"))
        )
        for test, (kind, leaf, program) in messages.items()
    }


def mend_of(test):
    name = test.partition("::")[2]
    return MENDED.get(name, MENDED.get(name.partition("[")[0]))


LEAKY = ("class_attribute", "raises_afterwards", "variable_metadata")
TESTS_THAT_BREAK = [
    *(f"test_leak[{name}]" for name in LEAKY),
    "test_crash[True-False]",
    *(name for name in MENDED if name not in ("test_leak", "test_crash")),
]
SINCE = {
    "test_set_in_init": FLAX >= (0, 12),
    "test_cached": hasattr(nnx, "cached_partial"),
    "test_model_and_optimizer": hasattr(nnx, "ModelAndOptimizer"),
    "test_copy": FLAX >= (0, 12),
    "test_pinned": FLAX >= (0, 10, 7),
}
"""What the installed flax has, or breaks."""
FORMS_OF_TESTS = (
    "test_fixtures[four]",
    "test_parameters[config0-<lambda>]",
    "test_drawn",
    "TestClass::test_method",
    'test_hostile[a\\nb\'"""]',
    r"test_hostile[\xfcn\xef\u2028 \\ {x} %s]",
    "test_calls",
    "test_around",
    "test_own_assertion",
    "test_only_nested",
)
SHOWN = [*(test for test in TESTS_THAT_BREAK if SINCE.get(test, True)), *FORMS_OF_TESTS]


@pytest.mark.parametrize("test", SHOWN)
def test_a_program_fails_as_the_test_does_and_says_so_first(shown, test):
    found = shown[test]
    raised, text = found.ended
    first = found.program.read_text("utf-8").splitlines()[0]
    if raised == "AssertionError" != found.kind:
        assert text.splitlines()[0] == f"nnx invariant broken: {found.kind}", text
        assert found.leaf in text or found.kind == "memory"
        assert first == f"# nnx invariant broken: {found.kind}"
    else:
        assert raised == found.kind, text
        assert first.startswith("# nnx nesting failed: ")


@pytest.mark.parametrize("test", [test for test in SHOWN if test not in FORMS_OF_TESTS])
def test_a_program_ends_well_once_the_code_is_mended(shown, test):
    assert shown[test].mended == ("", "")


MOST = {"memory": 250}
"""How many lines a program may have, other than 150. Where the test's own code has more than ten, that is not counted."""


@pytest.mark.parametrize("test", SHOWN)
def test_a_program_is_short_and_every_python_reads_it(shown, test):
    text = shown[test].program.read_text("utf-8")
    before, own, after = re.split(r"^# --- the (?:test|layers) .*\n", text, flags=re.MULTILINE)
    lines = (before + own + after if own.count("\n") <= 10 else before + after).count("\n")
    assert lines <= MOST.get(shown[test].kind, 150)
    # Quotes in the quotes of an f-string are for Python 3.12 and later.
    assert not re.search(r"f'[^'\n]*\{[^}\n]*'", after)


def test_every_kind_of_finding_is_shown(shown):
    texts = {test: found.ended[1] for test, found in shown.items()}
    assert {found.kind for found in shown.values()} >= {"tracers", "memory", "donation", "parity"}
    for test, words in {
        "test_step[step_other_dtype]": "pair.b   float32[100]   became bfloat16[100]",
        "test_step[step_drops_one]": "pair.b   float32[100]   not returned",
        "test_shape": "pair.b   float32[100]   became float32[50]",
        "test_sharding": "pair.a   float32[4,8]   not reused by XLA, or in other shards",
        "test_shared": "pair.a shares its buffer with another array: XLA refuses to donate it twice",
        "test_viewed": "pair.a   float32[1000]   not reused by XLA",
        "test_dropped_update": "optimizer.step   its update is dropped",
        "test_copies": "the program holds 2.0 more copies of its state at the peak",
        "test_budget": "is over the budget of 18.0 KiB",
        "test_captured": "the call captures 156.2 KiB of constants",
        "test_drops": "model.mean   its update is dropped",
        "test_layer": "output differs from that of the un-nested call, by 1",
    }.items():
        assert words in texts[test], texts[test]


# --- healthy twins


HEALTHY = """
from leaky import LEAKY
from healthy import HEALTHY

@marked
@pytest.mark.parametrize("name", sorted(LEAKY)[:4])
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
            for other in ("jit", "un-nested", "jit[functional] > scan > while_loop", "jit > cond > fori_loop")
        ),
    ],
)
def test_the_program_of_a_healthy_twin_ends_well(inner, pytester, monkeypatch, nesting):
    monkeypatch.setattr(Programs, "_keep", lambda self, outcomes: None)  # which removes them
    inner(HEALTHY, "--nnx-nesting", nesting).assert_outcomes(passed=8)
    paths = sorted(pytester.path.glob(".pytest_cache/d/nnxcheck/*/*.py"))
    assert len(paths) >= 8
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
split = stack = own = nesting = None  # names that our own part of the program has too

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
        assert split is stack is own is nesting is None
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

    class TestInner:  # of which nothing is left
        pytestmark = pytest.mark.filterwarnings("ignore")

        def test_other(self, nnx_wrap):
            pytest.skip("not the one either")

@marked
@pytest.mark.parametrize("text", ["a\\nb'\\"\\"\\"", "ünï\\u2028 \\\\ {x} %s"])
def test_hostile(nnx_wrap, text):
    y = nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((2, 4)))
    assert text

@marked
def test_calls(nnx_wrap):
    first = nnx_wrap(nnx.Linear(4, 8, rngs=nnx.Rngs(0)))
    y = first(jnp.ones((2, 4)))
    nnx_wrap(lambda model, y: KEPT.append(model(y)))(nnx.BatchNorm(8, rngs=nnx.Rngs(0)), y)

def over(describe, report):  # so are these, which the test takes from around it
    def test_around(nnx_wrap):
        nnx_wrap(Größe(Config(), nnx.Rngs(0)))(jnp.ones((describe, report)))

    return marked(test_around)

test_around = over(2, 4)

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


HOLE = """
class Odd:
    def __init__(self):
        self.n = 2

KEPT = []

@pytest.fixture
def handle(tmp_path):
    try:
        yield object()
    finally:
        print("closed with a", type(jnp).__name__)

@marked
def test_hole(nnx_wrap, handle, capsys):
    nnx_wrap(lambda model, x: KEPT.append(model(x)))(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), jnp.ones((2, 4)))
"""


def test_what_cannot_be_written_is_a_marked_place(inner, pytester):
    result = inner(HOLE, "--nnx-nesting", "jit")
    ((_, _, program),) = told(result.stdout.str()).values()
    text = (pytester.path / program).read_text("utf-8")
    assert "capsys = FILL_IN  # capsys was a CaptureFixture" in text
    done = run_fresh(pytester.path / program)
    assert done.returncode == 1
    assert "fill in capsys" in done.stderr
    assert "Traceback" not in done.stderr
    (pytester.path / "filled.py").write_text(text.replace("capsys = FILL_IN", "capsys = None"), "utf-8")
    done = run_fresh(pytester.path / "filled.py")
    assert "AssertionError: nnx invariant broken: tracers" in done.stderr
    assert "closed with a module" in done.stdout, "a fixture is closed before the modules that it needs are gone"


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
    ((_, _, program),) = told(result.stdout.str()).values()
    assert Path(program).is_relative_to(tmp_path)
    assert Path(program).is_file()


def test_a_path_with_spaces_is_quoted_in_the_command(inner, pytester):
    result = inner(LEAK, "--nnx-nesting", "jit", "-o", "cache_dir=a b'ü")
    ((_, _, program),) = told(result.stdout.str()).values()
    text = (pytester.path / program).read_text("utf-8")
    command = next(line for line in text.splitlines() if line.startswith("# run:")).removeprefix("# run:    python ")
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
