"""What a run of the benchmarks was asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import figures
from benchmarks.children import Child, Sample, measure
from benchmarks.figures import Ratio, Result, Series

FIVE = ("linear", "batchnorm", "block", "mlp_step", "lm_step")
MARKED = ("linear", "block", "decode", "qwen3", "mlp_step", "lm8_step")
"""The subjects of `marked`."""
SHORT = {"linear": 3, "batchnorm": 3}
"""Subjects of a few seconds, and how many times the rounds of the others they get."""
BEFORE = "32001ee"
"""The last commit before nestings were traced first."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How often, how much, against which commit, and a folder for what the children write.

    A ``partial`` run was asked for some subjects by name: what is known of the others stays.
    """

    folder: Path
    rounds: int = 3
    quick: bool = False
    subjects: tuple[str, ...] = FIVE
    against: str = BEFORE
    partial: bool = False

    def new_folder(self) -> Path:
        """An empty folder."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def measure(self, *children: Child, times: int = 1) -> dict[str, tuple[Sample, ...]]:
        """The samples of each child, interleaved; ``times`` as many rounds where one is short, and so its noise great."""
        return measure(children, self.rounds * (1 if self.quick else times))


def result(
    benchmark: str, ratios: Sequence[Ratio | None] = (), series: Sequence[Series] = (), notes: Sequence[str] = ()
) -> Result:
    """What a benchmark found, on this machine; what could not be measured is left out of the table."""
    measured = tuple(ratio for ratio in ratios if ratio is not None)
    return Result(benchmark, figures.environment(), measured, tuple(series), tuple(dict.fromkeys(notes)))


def disagreements(case: str, samples: Mapping[str, Sequence[Sample]], fact: str) -> tuple[str, ...]:
    """A note where the sides did not come to the same: a ratio of two different things is none."""
    values = {
        label: {str(sample.facts.get(fact)) for sample in side if not sample.refused} for label, side in samples.items()
    }
    if len(set().union(*values.values())) <= 1:
        return ()
    return (f"{case}: {fact} differs, " + "; ".join(f"{label} {sorted(seen)}" for label, seen in values.items()),)
