"""Mistral 7B of examples/language_model.py on one chip, and cut over the devices of a slice: does it fit, and how many chips does a step need?"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.on_targets.rows import Row, measured

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from language_model import MISTRAL_7B, Config, Decoder, train_step, with_adam

CHIPS = "v5e,v5p,h100,h200"
SLICES = {"v5e:4x4": 16, "h100:8": 8}
"""The targets of the sharded step, and their devices."""
TEXT, TEXT_OF_A_DEVICE = 4096, 2048
"""Tokens of a text on one chip, and of the one text of each device of a slice."""
SMALL = 2**16
"""Elements of a leaf that every device keeps whole."""
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A subject and its arguments, abstract."""


def tokens(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of tokens."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def forward(config: Config) -> Call:
    """Logits of one text."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))), (tokens(1, TEXT),)


def decoding(config: Config) -> Call:
    """One token, with a cache of one text."""
    decoder = nnx.eval_shape(lambda: Decoder(config, cache=(1, TEXT), rngs=nnx.Rngs(0)))
    return decoder.decode, (tokens(1), tokens())


def step(config: Config) -> Call:
    """A step of adam on one text."""
    return train_step, (*nnx.eval_shape(lambda: with_adam(config, nnx.Rngs(0))), tokens(1, TEXT + 1))


ON_ONE_CHIP: dict[str, Callable[[Config], Call]] = {
    "forward, 4096 tokens": forward,
    "one token, cache of 4096": decoding,
    "step of adam, 4096 tokens": step,
}


def rows(config: Config = MISTRAL_7B) -> Iterator[Row]:
    """The programs on one chip, then the step of adam on the slices for which jax simulates enough devices."""
    for name, make in ON_ONE_CHIP.items():
        function, args = make(config)
        yield measured(name, function, args, CHIPS)
    for target, devices in SLICES.items():
        mesh = Mesh(jax.devices()[:devices], ("fsdp",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh):
            function, args = sharded_step(config, mesh)
            name = f"step of adam over {devices} devices, 2048 tokens each"
            yield measured(name, function, args, target, devices=devices)


def sharded_step(config: Config, mesh: Mesh) -> Call:
    """A step of adam whose state is cut over all devices of the mesh, and stays so: a compiler gives small leaves another sharding."""
    model, optimizer = nnx.eval_shape(lambda: with_adam(config, nnx.Rngs(0)))
    nnx.update((model, optimizer), jax.tree.map(lambda leaf: cut(leaf, mesh), nnx.state((model, optimizer))))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, nnx.state((model, optimizer)))

    def step(model: Decoder, optimizer: Any, tokens: jax.Array) -> Any:
        loss = train_step(model, optimizer, tokens)
        state = nnx.state((model, optimizer))
        nnx.update((model, optimizer), jax.lax.with_sharding_constraint(state, shardings))
        return loss

    texts = NamedSharding(mesh, P("fsdp"))
    shape = (mesh.size, TEXT_OF_A_DEVICE + 1)
    return step, (model, optimizer, jax.ShapeDtypeStruct(shape, jnp.int32, sharding=texts))


def cut(leaf: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The leaf, cut along the largest axis that all devices divide."""
    axes = [(size, axis) for axis, size in enumerate(leaf.shape) if size % mesh.size == 0]
    spec: list[str | None] = [None] * len(leaf.shape)
    if axes and math.prod(leaf.shape) >= SMALL:
        spec[max(axes)[1]] = "fsdp"
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P(*spec)))
