"""The plot of docs/speed.md: what a check costs against the alternatives, and against the size of its subject."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Ratio, Result, Series

AGAINST = ("before", "floor", "by_hand")
COLOURS = ("#4269d0", "#9ec5f4", "#ff8ab7", "#6cc5b0")


def require() -> None:
    """Raise `SystemExit` where the library that draws is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("--write draws a plot: pip install --group bench (or pip install matplotlib)")


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw what there is. The same figures give the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.hashsalt": "speed", "svg.fonttype": "none", "axes.spines.top": False, "font.size": 9})
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    draw_bars(left, bars(results))
    series = [line for result in results for line in result.series]
    draw_lines(middle, [line for line in series if line.axis == "layers"], "layers")
    draw_lines(right, [line for line in series if line.axis == "max_depth"], "max_depth")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(results: Sequence[Result]) -> dict[str, list[Ratio]]:
    """The ratios of checks by what they are held against."""
    ratios: dict[str, list[Ratio]] = {}
    for result in results:
        for ratio in result.ratios if result.benchmark in AGAINST else ():
            ratios.setdefault(f"{ratio.over} / {ratio.under.replace('_', ' ')}", []).append(ratio)
    return ratios


def draw_bars(axes: Any, ratios: dict[str, list[Ratio]]) -> None:
    """A group for each subject, a bar for each alternative with its spread."""
    cases = list(dict.fromkeys(ratio.case for those in ratios.values() for ratio in those))
    wide = 0.8 / max(len(ratios), 1)
    for number, (label, those) in enumerate(ratios.items()):
        places = [cases.index(ratio.case) + number * wide for ratio in those]
        spread = [
            [ratio.median - ratio.spread[0] for ratio in those],
            [ratio.spread[1] - ratio.median for ratio in those],
        ]
        colour = COLOURS[number % len(COLOURS)]
        axes.bar(places, [ratio.median for ratio in those], wide, label=label, yerr=spread, color=colour)
    axes.set_xticks([place + 0.4 - wide / 2 for place in range(len(cases))], cases)
    axes.set_ylabel("ratio of CPU time")
    axes.axhline(1, color="black", linewidth=0.6)
    if ratios:
        axes.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def draw_lines(axes: Any, series: Sequence[Series], label: str) -> None:
    """CPU seconds against a size."""
    for number, line in enumerate(series):
        axes.plot(line.sizes, line.medians, "o-", label=line.name, color=COLOURS[number])
    axes.set_xlabel(label)
    axes.set_ylabel("CPU seconds of a check")
    axes.set_ylim(bottom=0)
    if series:
        axes.set_xticks(sorted({size for line in series for size in line.sizes}))
        axes.legend(frameon=False)
