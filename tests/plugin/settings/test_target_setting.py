"""Targets that command line, ini file, marker and call name: what is refused, and what the run is prepared for."""

import os

import jax
import pytest
from fake_engine import Model

from pytest_nnxcheck import check, wheels
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.devices import FLAG

NO_WHEEL = "v5e needs the compiler of TPUs: pip install '.[[]tpu]' in a checkout of pytest-nnxcheck (0.6 GB, Linux on x86-64)"  # for fnmatch


@pytest.fixture(autouse=True)
def started():
    """Jax is started before an inner run in this process could simulate devices, or name a platform, for all tests after it."""
    assert jax.device_count() == 1


@pytest.fixture
def no_wheel(monkeypatch):
    monkeypatch.setattr(wheels, "_machine", lambda: ("Linux", "x86_64"))
    monkeypatch.setattr(wheels, "version", {"jax": "0.12.0", "jaxlib": "0.12.0"}.get)


@pytest.fixture
def all_wheels(monkeypatch):
    monkeypatch.setattr(wheels, "problem", lambda _: "")


def ours():
    """The variables that a target sets."""
    names = {*wheels.WITHOUT_TPU, *wheels.WITHOUT_GPU, *wheels.WITHOUT_BOTH, wheels.LOG_LEVEL}
    return {name: os.environ.get(name) for name in names}


@pytest.mark.usefixtures("no_wheel")
@pytest.mark.parametrize(
    "value, line",
    [
        ("v5e", NO_WHEEL),
        (
            "h100",
            "h100 needs the compiler of NVIDIA GPUs: pip install '.[[]cuda]' in a checkout of pytest-nnxcheck (0.5 GB, *)",
        ),
        ("v5", "unknown target 'v5', did you mean 'v5*'[?]"),
        ("v5e:3x5", "unknown slice 'v5e:3x5', v5e has 1x1, *, 16x16"),
        ("h100:many", "unknown slice 'h100:many', write the number of GPUs: h100:8"),
        ("2*v5e", "unknown slices '2*v5e', write 2*v5e:16x16"),
        ("two*v5p:2x2x1", "unknown slices 'two*v5p:2x2x1', write 2*v5p:16x16x16"),
        ("0*v5e:2x2", "unknown slices '0*v5e:2x2', write 2*v5e:16x16"),
        ("2*h100:8", "unknown slices '2*h100:8', write h100:16, two hosts of eight"),
    ],
)
def test_a_target_that_nothing_compiles_for_stops_the_run_before_any_conftest(run_inner, value, line):
    result = run_inner("", f"--nnx-target={value}", conftest="raise SystemExit('too late')\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: option --nnx-target: {line}"])
    assert "Traceback" not in result.stderr.str()


@pytest.mark.usefixtures("no_wheel")
def test_the_command_line_takes_the_target_of_the_ini_file_back(run_inner, pytester):
    pytester.makeini("[pytest]\nnnx_target = v5e\n")
    source = "def test_x(): pass"
    run_inner(source, "--nnx-target=").assert_outcomes(passed=1)
    result = run_inner(source)
    result.stderr.fnmatch_lines([f"ERROR: ini option nnx_target (tox.ini): {NO_WHEEL}"])


@pytest.mark.usefixtures("no_wheel")
def test_a_target_in_a_marker_is_a_collection_error_and_other_files_run(run_inner, pytester):
    head = "import pytest\nmarked = pytest.mark.nnx_invariants\n"
    pytester.makepyfile(test_marked=head + "@marked(target='v5e')\ndef test_x(nnx_wrap): pass\n")
    result = run_inner("def test_plain(): pass", "--continue-on-collection-errors")
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines([f"nnx_invariants marker at test_marked.py:3: {NO_WHEEL}"])
    assert "Traceback" not in result.stdout.str()


@pytest.mark.usefixtures("no_wheel", "fake")
def test_a_target_in_a_call_is_refused_before_anything_runs():
    model = Model()
    with pytest.raises(SettingError, match=r"^check\(..., target=...\): v5e needs the compiler of TPUs: pip install"):
        check(model, 1, target="v5e")
    assert model.calls == []


class Looks(Model):
    """Sees the environment that it is called in."""

    def __call__(self, x):
        self.seen = os.environ.get("ALLOW_MULTIPLE_LIBTPU_LOAD")
        return x


@pytest.mark.usefixtures("all_wheels", "fake")
def test_a_call_has_its_environment_and_leaves_the_users():
    before, model = ours(), Looks()
    assert check(model, 1, target="v5e", sweep="probes", max_examples=0).ok
    assert (model.seen, ours()) == ("1", before)


PREPARED = "import os\ndef test_x(): assert os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] == '1'\n"
AT_LOAD = "import os\nassert os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] == '1'\n"


@pytest.mark.usefixtures("all_wheels")
@pytest.mark.parametrize("args, conftest, marker", [(["--nnx-target=v5e"], AT_LOAD, ""), ([], "", "(target='v5e')")])
def test_an_option_or_a_marker_prepares_the_environment_and_the_end_of_the_run_puts_it_back(
    run_inner, args, conftest, marker
):
    before = ours()
    source = f"{PREPARED}\n@marked{marker}\ndef test_y(nnx_wrap): nnx_wrap(Model())(1)\n"
    run_inner(source, *args, conftest=conftest).assert_outcomes(passed=2)
    assert ours() == before


@pytest.mark.usefixtures("all_wheels")
@pytest.mark.parametrize(
    "args, flags, made",
    [
        (["--nnx-target=v5e:4x4"], "", f"{FLAG}=16"),
        (["--nnx-target=h100:8,v5e:4x4,v5e"], "", f"{FLAG}=16"),
        (["--override-ini=nnx_target=v5e:4x4"], "--xla_a=1", f"--xla_a=1 {FLAG}=16"),
        (["--nnx-target=v5e:4x4", "--nnx-devices=4"], "", f"{FLAG}=4"),
        (["--nnx-target=v5e:4x4"], f"{FLAG}=32", f"{FLAG}=32"),
        (["--nnx-target=v5e,h100"], "", ""),
    ],
)
def test_a_slice_simulates_its_devices_where_nobody_says_how_many(run_inner, monkeypatch, args, flags, made):
    monkeypatch.setenv("XLA_FLAGS", flags)
    source = f"import os\ndef test_x(): assert os.environ['XLA_FLAGS'] == {made!r}\n"
    run_inner(source, *args).assert_outcomes(passed=1)
    assert os.environ["XLA_FLAGS"] == flags


@pytest.mark.slow
def test_who_names_no_target_loads_nothing(run_inner):
    source = "import sys\ndef test_x(): assert not {'pytest_nnxcheck.wheels', 'pytest_nnxcheck.core.chips'} & sys.modules.keys()\n"
    run_inner(source, subprocess=True).assert_outcomes(passed=1)
