"""Holds the peak that pytest-nnxcheck reports against the peak resident size that the kernel saw (Linux only).

``python benchmarks/peak_against_kernel.py`` prints a Markdown table and exits with 1 if a program is off by more than
5 %. Each program runs in a fresh process: it is compiled for abstract arguments, then the arguments are made, then the
kernel's high-water mark is reset, then the program runs once. The resident size just before the arguments were made is
what Python, jax and the compiler take, and is subtracted.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

TOLERANCE = 0.05
MIB = 1024**2
Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]
"""A function, the shapes of its arguments, the numbers of those that it donates."""


def matmul_chain() -> Program:
    """Six products; the intermediate results take turns in two buffers."""
    import jax.numpy as jnp

    def program(x: Any, w: Any) -> Any:
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x

    return program, (floats(262_144, 256), floats(256, 256)), ()


def convolution_chain() -> Program:
    """Ten convolutions of google/jax#926: arguments, output and two temporaries, 4.0 times the input."""
    import jax

    def program(x: Any, kernel: Any) -> Any:
        for _ in range(10):
            x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return x

    return program, (floats(16, 512, 512, 16), floats(3, 3, 16, 16)), ()


def convolution_chain_donated() -> Program:
    """The same with its input donated: 2.0 times the input."""
    program, shapes, _ = convolution_chain()
    return program, shapes, (0,)


def scan() -> Program:
    """A loop that returns a stack of what it computed."""
    import jax
    import jax.numpy as jnp

    def program(x: Any, w: Any) -> Any:
        def body(x: Any, _: None) -> tuple[Any, Any]:
            x = jnp.tanh(x @ w)
            return x, x

        return jax.lax.scan(body, x, None, length=8)

    return program, (floats(65_536, 256), floats(256, 256)), ()


def vmap() -> Program:
    """A batch of matrices, each with its own product."""
    import jax
    import jax.numpy as jnp

    def one(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.tanh(x @ w) @ w.T)

    return jax.vmap(one), (floats(8, 32_768, 256), floats(8, 256, 256)), ()


def gradient() -> Program:
    """The gradient of four layers: the activations are kept for the way back."""
    import jax
    import jax.numpy as jnp

    def loss(weights: Any, x: Any) -> Any:
        for layer in range(4):
            x = jnp.tanh(x @ weights[layer])
        return jnp.mean(x**2)

    return jax.grad(loss), (floats(4, 256, 256), floats(131_072, 256)), ()


def nnx_update() -> Program:
    """A Flax NNX model whose state is donated and returned, as the plugin runs it."""
    import jax
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: nnx.Linear(8192, 8192, use_bias=False, rngs=nnx.Rngs(0))))

    def program(state: Any, x: Any) -> Any:
        model = nnx.merge(graph, state)
        y = model(x)
        nnx.update(model, jax.tree.map(lambda leaf: leaf * 0.5, nnx.state(model)))
        return y, nnx.state(model)

    return program, (state, floats(64, 8192)), (0,)


def captured_constants() -> Program:
    """Weights captured by closure: the executable holds them."""
    import jax.numpy as jnp
    import numpy as np

    w = jnp.asarray(np.random.default_rng(0).random((256, 256 * 1024), np.float32))

    def program(x: Any) -> Any:
        return jnp.tanh(x + w)

    return program, (floats(256, 1),), ()


PROGRAMS = (
    matmul_chain,
    convolution_chain,
    convolution_chain_donated,
    scan,
    vmap,
    gradient,
    nnx_update,
    captured_constants,
)


def floats(*shape: int) -> Any:
    """The shape of an argument."""
    import jax
    import numpy as np

    return jax.ShapeDtypeStruct(shape, np.float32)


def resident(field: str) -> int:
    """``VmRSS`` (now) or ``VmHWM`` (its highest since the last reset), in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def filled(shape: Any) -> Any:
    """An argument whose pages are all touched."""
    import jax
    import numpy as np

    return jax.device_put(np.random.default_rng(0).random(shape.shape, np.float32))


def measure(name: str) -> dict[str, int]:
    """The peak by the compiler's figures and by the kernel's, bytes, of one program in this process."""
    import jax

    from pytest_nnxcheck.xla import buffers

    function, shapes, donated = next(program for program in PROGRAMS if program.__name__ == name)()
    compiled = jax.jit(function, donate_argnums=donated).lower(*shapes).compile()
    memory = buffers.read(compiled)
    gc.collect()
    before = resident("VmRSS")
    arguments = jax.block_until_ready(jax.tree.map(filled, shapes))
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    jax.block_until_ready(compiled(*arguments))
    # The constants came with the executable, hence before the arguments.
    kernel = resident("VmHWM") - before + memory.constants
    return {"arguments": memory.arguments, "constants": memory.constants, "peak": memory.peak, "kernel": kernel}


def in_fresh_process(name: str) -> dict[str, int]:
    """The same in a process of its own, where no other program left memory behind."""
    command = [sys.executable, __file__, name]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    figures: dict[str, int] = json.loads(done.stdout)
    return figures


def main() -> int:
    """Print the table; the exit status says whether every program agrees."""
    print(f"jax {version('jax')}, flax {version('flax')}, Python {sys.version.split()[0]}\n")
    print("| program | arguments, MiB | peak, MiB | kernel, MiB | difference |")
    print("|---|---|---|---|---|")
    worst = 0.0
    for program in PROGRAMS:
        figures = in_fresh_process(program.__name__)
        off = figures["kernel"] / figures["peak"] - 1
        worst = max(worst, abs(off))
        sizes = " | ".join(f"{figures[key] / MIB:.1f}" for key in ("arguments", "peak", "kernel"))
        print(f"| {program.__name__.replace('_', ' ')} | {sizes} | {off:+.1%} |", flush=True)
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    if sys.argv[1:]:
        json.dump(measure(sys.argv[1]), sys.stdout)
    else:
        sys.exit(main())
