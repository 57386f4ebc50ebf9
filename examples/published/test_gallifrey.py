"""gallifrey: a tree of kernels cannot be an argument of a jit, and two of them share arrays. docs/published.md tells the story."""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import pytest
from training import FORWARD

from pytest_nnxcheck import check

pytest.importorskip("gallifrey", reason="gallifrey is not installed")
KernelLibrary = importlib.import_module("gallifrey.kernels.library").KernelLibrary
TreeKernel = importlib.import_module("gallifrey.kernels.tree").TreeKernel

X = jnp.ones(1)


def kernel() -> Any:
    return TreeKernel(jnp.array([0, -1, -1]), KernelLibrary(), max_depth=1, num_datapoints=4)


def test_a_kernel_cannot_be_an_argument_of_a_jit() -> None:
    """Its sizes are Variables, which a transform hands over as tracers, and the call makes ints of them."""
    report = check(lambda kernel, x: kernel(x, x), kernel(), X, **FORWARD)
    assert report.verdict == "failed"
    assert "plain attributes: a trace has no value of a Variable" in " ".join(str(report).split())


def test_two_kernels_share_arrays() -> None:
    """A default argument of the constructor, which is one array for all of them, is a note."""
    report = check(
        lambda a, b, x: a.parameters.value + b.parameters.value + x,
        kernel(),
        kernel(),
        X,
        transforms="jit",
        styles="argument",
    )
    assert report.ok
    assert any("a.root_idx and b.root_idx share a buffer" in note for note in report.notes)
