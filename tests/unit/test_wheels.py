"""What a target needs before its compiler is asked: the machine, the wheels that are installed, the environment."""

import pytest

from pytest_nnxcheck import wheels
from pytest_nnxcheck.core.errors import SettingError

CUDA12 = {"jax-cuda12-pjrt": "0.12.0.1", "jax-cuda12-plugin": "0.12.0.1"}
CUDA13 = {"jax-cuda13-pjrt": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1"}
OLD12 = {"jax-cuda12-pjrt": "0.10.2", "jax-cuda12-plugin": "0.10.2"}
NO_TPU = "needs the compiler of TPUs: pip install 'pytest-nnxcheck[tpu]' (0.6 GB, Linux on x86-64)"
NO_CUDA = "needs the compiler of NVIDIA GPUs: pip install 'pytest-nnxcheck[cuda]' (0.5 GB, Linux on x86-64)"

PINNED = "'jax-cuda12-pjrt==0.12.0.1' 'jax-cuda12-plugin==0.12.0.1'"


@pytest.fixture
def machine(monkeypatch):
    """Say on what machine this runs, what is installed there, and which devices it has."""

    def machine(installed=(), system="Linux", processor="x86_64", jax="0.12.0.1", libtpu="==0.0.50.*", devices=()):
        there = {"jax": jax, "jaxlib": jax, **dict(installed)}
        monkeypatch.setattr(wheels, "_machine", lambda: (system, processor))
        monkeypatch.setattr(wheels, "version", lambda name: there.get(name, ""))
        wanted = [f'libtpu{libtpu}; extra == "tpu"', "libtpu-nightly==0.1"] if libtpu else ["numpy>=2"]
        monkeypatch.setattr(wheels.metadata, "requires", lambda name: wanted)
        monkeypatch.setattr(wheels, "_has_device", lambda patterns: bool({*devices} & {*patterns}))

    return machine


@pytest.mark.parametrize(
    "targets, installed, text",
    [
        ("v5e", {"libtpu": "0.0.50.1"}, ""),
        ("v5e", {"libtpu": "0.0.50.dev20261126"}, ""),
        ("h100", CUDA12, ""),
        ("h100", CUDA13, ""),
        ("h100", OLD12 | CUDA13, ""),
        ("h100", {name: f"{version}.post1" for name, version in CUDA12.items()}, ""),
        ("h100:8 v5e:4x4", CUDA12 | {"libtpu": "0.0.50.1"}, ""),
        ("v5e:4x4 v4", CUDA12, f"v5e:4x4 {NO_TPU}"),
        ("v5e h100", {"libtpu": "0.0.50.1"}, f"h100 {NO_CUDA}"),
        ("h100", {"jax-cuda12-plugin": "0.12.0.1"}, f"h100 {NO_CUDA}"),
        (
            "v5e",
            {"libtpu": "0.0.42.1"},
            "v5e needs the libtpu of jax 0.12.0.1, this is 0.0.42.1: pip install 'libtpu==0.0.50.*'",
        ),
        (
            "h100",
            CUDA12 | {"jax-cuda12-plugin": "0.10.2"},
            f"h100 needs the plugin of jaxlib 0.12.0.1, jax-cuda12-plugin is 0.10.2: pip install {PINNED}",
        ),
    ],
)
def test_the_wheel_must_be_there_and_be_the_one_of_jax(machine, targets, installed, text):
    machine(installed)
    assert wheels.problem(targets.split()) == text


@pytest.mark.parametrize(
    "system, processor, text",
    [
        ("Darwin", "arm64", "macOS on arm64"),
        ("Linux", "aarch64", "Linux on aarch64"),
        ("Windows", "AMD64", "Windows on AMD64"),
    ],
)
def test_there_are_wheels_for_one_kind_of_machine(machine, system, processor, text):
    machine({"libtpu": "0.0.50.1"}, system=system, processor=processor)
    told = f"the compilers of TPUs and NVIDIA GPUs come as wheels for Linux on x86-64 only, this is {text}"
    assert wheels.problem(["v5e"]) == wheels.problem(["h100"]) == told
    assert wheels.problem([]) == ""


def test_jax_must_be_one_that_targets_were_tried_with(machine):
    machine({"libtpu": "0.0.11.4"}, jax="0.4.38")
    assert wheels.problem(["v5e"]) == "targets need jax 0.5.3 or newer, this is 0.4.38: pip install 'jax>=0.5.3'"
    machine({"libtpu": "0.0.11.4"}, jax="0.5.3", libtpu="==0.0.11.*")
    assert wheels.problem(["v5e"]) == ""
    machine({"libtpu": "0.0.60"}, libtpu="")
    assert wheels.problem(["v5e"]) == "", "a jax that asks for no libtpu takes any"


def test_the_libtpu_of_the_jax_that_is_installed_is_read(monkeypatch):
    if wheels.version("jax") == "0.4.33":
        pytest.skip("it asks for a nightly build of another name")
    real = wheels.version
    monkeypatch.setattr(wheels, "_machine", lambda: ("Linux", "x86_64"))
    monkeypatch.setattr(wheels, "version", lambda name: "99.0" if name == "libtpu" else real(name))
    assert ": pip install 'libtpu==0." in wheels.problem(["v5e"])


def test_a_stamp_names_the_wheel(machine):
    machine(CUDA12 | {"libtpu": "0.0.50.1"})
    assert [wheels.versions("tpu"), wheels.versions("cuda")] == ["libtpu 0.0.50.1", "jax-cuda12-pjrt 0.12.0.1"]
    machine()
    assert [wheels.versions("tpu"), wheels.versions("cuda")] == ["", ""]


@pytest.mark.parametrize("words, count", [("", 1), ("v5e h100", 1), ("v5e:2x2 h100 v5e:4x4", 16), ("v7x:2x2x1", 8)])
def test_the_largest_slice_counts(words, count):
    assert wheels.slice_devices(words.split()) == count


ALL = {*wheels.WITHOUT_TPU, *wheels.WITHOUT_GPU, *wheels.WITHOUT_BOTH, "TF_CPP_MIN_LOG_LEVEL"}


@pytest.mark.parametrize(
    "devices, left_alone",
    [
        ((), set()),
        (["nvidia[0-9]*"], {*wheels.WITHOUT_GPU, "JAX_PLATFORMS"}),
        (["kfd"], {*wheels.WITHOUT_GPU, "JAX_PLATFORMS"}),
        (["vfio/[0-9]*"], {*wheels.WITHOUT_TPU, "JAX_PLATFORMS"}),
    ],
)
def test_what_a_device_of_this_machine_needs_is_left_alone(machine, devices, left_alone):
    machine({"libtpu": "0.0.50.1"}, devices=devices)
    environment = {"HOME": "/"}
    put_back = wheels.prepare(environment, ["v5e"])
    assert {*environment} == {"HOME"} | ALL - left_alone
    put_back()
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize(
    "own, kept",
    [
        ({"JAX_PLATFORMS": "", "TPU_LOG_DIR": "/logs", "TF_CPP_MIN_LOG_LEVEL": "0"}, {"JAX_PLATFORMS": "cpu"}),
        # Jax itself sets this level as it is imported: it is not the user's.
        ({"TF_CPP_MIN_LOG_LEVEL": "1"}, {"TF_CPP_MIN_LOG_LEVEL": "3"}),
    ],
)
def test_a_variable_of_the_users_stays_and_is_put_back(machine, own, kept):
    machine({"libtpu": "0.0.50.1"})
    environment = dict(own)
    put_back = wheels.prepare(environment, ["v5e"])
    assert {name: environment[name] for name in own} == own | kept
    assert environment["TPU_SKIP_MDS_QUERY"] == "1"
    assert wheels.prepare(environment, ["v5e"])() is None
    put_back()
    assert environment == own


def test_without_a_target_nothing_is_set_and_without_a_wheel_neither(machine):
    machine(system="Darwin", processor="arm64")
    environment = {}
    wheels.prepare(environment, [])()
    with pytest.raises(SettingError, match="^the compilers of TPUs and NVIDIA GPUs come as wheels for Linux"):
        wheels.prepare(environment, ["v5e"])
    assert environment == {}
