"""A program to paste compiles for a target what is broken there alone: it fails as the test does, with jax and the wheel of a compiler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import jax
import pytest
from pasted_programs import HEAD, run_fresh, run_programs, told

from pytest_nnxcheck import wheels

WITHOUT_DEVICES = wheels.WITHOUT_TPU | wheels.WITHOUT_GPU | wheels.WITHOUT_BOTH
TPU = pytest.mark.skipif(not find_spec("libtpu"), reason="the compiler of TPUs is not installed: libtpu")
GPU = pytest.mark.skipif(
    not any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))) or jax.__version_info__ < (0, 6),
    reason="the compiler of GPUs is not installed, or older than jax 0.6, where it tells no totals",
)
RETYPED = pytest.mark.skipif(
    not find_spec("libtpu") or jax.__version_info__ < (0, 10),
    reason="the compiler of TPUs is not installed, or jax is older than 0.10: a buffer that is lost there is lost on the CPU",
)
BROKEN = """
from jax.experimental import pallas as pl

ROWS = 1 << 22

@marked(target="v5e")
def test_fits_tpu(nnx_wrap):
    model = nnx.eval_shape(lambda: nnx.Linear(ROWS, 8000, rngs=rngs()))
    nnx_wrap(model)(jax.ShapeDtypeStruct((8, ROWS), jnp.float32))

@marked(target="h100")
def test_fits_gpu(nnx_wrap):
    model = nnx.eval_shape(lambda: nnx.Linear(ROWS, 8000, rngs=rngs()))
    nnx_wrap(model)(jax.ShapeDtypeStruct((8, ROWS), jnp.float32))

class Branching(nnx.Module):
    # What the CPU runs needs one row.
    def __init__(self):
        self.w = nnx.Param(jnp.zeros(70_000))

    def __call__(self, x):
        rows = self.w[...] if jax.default_backend() == CHIP else self.w[:1]
        return jnp.sort(rows[:, None] * self.w[...] * x, axis=0)[0]

CHIP = "tpu"

@marked(target="v5e")
def test_branch(nnx_wrap):
    nnx_wrap(nnx.eval_shape(Branching))(jax.ShapeDtypeStruct((), jnp.float32))

class Kernels(nnx.Module):
    # A kernel for TPUs, which the CPU cannot lower, on a square of 18.3 GiB.
    def __init__(self, width):
        self.w = nnx.Param(jnp.zeros((1, width)))

    def __call__(self, x):
        def kernel(x, o):
            o[...] = x[...] * 2

        rows = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((8, 128), x.dtype))(x)
        return jnp.sort(self.w[...].T * self.w[...], axis=0)[:8, :128] + rows

TALL = 70_000

@marked(target="v5e")
def test_kernel(nnx_wrap):
    nnx_wrap(Kernels(TALL))(jnp.ones((8, 128)))

SHAPE = (64, 64, 8, 8, 3)

class Kernel(nnx.Module):
    # A TPU pads the last axis to 128 elements, or another one.
    def __init__(self):
        self.value = nnx.Param(jnp.zeros(SHAPE))

    def __call__(self, x):
        return self.value[...] * x

@marked(target="v5e", memory_budget="9MB")
def test_budget(nnx_wrap):
    nnx_wrap(Kernel())(jnp.ones(()))

NAMES = [f"kernel{number}" for number in range(12)]

class Blocks(nnx.Module):
    # On the CPU the copies of these leaves, 3.8 KiB each, are too small to count. On a TPU they are padded.
    def __init__(self):
        for name in NAMES:
            setattr(self, name, nnx.Param(jnp.ones((1, 3, 18, 18))))

    def __call__(self, x):
        @jax.checkpoint
        def layer(x, kernels):
            for kernel in kernels:
                x = jnp.tanh(x @ kernel)
            return x, kernels

        own = [getattr(self, name) for name in NAMES]
        values = [kernel[...] for kernel in own]
        x, values = jax.lax.scan(lambda x, kernels: jax.lax.scan(layer, x, kernels), x, values)
        for kernel, value in zip(own, values):
            assign(kernel, value)
        return x

@marked(target="v5e")
def test_copies(nnx_wrap):
    nnx_wrap(Blocks())(jnp.ones((4, 18)))

class Two(nnx.Module):
    def __init__(self):
        self.a, self.b = nnx.Variable(jnp.zeros((33, 7))), nnx.Variable(jnp.zeros((33, 7)))

def flatten(two):
    # The flat array takes the buffer of the other on the CPU, and has other tiles on a TPU.
    assign(two.a, (two.a[...] + 1).reshape(-1))

@marked(target="v5e", invariants="donation")
def test_lost(nnx_wrap):
    nnx_wrap(flatten)(Two())
"""
MENDED = {
    "test_kernel": ("TALL = 70_000", "TALL = 128"),
    "test_branch": ('CHIP = "tpu"', 'CHIP = "gpu"'),
    "test_fits_tpu": ("ROWS = 1 << 22", "ROWS = 1 << 10"),
    "test_fits_gpu": ("ROWS = 1 << 22", "ROWS = 1 << 10"),
    "test_budget": ("SHAPE = (64, 64, 8, 8, 3)", "SHAPE = (48, 128, 128)"),
    "test_copies": ("assign(kernel, value)", "pass"),
    "test_lost": (".reshape(-1)", ""),
}
SAYS = {
    "test_kernel": "the program does not fit a v5e: it needs more than 15.75 GiB",
    "test_branch": "the program does not fit a v5e: it needs more than 15.75 GiB",
    "test_fits_tpu": "the program does not fit a v5e: it needs more than 15.75 GiB",
    "test_fits_gpu": "the program does not fit an h100: peak 125",
    "test_budget": "peak 12.00 MiB on v5e is over the budget of 8.6 MiB",
    "test_copies": "extra copies of its state on v5e",
    "test_lost": "1 of 2 donated leaves loses its buffer on v5e: two.b",
}


def mark_of(test):
    return {"test_fits_gpu": GPU, "test_lost": RETYPED, "test_kernel": RETYPED}.get(test, TPU)


SHOWN = [pytest.param(name, marks=mark_of(name)) for name in MENDED]


@pytest.fixture(scope="module")
def programs(tmp_path_factory, inner_args):
    """{test: the path of its program}: all tests that have a compiler, in one interpreter."""
    folder = tmp_path_factory.mktemp("targets")
    (folder / "test_inner.py").write_text(HEAD + BROKEN, "utf-8")
    names = [name for name in MENDED if not mark_of(name).args[0]]
    if not names:
        pytest.skip("no compiler of a target is installed")
    tests = [f"test_inner.py::{name}" for name in names]
    options = [*inner_args, "-p", "no:randomly", "--nnx-nesting", "jit", "-W", "ignore", *tests]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        capture_output=True,
        cwd=folder,
        check=False,
        env={**os.environ, **WITHOUT_DEVICES},
    )
    messages = told(done.stdout.decode())
    assert len(messages) == len(names), done.stdout.decode()
    return {test.partition("::")[2]: folder / program for test, (_, _, program) in messages.items()}


@pytest.mark.parametrize("test", SHOWN)
def test_a_program_compiles_for_the_target_and_fails_as_the_test_does(programs, monkeypatch, test):
    for name in WITHOUT_DEVICES:
        monkeypatch.delenv(name, raising=False)  # the program sets what it needs
    text = programs[test].read_text("utf-8")
    ended = run_fresh(programs[test])
    last = ended.stderr.partition("AssertionError: nnx invariant broken: ")[2].splitlines()
    assert last, ended.stderr
    assert SAYS[test] in last[1]
    head = " ".join(text.partition("import os")[0].replace("\n#", " ").split())
    assert f"{last[0]} {last[1].strip()}" in head, "the words of the message"
    assert all(peak in text for peak in re.findall(r"^peak \S+ \S+", ended.stdout, re.MULTILINE)), (
        "compiled as the check does"
    )
    assert "needs the wheel " in head
    assert text.count("\n") < 260


def test_a_program_ends_well_once_the_code_is_mended(programs, monkeypatch):
    for name, value in WITHOUT_DEVICES.items():
        monkeypatch.setenv(name, value)
    mended = {}
    for test, path in programs.items():
        text = path.read_text("utf-8")
        assert MENDED[test][0] in text, test
        mended[test] = path.with_suffix(".mended.py")
        mended[test].write_text(text.replace(*MENDED[test]), "utf-8")
    ended = run_programs(mended.values())
    assert {test: ended[path] for test, path in mended.items()} == dict.fromkeys(mended, ("", ""))


WITH_BOTH = """
@marked(target="v5e")
def test_both(nnx_wrap):
    nnx_wrap(bugs.call_twice)(bugs.ScanOverRemat(rngs()), *bugs.inputs_scan_over_remat())
"""


@TPU
def test_what_the_cpu_shows_as_well_needs_no_wheel(inner, pytester, monkeypatch):
    for name, value in WITHOUT_DEVICES.items():
        monkeypatch.setenv(name, value)
    result = inner(WITH_BOTH, "--nnx-nesting", "jit", subprocess=True)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*extra copies of its state on v5e*"])
    (path,) = Path(pytester.path).glob(".pytest_cache/d/nnxcheck/*/*.py")
    text = path.read_text("utf-8")
    assert "peak(executable)" in text
    assert not any(word in text for word in ("topologies", "TPU_", "needs the wheel"))
