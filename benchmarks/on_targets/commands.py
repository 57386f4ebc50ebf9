"""The benchmarks of targets: each is measured in a process that is ready for them, kept in docs/targets.json, and shown in docs/targets.md."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator

from benchmarks import table
from benchmarks.children import ROOT
from benchmarks.on_targets import rows
from benchmarks.on_targets.rows import Row, Table

DOCUMENT, DATA = (ROOT / "docs" / f"targets.{kind}" for kind in ("md", "json"))
TARGETS = "v5e,h100"
SIMULATED = "--xla_force_host_platform_device_count=16"


def of_programs() -> Iterator[Row]:
    """Fifteen programs on a TPU and a GPU."""
    from benchmarks.on_targets.programs import PROGRAMS

    for name, make in PROGRAMS.items():
        function, args = make()
        yield rows.measured(name, function, args, TARGETS)


def of_mistral() -> Iterator[Row]:
    """A model of 7 billion parameters on chips and slices."""
    from benchmarks.on_targets import mistral

    yield from mistral.rows()


def of_plain() -> Iterator[Row]:
    """Programs beside a plain compile of the same."""
    from benchmarks.on_targets import plain

    yield from plain.rows()


BENCHMARKS: dict[str, tuple[Callable[[], Iterator[Row]], Callable[[Table], str]]] = {
    "targets": (of_programs, rows.programs),
    "mistral_targets": (of_mistral, rows.fits),
    "plain_targets": (of_plain, rows.beside_plain),
}


def run(name: str, *, write: bool) -> None:
    """Measure in a fresh process, print, and write."""
    words = [sys.executable, "-m", "benchmarks.on_targets.commands", name, *(["--write"] if write else [])]
    subprocess.run(words, check=True, cwd=ROOT, env=environment())


def environment() -> dict[str, str]:
    """Variables for a process that simulates the devices of the largest mesh, and has the compilers of targets."""
    there = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    there["XLA_FLAGS"] = " ".join(filter(None, (os.environ.get("XLA_FLAGS", ""), SIMULATED)))
    return there


def main(name: str, write: str = "") -> None:
    """Measure here."""
    measure, show = BENCHMARKS[name]
    found = []
    for row in measure():
        found.append(row)
        print(row.program, *(f"{there.target} {there.peak}" for there in row.targets), flush=True)
    measured = Table(rows.environment(), tuple(found))
    print(show(measured))
    if write:
        keep(name, measured)


def keep(name: str, measured: Table) -> None:
    """Put a table into the data, and all of them into the document."""
    tables = {**rows.load(DATA), name: measured}
    rows.save({each: tables[each] for each in BENCHMARKS if each in tables}, DATA)
    if DOCUMENT.exists():
        DOCUMENT.write_text(document(DOCUMENT.read_text(), tables))


def document(text: str, tables: dict[str, Table]) -> str:
    """The document with each table between ``<!-- NAME -->`` and ``<!-- end of NAME -->``."""
    for name, measured in tables.items():
        _, show = BENCHMARKS[name]
        text = table.put_between(text, show(measured), *markers(name))
    return text


def markers(name: str) -> tuple[str, str]:
    """What a table of the document is between."""
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


if __name__ == "__main__":
    main(*sys.argv[1:])
