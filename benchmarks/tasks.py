"""The entry of a child process: ``python -m benchmarks.tasks NAME JSON`` runs one task and reports its facts.

Everything is imported, and jax has its backend, before the clock starts. Only what both the package of today and that of earlier
commits have is used here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.children import FACTS, LIBRARY, ROOT

Facts = dict[str, Any]


def check(subject: str, settings: dict[str, Any], nestings: str = "") -> Facts:
    """One check of a subject; its nestings go to a file, for those who run the same."""
    from benchmarks.subjects import make
    from pytest_nnxcheck import CheckError
    from pytest_nnxcheck import check as run

    function, args = make(subject)
    facts: Facts = {}
    try:
        with clock(facts):
            report = run(function, *args, **settings)
    except CheckError as error:
        return {"refused": str(error)}
    ran = [str(outcome.nesting) for outcome in report.outcomes if not outcome.unfit]
    if nestings:
        Path(nestings).write_text(json.dumps(ran))
    raised = sum(outcome.verdict in {"rejected", "failed"} and not outcome.unfit for outcome in report.outcomes)
    judged = sum(outcome.peak is not None for outcome in report.outcomes)
    return {**facts, "verdict": report.verdict, "nestings": len(ran), "raised": raised, "judged": judged}


def loop(way: str, subject: str, nestings: str) -> Facts:
    """The nestings of a check without the plugin."""
    from benchmarks import bare
    from benchmarks.subjects import make

    function, args = make(subject)
    runner = {"floor": bare.Loop, "needed": bare.Needed, "traced": bare.Traced, "by_hand": bare.ByHand}[way]()
    names = json.loads(Path(nestings).read_text())
    facts: Facts = {}
    with clock(facts):
        bare.run_all(runner, function, args, names)
    return {**facts, "nestings": len(names), "raised": runner.raised, "peaks": len(runner.peaks), "moved": runner.moved}


def first_failure(cases: int) -> Facts:
    """The corpus, case by case, until each has failed: `assert_invariants` raises when it has something to tell."""
    from benchmarks.corpus import CASES

    failures = {name: failure(*make()) for name, make in list(CASES.items())[:cases]}
    seconds = {name: cpu for name, cpu in failures.items() if cpu is not None}
    return {"cpu": sum(seconds.values()), "failed": sorted(seconds), "seconds": seconds}


def failure(subject: Callable[..., Any], args: tuple[Any, ...]) -> float | None:
    """CPU seconds until a check fails; None if it does not."""
    from pytest_nnxcheck import CheckError, assert_invariants

    started = time.process_time()
    try:
        assert_invariants(subject, *args)
    except CheckError:
        raise
    except Exception:  # noqa: BLE001 - a violation, or what a leak makes the program raise
        return time.process_time() - started
    return None


@contextlib.contextmanager
def clock(facts: Facts) -> Iterator[None]:
    """CPU seconds of this process, all threads, as a fact."""
    started = time.process_time()
    yield
    facts["cpu"] = time.process_time() - started


TASKS: dict[str, Callable[..., Facts]] = {"check": check, "loop": loop, "first_failure": first_failure}


def import_all() -> Path:
    """Import every module of the package, wherever it is, and start jax. Return the folder that holds it."""
    import hypothesis
    import jax
    import numpy.random  # hypothesis imports it in its first test
    import pytest

    import pytest_nnxcheck

    del numpy, pytest
    for module in pkgutil.walk_packages(pytest_nnxcheck.__path__, f"{pytest_nnxcheck.__name__}."):
        importlib.import_module(module.name)
    jax.block_until_ready(jax.numpy.ones(3))
    # In its first test of a process hypothesis looks through all objects for generators of random numbers, and with its first draw it reads the source of
    # each module that is not installed, ours among them, for constants.
    hypothesis.given(hypothesis.strategies.integers())(lambda _: None)()
    return Path(pytest_nnxcheck.__file__).parents[1]


def main(name: str, arguments: str) -> None:
    """Run a task."""
    library, wanted = import_all(), Path(os.environ.get(LIBRARY, ROOT))
    if library != wanted:
        raise SystemExit(f"imported the package from {library}, not from {wanted}")
    facts = TASKS[name](**json.loads(arguments))
    Path(os.environ[FACTS]).write_text(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
