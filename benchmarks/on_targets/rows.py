"""What the CPU's compiler and those of targets say of a program: measured by a check of its un-nested `jit`, kept as JSON, shown as tables."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pytest_nnxcheck import check, wheels
from pytest_nnxcheck.core.on_target import OnTarget

MIB, GIB = 2**20, 2**30
LARGE = "1000GiB"
"""A budget that nothing passes: these benchmarks show, and judge nothing."""


NEAR = 0.01
"""The part by which a peak may differ from that of a plain compile, and count as the same."""


class Verdict(Enum):
    """Whether a program fits, or could not be compiled."""

    FITS = "fits"
    FITS_NOT = "does not fit"
    LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True)
class There:
    """A program on one target, bytes a device; no ``peak`` where its compiler refused the program."""

    target: str
    limit: int
    fits: bool
    peak: int | None
    total: int | None
    copies: int
    donated: int
    lost: int
    said: str
    seconds: float
    effort: str = ""
    plain: int | None = None
    """The peak of a plain compile at the same effort; none where its compiler refused it, or nobody asked. Further fields are those of the default effort."""
    plain_default: int | None = None
    plain_fits: bool = True
    plain_kept: int = 0
    plain_said: str = ""
    """Why the plain compile failed, for another reason than memory."""

    @property
    def verdict(self) -> Verdict:
        """That of the plugin."""
        return _verdict(fits=self.fits, said=self.said)

    @property
    def plain_verdict(self) -> Verdict:
        """That of the plain compile."""
        return _verdict(fits=self.plain_fits, said=self.plain_said)

    @classmethod
    def of(cls, row: OnTarget) -> There:
        """What a check says."""
        total = None if row.split is None else row.split.peak
        said = row.refused or row.left_out
        lost = len(row.lost) + row.lost_too
        seconds = round(row.seconds, 2)
        return cls(
            *(row.target, row.limit, row.fits, row.peak, total, row.copies, row.donated, lost, said, seconds),
            effort=row.effort,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One program; ``peak`` and ``seconds`` are those of the CPU, the seconds those of the whole check without targets. No ``peak`` where the CPU cannot lower it."""

    program: str
    state: int
    peak: int | None
    seconds: float
    targets: tuple[There, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """The programs of one benchmark, and what they were compiled by."""

    environment: str
    rows: tuple[Row, ...]


def measured(program: str, subject: Callable[..., Any], args: Sequence[Any], targets: str, **settings: Any) -> Row:
    """Check the un-nested program, its state donated."""
    started = time.perf_counter()
    report = check(
        subject,
        *args,
        nesting="jit",
        transforms="jit",
        invariants="memory,donation",
        memory_budget=LARGE,
        target=targets,
        **settings,
    )
    seconds = time.perf_counter() - started
    (outcome,) = report.outcomes
    if outcome.evidence is None or not outcome.evidence.targets:
        raise RuntimeError(f"{program}: {outcome.verdict}, {outcome.violations}")
    there = outcome.evidence.targets
    alone = round(seconds - sum(row.seconds for row in there), 2)
    return Row(program, there[0].state, outcome.peak, alone, tuple(map(There.of, there)))


def environment() -> str:
    """The versions and the machine, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "flax"))
    compilers = ", ".join(filter(None, (wheels.versions("tpu"), wheels.versions("cuda"))))
    return f"{packages}, {compilers}, Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores"


def save(tables: Mapping[str, Table], path: Path) -> None:
    """Write as JSON."""
    path.write_text(json.dumps({name: asdict(table) for name, table in tables.items()}, indent=1) + "\n")


def load(path: Path) -> dict[str, Table]:
    """Read; nothing where there is no file."""
    tables = json.loads(path.read_text()) if path.exists() else {}
    return {name: Table(table["environment"], tuple(map(_row, table["rows"]))) for name, table in tables.items()}


def _row(value: dict[str, Any]) -> Row:
    row = Row(**value)
    return replace(row, targets=tuple(There(**there) for there in value["targets"]))


# --- tables


def programs(table: Table) -> str:
    """The table of `targets`: the least, the median and the greatest ratio of a peak to the CPU's. The data have the peak of each program."""
    names = [there.target for there in table.rows[0].targets]
    lines = [_line(["peak against the CPU's", "least", "median", "greatest"]), "|---|---|---|---|"]
    for number, name in enumerate(names):
        ratios = [ratio for row in table.rows if (ratio := _ratio(row, row.targets[number]))]
        spread = [min(ratios), statistics.median(ratios), max(ratios)]
        lines.append(_line([name, *(f"{ratio:.2f}" for ratio in spread)]))
    efforts = "A TPU's compiler has its quick effort `O0`, and its default one where it found a copy."
    return "\n".join([*lines, "", f"{table.environment}. {efforts}"]) + "\n"


def fits(table: Table) -> str:
    """The table of `mistral_targets`: a row a program, a column a target."""
    targets = list(dict.fromkeys(there.target for row in table.rows for there in row.targets))
    lines = [_line(["program, peaks in GiB", *targets]), "|---" * (1 + len(targets)) + "|"]
    for row in table.rows:
        cells = {there.target: _fit(there) for there in row.targets}
        lines.append(_line([row.program, *(cells.get(target, "") for target in targets)]))
    kept = [there.lost == 0 for row in table.rows for there in row.targets if there.donated]
    donated = f"In {sum(kept)} of {len(kept)} compiled programs all donated leaves keep their buffers."
    return "\n".join([*lines, "", donated, "", f"{table.environment}."]) + "\n"


def beside_plain(table: Table) -> str:
    """What `plain_targets` found: in how many programs of each target the plain compile says the same, and where not. The data have each program."""
    every = [(row.program, there) for row in table.rows for there in row.targets]
    targets = Counter(there.target for _, there in every)
    verdicts = Counter(there.verdict for _, there in every)
    compiled = [there for _, there in every if there.peak and there.plain]
    kept = sum(there.donated - there.lost == there.plain_kept for there in compiled)
    ratios = {
        f"{program} on {there.target}": there.peak / there.plain
        for program, there in every
        if there.peak and there.plain
    }
    near = [ratio for ratio in ratios.values() if abs(ratio - 1) < NEAR]
    far = [f"{name} ({ratio:.3f})" for name, ratio in ratios.items() if abs(ratio - 1) >= NEAR]
    differ = [
        f"{program} on {there.target} ({there.verdict.value}, plain: {there.plain_verdict.value})"
        for program, there in every
        if there.verdict is not there.plain_verdict
    ]
    counts = ", ".join(f"{count} on {target}" for target, count in targets.items())
    of_each = ", ".join(f"{verdicts[verdict]} {verdict.value}" for verdict in Verdict)
    lines = [
        f"* Programs: {counts}. Verdicts: {of_each}.",
        f"* The same verdict in {len(every) - len(differ)} of {len(every)}.",
        *([f"* Another verdict: {', '.join(differ)}."] if differ else []),
        f"* The same number of donated leaves that keep their buffer in {kept} of the {len(compiled)} that both compile.",
        f"* Peaks at the same effort: {min(near):.3f} to {max(near):.3f} times the plain one.",
        *([f"* Another peak: {', '.join(far)}."] if far else []),
    ]
    return "\n".join([*lines, "", f"{table.environment}."]) + "\n"


def _verdict(*, fits: bool, said: str) -> Verdict:
    if not fits:
        return Verdict.FITS_NOT
    return Verdict.LEFT_OUT if said else Verdict.FITS


def _fit(there: There) -> str:
    """The peak of a program; whether it fits, where it does not."""
    if there.said and there.fits:
        return "left out"
    return _gib(there.peak) if there.fits else " ".join(["**no**", *([_gib(there.peak)] if there.peak else [])])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _ratio(row: Row, there: There) -> float | None:
    return there.peak / row.peak if there.peak and row.peak else None


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:.2f}"
