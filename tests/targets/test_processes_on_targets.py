"""Processes that compile for a target: alone, and as workers of xdist."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMPILES = """
import os
from pytest_nnxcheck import wheels

put_back = wheels.prepare(os.environ, ["v5e"])
import jax
from jax.experimental import topologies

print(jax.devices())
chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
array = jax.ShapeDtypeStruct((256, 256), "float32", sharding=jax.sharding.SingleDeviceSharding(chip))
compiled = jax.jit(lambda x: x @ x).lower(array).compile()
print(compiled.memory_analysis().argument_size_in_bytes)
put_back()
"""


def test_a_compiler_of_tpus_is_silent_and_leaves_jax_on_the_cpu():
    # As users start Python: the folder of programs that the tests have takes none of a target.
    names = ("JAX_", "TPU_", "TF_CPP_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILES], check=True, env=environ, capture_output=True, text=True, timeout=60
    )
    assert ran.stdout.splitlines()[-2:] == ["[CpuDevice(id=0)]", "262144"]
    if "cudart_stub.cc" not in ran.stderr:  # the libraries of jax 0.10's CUDA plugin tell of it whatever is set
        assert ran.stderr == ""


WAITS = """
import gc
import signal
from pathlib import Path

from pytest_nnxcheck.compat.targets import machine_of
from pytest_nnxcheck.core.chips import parse_target

def test_waits():
    machine_of(parse_target("v5e"))
    gc.disable()  # what is raised in a function that the collector calls is lost
    Path("loaded").touch()
    signal.pause()
"""


LISTENS = """
import os, signal, sys
signal.signal({number:d}, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_inner.py"])
"""
"""Starts pytest where a shell that runs commands in the background has made its children deaf to a signal."""


@pytest.mark.parametrize("loads", [True, False], ids=["libtpu", "without"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGABRT])
def test_a_signal_ends_pytest_as_without_libtpu(pytester, number, loads):
    pytester.makepyfile(test_inner=WAITS if loads else WAITS.replace("machine_of(", "parse_target; ("))
    environ = {**os.environ, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}  # as a run for targets sets it
    words = [sys.executable, "-c", LISTENS.format(number=number)]
    with subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            while not Path("loaded").exists():
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(number)
            told = process.communicate(timeout=60)[0]
        finally:
            process.kill()  # `Popen` waits for it
    assert process.returncode == (pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else -number)
    assert "stack trace" not in told
    assert ("KeyboardInterrupt" in told) == (number == signal.SIGINT)
    assert ("Fatal Python error: Aborted" in told) == (number == signal.SIGABRT)


LINEAR = """
import jax.numpy as jnp
import pytest
from flax import nnx

@pytest.mark.nnx_invariants
def test_linear(nnx_wrap):
    nnx_wrap(nnx.Linear(4, 4, rngs=nnx.Rngs(0)))(jnp.ones((2, 4)))
"""


def test_a_target_is_judged_while_the_cache_of_programs_is_open(pytester, inner_args, monkeypatch):
    # As users run it: the folder of programs that the tests have shuts off that of the plugin.
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    pytester.makepyfile(test_inner=LINEAR)
    for _ in ("written", "read"):
        result = pytester.runpytest_subprocess(*inner_args, "--nnx-target=v5e", "--nnx-nesting=jit")
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines(["*::test_linear  1 nesting: 1 passed; *; fits v5e: *"])


AT_LOAD = "import os\nassert os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] == '1'\n"
SUITE = """
import jax
from jax.experimental import topologies

@pytest.mark.parametrize("number", range(4))
def test_x(number):
    assert topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
"""


def test_workers_find_the_environment(run_inner):
    result = run_inner(SUITE, "--nnx-target=v5e", "-n2", "-s", subprocess=True, conftest=AT_LOAD)
    result.assert_outcomes(passed=4)
    if "cudart_stub.cc" not in result.stderr.str():
        assert not result.stderr.str()
