"""The benchmarks of pytest runs: marked tests, collection, workers, and the size of the process."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

from benchmarks import plan as plans
from benchmarks.children import Child, Sample
from benchmarks.earlier import library_of
from benchmarks.figures import Ratio, Result, Series, ratio
from benchmarks.plan import Plan, result
from pytest_nnxcheck import wheels

FIRST, SECOND, TWELVE = "first run", "second run", "twelve by hand"
TWO = ("v5e", "h100")
TWO_TARGETS = f"--nnx-target={','.join(TWO)}"
WITH_TARGETS = ("block", "decode", "mlp_step")
"""The subjects of `with_targets`."""
BODIES_BEFORE = "8247683b"
"""The last commit that profiled what a body makes anew for every nesting, and kept executables."""

MARKED = """
import jax.numpy as jnp
import pytest
from flax import nnx


class Model(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.Linear(width, 2 * width, rngs=rngs)
        self.norm = nnx.BatchNorm(2 * width, rngs=rngs)
        self.last = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


@pytest.mark.nnx_invariants
@pytest.mark.parametrize("width", range(4, 4 + {tests}))
def test_model(nnx_wrap, width):
    model = nnx_wrap(Model(width, nnx.Rngs(0)))
    assert model(jnp.ones((3, width))).shape == (3, width)
"""
"""Every test has a model of another width: no program serves two of them."""

IN_THE_BODY = """
import jax
import pytest
from benchmarks import subjects


@pytest.mark.nnx_invariants
def test_{subject}(nnx_wrap):
    function, arguments = subjects.make("{subject}")
    assert jax.tree.leaves(nnx_wrap(function)(*arguments))
"""
"""A test as people write it: its body makes the model and the optimizer for every nesting."""

BY_HAND = """
import pytest
from benchmarks import twelve


@pytest.fixture(scope="module")
def plain():
    return twelve.plain_peak("{subject}")


@pytest.mark.parametrize("nesting", twelve.NESTINGS, ids=" > ".join)
def test_nested(nesting, plain):
    twelve.check("{subject}", nesting, plain)
"""

UNMARKED = """
import pytest


@pytest.mark.parametrize("number", range(200))
def test_plain(number):
    pass
"""

CLOCK = """
import json, os, time
import pytest
from benchmarks.tasks import import_all
import_all()


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    started = time.process_time()
    outcome = yield
    with open(os.environ["BENCHMARK_FACTS"], "w") as file:
        json.dump({"cpu": time.process_time() - started}, file)
    return outcome
"""
"""CPU seconds of the tests alone: what is imported is imported before."""

LINEAR = """
import jax.numpy as jnp
import pytest
from flax import nnx


@pytest.mark.nnx_invariants
@pytest.mark.parametrize("width", range(4, 4 + {tests}))
def test_linear(nnx_wrap, width):
    layer = nnx_wrap(nnx.Linear(width, 8, rngs=nnx.Rngs(0)))
    assert layer(jnp.ones((3, width))).shape == (3, 8)
"""

SIZES = """
import json, os, time
import pytest
from benchmarks.tasks import import_all
import_all()
SEEN = []


def seen():
    with open("/proc/self/statm") as file:
        SEEN.append((time.process_time(), int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    seen()
    return (yield)


def pytest_sessionfinish():
    seen()
    with open(os.environ["BENCHMARK_FACTS"], "w") as file:
        json.dump({"seen": SEEN}, file)
"""
"""Before each test and at the end, when all is put away: CPU seconds and the resident size of the process."""


def suite(plan: Plan, tests: str, conftest: str = "") -> Path:
    """A folder with one file of tests."""
    folder = plan.new_folder()
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_suite.py").write_text(tests)
    return folder


def with_the_plugin() -> tuple[str, ...]:
    """The option that loads the plugin where it is not installed."""
    installed = "nnxcheck" in entry_points(group="pytest11").names
    return () if installed else ("-p", "pytest_nnxcheck.plugin.hooks")


def marked(plan: Plan) -> Result:
    """Marked tests that build their objects in the body, each way to run them beside a first run of the default."""
    chosen = plan.subjects if plan.partial else plans.MARKED[: 1 if plan.quick else None]
    subjects = [name for name in chosen if name != "qwen3" or importlib.util.find_spec("tunix")]
    notes = [f"{name} is left out, google-tunix is not installed" for name in chosen if name not in subjects]
    target = "" if importlib.util.find_spec("libtpu") else "v5e is left out, libtpu is not installed"
    ratios: list[Ratio | None] = []
    with library_of(BODIES_BEFORE) as library:
        for subject in subjects:
            folder = plan.new_folder()
            nestings = str(folder / "nestings.json")
            Plan(folder, rounds=1).measure(
                Child.task("nestings", "check", folder, subject=subject, settings={}, nestings=nestings)
            )
            samples: dict[str, tuple[Sample, ...]] = {}
            for _ in range(plan.rounds):
                children = ways(plan, subject, nestings, library, on_target=not target)
                found = Plan(plan.folder, rounds=1).measure(*children)
                samples = {label: (*samples.get(label, ()), *side) for label, side in found.items()}
            ratios.append(ratio(subject, samples, FIRST, BODIES_BEFORE))
            others = [label for label in samples if label not in (FIRST, BODIES_BEFORE)]
            ratios += [ratio(subject, samples, label, FIRST) for label in others]
    return result("marked", ratios, notes=[*notes, *filter(None, [target])])


def ways(plan: Plan, subject: str, nestings: str, library: Path, *, on_target: bool) -> list[Child]:
    """The processes of one round, in their order: the second run follows the first."""
    folder = suite(plan, IN_THE_BODY.format(subject=subject), CLOCK)
    uncached = (*with_the_plugin(), "-p", "no:cacheprovider")
    options = {
        "quick": "--nnx-effort=quick",
        "parity": "--nnx-invariants=tracers,updates,memory,donation,parity",
        **({"v5e": "--nnx-target=v5e"} if on_target else {}),
    }
    by_hand = suite(plan, BY_HAND.format(subject=subject), CLOCK)
    return [
        *(Child.pytest(label, folder, *with_the_plugin()) for label in (FIRST, SECOND)),
        *(Child.pytest(label, folder, *uncached, option) for label, option in options.items()),
        replace(Child.pytest(BODIES_BEFORE, folder, *uncached), library=library),
        Child.pytest(TWELVE, by_hand, "-p", "no:cacheprovider"),
        Child.task("what is needed", "loop", folder, way="needed", subject=subject, nestings=nestings),
        Child.task("traces alone", "loop", folder, way="traced", subject=subject, nestings=nestings),
    ]


def with_targets(plan: Plan) -> Result:
    """Marked tests with a TPU and a GPU as targets beside the same run without: first run beside first run, second beside second."""
    if problem := wheels.problem(TWO):
        return result("with_targets", notes=[problem])
    subjects = plan.subjects if plan.partial else WITH_TARGETS[: 1 if plan.quick else None]
    ratios: list[Ratio | None] = []
    for subject in subjects:
        samples: dict[str, tuple[Sample, ...]] = {}
        for _ in range(plan.rounds):
            folders = {option: suite(plan, IN_THE_BODY.format(subject=subject), CLOCK) for option in ("", TWO_TARGETS)}
            children = [
                Child.pytest(f"{run} {option}".strip(), folder, *with_the_plugin(), *filter(None, [option]))
                for run in (FIRST, SECOND)
                for option, folder in folders.items()
            ]
            found = Plan(plan.folder, rounds=1).measure(*children)
            samples = {label: (*samples.get(label, ()), *side) for label, side in found.items()}
        for run in (FIRST, SECOND):
            over = f"{run} {TWO_TARGETS}"
            ratios.append(ratio(subject, samples, over, run))
            ratios.append(ratio(f"{subject}, whole process", samples, over, run, "process"))
    return result("with_targets", ratios)


def collect(plan: Plan) -> Result:
    """Collecting 200 tests that have no marker, with the plugin and without it."""
    folder = suite(plan, UNMARKED)
    on, off = "with the plugin", "-p no:nnxcheck"
    sides = {on: with_the_plugin(), off: ("-p", "no:nnxcheck")}
    children = [Child.pytest(label, folder, "--collect-only", *words) for label, words in sides.items()]
    samples = plan.measure(*children, times=20)
    return result("collect", [ratio("200 unmarked", samples, on, off, "process")])


def workers(plan: Plan) -> Result:
    """Eight marked tests in two workers and in none, by the clock on the wall."""
    if importlib.util.find_spec("xdist") is None:
        return result("workers", notes=["pytest-xdist is not installed"])
    tests = 2 if plan.quick else 8
    folder = suite(plan, MARKED.format(tests=tests))
    options = (*with_the_plugin(), "-p", "no:cacheprovider")
    children = [Child.pytest(f"-n {number}", folder, "-n", str(number), *options) for number in (2, 0)]
    samples = plan.measure(*children)
    return result("workers", [ratio(f"{tests} marked", samples, "-n 2", "-n 0", "wall")])


def resident(plan: Plan) -> Result:
    """Two hundred marked tests in one process: seconds a test, and the resident size of the process."""
    step = 1 if plan.quick else 50
    folder = suite(plan, LINEAR.format(tests=4 * step), SIZES)
    options = (*with_the_plugin(), "-p", "no:cacheprovider", "--nnx-effort=quick")
    samples = plan.measure(Child.pytest("tests", folder, *options))["tests"]
    done = tuple(step * number for number in (1, 2, 3, 4))
    seen = [sample.facts["seen"] for sample in samples]
    seconds = tuple(tuple((each[n][0] - each[n - step][0]) / step for each in seen) for n in done)
    sizes = tuple(tuple(each[n][1] / 1e6 for each in seen) for n in done)
    return result(
        "resident",
        series=[
            Series(f"a test of the last {step}, effort quick", "tests in one process", done, seconds),
            Series("resident size", "tests in one process", done, sizes, "MB"),
        ],
    )
