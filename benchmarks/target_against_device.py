"""Compares what the compiler says of a GPU that is not there with what the GPU itself says.

``python -m benchmarks.target_against_device [--target h100] [--json PATH]`` prints a Markdown table; with a path it keeps the
figures there and the table beside them. Six NNX programs run in two fresh processes each: one has the CPU alone and compiles
for the target, the other compiles for the GPU, and runs the program once. The programs of the other benchmarks of targets are
compiled alone, all in two processes. It takes at most nine minutes. Without a GPU the table has the figures of the target alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.on_targets import one_chip, programs
from benchmarks.on_targets.plain import functional
from pytest_nnxcheck.compat import targets
from pytest_nnxcheck.core.chips import BY_NAME, parse_target
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.engine.host_memory import OnHost
from pytest_nnxcheck.engine.on_targets import with_most, with_totals
from pytest_nnxcheck.jaxprs.copies import TracedProgram
from pytest_nnxcheck.xla.hlo import module_of

KIB, MIB = 2**10, 2**20
SAME, ALIGNED = 16 * KIB, KIB
"""The bytes by which two peaks may differ and count as the same; those by which the device aligns its buffers."""
SIDES = ("target", "device")
SECONDS, OF_ONE, OF_OTHERS = 340.0, 100.0, 180.0
"""For all programs that run, for one of them, and for those that are only compiled."""
PACKAGES = "jax jaxlib jax-cuda12-pjrt jax-cuda13-pjrt flax optax".split()
WITHOUT_GPU = {
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}
WITH_GPU = {"JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
"""Without a pool of memory the allocator's peak is the program's."""
Program = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its abstract arguments; the first is donated, and comes back."""


# --- programs


class Block(nnx.Module):
    """A block of a transformer."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(width // 128, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Stack(nnx.Module):
    """A scan over rematerialized layers."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs) -> None:
        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Module:
            return make(rngs)

        self.layers = layers(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: Any) -> Any:
            return nnx.remat(type(layer).__call__)(layer, x)

        y: jax.Array = forward(x, self.layers)
        return y


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an argument."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def called(make: Callable[[nnx.Rngs], Any], calls: int, x: Any) -> Program:
    """Calls of a model, one after the other, in one program."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))

    def run(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        for _ in range(calls):
            x = model(x)
        return nnx.state(model), x

    return run, (state, x)


def trained(make: Callable[[nnx.Rngs], Any], x: Any) -> Program:
    """A step of adam on a mean of squares."""

    def build() -> Any:
        model = make(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    graphdef, state = nnx.split(nnx.eval_shape(build))

    def step(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graphdef, state)
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return step, (state, x)


def mlp(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(nnx.Linear(4096, 16384, rngs=rngs), nnx.relu, nnx.Linear(16384, 4096, rngs=rngs))


def convolutions(rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(*(nnx.Conv(64, 64, (3, 3), rngs=rngs) for _ in range(10)))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "linear, 10 calls": lambda: called(lambda rngs: nnx.Linear(8192, 8192, rngs=rngs), 10, floats(8192, 8192)),
    "stack of remat, 3 calls": lambda: called(
        lambda rngs: Stack(lambda rngs: nnx.Linear(4096, 4096, rngs=rngs), 16, rngs), 3, floats(256, 4096)
    ),
    "mlp, step of adam": lambda: trained(mlp, floats(8192, 4096)),
    "10 convolutions": lambda: called(convolutions, 1, floats(64, 256, 256, 64)),
    "transformer, step of adam": lambda: trained(
        lambda rngs: Stack(lambda rngs: Block(2048, rngs), 8, rngs), floats(4, 1024, 2048)
    ),
    "attention block": lambda: called(lambda rngs: Block(2048, rngs), 1, floats(8, 1024, 2048)),
}
OTHERS = {**one_chip.PROGRAMS, **programs.PROGRAMS}
"""The programs of the other benchmarks of targets."""


# --- in the processes


def on_target(program: Program, target: str) -> dict[str, Any]:
    """The figures of a program for a target, as the plugin gets them."""
    function, arguments = program
    jitted = jax.jit(function, donate_argnums=0, keep_unused=True)
    donated = tuple(range(len(jax.tree.leaves(arguments[0]))))
    there = parse_target(target)
    flags = [number in donated for number, _ in enumerate(jax.tree.leaves(arguments))]
    traced = TracedProgram.of(jitted.trace(*arguments).jaxpr, jax.tree.leaves(arguments), flags)
    compiled = targets.compiled_for(there, targets.lowered_for(there, None, jitted, arguments, donated))
    module = module_of(compiled)
    on_host = OnHost.of(traced, module)
    facts = with_most(with_totals(OnTarget(target), compiled, 0, on_host), module, on_host)
    if facts.split is None:
        return {"error": "the compiler gives no totals"}
    return asdict(facts.split) | {"peak": facts.peak, "most": facts.most}


def compiled_on_device(program: Program) -> tuple[Any, dict[str, Any]]:
    """A program that the GPU of jax compiles, and its figures."""
    function, arguments = program
    compiled = jax.jit(function, donate_argnums=0, keep_unused=True).lower(*arguments).compile()
    totals: Any = compiled.memory_analysis()
    sizes = {
        "arguments": totals.argument_size_in_bytes,
        "outputs": totals.output_size_in_bytes,
        "temporaries": totals.temp_size_in_bytes,
        "aliased": totals.alias_size_in_bytes,
    }
    sizes["peak"] = sizes["arguments"] + sizes["outputs"] + sizes["temporaries"] - sizes["aliased"]
    return compiled, sizes


def on_device(program: Program) -> dict[str, Any]:
    """The figures of a program on the GPU that jax has, and its allocator's peak while the program runs once."""
    device = jax.devices("gpu")[0]
    compiled, sizes = compiled_on_device(program)
    values = jax.block_until_ready(jax.tree.map(filled, program[1]))
    before = device.memory_stats()
    jax.block_until_ready(compiled(*values))
    after = device.memory_stats()
    return sizes | {
        "in_use_before": before["bytes_in_use"],
        "peak_before": before["peak_bytes_in_use"],
        "peak_in_use": after["peak_bytes_in_use"],
        "limit": after.get("bytes_limit"),
    }


def of_others(figures: Callable[[Program], dict[str, Any]]) -> None:
    """Print the figures of each program that is only compiled, one line each."""
    for name, make in OTHERS.items():
        with jax.enable_x64(name in one_chip.IN_DOUBLE):
            try:
                found = figures(functional(*make()))
            except Exception as error:  # noqa: BLE001 - jax and a compiler refuse in many ways
                found = {"error": " ".join(str(error).split())[:200] or type(error).__name__}
        print(json.dumps({"program": name, **found}), flush=True)


def filled(leaf: Any) -> Any:
    """A value for an argument."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), leaf.shape) if leaf.shape else jax.random.key(0)
    return jnp.full(leaf.shape, 1e-3 if jnp.issubdtype(leaf.dtype, jnp.floating) else 0, leaf.dtype)


def kind() -> dict[str, Any]:
    """The kind of the GPU that jax has."""
    try:
        device = jax.devices("gpu")[0]
    except (RuntimeError, AssertionError) as error:  # jax asserts that it found some device
        return {"missing": " ".join(str(error).split())[:200] or "jax finds none"}
    return {"kind": device.device_kind}


# --- the table


def start(words: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
    """A fresh process that prints its figures in its last line."""
    command = [sys.executable, "-m", "benchmarks.target_against_device", *words]
    return subprocess.Popen(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    """What a process printed, or why it printed nothing."""
    try:
        output, errors = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"took over {seconds:.0f} s"}
    if process.returncode != 0 or not output.strip():
        return {"error": (errors.strip().splitlines() or [f"ended with {process.returncode}"])[-1][:300]}
    figures: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return figures


def chip_of(kind: str) -> str:
    """The target that is a GPU of this kind: an H200 names itself ``NVIDIA H200``."""
    name = next((name for name in ("h200", "h100", "b200", "a100") if name in kind.lower()), "")
    if not name:
        raise SystemExit(f"no target is a GPU of the kind {kind!r}: name one with --target")
    return "a100-40" if name == "a100" and "40GB" in kind else name


def measured(target: str, with_gpu: bool, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """A row a program; ``keep`` has them after each, so that an interrupted run loses one."""
    ends, rows = time.monotonic() + SECONDS, list[dict[str, Any]]()
    for name in PROGRAMS:
        left = min(ends - time.monotonic(), OF_ONE)
        if left < 20:
            rows.append({"program": name, "error": f"left out: the others took {SECONDS:.0f} s"})
            continue
        began = time.monotonic()
        there = start(["--on-target", name, "--target", target], WITHOUT_GPU)
        here = start(["--on-device", name], WITH_GPU) if with_gpu else None
        row: dict[str, Any] = {"program": name, "target": finished(there, left)}
        if here is not None:
            row["device"] = finished(here, left - (time.monotonic() - began))
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        keep(rows)
    return rows


def compiled_alone(target: str, with_gpu: bool) -> list[dict[str, Any]]:
    """A row for each of `OTHERS`."""
    processes = {"target": start(["--others-on-target", "--target", target], WITHOUT_GPU)}
    if with_gpu:
        processes["device"] = start(["--others-on-device"], WITH_GPU)
    rows: dict[str, dict[str, Any]] = {}
    ends = time.monotonic() + OF_OTHERS
    for side, process in processes.items():
        try:
            output, _ = process.communicate(timeout=max(ends - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
        for figures in map(json.loads, filter(None, output.splitlines())):
            name = figures.pop("program")
            rows.setdefault(name, {"program": name})[side] = figures
    return [*rows.values()]


def markdown(facts: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """The table, in MiB."""
    columns = [
        "program, MiB",
        f"peak for {facts['target']}",
        "at most",
        "peak on the device",
        "target / device",
        "`peak_bytes_in_use`",
        "target / in use",
    ]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        there, here = row.get("target", row), row.get("device", {})
        cells = [sizes(there, "peak"), sizes(there, "most"), sizes(here, "peak")]
        of_call = {} if reached_before(here) else here
        cells += [ratio(there, here, "peak"), sizes(of_call, "peak_in_use"), ratio(there, of_call, "peak_in_use")]
        lines.append(f"| {row['program']} | {' | '.join(cells)} |")
    for row in rows:
        said = [f"{side}: {row[side]['error']}" for side in ("target", "device") if "error" in row.get(side, {})]
        lines += [f"\n* {row['program']}: {text}" for text in said]
        if reached_before(row.get("device", {})):
            lines.append(
                f"\n* {row['program']}: the allocator's peak was reached before the call, so that it says nothing."
            )
    compared = [row for row in facts.get("others", ()) if all("peak" in row.get(side, {}) for side in SIDES)]
    if compared:
        within = sum(row["device"]["peak"] <= row["target"]["most"] + ALIGNED for row in compared)
        same = sum(abs(more(row)) < SAME for row in compared)
        lines.append(
            f"\n* {len(compared)} programs more: {same} of the same peak, {within} within what is said at most."
        )
    packages = ", ".join(f"{name} {number}" for name, number in facts["packages"].items())
    return "\n".join([*lines, "", f"{facts['device']}; {packages}.", ""])


def more(row: dict[str, Any]) -> int:
    """The bytes by which the peak on the device is higher."""
    return int(row["device"]["peak"] - row["target"]["peak"])


def reached_before(device: dict[str, Any]) -> bool:
    """Whether the allocator's peak is not that of the call: something before it, as the arguments were made, held as much."""
    return bool(device.get("peak_before", -1) >= device.get("peak_in_use", 0))


def sizes(figures: dict[str, Any], key: str) -> str:
    """One figure, in MiB."""
    return f"{figures[key] / MIB:.1f}" if figures.get(key) is not None else ""


def ratio(there: dict[str, Any], here: dict[str, Any], key: str) -> str:
    """The peak for the target, over a figure of the device."""
    return f"{there['peak'] / here[key]:.3f}" if there.get("peak") and here.get(key) else ""


def packages() -> dict[str, str]:
    """The packages that decide the figures."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def run(target: str, path: Path | None) -> None:
    """Measure, print, and keep."""
    gpu = finished(start(["--kind"], WITH_GPU), OF_ONE)
    there = "kind" in gpu
    target = target or (chip_of(gpu["kind"]) if there else "h100")
    device = f"device: {gpu['kind']}" if there else f"no device: {gpu.get('missing') or gpu.get('error')}"
    facts: dict[str, Any] = {"target": target, "device": device, "packages": packages()}
    if not there:
        print(f"jax has no GPU here, so that the table has the figures of {target} alone. {device}", file=sys.stderr)

    def keep(rows: list[dict[str, Any]]) -> None:
        if path is not None:
            path.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
            path.with_suffix(".md").write_text(markdown(facts, rows))

    rows = measured(target, there, keep)
    facts["others"] = compiled_alone(target, there)
    keep(rows)
    print(markdown(facts, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.target_against_device", description=__doc__)
    gpus = [name for name, chip in BY_NAME.items() if chip.gpu]
    parser.add_argument("--target", default="", choices=["", *gpus], help="that of the GPU by default, or h100")
    parser.add_argument(
        "--json", type=Path, default=None, metavar="PATH", help="keep the figures, and the table beside"
    )
    parser.add_argument("--on-target", default="", choices=["", *PROGRAMS], help=argparse.SUPPRESS)
    parser.add_argument("--on-device", default="", choices=["", *PROGRAMS], help=argparse.SUPPRESS)
    parser.add_argument("--others-on-target", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--others-on-device", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--kind", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.kind:
        print(json.dumps(kind()))
    elif given.on_target:
        print(json.dumps(timed(lambda: on_target(PROGRAMS[given.on_target](), given.target or "h100"))))
    elif given.on_device:
        print(json.dumps(timed(lambda: on_device(PROGRAMS[given.on_device]()))))
    elif given.others_on_target:
        of_others(lambda program: on_target(program, given.target or "h100"))
    elif given.others_on_device:
        of_others(lambda program: compiled_on_device(program)[1])
    else:
        run(given.target, given.json)


def timed(figures: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Figures, and the seconds that they took."""
    began = time.monotonic()
    return figures() | {"seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    main()
