"""``python -m benchmarks.comparison`` runs other tools on the same programs, each in a process of its own. See docs/comparison.md."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks import figures
from benchmarks.children import ROOT, Child, Sample, start
from benchmarks.comparison import results, tools
from benchmarks.comparison.programs import PROGRAM, PROGRAMS, TWIN
from benchmarks.comparison.results import Cell, Comparison
from benchmarks.comparison.tools import NOTHING, TOOLS, Tool

DOCUMENT, DATA = (ROOT / "docs" / f"comparison.{kind}" for kind in ("md", "json"))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    known = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    known.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"all by default: {'; '.join(PROGRAMS)}")
    known.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of the healthy twins, 3 by default")
    known.add_argument("--write", action="store_true", help="put the tables into docs/, beside those of other versions")
    return known


def installed() -> tuple[list[Tool], list[str]]:
    """The tools that are there, and the packages that are missing."""
    there = [tool for tool in TOOLS if not tool.package or tool.release]
    missing = sorted({tool.package for tool in TOOLS if tool not in there})
    return there, missing


def environment(there: Sequence[Tool]) -> str:
    """The versions of everything, and the machine."""
    releases = dict.fromkeys(f"{tool.package} {tool.release}" for tool in there if tool.package)
    return ", ".join([*releases, figures.environment()])


def sample(tool: Tool, program: str, twin: str, folder: Path) -> Sample:
    """One test in one process."""
    settings = folder / "pytest.ini"  # that of this project makes errors of warnings
    settings.write_text("[pytest]\n")
    options = ("-p", "benchmarks.comparison.clock", "-p", "no:cacheprovider", "-c", str(settings))
    child = Child.pytest(f"{tool.name}, {program}, {twin}", folder, *options, *tool.options, str(tool.path))
    return start(replace(child, variables={PROGRAM: program, TWIN: twin}))


def cells(program: str, there: Sequence[Tool], rounds: int, folder: Path) -> list[Cell]:
    """All tools on one program: the broken twin once, the healthy one in turns."""
    broken = {tool: sample(tool, program, "broken", folder) for tool in there}
    healthy: dict[Tool, list[Sample]] = {tool: [] for tool in there}
    for _ in range(rounds):
        for tool in there:
            healthy[tool].append(sample(tool, program, "healthy", folder))
    return [cell(program, tool, broken[tool], healthy[tool], healthy[NOTHING]) for tool in there]


def cell(program: str, tool: Tool, broken: Sample, healthy: Sequence[Sample], bare: Sequence[Sample]) -> Cell:
    """What one tool made of one program."""
    verdict = tool.verdict(broken.facts)
    if verdict == "passes" and tools.visible(broken.facts, healthy[0].facts):
        verdict = "visible"
    worst = next((said for each in healthy if (said := tool.verdict(each.facts)) != "passes"), "passes")
    seconds, others = (tuple(round(each.cpu, 3) for each in side) for side in (healthy, bare))
    return Cell(program, tool.name, verdict, worst, seconds, others)


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    given = parser().parse_args(arguments)
    there, missing = installed()
    if missing:
        print(f"not installed, and left out: {', '.join(missing)}. Write: pip install . --group comparison")
    if missing and given.write:
        raise SystemExit("--write needs all of them")
    for program in given.programs:
        if program not in PROGRAMS:
            raise SystemExit(f"no program {program!r}: there are {'; '.join(PROGRAMS)}")
    if given.rounds < 1:
        raise SystemExit(f"--rounds {given.rounds}: at least 1")
    with tempfile.TemporaryDirectory(prefix="nnxcheck-comparison-") as folder:
        all_cells: list[Cell] = []
        for program in given.programs or PROGRAMS:
            all_cells += cells(program, there, given.rounds, Path(folder))
            print(results.markdown([Comparison(program, tuple(all_cells))]), flush=True)
    comparison = Comparison(environment(there), tuple(all_cells))
    if given.write:
        keep(comparison)


def keep(comparison: Comparison) -> None:
    """Put a comparison into the documents."""
    together = results.merge(results.load(DATA), comparison)
    results.save(together, DATA)
    DOCUMENT.write_text(results.put_between(DOCUMENT.read_text(), results.markdown(together)))


if __name__ == "__main__":
    main()
