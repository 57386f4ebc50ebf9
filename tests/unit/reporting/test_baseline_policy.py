"""What is made of a baseline, without a run: what grew and how it is told, what is stale, when a run may write, and what stands in the file then."""

from dataclasses import asdict, astuple, replace
from fractions import Fraction

import pytest

from pytest_nnxcheck import Report
from pytest_nnxcheck.core.facts import Evidence, Stamp
from pytest_nnxcheck.core.peak import Buffer, Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import baseline_comparison, baseline_file
from pytest_nnxcheck.reporting.baseline_comparison import Measured, Refused, Request, Result, summary
from pytest_nnxcheck.reporting.baseline_file import Baseline, Entry, TargetPeak

OLD = Stamp("0.5.3", "0.5.3", "0.10.2", "cpu", "cpu")
NEW = Stamp("0.6.2", "0.6.1", "0.10.7", "cpu", "cpu")
DIFFERS = "jax 0.5.3 -> 0.6.2, jaxlib 0.5.3 -> 0.6.1, flax 0.10.2 -> 0.10.7"
FIVE = Fraction(1, 20)
PEAKS = Request("peaks", FIVE)


def held(size, kind="temporary", shape="float32[4]", operation="dot", line=""):
    return Buffer(size, shape, kind, operation, (line,) if line else ())


def measured(split, *buffers, fleeting=False):
    entry = baseline_file.entry_of(split.peak, Evidence(split, buffers=buffers), drawn=fleeting)
    return Measured(entry, buffers, fleeting)


def known_of(**sizes):
    return {name.replace("_", " > "): Entry(size) for name, size in sizes.items()}


def now_of(**sizes):
    return {name: measured(Split(entry.peak, 0, 0, 0, 0)) for name, entry in known_of(**sizes).items()}


# --- growth --------------------------------------------------------------------------------------------------------------


def on_v5e(entry, peak, wheel="libtpu 1", target="v5e"):
    return replace(entry, targets=(*entry.targets, TargetPeak(target, peak, wheel)))


def now_on_v5e(cpu, peak):
    now = measured(Split(cpu, 0, 0, 0, 0))
    return {"jit": replace(now, entry=on_v5e(now.entry, peak))}


@pytest.mark.parametrize(
    "cpu, peak, wheel, any_stamp, expected",
    [
        (100, 105, "libtpu 1", False, Result("t", compared=1)),
        (100, 106, "libtpu 1", False, Result("t", compared=1, grew=("jit",))),
        (100, 94, "libtpu 1", False, Result("t", compared=1, shrank=1)),
        (106, 100, "libtpu 1", False, Result("t", compared=1, grew=("jit",))),
        (100, 106, "libtpu 0", False, Result("t", compared=1, other_wheels=("v5e libtpu 0 -> libtpu 1",))),
        (
            100,
            106,
            "libtpu 0",
            True,
            Result("t", compared=1, grew=("jit",), other_wheels=("v5e libtpu 0 -> libtpu 1",)),
        ),
    ],
)
def test_a_peak_on_a_target_is_compared_where_the_same_compiler_counted_it(cpu, peak, wheel, any_stamp, expected):
    known, request = {"jit": on_v5e(Entry(100), 100, wheel)}, Request("peaks", FIVE, any_stamp=any_stamp)
    assert baseline_comparison.compare("t", known, now_on_v5e(cpu, peak), request) == expected


def test_a_peak_on_a_target_that_the_file_does_not_have_is_new():
    known = {"jit": on_v5e(Entry(100), 100, target="h100")}
    assert baseline_comparison.compare("t", known, now_on_v5e(100, 900), PEAKS) == Result(
        "t", compared=1, new_on_targets=1
    )
    assert baseline_comparison.compare("t", known, now_of(jit=100), PEAKS) == Result("t", compared=1), (
        "a run without a target"
    )


@pytest.mark.parametrize(
    "before, now, tolerance, grew, shrank",
    [
        (100, 105, "5", False, False),
        (100, 106, "5", True, False),
        (100, 95, "5", False, False),
        (100, 94, "5", False, True),
        (100, 100, "0", False, False),
        (10**17, 10**17 + 1, "0", True, False),
        (10**17, 10**17 - 1, "0", False, True),
        (0, 0, "5", False, False),
        (0, 1, "5", True, False),
        (1000, 1006, "0.5", True, False),
    ],
)
def test_what_grew_and_what_shrank(before, now, tolerance, grew, shrank):
    result = baseline_comparison.compare(
        "t", known_of(jit=before), now_of(jit=now), Request("peaks", Fraction(tolerance) / 100)
    )
    assert result == Result("t", compared=1, grew=("jit",) * grew, shrank=int(shrank))


def test_what_is_new_and_what_is_stale():
    known = {**known_of(jit=1, jit_remat=5, jit_vmap=7), "jit > cond": Entry(1, drawn=True)}
    now = {**now_of(jit=1, jit_scan=9), "jit > jit": measured(Split(1, 0, 0, 0, 0), fleeting=True)}
    result = baseline_comparison.compare("t", known, now, Request("peaks", Fraction(0)), excused={"jit > vmap"})
    assert result == Result("t", compared=1, new=1, stale=("jit > remat",))
    replayed = Request("peaks", Fraction(0), replayed=True)
    assert baseline_comparison.compare("t", known, now, replayed) == Result("t", compared=1, new=1)


def test_draws_that_vary_are_compared():
    now = {"jit": measured(Split(9, 0, 0, 0, 0), fleeting=True), **now_of(jit_scan=9)}
    assert baseline_comparison.compare("t", known_of(jit=1), now, PEAKS).grew == ("jit",)


@pytest.mark.parametrize(
    "update, any_stamp, same, other",
    [("", False, True, False), ("", True, True, True), ("new", False, True, False), ("all", True, False, False)],
)
def test_what_is_compared(update, any_stamp, same, other):
    request = Request("peaks", FIVE, update, any_stamp)
    assert (request.compares(""), request.compares(DIFFERS)) == (same, other)


# --- the text ------------------------------------------------------------------------------------------------------------


def text_of(known, now, **more):
    result = baseline_comparison.compare("t", known, now, PEAKS)
    checked = Report((), Settings(), test_id="t.py::test_x[a  b]", argument="t.py::test_x[a  b]", **more)
    return baseline_comparison.message(result, known, now, PEAKS, checked).splitlines()


def test_the_message_says_what_grew():
    before = measured(Split(100, 20, 80, 20, 0), held(64), held(16, "constant", "s32[4]", ""))
    buffers = (held(64, line="m.py:3"), held(64, line="m.py:9"), held(40, "output", "f32[10]", "add"))
    now = measured(Split(100, 28, 112, 20, 0), *buffers)
    known = {"jit > scan": before.entry, **known_of(jit_vmap=100, jit=50)}
    lines = text_of(known, {"jit > scan": now, **now_of(jit_vmap=110, jit=50)}, options="--nnx-baseline 'a b.txt'")
    assert lines == [
        "nnx memory baseline exceeded",
        "  test        t.py::test_x[a  b]",
        "  nesting     jit > scan   smallest of 2 that grew, 3 compared",
        "  peak        220 B, was 180 B: +40 B (+22.2 %), tolerance 5%",
        "  outputs     28 B, was 20 B: +8 B (+40.0 %)",
        "  temporaries 112 B, was 80 B: +32 B (+40.0 %)",
        "  buffer      + 64 B temporary float32[4] dot   m.py:3",
        "  buffer      + 40 B output f32[10] add",
        "  buffer      - 16 B constant s32[4]",
        "  also grew   jit > vmap   110 B, was 100 B: +10 B (+10.0 %)",
        "  accept      pytest 't.py::test_x[a  b]' --nnx-baseline 'a b.txt' --nnx-baseline-update",
        "  replay      pytest 't.py::test_x[a  b]' --nnx-baseline 'a b.txt' --nnx-nesting 'jit > scan'",
    ]


def test_the_message_names_the_target_that_grew():
    known = {"jit": on_v5e(Entry(100), 100), "jit > scan": on_v5e(Entry(100), 100)}
    now = now_on_v5e(101, 120)
    lines = text_of(
        known,
        {**now, "jit > scan": replace(measured(Split(200, 0, 0, 0, 0)), entry=on_v5e(Entry(200), 130))},
    )
    assert lines[2:6] == [
        "  nesting     jit   smallest of 2 that grew, 2 compared",
        "  v5e         120 B, was 100 B: +20 B (+20.0 %), tolerance 5%",
        "  also grew   jit > scan   200 B, was 100 B: +100 B (+100.0 %), v5e",
        "              130 B, was 100 B: +30 B (+30.0 %)",
    ]
    both = text_of({"jit": on_v5e(Entry(100), 100)}, now_on_v5e(110, 120))
    assert [line.split()[0] for line in both[3:6]] == ["peak", "v5e", "accept"]


def test_many_that_grew_are_counted():
    names = "jit jit_jit jit_remat jit_scan jit_vmap jit_cond jit_switch".split()
    lines = text_of(known_of(**dict.fromkeys(names, 1)), now_of(**dict.fromkeys(names, 2)))
    rows = [line for line in lines if line.startswith("  also grew")]
    assert len(rows) == 6
    assert rows[-1] == "  also grew   and 1 more"


def test_what_the_baseline_does_not_name_is_not_called_new():
    before = measured(Split(0, 0, 99, 0, 0), *map(held, (64, 32, 16, 8)))
    now = measured(Split(0, 0, 199, 0, 0), *map(held, (64, 32, 20, 16, 8, 4)))
    assert [*baseline_comparison.buffer_rows(before.entry, now)] == ["+ 20 B temporary float32[4] dot"]


def test_what_the_evidence_does_not_name_is_not_called_gone():
    before = measured(Split(0, 0, 99, 0, 0), held(70), held(50), held(8))
    now = measured(Split(0, 0, 199, 0, 0), *map(held, range(60, 50, -1)))
    rows = [*baseline_comparison.buffer_rows(before.entry, now)]
    assert [row for row in rows if row.startswith("-")] == ["- 70 B temporary float32[4] dot"]


# --- what a test hands over ----------------------------------------------------------------------------------------------


def result(test, stamp=OLD, **sizes):
    lines = tuple(baseline_file.format_line(test, name, entry) for name, entry in known_of(**sizes).items())
    return Result(test, astuple(stamp), lines=lines)


def renewed(baseline, results, *, gone=(), **request):
    return baseline_comparison.renewed(baseline, results, Request("peaks", FIVE, **request), gone)


def test_a_result_crosses_processes_as_plain_values():
    full = replace(result("t", jit=1, jit_scan=2), differences=DIFFERS, compared=9, grew=("jit",))
    assert Result(**asdict(full)) == full
    assert {name: entry.peak for name, entry in full.entries().items()} == {"jit": 1, "jit > scan": 2}


def test_of_a_test_that_failed_after_all_only_what_was_compared_is_told():
    full = replace(result("t", jit=1), compared=9, grew=("jit",), shrank=2, new=1, new_on_targets=3)
    compared, *others = summary(PEAKS, [full], exists=True)
    assert (compared, len(others)) == ("peaks: 9 nestings compared, 1 grew by more than 5%", 3)
    assert [*summary(PEAKS, [replace(full, stamp=())], exists=True)] == [compared]


# --- an update -----------------------------------------------------------------------------------------------------------

BEFORE = Baseline(OLD, {"a": {"jit": Entry(1), "jit > vmap": Entry(2, drawn=True)}, "b": {"jit": Entry(3)}})


def sizes_of(after):
    return {(test, name): entry.peak for test, entries in after.tests.items() for name, entry in entries.items()}


def test_an_update_replaces_the_tests_that_passed():
    after = renewed(BEFORE, [result("a", jit=9, jit_scan=8), Result("b")])
    assert sizes_of(after) == {("a", "jit"): 9, ("a", "jit > scan"): 8, ("b", "jit"): 3}
    assert baseline_comparison.changes(BEFORE, after) == "3 entries: 1 new, 1 changed, 1 removed"


def test_an_update_takes_out_what_is_gone():
    after = renewed(BEFORE, [result("a", jit=1)], gone=["b"])
    assert sizes_of(after) == {("a", "jit"): 1}
    assert baseline_comparison.changes(after, after) == "1 entry: nothing changed"
    assert baseline_comparison.changes(None, after) == "1 entry: 1 new"


def test_a_replay_replaces_its_nesting_alone():
    after = renewed(BEFORE, [result("a", jit_vmap=9, jit_scan=8)], replayed=True)
    assert sizes_of(after) == {("a", "jit"): 1, ("a", "jit > vmap"): 9, ("a", "jit > scan"): 8, ("b", "jit"): 3}
    assert after.tests["a"]["jit > vmap"].drawn


def on_targets(after):
    return {nesting: [(on.target, on.peak) for on in entry.targets] for nesting, entry in after.tests["a"].items()}


def of_targets(entry):
    return Result("a", astuple(OLD), lines=(baseline_file.format_line("a", "jit", entry),))


ON_TWO = Baseline(OLD, {"a": {"jit": on_v5e(on_v5e(Entry(1), 5, target="h100"), 7, target="v5e:2x4")}})


def test_an_update_leaves_the_peaks_on_targets_that_the_run_has_none_of():
    assert on_targets(renewed(ON_TWO, [result("a", jit=9)])) == {"jit": [("h100", 5), ("v5e:2x4", 7)]}
    again = of_targets(on_v5e(Entry(9), 8))
    assert on_targets(renewed(ON_TWO, [again])) == {"jit": [("h100", 5), ("v5e", 8)]}, "of a chip all are replaced"
    assert sizes_of(renewed(ON_TWO, [again])) == {("a", "jit"): 9}
    other = Result("a", astuple(NEW), lines=result("a", jit=9).lines)
    assert on_targets(renewed(ON_TWO, [other])) == {"jit": []}, "all entries are of one stamp"


def test_new_only_adds_peaks_on_targets():
    after = renewed(ON_TWO, [of_targets(on_v5e(on_v5e(Entry(9), 8), 6, target="h100"))], update="new")
    assert on_targets(after) == {"jit": [("h100", 5), ("v5e", 8), ("v5e:2x4", 7)]}
    assert sizes_of(after) == {("a", "jit"): 1}


def test_new_only_adds_and_changes_nothing():
    after = renewed(BEFORE, [result("a", jit=9, jit_scan=8)], gone=["b"], update="new")
    assert sizes_of(after) == {("a", "jit"): 1, ("a", "jit > vmap"): 2, ("a", "jit > scan"): 8, ("b", "jit"): 3}


@pytest.mark.parametrize(
    "results, asked, reason",
    [
        ([result("a", NEW, jit=9)], {}, f"its stamp would change, {DIFFERS}, and 1 test in it did not run (b): run all of them"),
        ([Result("x"), result("y", NEW)], {}, f"its stamp would change, {DIFFERS}, and 2 tests in it did not run (a, ...): run all of them"),
        ([result("a", NEW, jit=9), result("b", NEW)], {"replayed": True}, f"its stamp would change, {DIFFERS}, and 2 tests in it did not run (a, ...): run all of them"),
        ([result("c", NEW, jit=9)], {"update": "new"}, f"its entries are of another stamp, {DIFFERS}: write all anew with --nnx-baseline-update"),
        ([result("a", OLD), result("b", NEW)], {}, f"its processes are not of the same versions and devices: {DIFFERS}"),
    ],
)  # fmt: skip
def test_entries_of_two_stamps_never_stand_in_one_file(results, asked, reason):
    with pytest.raises(Refused) as caught:
        renewed(BEFORE, results, **asked)
    assert str(caught.value) == reason


def test_another_stamp_is_written_from_a_run_of_all_tests():
    after = renewed(BEFORE, [result("a", NEW, jit=9)], gone=["b"])
    assert (after.stamp, sizes_of(after)) == (NEW, {("a", "jit"): 9})
    # A test that the run came to, and skipped, was not measured under this stamp.
    assert sizes_of(renewed(BEFORE, [result("a", NEW, jit=9), Result("b")])) == {("a", "jit"): 9}


def test_a_run_that_measured_nothing():
    with pytest.raises(Refused, match=r"^no test that uses nnx_wrap passed$"):
        renewed(None, [])
    assert renewed(BEFORE, []) == BEFORE
