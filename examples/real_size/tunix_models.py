"""Qwen3 8B and Llama 3.1 8B of google-tunix at full depth, over 16 chips: a step of adamw, a step of LoRA, the prefill of a cache, and decoding.

Run it with ``pytest examples/real_size/tunix_models.py --nnx-devices 16 --nnx-target v5e,v5p,h100``, with google-tunix installed. The
package shards its own parameters and activations, the latter on a TPU or GPU alone: the targets judge that branch. Nothing is allocated. The training
steps take minutes, since the package unrolls its layers.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

FSDP, TENSOR = 8, 2
BATCH, LENGTH = 16, 2048
FAMILIES = {"qwen3": ("Qwen3", "qwen3_8b"), "llama3": ("Llama3", "llama3p1_8b")}
Wrap = Callable[[Any], Callable[..., Any]]
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A subject and its arguments, abstract."""


def mesh_of_chips() -> jax.sharding.Mesh:
    """The mesh that the package's own sharding names."""
    return jax.make_mesh((FSDP, TENSOR), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def maker(family: str, **options: Any) -> Callable[[], Any]:
    """The constructor of a published model, with other options where its configuration has them."""
    module, (name, size) = importlib.import_module(f"tunix.models.{family}.model"), FAMILIES[family]
    config = getattr(module.ModelConfig, size)()
    fields = {field.name for field in dataclasses.fields(config)}
    options |= {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    config = dataclasses.replace(config, **{name: given for name, given in options.items() if name in fields})
    return lambda: getattr(module, name)(config, rngs=nnx.Rngs(0))


def rematerialized(family: str) -> Callable[[], Any]:
    """The same, with each layer under remat."""
    module = importlib.import_module(f"tunix.models.{family}.model")
    return maker(family, remat_config=module.RematConfig.DECODER)


def sharded(mesh: Any, *shape: int, dtype: Any = jnp.int32, axes: Any = ("fsdp",)) -> jax.ShapeDtypeStruct:
    """An input of one text or more on each row of the mesh."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*axes)))


def texts(mesh: Any) -> tuple[Any, ...]:
    """Tokens, positions and the mask of a batch of whole texts."""
    ids = sharded(mesh, BATCH, LENGTH)
    return ids, ids, sharded(mesh, BATCH, LENGTH, LENGTH, dtype=bool)


def step(model: Any, optimizer: Any, tokens: Any, positions: Any, mask: Any) -> Any:
    """A training step."""

    def loss_of(model: Any) -> Any:
        logits, _ = model(tokens, positions, None, mask)
        logits = logits[:, :-1].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, optimizer.wrt))(model)
    optimizer.update(model, gradients)
    return loss


def adamw(family: str, mesh: Any) -> Call:
    """A step of adamw on 16 texts of 2048 tokens."""

    def make() -> Any:
        model = rematerialized(family)()
        return model, nnx.Optimizer(model, optax.adamw(1e-5), wrt=nnx.Param)

    return step, (*nnx.eval_shape(make), *texts(mesh))


def lora(family: str, mesh: Any) -> Call:
    """The same of adapters alone, which qwix adds to all products of the layers, as the package's trainer does."""
    qwix = importlib.import_module("qwix")

    def make() -> Any:
        base = rematerialized(family)()
        provider = qwix.LoraProvider(module_path=".*(_proj|_einsum).*", rank=16, alpha=32.0)
        model = qwix.apply_lora_to_model(base, provider, **base.get_model_input(), rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)

    return step, (*nnx.eval_shape(make), *texts(mesh))


class WithCache(nnx.Module):
    """A model of the package with its cache, a dict of arrays, as state."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, nnx.Cache(cache)

    def __call__(self, tokens: Any, positions: Any, mask: Any) -> Any:
        logits, cache = self.model(tokens, positions, self.cache.get_value(), mask)
        self.cache.set_value(cache)
        return logits[:, -1]


def cached(family: str, mesh: Any) -> WithCache:
    """A model with a cache of all texts, cut over both axes of the mesh."""
    model = nnx.eval_shape(maker(family))
    heads, width = model.config.num_kv_heads, model.config.head_dim
    dtype = jax.tree.leaves(nnx.state(model, nnx.Param))[0].dtype
    whole = sharded(mesh, BATCH, LENGTH, heads, width, dtype=dtype, axes=("fsdp", None, "tp"))
    layer = {"k": whole, "v": whole, "end_index": sharded(mesh, BATCH)}
    return WithCache(model, {f"layer_{number}": dict(layer) for number in range(model.config.num_layers)})


def decode(family: str, mesh: Any) -> Call:
    """One token of each text."""
    one = sharded(mesh, BATCH, 1)
    return cached(family, mesh), (one, one, sharded(mesh, BATCH, 1, LENGTH, dtype=bool))


def prefill(family: str, mesh: Any) -> Call:
    """All tokens of each text, into an empty cache."""
    return cached(family, mesh), texts(mesh)


CALLS = {"adamw": adamw, "lora": lora, "prefill": prefill, "decode": decode}


@pytest.fixture
def mesh() -> Iterator[Any]:
    pytest.importorskip("tunix", reason="google-tunix is not installed")
    mesh = mesh_of_chips()
    with jax.set_mesh(mesh), mesh:  # the package asks for the older kind
        yield mesh


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.nnx_invariants(devices=16, transforms="jit", styles="functional", sweep="singles", max_examples=0)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_sixteen_chips(nnx_wrap: Wrap, mesh: Any, family: str, call: str) -> None:
    subject, args = CALLS[call](family, mesh)
    nnx_wrap(subject)(*args)
