"""Compares the largest sum of live buffers with the peak that each compiler says, over the programs of the tests' corpus.

``python benchmarks/live_bytes.py [--width 512] [--groups wide,reports] [--targets v5e,h100]`` prints a Markdown table: of the programs above each size,
how many are within 1, 5 and 10 %, and how many are off by more than 1 % to either side. The compilers of targets are wheels: see docs/targets.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
CORPUS = Path(__file__).parents[1] / "tests"
SIZES = {"all": 0, "64 KiB": 2**16, "1 MiB": 2**20}
Pairs = dict[str, list[tuple[int, int]]]
"""The live bytes and the compiler's peak of each program, by compiler."""


def main() -> None:
    """Check the corpus and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512, help="the width of the models")
    parser.add_argument("--groups", default="wide,reports", help="parts of the corpus, those of tests/verdicts.py")
    parser.add_argument("--targets", default="", help="compilers beside that of the CPU: v5e,h100")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    sys.path[:0] = [str(CORPUS), str(CORPUS / "corpus")]
    # Facts that an earlier run has kept are no programs.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        found = measured(chosen.groups.split(","), chosen.width, chosen.targets)
    for line in table(found):
        print(line)


def measured(groups: list[str], width: int, targets: str) -> Pairs:
    """Check each subject, and compare each program that is read on the way, each text once."""
    import healthy
    import verdicts

    from pytest_nnxcheck import check
    from pytest_nnxcheck.compat.staging import serialized_hlo_module
    from pytest_nnxcheck.engine import on_targets
    from pytest_nnxcheck.xla import buffers

    pairs: Pairs = defaultdict(list)
    known, read, with_buffers = set[bytes | None](), buffers.read, on_targets.with_buffers

    def note(compiler: str, compiled: Any, memory: Any, peak: int) -> None:
        text = serialized_hlo_module(compiled)
        if memory.order is not None and peak and text not in known:
            known.add(text)
            pairs[compiler].append((max(memory.order.totals()), peak))

    def read_here(compiled: Any, subject: str | None = None, *, gpu: bool = False) -> Any:
        memory = read(compiled, subject, gpu=gpu)
        if not compiled_for:
            note("cpu", compiled, memory, memory.peak - memory.constants)
        return memory

    compiled_for: list[str] = []

    def on_target(on: Any, compiled: Any, program: Any) -> Any:
        compiled_for.append(on.target)
        note(on.target, compiled, read(compiled, gpu=on.target.startswith("h")), on.peak or 0)
        found = with_buffers(on, compiled, program)
        compiled_for.clear()
        return found

    buffers.read, on_targets.with_buffers = read_here, on_target
    subjects = [subject for group in groups for subject in verdicts.subjects_of(group)]
    healthy.WIDTH, healthy.BATCH, healthy.SEQUENCE = width, (3, width), (2, 4, width)
    chosen = {"sweep": "short", "max_examples": 0, "all": "on", "invariants": "memory"}
    if targets:
        chosen = {"nesting": "jit", "target": targets, "invariants": "memory"}
    for _, make in subjects:
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
            shares = [live / peak for live, peak in found if peak > least]
            near = [sum(abs(share - 1) <= within for share in shares) for within in (0.01, 0.05, 0.1)]
            off = sum(share < 0.99 for share in shares), sum(share > 1.01 for share in shares)
            lines.append(f"| {compiler} | {name} | {' | '.join(map(str, (len(shares), *near, *off)))} |")
    return lines


if __name__ == "__main__":
    main()
