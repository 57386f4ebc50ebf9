"""Llama 3.1 8B of MaxText at full depth, over 16 chips: a step of adamw. Its layers are one scan over remat.

Run it with ``pytest examples/real_size/maxtext_models.py --nnx-devices 16 --nnx-target v5e``, with MaxText and its requirements installed. Nothing
is allocated. MaxText asks the devices of its mesh what they are, and those are of the CPU: its attention is the plain one, not the kernel for TPUs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH, LENGTH = 16, 2048
CONFIG = {
    "model_name": "llama3.1-8b",
    "weight_dtype": "bfloat16",
    "ici_fsdp_parallelism": 8,
    "ici_tensor_parallelism": 2,
    "per_device_batch_size": 1,
    "max_target_length": LENGTH,
    "enable_checkpointing": False,
    "skip_jax_distributed_system": True,
}
Wrap = Callable[[Any], Callable[..., Any]]


def configured(**options: Any) -> Any:
    """The package's own configuration, with other values for some of its names."""
    package = pytest.importorskip("maxtext", reason="MaxText is not installed")
    given = [f"{name}={value}" for name, value in (CONFIG | options).items()]
    return importlib.import_module("maxtext.configs.pyconfig").initialize(
        ["", str(Path(package.__file__).parent / "configs" / "base.yml"), *given]
    )


def sharded(make: Callable[[], Any], mesh: Any) -> Any:
    """What a function makes, abstract, cut as the package cuts it."""
    sharding = importlib.import_module("maxtext.utils.sharding")
    graph, state = nnx.split(nnx.eval_shape(make))
    cuts = sharding.nnx_construct_named_sharding(state, mesh)
    return nnx.merge(
        graph, jax.tree.map(lambda a, cut: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=cut), state, cuts)
    )


def step(model: Any, optimizer: Any, tokens: Any, positions: Any, segments: Any) -> Any:
    """A training step."""

    def loss_of(model: Any) -> Any:
        logits = model(tokens, positions, decoder_segment_ids=segments, enable_dropout=False)
        logits = logits[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.nnx_invariants(devices=16, transforms="jit", styles="functional", sweep="singles", max_examples=0)
def test_on_sixteen_chips(nnx_wrap: Wrap) -> None:
    config = configured()
    creation = importlib.import_module("maxtext.utils.model_creation_utils")
    devices = importlib.import_module("maxtext.utils.maxtext_utils").create_device_mesh(config)
    mesh = jax.sharding.Mesh(devices, config.mesh_axes)

    def make() -> Any:
        model = creation.get_nnx_create_model_fn(config, mesh)()
        return model, nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)

    ids = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))
    with jax.set_mesh(mesh), nnx.logical_axis_rules(config.logical_axis_rules):
        nnx_wrap(step)(*sharded(make, mesh), ids, ids, ids)
