"""Command line and ini file: which of them wins, what they may say, and what is said of a bad value."""

import pytest

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.settings import TABLE


def test_nothing_given(read):
    assert read().of_a_check == read().of_a_run == {}
    assert read("--nnx-baseline-update").of_a_run == {"baseline_update": "on"}


def test_the_command_line_wins_and_each_source_has_its_folder(read, pytester, monkeypatch):
    """A path of the ini file starts from the root, and a typed one from where pytest is started."""
    ini = "nnx_baseline = peaks.txt\nnnx_memory_tolerance = 2%"
    monkeypatch.chdir(pytester.mkdir("sub"))
    written = read(ini=ini)
    assert written.of_a_run == {"baseline": "peaks.txt", "memory_tolerance": "1/50"}
    assert written.source("baseline") == ("ini option nnx_baseline (tox.ini)", pytester.path)
    typed = read("--nnx-baseline=a b/é.txt", "--nnx-memory-tolerance=7%", ini=ini)
    assert typed.of_a_run == {"baseline": "a b/é.txt", "memory_tolerance": "7/100"}
    assert typed.source("baseline") == ("option --nnx-baseline", pytester.path / "sub")


def test_the_settings_of_a_check_come_from_both_field_by_field(read):
    ini = "nnx_transforms = jit scan\nnnx_max_depth = 2\nnnx_memory_budget = 2x\nnnx_expected_failures = known.toml"
    assert read("--nnx-max-depth=4", "--nnx-all", "--nnx-nesting=jit > scan", ini=ini).of_a_check == {
        "transforms": "jit,scan",
        "max_depth": "4",
        "memory_budget": "2x",
        "all": "on",
        "nesting": "jit > scan",
    }


def test_an_effort_that_is_typed_takes_back_the_sweep_of_the_ini_file(read):
    found = read("--nnx-effort=thorough", ini="nnx_sweep = probes").of_a_check
    assert (found["effort"], found["sweep"]) == ("thorough", "pairs")


@pytest.mark.parametrize("name", [name for name in table.names(place="ini file") if TABLE[name].default])
def test_every_default_can_be_typed_and_written(read, name):
    row, text = TABLE[name], table.show(TABLE[name].default)
    typed = read(f"{table.flag(name)}={text}" if row.kind.metavar else table.flag(name))
    written = read(ini=f"nnx_{name} = {text}")
    shown = table.show(row.kind.read(name, row.default))
    assert (typed.of_a_check | typed.of_a_run)[name] == (shown if row.kind.metavar else "on")
    assert (written.of_a_check | written.of_a_run)[name] == shown


def test_a_report_may_be_repeated(read):
    assert read("--nnx-report=a.md", "--nnx-report=b.json").of_a_run == {"report": "a.md,b.json"}
    assert read(ini="nnx_report = a.md b.json").of_a_run == {"report": "a.md,b.json"}
    assert read(ini="nnx_report =").of_a_run == {}


BAD = [
    ("--nnx-memory-tolerance=5", "", r"option --nnx-memory-tolerance: memory_tolerance='5' is not a percentage"),
    ("--nnx-report=a.pdf", "", r"option --nnx-report: report='a.pdf' ends in none of .json, .html, .md"),
    ("--nnx-nesting=jit > scna", "", r"option --nnx-nesting: unknown transform 'scna', did you mean 'scan'\?"),
    ("--nnx-watch=reprot", "", r"option --nnx-watch: unknown watch 'reprot', did you mean 'report'\?"),
    ("", "watch = fial", r"ini option nnx_watch \(tox.ini\): unknown watch 'fial', did you mean 'fail'\?"),
    ("", "max_depth = zero", r"ini option nnx_max_depth \(tox.ini\): .*zero"),
]


@pytest.mark.parametrize("option, ini, message", BAD)
def test_a_bad_value_stops_the_run_and_names_its_source(read, option, ini, message):
    with pytest.raises(pytest.UsageError, match=f"^{message}"):
        read(*filter(None, [option]), ini=f"nnx_{ini}" if ini else "").configure()


def test_a_replay_repeats_what_says_how_a_nesting_is_judged(read):
    typed = ("--nnx-memory-budget=2x", "--nnx-max-depth=2", "--nnx-all", "--nnx-expected-failures=a b.toml")
    assert read(*typed).replayed == "--nnx-memory-budget 2x --nnx-expected-failures 'a b.toml'"


TOML = '[tool.pytest.ini_options]\nnnx_max_depth = 2\nnnx_transforms = ["jit", "scan"]\nnnx_memory_budget = "2x"\n'
NATIVE = '[tool.pytest]\nnnx_max_depth = 2\nnnx_transforms = ["jit", "scan"]\nnnx_memory_budget = "2x"\n'
NUMBER = "[tool.pytest]\nnnx_max_depth = 2\nnnx_transforms = ['jit', 'scan']\nnnx_memory_budget = 1024\n"
SINCE = [(TOML, (8, 0)), (NATIVE, (9, 0)), (NUMBER, (9, 2))]


@pytest.mark.parametrize("text, since", SINCE, ids=["ini_options", "native", "number"])
def test_values_of_a_toml_file(read, text, since):
    if pytest.version_tuple < since:
        pytest.skip(f"pytest {since} reads this")
    budget = "1KiB" if "1024" in text else "2x"
    assert read(pyproject=text).of_a_check == {"transforms": "jit,scan", "max_depth": "2", "memory_budget": budget}


@pytest.mark.skipif(pytest.version_tuple < (9, 2), reason="pytest 9.2 reads native values of several types")
def test_a_switch_of_a_toml_file(read):
    pyproject = "[tool.pytest]\nnnx_all = true\nnnx_shortcuts = false\n"
    assert read(pyproject=pyproject).of_a_check == {"all": "on", "shortcuts": "off"}


def test_help_and_markers_come_from_the_table(pytester, inner_args):
    text = " ".join(pytester.runpytest_inprocess(*inner_args, "--help").stdout.str().split())
    assert [name for name in TABLE if table.flag(name) not in text or TABLE[name].help not in text] == []
    assert [name for name in table.names(place="ini file") if f"nnx_{name} (" not in text] == []
    text = pytester.runpytest_inprocess(*inner_args, "--markers").stdout.str()
    assert f"@pytest.mark.{table.marker_line()}" in text
