"""``pytest --nnx-check``: a check of a class or a function by its name, with no test file."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import flax
import pytest

MODELS = '''
import jax.numpy as jnp
from flax import nnx


class Block(nnx.Module):
    """Healthy."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x, scale=1.0):
        return self.linear(x) * scale

    def decode(self, x):
        return self.linear(x)


class Wide(nnx.Module):
    def __init__(self, features, *, rngs):
        self.linear = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Quiet(nnx.Module):
    """Has no ``__call__``."""

    def encode(self, x):
        return x


class Bare(nnx.Module):
    """Has no method."""


class This(nnx.Module):
    """Calls itself by another name."""

    def __init__(this, *, rngs):
        this.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(this, x):
        return this.linear(x)


class Self(nnx.Module):
    """Asks for an argument of the name that others give to themselves."""

    def __init__(this, self):
        pass


def step(model, x):
    return model(x).sum()


def case():
    return step, Block(nnx.Rngs(0)), jnp.ones((2, 4))


def make():
    return Block(nnx.Rngs(0))


def number():
    return 3


def nothing():
    return ()


def raising():
    raise ValueError("no such dataset")


def broken(model, x):
    raise KeyError("of the user")


def breaks():
    return broken, Block(nnx.Rngs(0)), jnp.ones((2, 4))


model = Block(nnx.Rngs(0))
'''
JIT = "--nnx-nesting=jit"
INPUTS = "--nnx-inputs=f32[2,4]"
BLOCK = ["--nnx-check=models:Block", INPUTS]
BLOCK_ID = "nnx-check::models:Block(f32(2,4))"
DECODE = ["--nnx-check=models:Block.decode", "--nnx-inputs=f32[2,4]"]
TIGHT = "--nnx-memory-budget=10B"


@pytest.fixture
def named(pytester, inner_args):
    """Run pytest in a folder that holds ``models.py`` alone."""
    pytester.makepyfile(models=MODELS)

    def run(*args, subprocess=False):
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return start(*inner_args, "-p", "no:randomly", *args)

    return run


def ids_of(result):
    """The ids that ``--collect-only -q`` lists."""
    return [line for line in result.outlines if "::" in line and "ERROR" not in line]


# --- what is checked


def test_a_class_whose_constructor_asks_for_rngs_alone(named):
    named("--nnx-check=models:This", INPUTS, JIT).assert_outcomes(passed=1)
    result = named(*BLOCK, JIT)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"{BLOCK_ID}  1 nesting: 1 passed*"])


def test_a_class_that_breaks_an_invariant_fails_with_a_replay_that_can_be_run(named, pytester):
    result = named("--nnx-check=models:Block", INPUTS, TIGHT, JIT)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*nnx invariant broken: memory", "*nnx-check::models:Block(f32(2,4))"])
    (replay,) = set(re.findall(r"replay +pytest (.*)", result.stdout.str()))  # in CI the short summary has it again
    assert replay == "--nnx-check=models:Block --nnx-inputs 'f32[2,4]' --nnx-memory-budget 10B --nnx-nesting jit"
    again = named(*shlex.split(replay))
    again.assert_outcomes(failed=1)
    named("--nnx-check=models:Block", INPUTS, "--nnx-memory-budget=1MiB", JIT).assert_outcomes(passed=1)


@pytest.mark.slow
def test_the_program_to_paste_runs_without_the_plugin(named, pytester):
    result = named("--nnx-check=models:Block", INPUTS, TIGHT, JIT)
    (program,) = set(re.findall(r"program +(\S+\.py)", result.stdout.str()))
    text = Path(program).read_text()
    assert "from models import Block" in text
    assert "subject, *inputs = Block(rngs=nnx.Rngs(0)), jax.random.normal(" in text
    assert "pytest_nnxcheck" not in text
    ended = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert (ended.returncode, "nnx invariant broken: memory" in ended.stderr) == (1, True)


def test_a_method_a_factory_and_a_function_that_returns_its_inputs(named):
    result = named(
        "--nnx-check=models:Block.decode",
        INPUTS,
        "--nnx-check=models:Quiet.encode",
        INPUTS,
        "--nnx-check=models:make",
        INPUTS,
        "--nnx-check=models:case",
        JIT,
    )
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["nnx-check::models:case  1 nesting: 1 passed*"])


def test_a_constructor_that_asks_for_more_is_given_it_by_build(named):
    build = ["--nnx-check=models:Wide", "--nnx-inputs=f32[2,8]", "--nnx-build=Wide(8, rngs=nnx.Rngs(0))"]
    result = named(*build, JIT)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["nnx-check::models:Wide(Wide(8, rngs=nnx.Rngs(0));f32(2,8))  *"])


@pytest.mark.slow
def test_build_may_make_the_whole_case_of_a_function_a_class_and_a_method(named):
    whole = "--nnx-build=(step, Block(nnx.Rngs(0)), jnp.ones((5, 4)))"
    block = "--nnx-build=(Block(nnx.Rngs(0)), jnp.ones((5, 4)))"
    quiet = "--nnx-build=[Quiet(), jnp.ones((5, 4))]"
    checks = [("step", whole), ("Block", block), ("Block.decode", block), ("Quiet.encode", quiet)]
    typed = [word for name, build in checks for word in (f"--nnx-check=models:{name}", build)]
    result = named(*typed, JIT)
    result.assert_outcomes(passed=4)
    ids = [line.partition("  ")[0] for line in result.outlines if "1 nesting: 1 passed" in line]
    named(ids[-1], JIT).assert_outcomes(passed=1)
    named(*typed, JIT, TIGHT).assert_outcomes(failed=4)
    named(*typed, JIT, "--nnx-abstract").assert_outcomes(passed=4)


LARGE = """
import jax.numpy as jnp
from flax import nnx

def step(model, x):
    return model(x).sum()

def case():
    model = nnx.Linear(4, 10**11, rngs=nnx.Rngs(0))
    return step, model, jnp.ones((2, 4))

def factory(rngs):
    return nnx.Linear(4, 10**11, rngs=rngs)
"""


@pytest.mark.parametrize("check", [["case"], ["factory", INPUTS]], ids=["case", "factory"])
def test_an_abstract_check_allocates_nothing(named, pytester, check):
    """Its values are 1.6 TB."""
    pytester.makepyfile(large=LARGE)
    name, *inputs = check
    result = named(f"--nnx-check=large:{name}", *inputs, "--nnx-abstract", "--nnx-memory-budget=4TB", JIT)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [f"nnx-check::large:{name}(abstract*  1 nesting: 1 passed; worst peak * TiB *, budget 3.6 TiB*"]
    )


SHARDED = """
import jax
from flax import nnx
from jax.sharding import PartitionSpec as P


class Cut(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 8, rngs=rngs)

    def __call__(self, x):
        return self.linear(jax.lax.with_sharding_constraint(x, P("data", "model")))
"""
MESH = ["--nnx-inputs=f32[8,4]", "--nnx-mesh", "data=4, model=2"]


def test_a_subject_is_built_and_called_under_a_mesh_of_simulated_devices(named, pytester):
    pytester.makepyfile(sharded=SHARDED)
    result = named("--nnx-check=sharded:Cut", *MESH, JIT, subprocess=True)
    result.stdout.fnmatch_lines(["nnx-check::sharded:Cut(mesh data=4,model=2;f32(8,4))  1 nesting: 1 passed;*"])
    result = named("nnx-check::sharded:Cut(abstract;mesh data=4,model=2;f32(8,4))", JIT, subprocess=True)
    result.assert_outcomes(passed=1)
    named("--nnx-check=sharded:Cut", MESH[0], JIT).assert_outcomes(failed=1)  # jax asks for the mesh


def test_a_check_under_a_mesh_has_a_replay_and_a_program_to_paste(named, pytester):
    pytester.makepyfile(sharded=SHARDED)
    result = named("--nnx-check=sharded:Cut", *MESH, JIT, TIGHT, subprocess=True)
    result.stdout.fnmatch_lines(
        ["E * replay * --nnx-inputs 'f32[[]8,4]' --nnx-mesh data=4,model=2 --nnx-memory-budget 10B --nnx-nesting jit"]
    )
    (program,) = pytester.path.glob(".pytest_cache/d/nnxcheck/*/jit-*.py")
    pasted = subprocess.run([sys.executable, program], check=False, capture_output=True, text=True)
    assert "nnx invariant broken: memory" in pasted.stderr


def test_inputs_by_name_and_plain_values(named):
    named("--nnx-check=models:Block", "--nnx-inputs=x=f32[2,4]; scale=2.0", JIT).assert_outcomes(passed=1)


NOTATION = """
import jax
import jax.numpy as jnp

def takes(shape, dtype):
    def takes(x, y=None):
        assert (x.shape, x.dtype) == (shape, dtype), (x.shape, x.dtype)
        if not isinstance(x, jax.core.Tracer) and x.size > 1:
            assert {"f": jnp.std, "i": lambda x: not x.any(), "b": jnp.all}.get(x.dtype.kind, jnp.any)(x)
        return jnp.ones(3)
    return takes

def plain(want):
    def plain(x, y):
        assert y == want and type(y) is type(want), y
        return x
    return plain
"""
"""Functions that say what they take: random numbers, indices that are zero, and masks that are true."""
TYPES = {
    "f32[8,64]": ((8, 64), "float32"),
    "bf16[2, 3]": ((2, 3), "bfloat16"),
    "i32[8]": ((8,), "int32"),
    "u8[1]": ((1,), "uint8"),
    "bool[2,2]": ((2, 2), "bool"),
    "c64[4]": ((4,), "complex64"),
    "f32[]": ((), "float32"),
    "float16[3]": ((3,), "float16"),
    "x=f32(8,64)": ((8, 64), "float32"),
    "key": ((), "key<fry>"),
    "key[3]; y=f32[2]": ((3,), "key<fry>"),
}


@pytest.mark.parametrize(
    "abstract", [pytest.param([], marks=pytest.mark.slow), ["--nnx-abstract"]], ids=["values", "abstract"]
)
def test_an_array_is_written_by_its_dtype_and_shape(named, pytester, abstract):
    pytester.makepyfile(notation=NOTATION)
    checks = []
    for text, (shape, dtype) in TYPES.items():
        type_ = f"jnp.{dtype}.dtype" if dtype != "key<fry>" else "jax.random.key(0).dtype"
        checks += [
            "--nnx-check=notation:takes",
            f"--nnx-build=takes({shape}, {type_})",
            f"--nnx-inputs={text}",
            *abstract,
        ]
    result = named(*checks, "--nnx-nesting=jit")
    result.assert_outcomes(passed=len(TYPES))


@pytest.mark.parametrize(
    "abstract", [[], pytest.param(["--nnx-abstract"], marks=pytest.mark.slow)], ids=["values", "abstract"]
)
def test_a_plain_value_is_python(named, pytester, abstract):
    pytester.makepyfile(notation=NOTATION)
    values = ["3", "-0.5", "True", "None", "'train'", "(1, 2)"]
    checks = [
        word
        for text in values
        for word in (
            "--nnx-check=notation:plain",
            f"--nnx-build=plain({text})",
            f"--nnx-inputs=f32[2];y={text}",
            *abstract,
        )
    ]
    named(*checks, "--nnx-nesting=jit").assert_outcomes(passed=len(values))


def test_options_belong_to_the_check_before_them_and_those_before_the_first_to_all(named):
    typed = ["--nnx-inputs=f32[1]", "--nnx-check=models:Block", "--nnx-check=models:Block.decode"]
    typed += [
        "--nnx-inputs= f32[2,4];;",
        "--nnx-abstract",
        "--nnx-check=models:Wide",
        "--nnx-build=Wide( 4, rngs=nnx.Rngs(0) )",
        "--nnx-check=models:Block",
        "--nnx-build=Block(max([1,2], step(3)))",
        "--nnx-inputs=i32[8];scale=[1, 2]",
        "--nnx-check=models:Wide",
        "--nnx-build=Wide(1)",
        "--nnx-abstract",
    ]
    ids = [
        "nnx-check::models:Block(f32(1))",
        "nnx-check::models:Block.decode(abstract;f32(2,4))",
        "nnx-check::models:Wide(Wide(4, rngs=nnx.Rngs(0));f32(1))",
        "nnx-check::models:Block(Block(max([1, 2], step(3)));i32(8);scale=[1, 2])",
        "nnx-check::models:Wide(Wide(1);abstract;f32(1))",
    ]
    assert ids_of(named(*typed, "--collect-only", "-q")) == ids
    assert ids_of(named(*ids, *ids, "--collect-only", "-q")) == ids, (
        "an id is read back as the same check, and one check"
    )


# --- which tests run


def test_without_files_only_the_checks_run_and_with_files_those_too(named, pytester):
    pytester.makepyfile(test_plain="def test_plain(): pass")
    assert ids_of(named(*BLOCK, "--collect-only", "-q")) == [BLOCK_ID]
    assert ids_of(named(*BLOCK, "--collect-only", "-q", "test_plain.py")) == [BLOCK_ID, "test_plain.py::test_plain"]
    pytester.makeini("[pytest]\ntestpaths = test_plain.py\n")
    assert ids_of(named(*BLOCK, "--collect-only", "-q")) == [BLOCK_ID]
    assert ids_of(named("--collect-only", "-q")) == ["test_plain.py::test_plain"]


def test_an_id_runs_its_check_again(named):
    result = named("nnx-check::models:Wide(Wide(8, rngs=nnx.Rngs(0));abstract;f32(2,8))", JIT)
    result.assert_outcomes(passed=1)
    ids = ["nnx-check::models:Block(f32(2,4))", "../nnx-check::models:case"]
    assert ids_of(named(*ids, "--collect-only", "-q")) == [ids[0], "nnx-check::models:case"]


@pytest.mark.slow
def test_keywords_deselect_and_last_failed(named, pytester):
    pytester.makepyfile(test_plain="def test_plain(): assert 0")
    both = [*BLOCK, "--nnx-check=models:number", "--collect-only", "-q"]
    assert ids_of(named(*both, "-k", "Block")) == [BLOCK_ID]
    assert ids_of(named(*both, f"--deselect={BLOCK_ID}")) == ["nnx-check::models:number"]
    named(*BLOCK, "--nnx-check=models:number", "test_plain.py", JIT).assert_outcomes(passed=1, failed=2)
    assert ids_of(named(*both, "--lf")) == ["nnx-check::models:number"]
    assert ids_of(named(*both, "test_plain.py", "--lf")) == ["nnx-check::models:number", "test_plain.py::test_plain"]


def test_the_first_failure_stops_the_run(named):
    named("--nnx-check=models:number", *BLOCK, "-x", JIT).assert_outcomes(failed=1)


@pytest.mark.slow
def test_workers_of_xdist_run_them(named):
    pytest.importorskip("xdist")
    result = named(*BLOCK, "--nnx-check=models:number", "-n2", JIT, subprocess=True)
    result.assert_outcomes(passed=1, failed=1)


def test_a_folder_is_importable_during_the_run_alone(named, pytester, monkeypatch):
    before = [path for path in sys.path if path != str(pytester.path)]
    monkeypatch.setattr(sys, "path", [*before])
    named(*BLOCK, JIT).assert_outcomes(passed=1)
    assert sys.path == before


def test_conftest_hooks_and_fixtures_of_the_folder_count(named, pytester):
    pytester.makeconftest(
        "import pytest\nSEEN = []\n"
        "@pytest.fixture(autouse=True, scope='module')\ndef of_module(): SEEN.append('fixture')\n"
        "def pytest_runtest_setup(item): SEEN.append(item.nodeid)\n"
        "def pytest_terminal_summary(terminalreporter): terminalreporter.write_line(f'seen {SEEN}')\n"
    )
    result = named(*BLOCK, JIT)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"seen *{BLOCK_ID}*fixture*"])


# --- the options of a marked test


def test_settings_reports_and_junit_are_those_of_any_test(named, pytester):
    result = named(
        *BLOCK,
        "--nnx-transforms=jit",
        "--nnx-styles=argument",
        "--nnx-max-examples=0",
        "--nnx-report=r.json",
        "--junitxml=j.xml",
    )
    result.assert_outcomes(passed=1)
    document = json.loads((pytester.path / "r.json").read_text())
    (test,) = document["tests"]
    assert (test["nodeid"], test["outcome"], test["place"]["file"]) == (BLOCK_ID, "passed", "models.py")
    assert {nesting["nesting"] for nesting in document["nestings"]} == {"un-nested", "jit", "jit > call_first"}
    assert 'classname="nnx-check" name="models:Block(f32(2,4))"' in (pytester.path / "j.xml").read_text()


@pytest.mark.slow
def test_a_baseline_and_expected_failures_know_them_by_their_id(named, pytester):
    few = ["--nnx-transforms=jit", "--nnx-styles=argument", "--nnx-max-examples=0"]
    named(*BLOCK, *few, "--nnx-baseline=peaks.jsonl", "--nnx-baseline-update").assert_outcomes(passed=1)
    assert BLOCK_ID in (pytester.path / "peaks.jsonl").read_text()
    result = named(*BLOCK, *few, "--nnx-baseline=peaks.jsonl")
    assert (result.ret, "nestings compared" in result.stdout.str()) == (0, True)
    (pytester.path / "known.toml").write_text('["nnx-check::models:Block*"]\nmemory = "it copies"\n')
    tight = [*BLOCK, TIGHT, *few]
    named(*tight, "--nnx-expected-failures=known.toml").assert_outcomes(passed=1)
    named(*tight).assert_outcomes(failed=1)


def test_a_run_without_the_checks_does_not_call_their_entries_stale(named, pytester):
    named(*BLOCK, JIT, "--nnx-baseline=peaks.jsonl", "--nnx-baseline-update").assert_outcomes(passed=1)
    (pytester.path / "known.toml").write_text('["nnx-check::models:Block*"]\nmemory = "it copies"\n')
    pytester.makepyfile(test_plain="def test_plain(): pass")
    result = named("--nnx-baseline=peaks.jsonl", "--nnx-expected-failures=known.toml", "-W", "error")
    assert (result.ret, "stale entries" in result.stdout.str()) == (0, False)


# --- what is wrong


CHECK, WRONG = "--nnx-check={}".format, "--nnx-inputs={}".format
STOPPED = [
    ([CHECK("models:")], "--nnx-check: 'models:' is not a module and a name, write package.module:Name*"),
    ([CHECK("a-b:C")], "--nnx-check: 'a-b:C' is not a module and a name*"),
    ([CHECK("src/models.py::Block")], "*is a file, write its module: src.models:Block"),
    ([CHECK("models.py")], "*'models.py' is a file, write its module: models:Name"),
    ([CHECK("a:B(f32(8)")], "*is not an expression of Python*"),
    ([CHECK("a:B(")], "*'a:B(' has no ')' at its end, write a:B with --nnx-inputs or --nnx-build"),
    (["--nnx-inputs=f32[2]"], "--nnx-inputs needs a check: add --nnx-check package.module:Name"),
    (["--nnx-abstract"], "--nnx-abstract needs a check*"),
    ([*BLOCK, WRONG("fp32[8]")], "--nnx-inputs: 'fp32[[]8]' has an unknown dtype 'fp32', did you mean 'f32'*"),
    ([*BLOCK, WRONG("zz[8]")], "*write one of *bf16, c64, bool, float16, *complex64, key"),
    ([*BLOCK, WRONG("f32[B,8]")], "*'f32[[]B,8]' needs a shape of numbers from 0 on, write f32[[]8,64]*"),
    ([*BLOCK, WRONG("f32[-1]")], "*needs a shape of numbers from 0 on*"),
    ([*BLOCK, WRONG("f32[8],i32[8]")], "*cannot read the input 'f32[[]8],i32[[]8]', write *with ';' between several"),
    ([*BLOCK, WRONG("f32")], "*cannot read the input 'f32'*"),
    ([*BLOCK, "--nnx-build=B("], "--nnx-build: 'B(' is not an expression of Python*"),
    (
        [*BLOCK, "--nnx-mesh=data"],
        "--nnx-mesh: cannot read the mesh 'data', write each axis once, with its size: data=4,model=2",
    ),
    ([*BLOCK, "--nnx-mesh=a=2,a=2"], "--nnx-mesh: cannot read the mesh 'a=2,a=2', write each axis once*"),
    ([*BLOCK, "--nnx-mesh=a=64,b=65"], "--nnx-mesh: a mesh a=64,b=65 has 4160 devices, at most 4096 can be simulated"),
    ([CHECK("models:Block(mesh data)")], "--nnx-check: cannot read the mesh 'data'*"),
]


@pytest.mark.parametrize("args, line", STOPPED, ids=[args[-1] for args, _ in STOPPED])
def test_a_wrong_notation_stops_the_run(named, args, line):
    result = named(*args)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: option {line}"])
    assert "Traceback" not in result.stderr.str() + result.stdout.str()


REFUSED = {
    "models:Blok": "models has no 'Blok', did you mean 'Block'?",
    "models:Block.decod": "Block has no 'decod', did you mean 'decode'?",
    "modls:Block": "there is no module modls, here or installed, did you mean 'models'?",
    "flx:Block": "there is no module flx, here or installed",
    "models.inner:Block": "there is no module models.inner, here or installed*",
    "models:Wide": "Wide asks for features: write --nnx-build 'Wide(features=..., rngs=nnx.Rngs(0))'",
    "models:Self": "Self asks for self: write --nnx-build 'Self(self=...)'",
    "models:Block": "Block.__call__ takes x, scale; write --nnx-inputs 'f32[[]8,64]', say (missing a required argument: 'x')",
    "models:Quiet": "a Quiet has no __call__; it has encode; name a method, as models:Quiet.encode",
    "models:Bare": "a Bare has no __call__, and no public method of its own",
    "models:step": "step asks for model, x: write --nnx-build '(step, model, x)',"
    " or 'step(model=..., x=...)' if it returns (subject, [*]inputs)",
    "models:model": "model is a value of type Block: name a class, or write a function that returns (subject, [*]inputs)",
}


def test_a_name_that_leads_to_nothing_fails_in_one_line(named):
    result = named(*(f"--nnx-check={name}" for name in REFUSED))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=len(REFUSED))
    result.stdout.fnmatch_lines([f"option --nnx-check {name}: {said}" for name, said in REFUSED.items()])
    assert "Traceback" not in result.stdout.str()
    assert "pytest_nnxcheck" not in result.stdout.str()


def test_inputs_that_a_call_does_not_take_are_one_line(named):
    result = named("--nnx-check=models:Block.decode", "--nnx-inputs=f32[2,4];i32[3]")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*Block.decode takes x; --nnx-inputs has f32[[]2,4];i32[[]3] (too many positional arguments)"]
    )


def test_a_name_in_build_that_the_module_has_not(named):
    result = named(*BLOCK, "--nnx-build=Blck(nnx.Rngs(0))")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["option --nnx-build: models has no 'Blck', did you mean 'Block'?"])


WRONG_ONES = {
    "mistyped": (["--nnx-check=models"], "option --nnx-check models: it has no function check_..., write models:Name*"),
    "misspelt": (["--nnx-check=models:Blok"], "option --nnx-check models:Blok: models has no 'Blok', *"),
    "incomplete": (["--nnx-check=models:Block"], "option --nnx-check models:Block: Block.__call__ takes x, scale; *"),
    "bad inputs": ([*BLOCK[:1], "--nnx-inputs=fp32[2]"], "option --nnx-inputs: 'fp32[[]2]' has an unknown dtype *"),
    "bad build": ([*BLOCK[:1], "--nnx-build=B("], "option --nnx-build: 'B(' is not an expression of Python *"),
    "does not import": (["--nnx-check=failing:x"], "E *RuntimeError: no config"),
    "a wrong id": (
        ["nnx-check::models"],
        "option --nnx-check models: it has no function check_..., write models:Name*",
    ),
}


@pytest.mark.slow
def test_of_several_checks_the_complete_ones_run_and_each_other_fails_for_itself(named, pytester):
    pytester.makepyfile(failing="raise RuntimeError('no config')")
    result = named(*BLOCK, *(word for words, _ in WRONG_ONES.values() for word in words), *DECODE, JIT)
    result.assert_outcomes(passed=2, failed=len(WRONG_ONES) - 1)  # the id names the first of them
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for _, said in WRONG_ONES.values():
        result.stdout.fnmatch_lines([said])
    result.stdout.fnmatch_lines([f"{BLOCK_ID}  1 nesting: 1 passed; *"])
    assert "pytest_nnxcheck" not in result.stdout.str()


def test_a_report_has_the_check_that_could_not_be_made(named, pytester):
    named(*BLOCK, "--nnx-check=models:Blok", JIT, "--nnx-report=report.json")
    tests = json.loads((pytester.path / "report.json").read_text(encoding="utf-8"))["tests"]
    ends = {test["nodeid"]: (test["outcome"], "models has no 'Blok'" in test["message"]) for test in tests}
    assert ends == {BLOCK_ID: ("passed", False), "nnx-check::models:Blok": ("failed", True)}


RETURNS = {
    ("models:number",): "it returns a value of type int: return (subject, [*]inputs), or the model alone *",
    ("models:nothing",): "it returns an empty tuple: return (subject, [*]inputs)*",
    ("models:number", INPUTS): "it returns a value of type int as the subject, which cannot be called: *",
    (
        "models:case",
        INPUTS,
    ): "it returns a value of type tuple as the subject, *the model alone and its inputs by --nnx-inputs",
    ("models:Block", INPUTS, "--nnx-build=3"): "--nnx-build gives a value of type int as the subject, *: write *",
    ("models:Block", "--nnx-build=(3, 4)"): "--nnx-build gives a value of type int as the subject, *",
}


def test_a_function_that_returns_something_else_fails_in_one_line(named):
    checks = [word for name, *more in RETURNS for word in (f"--nnx-check={name}", *more)]
    result = named(*checks)
    result.assert_outcomes(failed=len(RETURNS))
    result.stdout.fnmatch_lines([f"option --nnx-check {name}: {said}" for (name, *_), said in RETURNS.items()])
    assert "pytest_nnxcheck" not in result.stdout.str()


def test_a_method_of_an_abstract_model_is_refused(named, pytester):
    pytester.makepyfile(
        bound="import jax.numpy as jnp\nfrom models import make\ndef case(): return make().decode, jnp.ones((2, 4))"
    )
    named("--nnx-check=bound:case", JIT).assert_outcomes(passed=1)
    result = named("--nnx-check=bound:case", JIT, "--nnx-abstract")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*with --nnx-abstract return a module, or a function that takes its modules as arguments"]
    )


def test_shapes_that_do_not_fit_show_the_users_line_and_what_the_call_got(named):
    result = named("--nnx-check=models:Block", "--nnx-inputs=f32[2,5]")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*subject, [*]inputs = Block(rngs=nnx.Rngs(0)), jax.random.normal(*(2, 5)*",
            ">*nnx_wrap(subject)([*]inputs)",
            "models.py:*",
            "E *nnx-check: the call got f32[[]2,5], from option --nnx-inputs",
        ]
    )
    assert "pytest_nnxcheck" not in result.stdout.str()


def test_a_model_that_needs_a_mesh_names_the_option_for_one(named, pytester):
    pytester.makepyfile(
        sharded="""
import jax
from flax import nnx
from jax.sharding import PartitionSpec

class Sharded(nnx.Linear):
    def __init__(self):
        super().__init__(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jax.lax.with_sharding_constraint(super().__call__(x), PartitionSpec("data"))
"""
    )
    result = named("--nnx-check=sharded:Sharded", "--nnx-inputs=f32[4,4]", JIT)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *nnx-check: --nnx-mesh data=4,model=2 makes the model and the call under a mesh"])


@pytest.mark.parametrize(
    "name, options",
    [("breaks", []), ("raising", []), ("raising", ["--nnx-abstract"]), ("raising", ["--nnx-abstract", INPUTS])],
)
def test_an_exception_of_the_users_shows_the_users_lines(named, name, options):
    result = named(f"--nnx-check=models:{name}", *options)
    result.assert_outcomes(failed=1)
    error = {"raising": "ValueError: no such dataset", "breaks": "KeyError: 'of the user'"}[name]
    result.stdout.fnmatch_lines([f"E  *{error}", "models.py:*"])
    assert "pytest_nnxcheck" not in result.stdout.str()
    assert not re.findall(r"in (shapes_of|arrays|<lambda>)", result.stdout.str())


def test_a_module_that_does_not_import_shows_its_own_lines(named, pytester):
    pytester.makepyfile(failing="import models\nraise RuntimeError('no config')", lacking="import not_installed_here")
    result = named("--nnx-check=failing:x")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["E *RuntimeError: no config", "failing.py:2: RuntimeError"])
    assert "pytest_nnxcheck" not in result.stdout.str()
    result = named("--nnx-check=lacking:x")
    result.stdout.fnmatch_lines(["E *No module named 'not_installed_here'", "lacking.py:1: ModuleNotFoundError"])


def test_a_module_with_a_syntax_error_shows_the_error_alone(named, pytester):
    pytester.makepyfile(unclosed="def f(:\n    pass")
    result = named("--nnx-check=unclosed:f", "--nnx-check=models:Blok")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["*unclosed.py*, line 1", "SyntaxError: *", "option --nnx-check models:Blok: *"])
    assert "runner.py" not in result.stdout.str()


def test_a_module_alone_is_checked_by_its_functions_of_that_name(named, pytester):
    pytester.makepyfile(cases="from models import case\n\ncheck_one = case\n\ndef check_two():\n    return case()\n")
    result = named("--nnx-check=cases", JIT)
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["nnx-check::cases:check_one  *", "nnx-check::cases:check_two  *"])


@pytest.mark.slow
@pytest.mark.skipif(flax.__version__ == "0.10.2", reason="before, a scan inside of a captured module leaks")
def test_the_demo_shows_a_bug_and_its_cure(named):
    result = named("--nnx-check", "pytest_nnxcheck.demo", "--nnx-effort=quick")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "E     memory      the program holds 1.00 extra copies of its state*",
            "E     line        *demo.py:*",
            "nnx-check::pytest_nnxcheck.demo:check_remat_without_updates  *",
            "FAILED nnx-check::pytest_nnxcheck.demo:check_remat - nnx memory: *",
        ]
    )


def test_the_inputs_of_a_call_that_a_suite_made_are_used(named, pytester):
    pytester.makepyfile(
        test_block="import jax.numpy as jnp\nfrom flax import nnx\nfrom models import Block, step\n\ndef test_block():\n    block, x = Block(rngs=nnx.Rngs(0)), jnp.ones((3, 4))\n    block(x)\n    step(block, x)\n"
    )
    named("test_block.py", "--nnx-watch=list")
    result = named("--nnx-check=models:Block", "--nnx-check=models:step", JIT)
    # The step takes a module, which the line of inputs cannot say.
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["option --nnx-check models:step: step asks for model, x: *"])
    result.stdout.fnmatch_lines(
        [
            "nnx-check: models:Block gets f32[[]3,4], as a test of this project called it",
            "nnx-check::models:Block(f32(3,4))  *",
        ]
    )
