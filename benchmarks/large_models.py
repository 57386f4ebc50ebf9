"""The peaks of a language model of 7 billion parameters, in each form of its scan over rematerialized layers.

``python benchmarks/large_models.py [dtype] [depth]`` (bfloat16, 32 layers) prints a Markdown table. The model is
examples/language_model.py; nothing of it is allocated. Each row is what `nnx.jit` with its state donated holds.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import nnx

from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.peak import Memory
from pytest_nnxcheck.engine import example
from pytest_nnxcheck.engine.observe import observe
from pytest_nnxcheck.subject.profile import profile
from pytest_nnxcheck.subject.subject import bind

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from language_model import MISTRAL_7B, Config, Decoder, Form, train_step, with_adam

GB = 1e9
LENGTH = 4096
GRAPH_UPDATES = "graph_updates" in inspect.signature(nnx.remat).parameters
FORMS: tuple[Form, ...] = ("remat", "no_graph_updates", "functional")
NAMES = {
    "remat": "`nnx.scan` over `nnx.remat`",
    "no_graph_updates": "... with `graph_updates=False`",
    "functional": "`jax.lax.scan` over `jax.checkpoint`",
}
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A subject and its arguments, abstract."""


@dataclass(frozen=True)
class Row:
    """One program: its figures in bytes, and the seconds of tracing, lowering and compiling."""

    call: str
    form: Form
    state: int
    memory: Memory
    seconds: float

    def markdown(self) -> str:
        """The row as the docs show it, in GB (10^9 bytes)."""
        used = self.memory
        sizes = (self.state, used.arguments, used.outputs, used.temporaries, used.aliased, used.peak)
        figures = " | ".join(f"{size / GB:.2f}" for size in sizes)
        return f"| {self.call} | {NAMES[self.form]} | {figures} | {self.seconds:.1f} |"


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of tokens."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def decoder(config: Config, cache: tuple[int, int] | None = None) -> Decoder:
    """The model without values."""
    return nnx.eval_shape(lambda: Decoder(config, cache=cache, rngs=nnx.Rngs(0)))


def forward(config: Config) -> Call:
    """Logits of one text of 4096 tokens."""
    return decoder(config), (integers(1, LENGTH),)


def decoding(config: Config, batch: int) -> Call:
    """One token of each text, with a cache of 4096 tokens."""
    return decoder(config, (batch, LENGTH)).decode, (integers(batch), integers())


def training(config: Config) -> Call:
    """One step of adam on one text of 4096 tokens."""
    model, optimizer = nnx.eval_shape(lambda: with_adam(config, nnx.Rngs(0)))
    return train_step, (model, optimizer, integers(1, LENGTH + 1))


CALLS: dict[str, tuple[Callable[[Config], Call], str]] = {
    "forward": (forward, "jit"),
    "forward, two calls": (forward, "jit > call_first"),
    "decoding, batch of 1": (lambda config: decoding(config, 1), "jit"),
    "decoding, batch of 8": (lambda config: decoding(config, 8), "jit"),
    "train step": (training, "jit"),
}


def measure(name: str, config: Config) -> Row:
    """Compile one program."""
    make, nesting = CALLS[name]
    function, args = make(config)
    started = time.perf_counter()
    subject = bind(function, args, {})
    facts = profile(subject)
    observation = observe(example.Call(subject, Nesting.parse(nesting), profile=facts), Nesting.parse(nesting))
    seconds = time.perf_counter() - started
    if observation.memory is None:
        raise RuntimeError(f"{name}, {config.form}: {observation.error}")
    return Row(name, config.form, facts.state.bytes, observation.memory, seconds)


def rows(config: Config) -> Iterator[Row]:
    """Every call in every form that the installed flax has."""
    for name in CALLS:
        for form in FORMS:
            if form != "no_graph_updates" or GRAPH_UPDATES:
                yield measure(name, replace(config, form=form))


def resident() -> float:
    """The highest resident size of this process, as the kernel counts it, in GB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / GB


def main(dtype: str = "bfloat16", depth: str = "32") -> None:
    """Print the table."""
    print(f"jax {jax.__version__}, flax {flax.__version__}, Python {sys.version.split()[0]}, {dtype}, {depth} layers\n")
    print("| call | form | state | arguments | outputs | temporaries | aliased | peak, GB | seconds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows(replace(MISTRAL_7B, dtype=jnp.dtype(dtype), depth=int(depth))):
        print(row.markdown(), flush=True)
    print(f"\nHighest resident size of this process: {resident():.2f} GB")


if __name__ == "__main__":
    main(*sys.argv[1:])
