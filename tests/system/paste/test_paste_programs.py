"""The program to paste fails in the same way as the test, in an interpreter that has neither this plugin nor pytest."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from broken_tests import BROKEN, LAYER, MENDED
from flax import nnx
from forms_of_tests import FORMS, HELPERS
from healthy import FLAX
from pasted_programs import CORPUS, HEAD, run_programs, told

from pytest_nnxcheck.paste.program import Programs

RUN_SUITES = """
import json, sys, pytest
for name, nesting in json.loads(sys.argv[1]):
    pytest.main([name, "--nnx-nesting", nesting, *sys.argv[2:]])
"""


# --- every way a program fails: what is broken, and the text that mends it


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
    """{test: `Shown`} of all suites of broken_tests.py and forms_of_tests.py: they run in one interpreter, and all programs in another."""
    folder = tmp_path_factory.mktemp("suites")
    names = [(f"test_{number}.py", nesting) for number, nesting in enumerate([*BROKEN, "jit[functional]"])]
    for (name, _), source in zip(names, [*BROKEN.values(), FORMS], strict=True):
        (folder / name).write_text(HEAD + source, "utf-8")
    (folder / "helpers_of_user.py").write_text(HELPERS, "utf-8")
    (folder / "conftest.py").write_text(f"import sys\nsys.path.insert(0, {str(CORPUS)!r})\n{LAYER}", "utf-8")
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
    "test_jit_partial": hasattr(nnx, "jit_partial"),
    "test_copy": FLAX >= (0, 12),
    "test_pinned": FLAX >= (0, 10, 7),
}
"""What the installed flax has, or breaks."""
FORMS_OF_TESTS = (
    "test_fixtures[four]",
    "test_parameters[config0-<lambda>]",
    "test_drawn",
    "TestClass::test_method",
    "TestClass::test_static[four]",
    "TestClass::test_of_class",
    'test_hostile[a\\nb\'"""]',
    r"test_hostile[\xfcn\xef\u2028 \\ {x} %s]",
    "test_around",
    "test_registered",
    "test_own_assertion",
    "test_only_nested",
    *(f"test_parameter[{name}]" for name in ("of_a_list", "of_a_subject", "of_wrapped")),
    "test_of_helpers",
    "test_made_with_pytest",
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
        assert first.startswith("# nnx nesting raised: ")


@pytest.mark.parametrize("test", [test for test in SHOWN if test not in FORMS_OF_TESTS])
def test_a_program_ends_well_once_the_code_is_mended(shown, test):
    assert shown[test].mended == ("", "")


@pytest.mark.parametrize("test", SHOWN)
def test_a_program_is_short_and_every_python_reads_it(shown, test):
    text = shown[test].program.read_text("utf-8")
    before, _, after = re.split(r"^# --- the (?:test|layers) .*\n", text, flags=re.MULTILINE)
    code = [line for line in (before + after).splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 85
    # Quotes in the quotes of an f-string are for Python 3.12 and later.
    assert not re.search(r"f'[^'\n]*\{[^}\n]*'", after)


def test_a_program_has_what_its_test_needs_and_no_more(shown):
    text = shown["test_of_helpers"].program.read_text("utf-8")
    assert "def make(width):" in text
    assert "helpers_of_user" not in text
    assert "import chain as chained" in text
    assert not any(word in text for word in ("def shown_by", "def unused", "import *", "pytest.mark", "class Batch"))
    assert "marked = None  # needs pytest: write it anew" in shown["test_made_with_pytest"].program.read_text("utf-8")


def test_every_kind_of_finding_is_shown(shown):
    texts = {test: found.ended[1] for test, found in shown.items()}
    assert {found.kind for found in shown.values()} >= {"tracers", "updates", "memory", "donation", "parity"}
    for test, words in {
        "test_step[step_other_dtype]": "pair.b   float32[100]   its dtype changed: it became bfloat16[100]",
        "test_step[step_drops_one]": "pair.b   float32[100]   not returned",
        "test_sharding": "pair.a   float32[4,8]   sharding changed from",
        "test_shared": "pair.a and pair.b share a buffer: XLA refuses to donate it twice",
        "test_viewed": "pair.a is viewed by",
        "test_dropped_update": "keep their values: the call writes to copies of them",
        "test_copies": "the program holds 2.00 extra copies of its state at its peak",
        "test_budget": "is over the budget of 18.0 KiB",
        "test_captured": "the call captures 156.2 KiB of constants",
        "test_stale": "model.gate.kernel is read past the arguments",
        "test_layer": "differs from that of the un-nested call",
        **(
            {"test_copy": "kept its old value: a transform inside the call updated a copy of it"}
            if SINCE["test_copy"]
            else {}
        ),
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
    pair = bugs.Pair(100)
    step = nnx_wrap(bugs.step_in_place)
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
    monkeypatch.setattr(Programs, "_finish", lambda self, outcomes: None)  # which removes them
    inner(HEALTHY, "--nnx-nesting", nesting).assert_outcomes(passed=8)
    paths = sorted(pytester.path.glob(".pytest_cache/d/nnxcheck/*/*.py"))
    assert len(paths) >= 8
    ended = run_programs(paths)
    assert {path: found for path, found in ended.items() if found != ("", "")} == {}
