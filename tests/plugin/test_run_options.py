"""The options of a whole run: where they come from, what they may be, and what is said of a bad one."""

from fractions import Fraction

import pytest

from pytest_nnxcheck.core.setting_values import SettingError
from pytest_nnxcheck.plugin import options
from pytest_nnxcheck.plugin.options import OUTLETS


@pytest.fixture
def config_of(pytester, inner_args):
    """The config of a run with these options and this ini file."""

    def make(*args, ini=""):
        pytester.makeini(f"[pytest]\n{ini}\n")
        return pytester.parseconfig(*inner_args, *args)

    return make


@pytest.mark.parametrize(
    "text, part",
    [("5%", "1/20"), ("0%", "0"), ("0.5%", "1/200"), (" 12.25 % ", "49/400"), ("250%", "5/2")],
)
def test_a_percentage_is_exact(text, part):
    assert options.percentage("memory_tolerance", text) == Fraction(part)


@pytest.mark.parametrize(
    "value", ["", "5", "0.05", "-5%", "5%%", "%", "1e3%", "nan%", "inf%", "٣%", "5 percent", 5, None]
)
def test_what_is_no_percentage(value):
    with pytest.raises(SettingError) as caught:
        options.percentage("memory_tolerance", value)
    assert str(caught.value) == (
        f"memory_tolerance={value!r} is not a percentage, write '5%' or '0.5%', or '0%' to allow nothing"
    )


@pytest.mark.parametrize("value", ["", "  ", "a\0b", 3, None])
def test_what_is_no_path(value):
    with pytest.raises(SettingError, match="is not a path, write the name of a file"):
        options.file_path("baseline", value)


def test_the_command_line_wins_and_each_source_has_its_folder(config_of, pytester):
    config = config_of(ini="nnx_baseline = peaks.txt\nnnx_memory_tolerance = 2%")
    found = options.given(config, "baseline")
    assert (found.value, found.origin, found.folder) == (
        "peaks.txt",
        "ini option nnx_baseline (tox.ini)",
        config.rootpath,
    )
    assert options.value(config, "memory_tolerance") == Fraction(1, 50)
    config = config_of("--nnx-baseline=a b/é.txt", "--nnx-memory-tolerance=7%", ini="nnx_baseline = peaks.txt")
    found = options.given(config, "baseline")
    assert (found.value, found.origin, found.folder) == ("a b/é.txt", "option --nnx-baseline", pytester.path)
    assert options.value(config, "memory_tolerance") == Fraction(7, 100)


def test_nothing_given(config_of):
    config = config_of()
    assert options.given(config, "baseline") is None
    assert options.value(config, "memory_tolerance") == Fraction(1, 20)
    assert not options.asked(config, "baseline_update")
    assert options.asked(config_of("--nnx-baseline-update"), "baseline_update")


def test_an_error_names_the_source(config_of):
    with pytest.raises(SettingError, match=r"^option --nnx-memory-tolerance: memory_tolerance='5' is not a percentage"):
        options.value(config_of("--nnx-memory-tolerance=5"), "memory_tolerance")
    with pytest.raises(
        SettingError, match=r"^ini option nnx_memory_tolerance \(tox.ini\): memory_tolerance='x' is not"
    ):
        options.value(config_of(ini="nnx_memory_tolerance = x"), "memory_tolerance")
    with pytest.raises(SettingError, match=r"^option --nnx-baseline: baseline='' is not a path"):
        options.given(config_of("--nnx-baseline="), "baseline")


def test_every_outlet_is_in_the_help(pytester, inner_args):
    text = " ".join(pytester.runpytest_inprocess(*inner_args, "--help").stdout.str().split())
    for name, outlet in OUTLETS.items():
        assert f"--nnx-{name.replace('_', '-')}" in text
        assert outlet.help in text


def test_the_table_has_a_row_an_outlet():
    lines = options.outlets_table_markdown().splitlines()
    assert len(lines) == len(OUTLETS) + 2
    assert all(line.count(" | ") == 3 for line in lines[2:])
