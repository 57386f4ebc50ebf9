"""What a target needs before its compiler is asked: the machine, the wheels that are installed, the environment."""

import os
from pathlib import Path

import fake_engine
import pytest

from pytest_nnxcheck import check, wheels
from pytest_nnxcheck.core.errors import SettingError

CUDA12 = {"jax-cuda12-pjrt": "0.12.0.1", "jax-cuda12-plugin": "0.12.0.1"}
CUDA13 = {"jax-cuda13-pjrt": "0.12.0.1", "jax-cuda13-plugin": "0.12.0.1"}
OLD12 = {"jax-cuda12-pjrt": "0.10.2", "jax-cuda12-plugin": "0.10.2"}
NO_TPU = "needs the compiler of TPUs: pip install '.[tpu]' in a checkout of pytest-nnxcheck (0.6 GB, Linux on x86-64)"
NO_CUDA = "needs the compiler of NVIDIA GPUs: pip install '.[cuda]' in a checkout of pytest-nnxcheck (0.5 GB, Linux on x86-64)"

PINNED = "'jax-cuda12-pjrt==0.12.0.1' 'jax-cuda12-plugin==0.12.0.1'"


@pytest.fixture
def machine(monkeypatch, fake):
    """Say on what machine this runs, what is installed there, and which devices it has."""

    def machine(installed=(), system="Linux", processor="x86_64", jax="0.12.0.1", libtpu="==0.0.50.*", devices=()):
        there = {"jax": jax, "jaxlib": jax, **dict(installed)}
        monkeypatch.setattr(wheels, "_machine", lambda: (system, processor))
        monkeypatch.setattr(wheels, "version", lambda name: there.get(name, ""))
        wanted = [f'libtpu{libtpu}; extra == "tpu"', "libtpu-nightly==0.1"] if libtpu else ["numpy>=2"]
        monkeypatch.setattr(wheels.metadata, "requires", lambda name: wanted)
        monkeypatch.setattr(wheels, "_has_device", lambda patterns: bool({*devices} & {*patterns}))

    return machine


def checked(targets, *, seen=None):
    """What a check for these targets says before it runs anything; the environment in which it runs is kept in ``seen``."""

    class Sees(fake_engine.Model):
        def __call__(self, x):
            if seen is not None:
                seen.update(os.environ)
            return x

    try:
        check(Sees(), 1, target=targets, nesting="jit")
    except SettingError as error:
        return str(error).removeprefix("check(..., target=...): ")
    return ""


@pytest.mark.parametrize(
    "targets, installed, text",
    [
        ("v5e", {"libtpu": "0.0.50.1"}, ""),
        ("v5e", {"libtpu": "0.0.50.dev20261126"}, ""),
        ("h100", CUDA12, ""),
        ("h100", CUDA13, ""),
        ("h100", OLD12 | CUDA13, ""),
        ("h100", {name: f"{version}.post1" for name, version in CUDA12.items()}, ""),
        ("h100:8,v5e:4x4", CUDA12 | {"libtpu": "0.0.50.1"}, ""),
        ("v5e:4x4,v4", CUDA12, f"v5e:4x4 {NO_TPU}"),
        ("v5e,h100", {"libtpu": "0.0.50.1"}, f"h100 {NO_CUDA}"),
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
    assert checked(targets) == text


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
    assert checked("v5e") == checked("h100") == told
    assert checked(()) == ""


def test_jax_must_be_one_that_targets_were_tried_with(machine):
    machine({"libtpu": "0.0.11.4"}, jax="0.4.38")
    assert checked("v5e") == "targets need jax 0.5.3 or newer, this is 0.4.38: pip install 'jax>=0.5.3'"
    machine({"libtpu": "0.0.11.4"}, jax="0.5.3", libtpu="==0.0.11.*")
    assert checked("v5e") == ""
    machine({"libtpu": "0.0.60"}, libtpu="")
    assert checked("v5e") == "", "a jax that asks for no libtpu takes any"


def test_the_libtpu_of_the_jax_that_is_installed_is_read(monkeypatch):
    if wheels.version("jax") == "0.4.33":
        pytest.skip("it asks for a nightly build of another name")
    real = wheels.version
    monkeypatch.setattr(wheels, "_machine", lambda: ("Linux", "x86_64"))
    monkeypatch.setattr(wheels, "version", lambda name: "99.0" if name == "libtpu" else real(name))
    assert ": pip install 'libtpu==0." in checked("v5e")


def test_every_page_and_error_says_the_install_command_of_the_readme():
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "pytest_nnxcheck").rglob("*.py")]
    texts = {path.name: path.read_text(encoding="utf-8") for path in pages}
    assert "pip install '.[tpu]'" in texts["README.md"]
    assert [name for name, text in texts.items() if "pytest-nnxcheck[" in text] == []


ALL = {*wheels.WITHOUT_TPU, *wheels.WITHOUT_GPU, *wheels.WITHOUT_BOTH}
LEVEL = "TF_CPP_MIN_LOG_LEVEL"


@pytest.fixture
def bare(monkeypatch):
    """An environment without any of the variables."""
    for name in (*ALL, LEVEL):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    "devices, left_alone",
    [
        ((), set()),
        (["nvidia[0-9]*"], {*wheels.WITHOUT_GPU, "JAX_PLATFORMS"}),
        (["kfd"], {*wheels.WITHOUT_GPU, "JAX_PLATFORMS"}),
        (["vfio/[0-9]*"], {*wheels.WITHOUT_TPU, "JAX_PLATFORMS"}),
    ],
)
def test_what_a_device_of_this_machine_needs_is_left_alone(machine, bare, devices, left_alone):
    machine({"libtpu": "0.0.50.1"}, devices=devices)
    before, seen = dict(os.environ), {}
    assert checked("v5e", seen=seen) == ""
    assert {*seen} - {*before} == ALL - left_alone | {LEVEL}
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "own, kept",
    [
        ({"JAX_PLATFORMS": "", "TPU_LOG_DIR": "/logs", LEVEL: "0"}, {"JAX_PLATFORMS": "cpu"}),
        # Jax itself sets this level as it is imported: it is not the user's.
        ({LEVEL: "1"}, {LEVEL: "3"}),
    ],
)
def test_a_variable_of_the_users_stays_and_is_put_back(machine, bare, own, kept):
    machine({"libtpu": "0.0.50.1"})
    for name, value in own.items():
        bare.setenv(name, value)
    seen = {}
    checked("v5e", seen=seen)
    assert {name: seen[name] for name in own} == own | kept
    assert seen["TPU_SKIP_MDS_QUERY"] == "1"
    assert {name: os.environ[name] for name in own} == own


def test_without_a_target_nothing_is_set_and_without_a_wheel_neither(machine, bare):
    before, seen = dict(os.environ), {}
    assert checked((), seen=seen) == ""
    assert seen == before
    machine(system="Darwin", processor="arm64")
    assert checked("v5e").startswith("the compilers of TPUs and NVIDIA GPUs come as wheels for Linux")
    assert dict(os.environ) == before
