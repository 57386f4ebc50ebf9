"""Child processes: what is measured runs in a fresh one, and its CPU time is the kernel's.

A child reports facts of its own, such as the CPU seconds of the part that counts, in the file that ``BENCHMARK_FACTS`` names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

ROOT = Path(__file__).parents[1]
FACTS = "BENCHMARK_FACTS"
LIBRARY = "BENCHMARK_LIBRARY"
FOREIGN = (
    "JAX_COMPILATION_CACHE_DIR",
    "PYTEST_ADDOPTS",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD",
    "PYTHONDONTWRITEBYTECODE",
    "XLA_FLAGS",
)
"""Variables of the caller's that would change what is measured."""

T = TypeVar("T")
Figure = Literal["cpu", "process", "wall"]


class ChildError(RuntimeError):
    """A child ended with an error; the text has the end of its output."""


@dataclass(frozen=True, slots=True)
class Child:
    """One process to measure: the arguments of Python, where it runs, and the folder that holds the package it imports."""

    label: str
    arguments: tuple[str, ...]
    directory: Path
    library: Path = ROOT
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def task(cls, label: str, name: str, directory: Path, library: Path = ROOT, **arguments: object) -> Child:
        """A task of `benchmarks.tasks`."""
        words = ("-P", "-m", "benchmarks.tasks", name, json.dumps(arguments))
        return cls(label, words, directory, library)

    @classmethod
    def pytest(cls, label: str, directory: Path, *options: str) -> Child:
        """A run of pytest in a folder."""
        return cls(label, ("-m", "pytest", "-q", "-p", "no:randomly", *options), directory)

    def command(self) -> list[str]:
        """The command line."""
        return [sys.executable, *self.arguments]

    def environment(self, outer: Mapping[str, str], facts: Path) -> dict[str, str]:
        """The variables: the package of `library`, the benchmarks of this checkout, nothing that changes the figures."""
        folders = dict.fromkeys(map(str, (self.library, ROOT)))
        kept = {name: value for name, value in outer.items() if name not in FOREIGN}
        added = {"PYTHONPATH": os.pathsep.join(folders), FACTS: str(facts), LIBRARY: str(self.library)}
        return {**kept, **added, **self.variables, "JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True, slots=True)
class Sample:
    """What one process took: CPU seconds (user and system) of the part that counts and of the process, and wall seconds."""

    label: str
    cpu: float
    process: float
    wall: float
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def refused(self) -> str:
        """Why the child could not do what was asked, such as a setting that its version does not have."""
        return str(self.facts.get("refused", ""))


def start(child: Child) -> Sample:
    """Run a child to its end. Raises `ChildError`."""
    with tempfile.TemporaryDirectory() as folder:
        facts, output = Path(folder) / "facts.json", Path(folder) / "output.txt"
        with output.open("w") as stream:
            started = time.perf_counter()
            process = subprocess.Popen(
                child.command(),
                cwd=child.directory,
                env=child.environment(os.environ, facts),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise ChildError(f"{child.label} ended with {process.returncode}:\n{output.read_text()[-3000:]}")
        reported = json.loads(facts.read_text()) if facts.exists() else {}
    whole = usage.ru_utime + usage.ru_stime
    return Sample(child.label, float(reported.get("cpu", whole)), whole, wall, reported)


def interleaved(sides: Sequence[T], rounds: int) -> Iterator[T]:
    """A B A B: what changes on the machine during the run changes for every side."""
    for _ in range(rounds):
        yield from sides


def measure(
    children: Sequence[Child], rounds: int, run: Callable[[Child], Sample] = start
) -> dict[str, tuple[Sample, ...]]:
    """The samples of each child by its label. One that refuses is asked once."""
    samples: dict[str, list[Sample]] = {child.label: [] for child in children}
    for child in interleaved(children, rounds):
        if not any(sample.refused for sample in samples[child.label]):
            samples[child.label].append(run(child))
    return {label: tuple(those) for label, those in samples.items()}
