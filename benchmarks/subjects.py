"""What the benchmarks check, from one linear layer to the training step of a transformer, and models that grow by layers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.children import ROOT

sys.path.insert(0, str(ROOT / "examples"))
from language_model import MISTRAL_7B, Config
from language_model import Decoder as LanguageModel
from model import Block as ExampleBlock

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A subject and its arguments."""

NARROW = replace(MISTRAL_7B, vocabulary=32, width=4, head_width=2, hidden=14, dtype=jnp.float32)
"""The language model of the examples at a thousandth of its width: as many layers and heads, and the same program."""


class MLP(nnx.Module):
    """Three linear layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.a = nnx.Linear(16, 32, rngs=rngs)
        self.b = nnx.Linear(32, 32, rngs=rngs)
        self.c = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 16) to logits (batch, 4)."""
        return self.c(nnx.relu(self.b(nnx.relu(self.a(x)))))


class TransformerBlock(nnx.Module):
    """Attention and a feed-forward layer, each after a LayerNorm and with a residual connection."""

    def __init__(self, width: int, rngs: nnx.Rngs, *, decode: bool = False) -> None:
        self.before_attention = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, decode=decode, rngs=rngs)
        self.before_feed_forward = nnx.LayerNorm(width, rngs=rngs)
        self.grow = nnx.Linear(width, 4 * width, rngs=rngs)
        self.shrink = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
        """(batch, length, width) to the same shape."""
        x = x + self.attention(self.before_attention(x), mask=mask)
        return x + self.shrink(nnx.gelu(self.grow(self.before_feed_forward(x))))


class Transformer(nnx.Module):
    """A language model of width 32, its layers written out one after the other."""

    def __init__(self, rngs: nnx.Rngs, *, layers: int = 4, decode: bool = False) -> None:
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.blocks = node_list([TransformerBlock(32, rngs, decode=decode) for _ in range(layers)])
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Ids (batch, length) to logits (batch, length, 64). A cache masks what is still to come."""
        mask = nnx.make_causal_mask(tokens) if tokens.shape[1] > 1 else None
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Residual(nnx.Module):
    """One feed-forward layer with a residual connection."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 8) to the same shape."""
        return x + nnx.gelu(self.linear(self.norm(x)))


class Unrolled(nnx.Module):
    """Layers in a list, called in a Python loop: the program grows with them."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        self.layers = node_list([Residual(rngs) for _ in range(layers)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 8) to the same shape."""
        for layer in self.layers:
            x = layer(x)
        return x


class Scanned(nnx.Module):
    """The same layers stacked, in one `nnx.scan`: the program stays as it is, its arrays grow."""

    def __init__(self, layers: int, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_layer(rngs: nnx.Rngs) -> Residual:
            return Residual(rngs)

        self.layers = make_layer(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, 8) to the same shape."""

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: Residual) -> jax.Array:
            return layer(x)

        return forward(x, self.layers)


def node_list(nodes: list[Any]) -> Any:
    """A list of graph nodes: `nnx.List` from flax 0.12 on, a plain list before."""
    return getattr(nnx, "List", list)(nodes)


def updated(model: Any, optimizer: Any, loss_of: Callable[[Any], jax.Array]) -> jax.Array:
    """The loss, and one update as the installed flax spells it."""
    loss: jax.Array
    loss, gradients = nnx.value_and_grad(loss_of)(model)
    if hasattr(optimizer, "model"):  # flax 0.10: the optimizer holds the model
        optimizer.update(gradients)
    else:
        optimizer.update(model, gradients)
    return loss


def mlp_step(model: MLP, optimizer: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """One step of adam on a batch."""

    def loss_of(model: MLP) -> jax.Array:
        loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()
        return loss

    return updated(model, optimizer, loss_of)


def lm_step(model: Transformer, optimizer: Any, tokens: jax.Array) -> jax.Array:
    """One step of adam on the loss of the next token."""

    def loss_of(model: Transformer) -> jax.Array:
        logits, wanted = model(tokens[:, :-1]), tokens[:, 1:]
        loss: jax.Array = optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean()
        return loss

    return updated(model, optimizer, loss_of)


def numbers(*shape: int) -> jax.Array:
    """Inputs that are neither constant nor zero."""
    return jax.random.normal(jax.random.key(1), shape, jnp.float32)


def tokens() -> jax.Array:
    """Two texts of 17 ids."""
    return jnp.arange(34).reshape(2, 17) % 64


def training(step: Callable[..., Any], model: nnx.Module, batch: Any, rule: Any = optax.adam) -> Call:
    """A training step with adam, or another rule."""
    return step, (model, nnx.Optimizer(model, rule(1e-3), wrt=nnx.Param), batch)


def decoding() -> Call:
    """One token for two layers, each with a cache for 16."""
    model = Transformer(nnx.Rngs(0), layers=2, decode=True)
    for block in model.blocks:
        block.attention.init_cache((2, 16, 32))
    return model, (jnp.zeros((2, 1), jnp.int32),)


def qwen3() -> Call:
    """Two small layers of Qwen3 as google-tunix has it."""
    published = importlib.import_module("tunix.models.qwen3.model")
    config = published.ModelConfig(
        num_layers=2,
        vocab_size=64,
        embed_dim=16,
        hidden_dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
        norm_eps=1e-6,
        rope_theta=10_000,
        use_tied_embedding=True,
    )
    ids = jnp.arange(12).reshape(2, 6)
    positions = jnp.broadcast_to(jnp.arange(6), (2, 6))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((6, 6), bool)), (2, 6, 6))
    return published.Qwen3(config, rngs=nnx.Rngs(0)), (ids, positions, None, mask)


def language_model(config: Config) -> Call:
    """The forward call of a text of 4096 tokens, abstract."""
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    return model, (jax.ShapeDtypeStruct((1, 4096), jnp.int32),)


def report_4871() -> Call:
    """google/flax#4871 at its real size, with the first call that makes it copy 20 GB."""
    sys.path.insert(0, str(ROOT / "examples" / "real_size"))
    import flax_4871

    run, state = flax_4871.program(call_first=True)
    return run, (state, flax_4871.NUMBER)


SUBJECTS: dict[str, Callable[[], Call]] = {
    "linear": lambda: (nnx.Linear(8, 4, rngs=nnx.Rngs(0)), (numbers(3, 8),)),
    "batchnorm": lambda: (nnx.BatchNorm(4, rngs=nnx.Rngs(0)), (numbers(3, 4),)),
    "block": lambda: (ExampleBlock(width=64, heads=4, rngs=nnx.Rngs(0)), (jnp.ones((8, 16, 64)),)),
    "mlp_step": lambda: training(mlp_step, MLP(nnx.Rngs(0)), {"x": numbers(8, 16), "y": jnp.arange(8) % 4}),
    "lm_step": lambda: training(lm_step, Transformer(nnx.Rngs(0)), tokens()),
    "decode": decoding,
    "qwen3": qwen3,
    "lm8_step": lambda: training(lm_step, Transformer(nnx.Rngs(0), layers=8), tokens(), optax.adamw),
    "7 billion parameters": lambda: language_model(replace(MISTRAL_7B, dtype=jnp.float32)),
    "a thousandth of the width": lambda: language_model(NARROW),
    "flax#4871": report_4871,
}
GROWING: dict[str, type[Unrolled | Scanned]] = {"unrolled": Unrolled, "scanned": Scanned}


def make(name: str) -> Call:
    """A fresh subject by name; ``unrolled 8`` is one of eight layers."""
    kind, _, layers = name.partition(" ")
    if kind in GROWING:
        return GROWING[kind](int(layers), nnx.Rngs(0)), (numbers(3, 8),)
    return SUBJECTS[name]()
