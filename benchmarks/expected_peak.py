"""The memory rule's calibration: the peak of healthy models under nestings, as a multiple of the expected peak.

Run from a checkout: ``python benchmarks/expected_peak.py [draws [further]]``, ``further`` to have the further transforms in the nestings too.
Prints one row a model, and a last row over all; exits with 1 if a nesting passes 1.5 times its expected peak. Figures come from the
compiler: they repeat.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.checks.check_call import check_call
from pytest_nnxcheck.core.catalogue import FURTHER, STYLES, TRANSFORMS
from pytest_nnxcheck.core.nesting import Layer, Nesting, impossible
from pytest_nnxcheck.core.settings import merge, parse_given
from pytest_nnxcheck.engine.example import Example

WIDTH = 256
BATCH = jnp.ones((16, WIDTH))
SEQUENCE = jnp.ones((2, 32, WIDTH))
IMAGE = jnp.ones((2, 32, 32, 16))
LIMIT = 1.5

MODELS: dict[str, Callable[[nnx.Rngs], tuple[nnx.Module, Any]]] = {
    "Linear": lambda rngs: (nnx.Linear(WIDTH, WIDTH, rngs=rngs), BATCH),
    "Einsum": lambda rngs: (nnx.Einsum("bi,ij->bj", (WIDTH, WIDTH), rngs=rngs), BATCH),
    "Conv": lambda rngs: (nnx.Conv(16, 64, (3, 3), rngs=rngs), IMAGE),
    "Embed": lambda rngs: (nnx.Embed(4096, 64, rngs=rngs), jnp.ones((4, 64), jnp.int32)),
    "LayerNorm": lambda rngs: (nnx.LayerNorm(WIDTH, rngs=rngs), SEQUENCE),
    "GroupNorm": lambda rngs: (nnx.GroupNorm(WIDTH, num_groups=8, rngs=rngs), SEQUENCE),
    "BatchNorm": lambda rngs: (nnx.BatchNorm(16, rngs=rngs), IMAGE),
    "Dropout": lambda rngs: (nnx.Dropout(0.5, rngs=rngs), SEQUENCE),
    "attention": lambda rngs: (nnx.MultiHeadAttention(8, WIDTH, decode=False, rngs=rngs), SEQUENCE),
    "GRU": lambda rngs: (nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs)), SEQUENCE),
    "LoRA": lambda rngs: (nnx.LoRALinear(WIDTH, WIDTH, lora_rank=8, rngs=rngs), BATCH),
    "MLP": lambda rngs: (mlp(rngs), BATCH),
}


def mlp(rngs: nnx.Rngs) -> nnx.Sequential:
    """Two layers with normalization and dropout: a call that changes its state."""
    return nnx.Sequential(
        nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs),
        nnx.BatchNorm(4 * WIDTH, rngs=rngs),
        nnx.Dropout(0.1, rngs=rngs),
        nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs),
    )


def nestings(draws: int, transforms: tuple[str, ...]) -> Iterator[Nesting]:
    """Every pair under a plain and a functional jit, then drawn nestings of three layers and more."""
    layers = [Layer(transform, style) for transform in transforms for style in STYLES[:2]]
    roots = [Layer("jit"), Layer("jit", "functional")]
    for root in roots:
        yield from (Nesting((root, layer)) for layer in layers)
    source = random.Random(0)
    drawn = (Nesting((source.choice(roots), *source.choices(layers, k=source.choice([2, 3])))) for _ in range(draws))
    yield from (nesting for nesting in drawn if not impossible(nesting))


def ratios(
    make: Callable[[nnx.Rngs], tuple[nnx.Module, Any]], draws: int, transforms: tuple[str, ...]
) -> list[tuple[float, str]]:
    """Peak over expected peak of each nesting of one model."""
    example = Example()
    settings = merge(parse_given({"memory_budget": "1000x"}, str))
    shares = []
    for nesting in nestings(draws, transforms):
        module, x = make(nnx.Rngs(0))
        outcome = check_call(module, (x,), {}, nesting=nesting, settings=settings, example=example).outcome
        if outcome.unfit:
            continue
        if outcome.verdict != "held" or outcome.peak is None or outcome.budget is None:
            raise SystemExit(f"{type(module).__name__} under {nesting}: {outcome}")
        shares.append((1000 * outcome.peak / outcome.budget, str(nesting)))
    return shares


def row(name: str, shares: list[tuple[float, str]]) -> str:
    """One row of the table."""
    values = sorted(value for value, _ in shares)
    worst, nesting = max(shares)
    p90 = values[int(0.9 * (len(values) - 1))]
    return f"| {name} | {len(values)} | {statistics.median(values):.2f} | {p90:.2f} | {worst:.2f} | `{nesting}` |"


def main() -> int:
    """Print the table."""
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    transforms = (*TRANSFORMS, *FURTHER) if "further" in sys.argv else TRANSFORMS
    print(f"jax {jax.__version__}\n")
    print("| model | nestings | median | p90 | max | at |")
    print("|---|---|---|---|---|---|")
    every: list[tuple[float, str]] = []
    for name, make in MODELS.items():
        shares = ratios(make, draws, transforms)
        every += shares
        print(row(name, shares), flush=True)
    print(row("all", every))
    return int(max(every)[0] > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
