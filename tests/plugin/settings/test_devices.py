"""Simulated devices: the flag as text, and the texts where there are too few; runs that simulate them: tests/system/processes."""

import os

import jax
import pytest
from fake_engine import Model
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck import CheckError, check, devices
from pytest_nnxcheck.devices import FLAG, Devices, too_few, with_flag

NUMBERS = st.integers(1, 999)
OTHER = "--xla_dump_to='/tmp/a b'  --xla_cpu_multi_thread_eigen=false"
WORDS = st.sampled_from(["--xla_dump_to=/tmp/x", f"{FLAG}_of=3", "--xla_cpu_enable_fast_math", "--xla_y='a b'", "x=2"])


@pytest.fixture
def one_device():
    """Jax is started before an inner run in this process could simulate devices for all tests after it."""
    assert jax.device_count() == 1


@given(st.lists(WORDS | st.just(f"{FLAG}=3"), max_size=6), NUMBERS)
def test_other_flags_survive_and_ours_wins(words, count):
    flags = " ".join(["--xla_first=1", *words])
    made = with_flag(flags, count)
    others = [word for word in made.split() if not word.startswith(f"{FLAG}=")]
    assert others == [word for word in flags.split() if not word.startswith(f"{FLAG}=")]
    assert [word for word in made.split() if word.startswith(f"{FLAG}=")] == [f"{FLAG}={count}"]
    assert with_flag(made, count) == made
    assert with_flag(f"{FLAG}=2 {OTHER} {FLAG}=3", 8) == f"{OTHER} {FLAG}=8", "quotes and spaces stay"
    assert with_flag(FLAG, 8) == with_flag("  ", 8) == f"{FLAG}=8"


@given(st.dictionaries(st.sampled_from(["XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "HOME"]), st.just("--xla_a=1")))
def test_the_environment_is_put_back(before):
    environment = dict(before)
    first = devices.simulate(environment, 3)
    second = devices.simulate(environment, 4)
    assert environment["XLA_FLAGS"].endswith(f"{FLAG}=4")
    assert environment.get("JAX_NUM_CPU_DEVICES", "4") == "4"
    second()
    first()
    assert environment == before


ASK = "run pytest --nnx-devices 8, or write nnx_devices = 8 into the ini file"
STARTED = (
    f"since it was started before pytest could simulate 8: start pytest with XLA_FLAGS={FLAG}=8 in the environment"
)


@pytest.mark.parametrize(
    "there, simulated, text",
    [
        (Devices(8, "cpu"), None, ""),
        (Devices(9, "gpu"), None, ""),
        (Devices(1, "cpu"), None, f"needs 8 devices, jax has 1: {ASK}"),
        (Devices(4, "cpu"), 4, f"needs 8 devices, jax has 4: {ASK}"),
        (Devices(1, "cpu"), 8, f"needs 8 devices, jax has 1, {STARTED}"),
        (
            Devices(1, "gpu"),
            8,
            "needs 8 devices, jax has 1 (gpu): JAX_PLATFORMS=cpu pytest --nnx-devices 8 simulates them on the CPU",
        ),
    ],
)
def test_too_few_devices_says_what_to_run(there, simulated, text):
    assert too_few(8, there, simulated) == text


@pytest.mark.usefixtures("fake", "one_device")
def test_check_says_what_to_set():
    assert check(Model(), 1, devices=1, sweep="probes", max_examples=0).ok
    with pytest.raises(
        CheckError, match=rf"^check\(..., devices=8\) needs 8 devices, jax has 1: .* XLA_FLAGS={FLAG}=8 in the env"
    ):
        check(Model(), 1, devices=8)


NEEDS = "BUILT = []\n@pytest.fixture\ndef mesh(): BUILT.append(1)\n@marked{}\ndef test_x(nnx_wrap, mesh): nnx_wrap(Model())(1)\ndef test_ran(): assert not BUILT\n"


@pytest.mark.usefixtures("one_device")
def test_too_few_devices_skip_a_test_before_its_fixtures(run_inner, pytester):
    pytester.makeini("[pytest]\nnnx_devices = 4\n")
    before = os.environ.get("XLA_FLAGS")
    result = run_inner(NEEDS.format("(devices=2)"), "-rs", "--nnx-devices=3")
    result.assert_outcomes(skipped=1, passed=1)
    reason = "SKIPPED [[]1] test_inner.py:7: needs 2 devices, jax has 1, * before pytest could simulate 3: *"
    result.stdout.fnmatch_lines([reason])
    assert os.environ.get("XLA_FLAGS") == before


@pytest.mark.usefixtures("one_device")
def test_too_few_devices_can_be_made_a_failure(run_inner):
    result = run_inner(NEEDS.format("(devices=2, on_too_few_devices='fail')"))
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["ERROR test_inner.py::test_x - Failed: needs 2 devices, jax has 1: run pytest *"])
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.usefixtures("one_device")
def test_enough_devices_and_none_asked_for(run_inner):
    run_inner(NEEDS.format("(devices=1)").replace("not BUILT", "BUILT")).assert_outcomes(passed=2)
    run_inner(NEEDS.format("(devices=None)").replace("not BUILT", "BUILT"), "--nnx-devices=2").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    "given, flags, message",
    [
        ("--nnx-devices=0", "", "option --nnx-devices*0*"),
        ("--override-ini=nnx_devices=x", "", "ini option nnx_devices*x*"),
        ("--nnx-devices=2", "flags.txt", "option --nnx-devices: XLA_FLAGS names a file, 'flags.txt', *"),
    ],
)
def test_a_bad_number_stops_the_run_before_any_conftest(run_inner, monkeypatch, given, flags, message):
    monkeypatch.setenv("XLA_FLAGS", flags)
    result = run_inner("", given, conftest="raise SystemExit('too late')\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert "Traceback" not in result.stderr.str()
