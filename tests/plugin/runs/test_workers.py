"""Workers of xdist: what reports make of what they send, of a crash and of an interruption.

What crosses is tested in tests/unit/test_worker_data.py, runs with workers in tests/system/processes/test_runs.py.
"""

from types import SimpleNamespace

import pytest

from pytest_nnxcheck.plugin import reports
from pytest_nnxcheck.reporting import records


def test_a_worker_writes_no_report(publisher, tmp_path):
    publisher.is_worker, publisher.targets = True, (reports.ReportFile(tmp_path / "r.json", "r.json", "option"),)
    config = SimpleNamespace(getoption=lambda name: False, rootpath=tmp_path)
    session = SimpleNamespace(config=config, exitstatus=0)
    assert [*publisher.pytest_sessionfinish(session)] == [None]
    assert not (tmp_path / "r.json").exists()
    publisher.is_worker = False
    assert [*publisher.pytest_sessionfinish(session)] == [None]
    assert (tmp_path / "r.json").exists()


@pytest.fixture
def publisher(pytester, inner_args):
    """The controller's publisher of a run."""
    return reports.Publisher(pytester.parseconfig(*inner_args), (), None, {})


def stopped_in(nodeid, nestings=1):
    test = records.unknown(nodeid)["test"]
    test["outcome"] = "interrupted"
    return {"test": test, "nestings": [{}] * nestings}


def crash(nodeid):
    """The report that xdist writes of a test in which its worker crashed, or was interrupted."""
    return SimpleNamespace(nodeid=nodeid, when="???", failed=True, longreprtext="worker 'gw0' crashed while running it")


def test_a_crash_is_an_error_of_its_test(publisher):
    publisher.pytest_runtest_logreport(crash("a::x"))
    test = publisher.tests["a::x"]["test"]
    assert (test["outcome"], test["message"]) == ("error", "worker 'gw0' crashed while running it")


def test_an_interrupted_test_is_not_lost_nor_called_a_crash(publisher):
    publisher.absorb([stopped_in("a::x")])
    publisher.pytest_runtest_logreport(crash("a::x"))
    assert publisher.tests["a::x"]["test"]["outcome"] == "interrupted"
    assert publisher.tests["a::x"]["test"]["message"] == ""


def test_what_a_test_told_when_it_ended_stays(publisher):
    publisher.absorb([stopped_in("a::x", nestings=2)])
    publisher.absorb([stopped_in("a::x", nestings=1), stopped_in("a::y", nestings=0)])
    assert {nodeid: len(found["nestings"]) for nodeid, found in publisher.tests.items()} == {"a::x": 2, "a::y": 0}
