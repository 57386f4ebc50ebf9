"""What crosses from a worker of xdist to the controller: what was collected and what our plugins add, also after a crash and an interruption."""

from types import SimpleNamespace

import pytest

from pytest_nnxcheck.plugin import worker_data
from pytest_nnxcheck.plugin.worker_data import Collection, Part, WorkerData

execnet = pytest.importorskip("execnet", reason="comes with xdist")


class Item:
    """What we use of an item of pytest."""

    def __init__(self, nodeid, *, marked=True):
        self.nodeid, self.marked, self.stash = nodeid, marked, pytest.Stash()

    def get_closest_marker(self, name):
        return "a marker" if self.marked else None


def collected(*items, skipped=(), failed=()):
    """The data of a process that collected these."""
    data = WorkerData()
    for item in items:
        data.pytest_itemcollected(item)
    for nodeid in (*skipped, *failed):
        report = SimpleNamespace(nodeid=nodeid, skipped=nodeid in skipped, failed=nodeid in failed)
        data.pytest_collectreport(report)
    return data


def ended(data):
    """What the controller gets of a worker that ended: only plain types cross."""
    output = {}
    data.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(workeroutput=output)))
    return SimpleNamespace(workeroutput=execnet.loads(execnet.dumps(output)))


def test_what_one_process_collected():
    late, plain = Item("a::late", marked=False), Item("a::plain", marked=False)
    data = collected(Item("a::x"), late, plain, skipped=["b"])
    assert data.collection == Collection(skipped={"b"})
    late.marked = True
    data.pytest_collection_finish()
    assert data.collection == Collection(finished=True, tests={"a::x", "a::late"}, skipped={"b"})


def test_a_node_id_stays_what_it_was_when_the_item_was_collected():
    item = Item("a::x")
    data = collected(item)
    item.nodeid = "a::x@group"  # which is what --dist=loadgroup of xdist does
    data.pytest_collection_finish()
    assert worker_data.nodeid(item) == "a::x"
    assert data.collection.tests == {"a::x"}


def test_what_several_workers_saw_adds_up():
    controller, taken = WorkerData(), []
    controller.add("mine", Part(list, taken.append))
    for name in ("x", "y"):
        worker = collected(Item(f"a::{name}"), skipped=[f"b_{name}"], failed=["c"] * (name == "y"))
        worker.pytest_collection_finish()
        worker.add("mine", Part(lambda name=name: [name], taken.append))
        controller.pytest_testnodedown(ended(worker))
        assert controller.saw_all(0) == (name == "x")
    assert taken == [["x"], ["y"]]
    assert controller.collection == Collection(
        finished=True, broken=True, tests={"a::x", "a::y"}, skipped={"b_x", "b_y"}
    )


def test_a_worker_that_crashed_says_nothing_and_takes_nothing_with_it():
    controller, taken = WorkerData(), []
    controller.add("mine", Part(list, taken.append))
    worker = collected(Item("a::x"))
    worker.pytest_collection_finish()
    worker.add("mine", Part(lambda: 1, taken.append))
    controller.pytest_testnodedown(ended(worker))
    for crashed in (SimpleNamespace(), SimpleNamespace(workeroutput={})):  # before and after it got to know its output
        controller.pytest_testnodedown(crashed)
    assert taken == [1]
    assert controller.saw_all(1)
    assert controller.collection.tests == {"a::x"}


def test_the_report_of_a_crash_is_of_no_phase_of_a_test():
    assert worker_data.is_crash(SimpleNamespace(when="???"))
    assert not any(worker_data.is_crash(SimpleNamespace(when=when)) for when in ("setup", "call", "teardown"))


def test_a_run_has_seen_all_where_its_collection_ended_and_nothing_stopped_it():
    data = collected(Item("a::x"))
    assert not data.saw_all(0)
    data.pytest_collection_finish()
    assert [status for status in range(8) if data.saw_all(status)] == [0, 1, 5]
    data.pytest_keyboard_interrupt()
    assert data.interrupted
    assert not data.saw_all(0)


def test_who_is_a_worker():
    assert worker_data.is_worker(SimpleNamespace(workerinput={}))
    assert not worker_data.is_worker(SimpleNamespace())
    alone = collected(Item("a::x"))
    alone.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace()))  # nobody to hand anything to
