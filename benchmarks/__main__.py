"""``python -m benchmarks [NAME ...]`` measures speed: ratios of CPU time, side by side in one run. See docs/speed.md.

  before         the check, with that of an early commit which ran every nesting (--against COMMIT for another)
  shortcuts      the default, with shortcuts="off", which runs everything
  efforts        quick and thorough, with the default
  floor          the check, with a plain loop that traces, lowers, compiles and runs the same nestings, and checks nothing
  by_hand        the check, with a loop that checks them by hand: leaks, memory_analysis(), pointers of donated buffers
  marked         marked tests that build model and optimizer in the body: a first run with twelve nestings by hand, what is needed (traces, and each program
                 compiled once), traces alone, a second run, quick, parity, a v5e, and a first run of an earlier commit; qwen3 needs google-tunix, the v5e libtpu
  with_targets   the first and the second run of marked tests with --nnx-target=v5e,h100, with the same run without; needs the compilers
  collect        pytest --collect-only of 200 tests without a marker, with -p no:nnxcheck; whole processes
  workers        eight marked tests with -n 2, with -n 0, in seconds of the clock
  size           seconds for a number of layers, and for each max_depth; 7 billion parameters, with a narrow model
  first_failure  seconds until the failure is shown, over 13 tests that fail, with the early commit
  resident       two hundred marked tests in one process: seconds a test, and the memory of the process

``targets``, ``mistral_targets`` and ``plain_targets`` have programs compiled for TPUs and GPUs; they need the compilers, and run where they are named. See docs/targets.md.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import checks, figures, suites, table
from benchmarks.children import ROOT
from benchmarks.figures import Result
from benchmarks.on_targets import commands as on_targets
from benchmarks.plan import BEFORE, FIVE, MARKED, Plan

DOCUMENT, PLOT, DATA = (ROOT / "docs" / f"speed.{kind}" for kind in ("md", "svg", "json"))
BENCHMARKS: dict[str, Callable[[Plan], Result]] = {
    "before": checks.before,
    "shortcuts": checks.shortcuts,
    "efforts": checks.efforts,
    "floor": checks.floor,
    "by_hand": checks.by_hand,
    "marked": suites.marked,
    "with_targets": suites.with_targets,
    "collect": suites.collect,
    "workers": suites.workers,
    "size": checks.size,
    "first_failure": checks.first_failure,
    "resident": suites.resident,
}

SUBJECTS = tuple(dict.fromkeys((*FIVE, *MARKED)))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=raw)
    names, others = ", ".join(BENCHMARKS), " and ".join(on_targets.BENCHMARKS)
    text = f"benchmarks to run, all these by default: {names}; or {others}"
    options.add_argument("names", nargs="*", metavar="NAME", help=text)
    options.add_argument("--rounds", type=int, default=3, metavar="N", help="rounds of each, 3 by default")
    options.add_argument("--quick", action="store_true", help="one round of the smallest subjects: does it work?")
    options.add_argument("--subjects", default="", metavar="LIST", help=f"some of {','.join(SUBJECTS)}")
    options.add_argument("--against", default=BEFORE, metavar="COMMIT", help=f"the earlier commit, {BEFORE} by default")
    options.add_argument("--write", action="store_true", help="put tables and plot into docs/, beside what is there")
    return options


def plan_of(given: argparse.Namespace, folder: Path) -> Plan:
    """The plan that a command line asks for. Raises `SystemExit` for names that there are not."""
    subjects = tuple(given.subjects.split(",")) if given.subjects else FIVE[: 2 if given.quick else None]
    known = (*BENCHMARKS, *on_targets.BENCHMARKS)
    for kind, names, valid in (("benchmark", given.names, known), ("subject", subjects, SUBJECTS)):
        for name in names:
            if name not in valid:
                raise SystemExit(f"no {kind} {name!r}: there are {', '.join(valid)}")
    if given.rounds < 1:
        raise SystemExit(f"--rounds {given.rounds}: at least 1")
    return Plan(folder, 1 if given.quick else given.rounds, given.quick, subjects, given.against, bool(given.subjects))


def run(names: Sequence[str], plan: Plan, *, write: bool) -> None:
    """Run benchmarks one after the other. Each is printed, and written, when it is done: an interrupted run loses one."""
    for name in names or BENCHMARKS:
        if name in on_targets.BENCHMARKS:
            on_targets.run(name, write=write)
            continue
        measured = BENCHMARKS[name](plan)
        print(table.markdown([measured]), flush=True)
        if write:
            keep(measured, partial=plan.partial)


def keep(new: Result, *, partial: bool) -> None:
    """Put a result into the documents, in the order of the benchmarks."""
    from benchmarks import plot

    results = {result.benchmark: result for result in figures.merge(figures.load(DATA), new, partial=partial)}
    ordered = [results[name] for name in BENCHMARKS if name in results]
    figures.save(ordered, DATA)
    DOCUMENT.write_text(table.put_between(DOCUMENT.read_text(), table.in_document(ordered)))
    plot.draw(ordered, PLOT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says."""
    given = parser().parse_args(arguments)
    if given.write and not (given.names and {*given.names} <= {*on_targets.BENCHMARKS}):
        from benchmarks import plot

        plot.require()
    with tempfile.TemporaryDirectory(prefix="nnxcheck-speed-") as folder:
        run(given.names, plan_of(given, Path(folder)), write=given.write)


if __name__ == "__main__":
    main()
