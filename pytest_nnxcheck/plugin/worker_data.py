"""Hand the observations of each worker of xdist to the controller, when the worker ends. A run without xdist is its own controller.

Like `hooks`, this imports pytest alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import pytest

from pytest_nnxcheck.core.settings import MARKER

NAME = "nnxcheck_worker_data"
_WIRE = "nnxcheck"
_WHOLE = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
_nodeid = pytest.StashKey[str]()
_data = pytest.StashKey["WorkerData"]()


def is_worker(config: pytest.Config) -> bool:
    """True if the process is a worker of xdist, whose controller writes files and reports results."""
    return hasattr(config, "workerinput")


def nodeid(item: pytest.Item) -> str:
    """The node id as it was when this was first asked: for --dist=loadgroup xdist adds to it on older versions of pytest."""
    return item.stash.setdefault(_nodeid, item.nodeid)


def is_crash(report: pytest.TestReport) -> bool:
    """True if xdist wrote the report, of a test in which its worker crashed or was interrupted."""
    return report.when not in {"setup", "call", "teardown"}


@dataclass(slots=True)
class Collection:
    """The marked tests that the processes of a run collected."""

    finished: bool = False
    """True if one of the processes finished its collection."""
    broken: bool = False
    """True if tests may be missing, since a file could not be collected."""
    tests: set[str] = field(default_factory=set)
    """Every collected test, deselected or not."""
    skipped: set[str] = field(default_factory=set)
    """Files and classes that were skipped as a whole: nobody knows which tests are in them."""

    def to_wire(self) -> dict[str, Any]:
        """The collection in types that cross processes."""
        return {**asdict(self), "tests": sorted(self.tests), "skipped": sorted(self.skipped)}

    def absorb(self, wire: dict[str, Any]) -> None:
        """Add the collection of another process."""
        self.finished |= wire["finished"]
        self.broken |= wire["broken"]
        self.tests.update(wire["tests"])
        self.skipped.update(wire["skipped"])


class Part(NamedTuple):
    """The pair of functions with which one of our plugins hands over its data of a worker."""

    give: Callable[[], Any]
    """Returns what the plugin saw, in plain types; a worker calls it."""
    take: Callable[[Any], None]
    """Takes the plain types of one worker; the controller calls it for each."""


def of(config: pytest.Config) -> WorkerData:
    """The data of a run; the first call starts to gather them."""
    if _data not in config.stash:
        config.stash[_data] = WorkerData()
        config.pluginmanager.register(config.stash[_data], NAME)
    return config.stash[_data]


class WorkerData:
    """The hooks that gather what the processes of a run saw, and hand it over."""

    def __init__(self) -> None:
        self.collection = Collection()
        self.interrupted = False
        self._items: list[pytest.Item] = []
        self._parts = {"collection": Part(self.collection.to_wire, self.collection.absorb)}

    def add(self, name: str, part: Part) -> None:
        """Hand over a further part, under this name."""
        self._parts[name] = part

    def saw_all(self, exit_status: int) -> bool:
        """True if everything was collected that the run was asked for, and the tests ran until they passed or failed."""
        return (
            exit_status in _WHOLE and not self.interrupted and self.collection.finished and not self.collection.broken
        )

    @pytest.hookimpl
    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Keep the node id as it is now."""
        nodeid(item)
        self._items.append(item)

    @pytest.hookimpl
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember where tests may be missing."""
        self.collection.broken |= report.failed
        if report.skipped:
            self.collection.skipped.add(report.nodeid)

    @pytest.hookimpl
    def pytest_collection_finish(self) -> None:
        """Note which tests there are: some have been marked since they were collected."""
        self.collection.tests.update(
            nodeid(item) for item in self._items if item.get_closest_marker(MARKER) is not None
        )
        self.collection.finished = True
        self._items.clear()

    @pytest.hookimpl
    def pytest_keyboard_interrupt(self) -> None:
        """Ctrl-C, or `pytest.exit`, which may give any exit status."""
        self.interrupted = True

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In a worker, hand over everything: xdist sends it when the session has ended."""
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_WIRE] = {name: part.give() for name, part in self._parts.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over what a worker saw; one that crashed says nothing."""
        wires = getattr(node, "workeroutput", {}).get(_WIRE, {})
        for name, wire in wires.items():
            self._parts[name].take(wire)
