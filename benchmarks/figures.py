"""The figures of a run as data: ratios of two sides measured in turn, and series of seconds. They go to JSON and back."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.children import Figure, Sample


@dataclass(frozen=True, slots=True)
class Ratio:
    """One side over another: their figures round by round, in the order in which they were measured."""

    case: str
    over: str
    under: str
    numerators: tuple[float, ...]
    denominators: tuple[float, ...]
    unit: str = "CPU s"

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio of each round."""
        return tuple(a / b for a, b in zip(self.numerators, self.denominators, strict=True))

    @property
    def median(self) -> float:
        """The median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the greatest ratio."""
        return min(self.ratios), max(self.ratios)


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds against a size: for each size the figures of its rounds."""

    name: str
    axis: str
    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    unit: str = "CPU s"

    @property
    def medians(self) -> tuple[float, ...]:
        """The median at each size."""
        return tuple(map(statistics.median, self.seconds))


@dataclass(frozen=True, slots=True)
class Result:
    """What one benchmark found, on what; notes say what was left out."""

    benchmark: str
    environment: str
    ratios: tuple[Ratio, ...] = ()
    series: tuple[Series, ...] = ()
    notes: tuple[str, ...] = ()


def together(ratios: Sequence[Ratio], cases: Collection[str]) -> tuple[Ratio, ...]:
    """What a suite of all those cases would cost: for each two sides that were held against one another, the sums of their medians."""
    by_sides: dict[tuple[str, str], list[Ratio]] = {}
    for each in ratios:
        if each.case in cases:
            by_sides.setdefault((each.over, each.under), []).append(each)
    return tuple(
        Ratio(
            f"all {len(rows)} together",
            *sides,
            (sum(statistics.median(row.numerators) for row in rows),),
            (sum(statistics.median(row.denominators) for row in rows),),
        )
        for sides, rows in by_sides.items()
        if len(rows) > 1
    )


def environment() -> str:
    """The versions and the machine, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax", "pytest"))
    return f"{packages}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"


def ratio(
    case: str, samples: Mapping[str, Sequence[Sample]], over: str, under: str, figure: Figure = "cpu"
) -> Ratio | None:
    """The ratio of two sides; None where one of them could not be measured."""
    sides = samples[over], samples[under]
    if any(sample.refused for side in sides for sample in side):
        return None
    numerators, denominators = (tuple(getattr(sample, figure) for sample in side) for side in sides)
    return Ratio(case, over, under, numerators, denominators, "wall s" if figure == "wall" else "CPU s")


def refusals(samples: Mapping[str, Sequence[Sample]]) -> tuple[str, ...]:
    """What was left out, and why."""
    refused = {label: side[0].refused for label, side in samples.items() if side and side[0].refused}
    return tuple(f"{label} is left out, {reason.partition(', write ')[0]}" for label, reason in refused.items())


def merge(old: Sequence[Result], new: Result, *, partial: bool = False) -> tuple[Result, ...]:
    """A new result in the place of an earlier one of its benchmark; a ``partial`` one replaces its own rows alone."""
    merged = {result.benchmark: result for result in old}
    earlier = merged.get(new.benchmark)
    same = earlier is not None and earlier.environment == new.environment
    merged[new.benchmark] = combined(earlier, new) if partial and earlier and same else new
    return tuple(merged.values())


def combined(old: Result, new: Result) -> Result:
    """The rows of both, where a row of the new one wins over the same of the old one."""
    ratios = {(ratio.case, ratio.over, ratio.under): ratio for ratio in (*old.ratios, *new.ratios)}
    series = {(line.name, line.axis): line for line in (*old.series, *new.series)}
    notes = tuple(dict.fromkeys((*old.notes, *new.notes)))
    return Result(new.benchmark, new.environment, tuple(ratios.values()), tuple(series.values()), notes)


def save(results: Sequence[Result], path: Path) -> None:
    """Write results as JSON."""
    path.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def load(path: Path) -> tuple[Result, ...]:
    """Read results; none where there is no file."""
    if not path.exists():
        return ()
    return tuple(
        Result(
            row["benchmark"],
            row["environment"],
            tuple(Ratio(**_tuples(cells)) for cells in row["ratios"]),
            tuple(Series(**_tuples(cells)) for cells in row["series"]),
            tuple(row["notes"]),
        )
        for row in json.loads(path.read_text())
    )


def _tuples(row: dict[str, object]) -> dict[str, Any]:
    """JSON's lists as the tuples that they were."""
    return {name: _as_tuple(value) for name, value in row.items()}


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
