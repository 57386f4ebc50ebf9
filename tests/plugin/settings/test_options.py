"""Command line and ini file: which of them wins, what they may say, and what is said of a bad value."""

from fractions import Fraction

import pytest

from pytest_nnxcheck import Nesting
from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.setting_values import Budget
from pytest_nnxcheck.core.settings import TABLE
from pytest_nnxcheck.plugin import hooks, options


@pytest.fixture
def config_of(pytester, inner_args):
    """The config of a run with these options and this ini file."""

    def make(*args, ini=""):
        pytester.makeini(f"[pytest]\n{ini}\n")
        return pytester.parseconfig(*inner_args, *args)

    return make


def test_nothing_given(config_of):
    config = config_of()
    assert options.of_a_check(config) == options.of_a_run(config) == {}
    assert options.given(config, "baseline") is options.value(config, "baseline") is None
    assert not options.asked(config, "baseline_update")
    assert options.asked(config_of("--nnx-baseline-update"), "baseline_update")


def test_the_command_line_wins_and_each_source_has_its_folder(config_of, pytester):
    config = config_of(ini="nnx_baseline = peaks.txt\nnnx_memory_tolerance = 2%")
    assert options.given(config, "baseline") == ("peaks.txt", "ini option nnx_baseline (tox.ini)", config.rootpath)
    assert options.value(config, "memory_tolerance") == Fraction(1, 50)
    config = config_of("--nnx-baseline=a b/é.txt", "--nnx-memory-tolerance=7%", ini="nnx_baseline = peaks.txt")
    assert options.given(config, "baseline") == ("a b/é.txt", "option --nnx-baseline", pytester.path)
    assert options.value(config, "memory_tolerance") == Fraction(7, 100)


def test_a_path_of_the_ini_file_starts_from_the_root_and_a_typed_one_from_where_pytest_is_started(
    config_of, pytester, monkeypatch
):
    monkeypatch.chdir(pytester.mkdir("sub"))
    config = config_of("--nnx-report=a.md", ini="nnx_baseline = peaks.txt")
    assert options.given(config, "baseline").folder == config.rootpath == pytester.path
    assert options.given(config, "report").folder == pytester.path / "sub"


def test_the_settings_of_a_check_come_from_both_field_by_field(config_of):
    ini = "nnx_transforms = jit scan\nnnx_max_depth = 2\nnnx_memory_budget = 2x\nnnx_expected_failures = known.toml"
    read = options.of_a_check(config_of("--nnx-max-depth=4", "--nnx-all", "--nnx-nesting=jit > scan", ini=ini))
    assert read == {
        "transforms": ("jit", "scan"),
        "max_depth": 4,
        "memory_budget": Budget(factor=2.0),
        "all": "on",
        "nesting": Nesting.parse("jit > scan"),
    }


def test_an_effort_that_is_typed_takes_back_the_sweep_of_the_ini_file(config_of):
    read = options.of_a_check(config_of("--nnx-effort=thorough", ini="nnx_sweep = probes"))
    assert (read["effort"], read["sweep"]) == ("thorough", "pairs")


@pytest.mark.parametrize("name", [name for name in table.names(place="ini file") if TABLE[name].default])
def test_every_default_can_be_typed_and_written(config_of, name):
    row, text = TABLE[name], table.show(TABLE[name].default)
    typed = [table.flag(name)] if not row.kind.metavar else [f"{table.flag(name)}={text}"]
    assert options.given(config_of(*typed), name).value == (
        "on" if not row.kind.metavar else row.kind.read(name, row.default)
    )
    assert options.given(config_of(ini=f"nnx_{name} = {text}"), name).value == row.kind.read(name, row.default)


def test_a_report_may_be_repeated(config_of):
    assert options.given(config_of("--nnx-report=a.md", "--nnx-report=b.json"), "report").value == ("a.md", "b.json")
    assert options.given(config_of(ini="nnx_report = a.md b.json"), "report").value == ("a.md", "b.json")
    assert options.given(config_of(ini="nnx_report ="), "report") is None


BAD = [
    ("--nnx-memory-tolerance=5", "", r"option --nnx-memory-tolerance: memory_tolerance='5' is not a percentage"),
    ("--nnx-report=a.pdf", "", r"option --nnx-report: report='a.pdf' ends in none of .json, .html, .md"),
    ("--nnx-nesting=jit > scna", "", r"option --nnx-nesting: unknown transform 'scna', did you mean 'scan'\?"),
    ("--nnx-watch=reprot", "", r"option --nnx-watch: unknown watch 'reprot', did you mean 'report'\?"),
    ("", "watch = fial", r"ini option nnx_watch \(tox.ini\): unknown watch 'fial', did you mean 'fail'\?"),
    ("", "max_depth = zero", r"ini option nnx_max_depth \(tox.ini\): .*zero"),
]


@pytest.mark.parametrize("option, ini, message", BAD)
def test_a_bad_value_stops_the_run_and_names_its_source(config_of, option, ini, message):
    with pytest.raises(pytest.UsageError, match=f"^{message}"):
        hooks.pytest_configure(config_of(*filter(None, [option]), ini=f"nnx_{ini}" if ini else ""))


def test_a_value_that_is_read_late_names_its_source_too(config_of):
    config = config_of()
    config.option.nnx_baseline = "a\0b"
    with pytest.raises(SettingError, match=r"^option --nnx-baseline: baseline='a\\x00b' is not a path"):
        options.given(config, "baseline")


def test_a_replay_repeats_what_says_how_a_nesting_is_judged(config_of):
    config = config_of("--nnx-memory-budget=2x", "--nnx-max-depth=2", "--nnx-all", "--nnx-expected-failures=a b.toml")
    assert options.replay_options(config.option) == "--nnx-memory-budget 2x --nnx-expected-failures 'a b.toml'"


TOML = '[tool.pytest.ini_options]\nnnx_max_depth = 2\nnnx_transforms = ["jit", "scan"]\nnnx_memory_budget = "2x"\n'
NATIVE = '[tool.pytest]\nnnx_max_depth = 2\nnnx_transforms = ["jit", "scan"]\nnnx_memory_budget = "2x"\n'
NUMBER = "[tool.pytest]\nnnx_max_depth = 2\nnnx_transforms = ['jit', 'scan']\nnnx_memory_budget = 1024\n"
SINCE = [(TOML, (8, 0)), (NATIVE, (9, 0)), (NUMBER, (9, 2))]


@pytest.mark.parametrize("text, since", SINCE, ids=["ini_options", "native", "number"])
def test_values_of_a_toml_file(pytester, inner_args, text, since):
    if pytest.version_tuple < since:
        pytest.skip(f"pytest {since} reads this")
    pytester.makepyprojecttoml(text)
    assert options.of_a_check(pytester.parseconfig(*inner_args)) == {
        "transforms": ("jit", "scan"),
        "max_depth": 2,
        "memory_budget": Budget(bytes=1024) if "1024" in text else Budget(factor=2.0),
    }


@pytest.mark.skipif(pytest.version_tuple < (9, 2), reason="pytest 9.2 reads native values of several types")
def test_a_switch_of_a_toml_file(pytester, inner_args):
    pytester.makepyprojecttoml("[tool.pytest]\nnnx_all = true\nnnx_shortcuts = false\n")
    assert options.of_a_check(pytester.parseconfig(*inner_args)) == {"all": "on", "shortcuts": "off"}


def test_help_and_markers_come_from_the_table(pytester, inner_args):
    text = " ".join(pytester.runpytest_inprocess(*inner_args, "--help").stdout.str().split())
    assert [name for name in TABLE if table.flag(name) not in text or TABLE[name].help not in text] == []
    assert [name for name in table.names(place="ini file") if f"nnx_{name} (" not in text] == []
    text = pytester.runpytest_inprocess(*inner_args, "--markers").stdout.str()
    assert f"@pytest.mark.{table.marker_line()}" in text
