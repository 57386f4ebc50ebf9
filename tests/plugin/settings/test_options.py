"""Command line and ini file: which of them wins, what they may say, and what is said of a bad value."""

import re

import pytest

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.settings import TABLE
from pytest_nnxcheck.plugin import options

HOLDS = "@marked(max_examples=0)\ndef test_x(nnx_wrap): nnx_wrap(Model())(1)\n"


@pytest.fixture
def config_of(pytester, inner_args):
    """The config of a run with these options and this ini file."""

    def make(*args, ini=""):
        pytester.makeini(f"[pytest]\n{ini}\n")
        return pytester.parseconfig(*inner_args, *args)

    return make


def test_the_settings_of_a_check_come_from_both_field_by_field(settings_of, pytester):
    pytester.makeini("[pytest]\nnnx_transforms = jit scan\nnnx_max_depth = 2\nnnx_memory_budget = 3x\n")
    found = settings_of("--nnx-max-depth=4", "--nnx-all", "--nnx-nesting=jit > scan")
    expected = {"transforms": "jit,scan", "max_depth": "4", "memory_budget": "3x", "all": "on", "nesting": "jit > scan"}
    assert {name: found[name] for name in expected} == expected


def test_an_effort_that_is_typed_takes_back_the_sweep_of_the_ini_file(settings_of, pytester):
    pytester.makeini("[pytest]\nnnx_sweep = probes\n")
    found = settings_of("--nnx-effort=thorough")
    assert (found["effort"], found["sweep"]) == ("thorough", "pairs")


def test_a_path_of_the_ini_file_starts_from_the_root_and_a_typed_one_from_where_pytest_is_started(
    run_inner, pytester, monkeypatch
):
    pytester.makeini("[pytest]\nnnx_baseline = peaks.json\n")
    run_inner(HOLDS, "--nnx-baseline-update")
    monkeypatch.chdir(pytester.mkdir("sub"))
    run_inner(HOLDS, "--rootdir=..", "-c", "../tox.ini", "..", "--nnx-report=a.md", "--nnx-report=b.json")
    assert (pytester.path / "peaks.json").exists()
    assert sorted(path.name for path in (pytester.path / "sub").iterdir()) == ["a.md", "b.json"]


@pytest.mark.parametrize("name", [name for name in table.names(place="ini file") if TABLE[name].default])
def test_every_default_can_be_typed_and_written(config_of, name):
    row, text = TABLE[name], table.show(TABLE[name].default)
    typed = [table.flag(name)] if not row.kind.metavar else [f"{table.flag(name)}={text}"]
    assert options.given(config_of(*typed), name).value == (
        "on" if not row.kind.metavar else row.kind.read(name, row.default)
    )
    assert options.given(config_of(ini=f"nnx_{name} = {text}"), name).value == row.kind.read(name, row.default)


BAD = [
    ("--nnx-memory-tolerance=5", "", r"option --nnx-memory-tolerance: memory_tolerance='5' is not a percentage"),
    ("--nnx-report=a.pdf", "", r"option --nnx-report: report='a.pdf' ends in none of .json, .html, .md"),
    ("--nnx-nesting=jit > scna", "", r"option --nnx-nesting: unknown transform 'scna', did you mean 'scan'\?"),
    ("--nnx-watch=reprot", "", r"option --nnx-watch: unknown watch 'reprot', did you mean 'report'\?"),
    ("", "watch = fial", r"ini option nnx_watch \(tox.ini\): unknown watch 'fial', did you mean 'fail'\?"),
    ("", "max_depth = zero", r"ini option nnx_max_depth \(tox.ini\): .*zero"),
]


@pytest.mark.parametrize("option, ini, message", BAD)
def test_a_bad_value_stops_the_run_and_names_its_source(refusal_of, pytester, option, ini, message):
    pytester.makeini(f"[pytest]\nnnx_{ini}\n" if ini else "[pytest]\n")
    assert re.match(message, refusal_of(*filter(None, [option])))


def test_a_replay_repeats_what_says_how_a_nesting_is_judged(run_inner, pytester):
    (pytester.path / "a b.toml").touch()
    broken = HOLDS.replace("Model()", "Model(tracers=has('jit'))")
    result = run_inner(
        broken, "--nnx-memory-budget=2x", "--nnx-max-depth=2", "--nnx-all", "--nnx-expected-failures=a b.toml"
    )
    replay = "* replay *::test_x --nnx-memory-budget 2x --nnx-expected-failures 'a b.toml' --nnx-nesting jit"
    result.stdout.fnmatch_lines([replay])


TOML = '[tool.pytest.ini_options]\nnnx_max_depth = 2\nnnx_transforms = ["jit", "scan"]\nnnx_memory_budget = "2x"\n'
NATIVE = '[tool.pytest]\nnnx_max_depth = 2\nnnx_transforms = ["jit", "scan"]\nnnx_memory_budget = "2x"\n'
NUMBER = "[tool.pytest]\nnnx_max_depth = 2\nnnx_transforms = ['jit', 'scan']\nnnx_memory_budget = 1024\n"
SINCE = [(TOML, (8, 0)), (NATIVE, (9, 0)), (NUMBER, (9, 2))]


@pytest.mark.parametrize("text, since", SINCE, ids=["ini_options", "native", "number"])
def test_values_of_a_toml_file(settings_of, pytester, text, since):
    if pytest.version_tuple < since:
        pytest.skip(f"pytest {since} reads this")
    pytester.makepyprojecttoml(text)
    found, budget = settings_of(), "1KiB" if "1024" in text else "2x"
    assert (found["transforms"], found["max_depth"], found["memory_budget"]) == ("jit,scan", "2", budget)


@pytest.mark.skipif(pytest.version_tuple < (9, 2), reason="pytest 9.2 reads native values of several types")
def test_a_switch_of_a_toml_file(settings_of, pytester):
    pytester.makepyprojecttoml("[tool.pytest]\nnnx_all = true\nnnx_shortcuts = false\n")
    found = settings_of()
    assert (found["all"], found["shortcuts"]) == ("on", "off")


def test_help_and_markers_come_from_the_table(pytester, inner_args):
    text = " ".join(pytester.runpytest_inprocess(*inner_args, "--help").stdout.str().split())
    assert [name for name in TABLE if table.flag(name) not in text or TABLE[name].help not in text] == []
    assert [name for name in table.names(place="ini file") if f"nnx_{name} (" not in text] == []
    text = pytester.runpytest_inprocess(*inner_args, "--markers").stdout.str()
    assert f"@pytest.mark.{table.marker_line()}" in text
