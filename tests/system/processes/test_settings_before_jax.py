"""What jax reads when it is imported: simulated devices, its options, and flax that comes while a test is watched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from pytest_nnxcheck.devices import FLAG

TESTS = Path(__file__).parents[2]
SIMULATED = f"""
import os, jax, pytest
from pytest_nnxcheck import devices

@pytest.fixture
def mesh():
    return jax.sharding.Mesh(jax.devices()[:4], "x")

@marked(devices=4, max_examples=0)
def test_four(nnx_wrap, mesh):
    assert mesh.size == 4
    assert devices.stamp().devices == "4"
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false {FLAG}=4"
    nnx_wrap(Model())(1)

@marked(devices=8)
def test_eight(nnx_wrap, mesh):
    nnx_wrap(Model())(1)
"""


@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n1", marks=pytest.mark.full)])
def test_devices_are_simulated(run_inner, monkeypatch, workers):
    monkeypatch.setenv("XLA_FLAGS", f"{FLAG}=2 --xla_cpu_enable_fast_math=false")
    # A conftest that starts jax comes after the plugin has asked for the devices.
    conftest = "import jax\nassert jax.device_count() == 4\n"
    result = run_inner(SIMULATED, "--nnx-devices=4", workers, "-rs", subprocess=True, conftest=conftest)
    result.assert_outcomes(passed=1, skipped=1)
    reason = "SKIPPED [[]1] test_inner.py:19: needs 8 devices, jax has 4: run pytest --nnx-devices 8, or write nnx_devices = 8 into the ini file"
    result.stdout.fnmatch_lines([reason, "test_inner.py::test_four  40 nestings: 40 passed; *"][::-1])


def test_a_plugin_that_a_conftest_brings_in_simulates_too(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makeini("[pytest]\nnnx_devices = 3\n")
    pytester.makeconftest("pytest_plugins = ['pytest_nnxcheck.plugin.hooks']\n")
    pytester.makepyfile("import jax\ndef test_x(): assert jax.device_count() == 3\n")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.skipif("jax_use_simplified_jaxpr_constants" not in jax.config.values, reason="all constants are text here")
def test_other_constants_are_another_program_where_jax_hands_them_in():
    test = f"{TESTS}/engine/compilation/test_shared_programs.py::test_other_constants_are_another_program"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    environ = os.environ | {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    ran = subprocess.run(command, check=False, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
    assert "1 passed" in ran.stdout


PLAIN = """
import sys

class Strict(type):
    __hash__ = type.__hash__

    def __eq__(cls, other):
        raise RuntimeError("the code of the user")

class Value(metaclass=Strict):
    pass

def test_plain():
    value = Value()
    assert not {"jax", "numpy"} & sys.modules.keys()

def test_after_another():
    assert not {"jax", "numpy"} & sys.modules.keys()
"""
IMPORTS = """
def test_imports():
    from flax import nnx

    assert nnx.Linear(2, 3, rngs=nnx.Rngs(0)).kernel.shape == (2, 3)
"""


@pytest.mark.parametrize("source, tests", [(PLAIN, "2 tests"), (IMPORTS, "1 test")], ids=["never", "in a test"])
def test_a_watched_suite_imports_jax_when_its_tests_do(pytester, inner_args, source, tests):
    """What is called in the meantime meets a module ``flax.nnx`` that has no names yet."""
    pytester.makepyfile(source)
    result = pytester.runpytest_subprocess(*inner_args, "-p", "no:randomly", "--nnx-watch")
    result.assert_outcomes(passed=int(tests[0]))
    result.stdout.fnmatch_lines([f"{tests} watched: no test left a tracer behind*"])
