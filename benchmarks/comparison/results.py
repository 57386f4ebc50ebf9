"""What the tools found, as data, and as the tables of docs/comparison.md."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

START, END = "<!-- comparison -->", "<!-- end -->"
WORDS = {"passes": "-", "visible": "in its table"}


@dataclass(frozen=True, slots=True)
class Cell:
    """One tool on one program and its twin; CPU seconds of the healthy one, and of the same test without the tool, round by round."""

    program: str
    tool: str
    broken: str
    healthy: str
    seconds: tuple[float, ...]
    bare: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """The words of the first table."""
        alarm = "" if self.healthy == "passes" else f", twin: {self.healthy}"
        return WORDS.get(self.broken, self.broken.replace("found", "**found**")) + alarm

    @property
    def cost(self) -> str:
        """The ratio of CPU time, the median of the rounds; of the bare test itself, its seconds."""
        if self.seconds == self.bare:
            return f"{statistics.median(self.bare):.2f} s"
        ratios = [mine / other for mine, other in zip(self.seconds, self.bare, strict=True)]
        return f"{statistics.median(ratios):.1f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The cells of one environment."""

    environment: str
    cells: tuple[Cell, ...]


def save(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write as JSON."""
    path.write_text(json.dumps([asdict(each) for each in comparisons], indent=1) + "\n")


def load(path: Path) -> tuple[Comparison, ...]:
    """Read; nothing where there is no file."""
    rows = json.loads(path.read_text()) if path.exists() else []
    return tuple(Comparison(row["environment"], tuple(map(_cell, row["cells"]))) for row in rows)


def _cell(row: dict[str, object]) -> Cell:
    return Cell(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})  # type: ignore[arg-type]


def merge(old: Sequence[Comparison], new: Comparison) -> tuple[Comparison, ...]:
    """A new comparison in the place of an earlier one of its environment."""
    merged = {each.environment: each for each in old} | {new.environment: new}
    return tuple(merged.values())


def markdown(comparisons: Sequence[Comparison]) -> str:
    """What was found in each environment, and what it cost in the first."""
    return "\n\n".join(part for n, each in enumerate(comparisons) for part in parts(each, costs=n == 0)) + "\n"


def parts(comparison: Comparison, *, costs: bool = True) -> list[str]:
    """The tables with the lines above them; tools are rows, so that a table is no wider than its programs."""
    programs = list(dict.fromkeys(cell.program for cell in comparison.cells))
    verdicts = table("what it found", programs, [(cell, cell.verdict) for cell in comparison.cells])
    found = [f"{comparison.environment}.", verdicts]
    return [*found, table("CPU time", programs, [(cell, cell.cost) for cell in comparison.cells])] if costs else found


def table(corner: str, programs: Sequence[str], cells: Sequence[tuple[Cell, str]]) -> str:
    """One table."""
    rows: dict[str, dict[str, str]] = {}
    for cell, text in cells:
        rows.setdefault(cell.tool, {})[cell.program] = text
    head = f"| {corner} | {' | '.join(programs)} |"
    lines = [f"| {tool} | {' | '.join(row[program] for program in programs)} |" for tool, row in rows.items()]
    return "\n".join([head, "|---" * (len(programs) + 1) + "|", *lines])


def put_between(document: str, text: str) -> str:
    """The document with the tables between its markers. Raises `ValueError` where the markers are not there."""
    before, found, rest = document.partition(START)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"the document must have {START} and {END} after it")
    return f"{before}{START}\n\n{text}\n{END}{after}"
