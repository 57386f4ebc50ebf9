"""Draws the pictures of docs/memory.md: the live bytes of public reports at their real size, and of a decoder's training step. Nothing is allocated.

``python benchmarks/pictures.py FOLDER NAME ...`` writes a NAME-COMPILER.svg for each, with NAME one of flax_4871 (jax 0.5.3 and flax 0.10.2), jax_926 and
decoder_step, which asks the compiler of an H100 as well: see docs/targets.md.
"""

from __future__ import annotations

import argparse
import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from pytest_nnxcheck import Report, check

EXAMPLES = Path(__file__).parents[1] / "examples" / "real_size"
VOCABULARY, WIDTH, LENGTH, BATCH, LAYERS = 50_304, 768, 1024, 8, 4
Drawn = Iterator[tuple[str, str]]
"""Compilers and SVGs."""


class Block(nnx.Module):
    """A layer of a small decoder."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(12, WIDTH, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        x += self.down(nnx.gelu(self.up(self.norms[1](x))))
        return x


class Decoder(nnx.Module):
    """The size of GPT-2, with a third of its layers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: jax.Array = self.embed.attend(x)
        return logits


def train_step(model: Decoder, optimizer: nnx.Optimizer[Decoder], tokens: jax.Array) -> Any:
    """One step of AdamW on the next token."""

    def loss_of(model: Decoder) -> Any:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


def named(example: str) -> dict[str, Any]:
    """Run the file of an example, and give what it defines."""
    return runpy.run_path(str(EXAMPLES / f"{example}.py"))


def drawn(report: Report) -> Drawn:
    """The picture on the CPU, and on each target."""
    (outcome,) = report.outcomes
    yield "cpu", outcome.picture()
    for on in outcome.evidence.targets if outcome.evidence else ():
        if on.picture:
            yield on.target, on.picture.svg()


def of_flax_4871() -> Drawn:
    """A scan over calls of a model that scans its layers, after a first call."""
    example = named("flax_4871")
    run, state = example["program"](call_first=True)
    return drawn(check(run, state, example["NUMBER"], nesting="jit", memory_budget="25GB"))


def of_jax_926() -> Drawn:
    """Ten convolutions of an input that is kept."""
    example = named("jax_926")
    return drawn(
        check(example["ten_convolutions"], example["INPUT"], nesting="jit", donate="none", memory_budget="5GiB")
    )


def of_decoder_step() -> Drawn:
    """A training step whose peak is the softmax of its logits."""
    model = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0)))
    optimizer = nnx.eval_shape(lambda: nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param))
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return drawn(check(train_step, model, optimizer, tokens, nesting="jit", target="h100"))


PROGRAMS: dict[str, Callable[[], Drawn]] = {
    "flax_4871": of_flax_4871,
    "jax_926": of_jax_926,
    "decoder_step": of_decoder_step,
}


def main() -> None:
    """Draw the named programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+", choices=[*PROGRAMS])
    chosen = parser.parse_args()
    for name in chosen.names:
        for compiler, svg in PROGRAMS[name]():
            (chosen.folder / f"{name}-{compiler}.svg").write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
