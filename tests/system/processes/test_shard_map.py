"""shard_map over several simulated devices: the state is put on all of them, keeps its buffers there, and comes back."""

from __future__ import annotations

import subprocess
import sys

import jax
import pytest
from checking import LACKING, call, text
from flax import nnx
from healthy import HEALTHY, numbers
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DEVICES = 4

on_four_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="runs in the process that has four devices")


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="this is the process that has four devices")
@pytest.mark.parametrize("which", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_this_file_passes_on_four_devices(which):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which]
    done = subprocess.run(
        [*command, "--nnx-devices", str(DEVICES), __file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"{15 if which == 'not full' else 14} passed, 1 skipped" in done.stdout


def leaves(model):
    return jax.tree.leaves(nnx.state(model))


@on_four_devices
@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "batch_norm_train",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("dropout", "attention_decoding")),
    ],
)
@pytest.mark.parametrize(
    "nesting",
    [
        "shard_map",
        "shard_map[functional]",
        "jit > shard_map",
        "jit[functional] > shard_map[functional]",
        "jit > shard_map[functional] > scan",
        "jit > vmap > shard_map[functional]",
        "shard_map[functional] > jit > cond",
    ],
)
def test_state_is_put_on_every_device_and_comes_back(name, nesting):
    case = HEALTHY[name]()
    before = [leaf.sharding for leaf in leaves(case.subject)]
    found = call(case.subject, *case.args, nesting=nesting)
    if LACKING and "shard_map[functional]" not in nesting:
        assert found.outcome.reason.endswith("has no nnx.shard_map")
    else:
        assert found.outcome.verdict == "held", text(found)
    assert [leaf.sharding for leaf in leaves(case.subject)] == before


@on_four_devices
def test_what_is_cut_into_parts_already_is_rejected():
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), numbers((8, 8))
    cut = NamedSharding(Mesh(jax.devices(), ("data",)), P("data"))
    outcome = call(model, jax.device_put(x, cut), nesting="jit > shard_map[functional]").outcome
    assert outcome.unfit
    assert outcome.reason.startswith("shard_map[functional] puts the state whole on each device, and ")
    assert outcome.reason.endswith(" is sharded over several")
    whole = jax.device_put(x, NamedSharding(cut.mesh, P()))
    assert call(model, whole, nesting="jit > shard_map[functional]").outcome.verdict == "held"
