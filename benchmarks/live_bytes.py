"""Compares the largest sum of live buffers with the peak that each compiler says, over the programs of the tests' corpus.

``python benchmarks/live_bytes.py [--width 512] [--groups healthy,wild] [--targets v5e,h100]`` prints a Markdown table: of the programs above each size,
how many are within 1, 5 and 10 %, and how many are off by more than 1 % to either side; then the large programs that are. The compilers of targets are
wheels: see docs/targets.md. The group ``real_size`` has the models of examples/, and takes no width.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).parents[1]
SIZES = {"all": 0, "64 KiB": 2**16, "1 MiB": 2**20}
LARGE = SIZES["1 MiB"]
NEAR = 0.01


@dataclass(frozen=True)
class Pair:
    """One program of a subject: its live bytes, and the compiler's peak."""

    subject: str
    live: int
    peak: int

    @property
    def share(self) -> float:
        """The live bytes as a part of the peak."""
        return self.live / self.peak


Pairs = dict[str, list[Pair]]
"""The programs, by compiler."""
Subject = tuple[str, Callable[[], Any]]


def main() -> None:
    """Check the corpus and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512, help="the width of the models")
    parser.add_argument("--groups", default="wide,reports", help="parts of the corpus, those of tests/verdicts.py")
    parser.add_argument("--targets", default="", help="compilers beside that of the CPU: v5e,h100")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(ROOT / each) for each in ("", "tests", "tests/corpus", "examples", "examples/real_size")]
    # Facts that an earlier run has kept are no programs.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        found = measured(chosen.groups.split(","), chosen.width, chosen.targets)
    for line in (*table(found), *off(found)):
        print(line)


def of_real_size() -> Iterator[Subject]:
    """The reports of examples/real_size, Mistral 7B, and the programs of the benchmark of targets."""
    from flax import nnx
    from healthy import Case

    import language_model
    from benchmarks import large_models
    from benchmarks.on_targets.programs import PROGRAMS

    today, twice, steps = map(importlib.import_module, ("flax_4871_today", "jax_926", "jax_26618"))

    def report_4871(graph_updates: bool) -> Any:
        remat = partial(nnx.remat, graph_updates=graph_updates)
        return today.two_calls, (nnx.eval_shape(lambda: today.Model(remat, nnx.Rngs(0))), today.NUMBER)

    calls: dict[str, Callable[[], Any]] = {
        **PROGRAMS,
        "flax 4871": partial(report_4871, True),
        "flax 4871, cured": partial(report_4871, False),
        "jax 926": lambda: (twice.ten_convolutions, (twice.INPUT,)),
        "jax 26618": lambda: (steps.train, (*nnx.eval_shape(steps.make), steps.IMAGES)),
    }
    for form in large_models.FORMS:
        config = replace(language_model.MISTRAL_7B, form=form)
        for name, (make, nesting) in large_models.CALLS.items():
            if nesting == "jit":
                calls[f"Mistral 7B, {name}, {form}"] = partial(make, config)

    def case(call: Callable[[], Any]) -> Any:
        return Case(*call())

    yield from ((name, partial(case, call)) for name, call in calls.items())


def measured(groups: list[str], width: int, targets: str) -> Pairs:
    """Check each subject, and compare each program that is read on the way, each text once."""
    import healthy
    import verdicts

    from pytest_nnxcheck import check
    from pytest_nnxcheck.compat.staging import serialized_hlo_module
    from pytest_nnxcheck.engine import on_targets
    from pytest_nnxcheck.xla import buffers

    verdicts.WIDE = healthy.WIDTH = width
    healthy.BATCH, healthy.SEQUENCE = (3, width), (2, 4, width)
    pairs: Pairs = defaultdict(list)
    known, read, with_buffers = set[bytes | None](), buffers.read, on_targets.with_buffers

    def note(compiler: str, compiled: Any, memory: Any, peak: int) -> None:
        text = serialized_hlo_module(compiled)
        if memory.order is not None and peak and text not in known:
            known.add(text)
            pairs[compiler].append(Pair(current[0], max(memory.order.totals()), peak))

    def read_here(compiled: Any, subject: str | None = None, **options: Any) -> Any:
        memory = read(compiled, subject, **options)
        if not compiled_for:
            note("cpu", compiled, memory, memory.peak - memory.constants)
        return memory

    compiled_for, current = list[str](), [""]

    def on_target(on: Any, compiled: Any, program: Any, on_host: Any) -> Any:
        compiled_for.append(on.target)
        note(on.target, compiled, read(compiled, gpu=on.target.startswith("h"), on_host=on_host.held), on.peak or 0)
        found = with_buffers(on, compiled, program, on_host)
        compiled_for.clear()
        return found

    buffers.read, on_targets.with_buffers = read_here, on_target
    subjects = (
        subject
        for group in groups
        for subject in (of_real_size() if group == "real_size" else verdicts.subjects_of(group))
    )
    chosen = {"sweep": "short", "max_examples": 0, "all": "on", "invariants": "memory"}
    if targets:
        chosen = {"nesting": "jit", "target": targets, "invariants": "memory"}
    for current[0], make in subjects:
        try:
            case = make()
            check(
                case.subject,
                *case.args,
                kwargs=getattr(case, "kwargs", {}),
                **{**chosen, **getattr(case, "settings", {})},
            )
        except Exception:  # noqa: BLE001, S112 - models that do not take this width, or this version, are no programs
            continue
    return pairs


def table(pairs: Pairs) -> list[str]:
    """The lines of the table."""
    lines = [
        "| compiler | above | programs | within 1 % | 5 % | 10 % | less | more |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for compiler, found in sorted(pairs.items()):
        for name, least in SIZES.items():
            shares = [pair.share for pair in found if pair.peak > least]
            near = [sum(abs(share - 1) <= within for share in shares) for within in (NEAR, 0.05, 0.1)]
            beside = sum(share < 1 - NEAR for share in shares), sum(share > 1 + NEAR for share in shares)
            lines.append(f"| {compiler} | {name} | {' | '.join(map(str, (len(shares), *near, *beside)))} |")
    return lines


def off(pairs: Pairs) -> Iterator[str]:
    """A line for each large program that is off by more than 1 %."""
    for compiler, found in sorted(pairs.items()):
        for pair in sorted(found, key=lambda pair: pair.share):
            if pair.peak > LARGE and abs(pair.share - 1) > NEAR:
                yield f"{compiler} {pair.share:.3f} of {pair.peak / 2**20:.1f} MiB: {pair.subject}"


if __name__ == "__main__":
    main()
