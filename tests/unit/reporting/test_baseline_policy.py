"""What is made of a baseline, without a run: what grew and how it is told, what is stale, when a run may write, and what stands in the file then."""

from dataclasses import asdict, astuple, replace
from fractions import Fraction

import pytest

from pytest_nnxcheck.core.facts import Evidence, Stamp
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.peak import Buffer, Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import baseline_comparison, baseline_file, baseline_update
from pytest_nnxcheck.reporting.baseline_comparison import Comparison, Measured, Request, Result
from pytest_nnxcheck.reporting.baseline_file import Baseline, Entry, OnTarget
from pytest_nnxcheck.reporting.baseline_update import Refused, RunEnd, renewed
from pytest_nnxcheck.reporting.report import Report

OLD = Stamp("0.5.3", "0.5.3", "0.10.2", "cpu", "cpu")
NEW = Stamp("0.6.2", "0.6.1", "0.10.7", "cpu", "cpu")
DIFFERS = "jax 0.5.3 -> 0.6.2, jaxlib 0.5.3 -> 0.6.1, flax 0.10.2 -> 0.10.7"
FIVE = Fraction(1, 20)
PEAKS = Request("peaks", FIVE)


def held(size, kind="temporary", shape="float32[4]", operation="dot", line=""):
    return Buffer(size, shape, kind, operation, (line,) if line else ())


def measured(nesting, split, *buffers, fleeting=False):
    known = Evidence(split, buffers=buffers)
    outcome = Outcome(Nesting.parse(nesting), "held", peak=split.peak, evidence=known)
    return Measured(outcome, baseline_file.entry_of(split.peak, known, drawn=fleeting), fleeting)


def known_of(**sizes):
    return {name.replace("_", " > "): Entry(size) for name, size in sizes.items()}


def now_of(**sizes):
    return {name: measured(name, Split(entry.peak, 0, 0, 0, 0)) for name, entry in known_of(**sizes).items()}


# --- growth --------------------------------------------------------------------------------------------------------------


def on_v5e(entry, peak, wheel="libtpu 1", target="v5e"):
    return replace(entry, targets=(*entry.targets, OnTarget(target, peak, wheel)))


def now_on_v5e(cpu, peak):
    now = measured("jit", Split(cpu, 0, 0, 0, 0))
    return {"jit": replace(now, entry=on_v5e(now.entry, peak))}


@pytest.mark.parametrize(
    "cpu, peak, wheel, any_stamp, expected",
    [
        (100, 105, "libtpu 1", False, Comparison(1)),
        (100, 106, "libtpu 1", False, Comparison(1, grew=("jit",))),
        (100, 94, "libtpu 1", False, Comparison(1, shrank=("jit",))),
        (106, 100, "libtpu 1", False, Comparison(1, grew=("jit",))),
        (100, 106, "libtpu 0", False, Comparison(1, other_wheels=("v5e libtpu 0 -> libtpu 1",))),
        (100, 106, "libtpu 0", True, Comparison(1, grew=("jit",), other_wheels=("v5e libtpu 0 -> libtpu 1",))),
    ],
)
def test_a_peak_on_a_target_is_compared_where_the_same_compiler_counted_it(cpu, peak, wheel, any_stamp, expected):
    known, request = {"jit": on_v5e(Entry(100), 100, wheel)}, Request("peaks", FIVE, any_stamp=any_stamp)
    assert baseline_comparison.compare(known, now_on_v5e(cpu, peak), request) == expected


def test_a_peak_on_a_target_that_the_file_does_not_have_is_new():
    known = {"jit": on_v5e(Entry(100), 100, target="h100")}
    assert baseline_comparison.compare(known, now_on_v5e(100, 900), PEAKS) == Comparison(1, new_on_targets=1)
    assert baseline_comparison.compare(known, now_of(jit=100), PEAKS) == Comparison(1), "a run without a target"


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
        known_of(jit=before), now_of(jit=now), Request("peaks", Fraction(tolerance) / 100)
    )
    assert result == Comparison(1, ("jit",) * grew, ("jit",) * shrank)


def test_what_is_new_and_what_is_stale():
    known = {**known_of(jit=1, jit_remat=5, jit_vmap=7), "jit > cond": Entry(1, drawn=True)}
    now = {**now_of(jit=1, jit_scan=9), "jit > jit": measured("jit > jit", Split(1, 0, 0, 0, 0), fleeting=True)}
    result = baseline_comparison.compare(known, now, Request("peaks", Fraction(0)), excused={"jit > vmap"})
    assert result == Comparison(1, new=("jit > scan",), stale=("jit > remat",))


def test_draws_that_vary_are_compared_and_not_kept():
    now = {"jit": measured("jit", Split(9, 0, 0, 0, 0), fleeting=True), **now_of(jit_scan=9)}
    assert baseline_comparison.compare(known_of(jit=1), now, PEAKS).grew == ("jit",)
    assert [*map(baseline_file.parse_line, baseline_comparison.lines_of("t", now))] == [
        (("t", "jit > scan"), now["jit > scan"].entry)
    ]


@pytest.mark.parametrize(
    "update, any_stamp, same, other",
    [("", False, True, False), ("", True, True, True), ("new", False, True, False), ("all", True, False, False)],
)
def test_what_is_compared(update, any_stamp, same, other):
    request = Request("peaks", FIVE, update, any_stamp)
    assert (request.compares(""), request.compares(DIFFERS)) == (same, other)


# --- the text ------------------------------------------------------------------------------------------------------------


def text_of(known, now, **more):
    result = baseline_comparison.compare(known, now, PEAKS)
    checked = Report((), Settings(), test_id="t.py::test_x[a b]", argument="t.py::test_x[a b]", **more)
    return baseline_comparison.message(result, known, now, PEAKS, checked).splitlines()


def test_the_message_says_what_grew():
    before = measured("jit > scan", Split(100, 20, 80, 20, 0), held(64), held(16, "constant", "s32[4]", ""))
    buffers = (held(64, line="m.py:3"), held(64, line="m.py:9"), held(40, "output", "f32[10]", "add"))
    now = measured("jit > scan", Split(100, 28, 112, 20, 0), *buffers)
    known = {"jit > scan": before.entry, **known_of(jit_vmap=100, jit=50)}
    lines = text_of(known, {"jit > scan": now, **now_of(jit_vmap=110, jit=50)}, options="--nnx-baseline 'a b.txt'")
    assert lines == [
        "nnx memory baseline exceeded",
        "  test        t.py::test_x[a b]",
        "  nesting     jit > scan   smallest of 2 that grew, 3 compared",
        "  peak        220 B, was 180 B: +40 B (+22.2 %), tolerance 5%",
        "  outputs     28 B, was 20 B: +8 B (+40.0 %)",
        "  temporaries 112 B, was 80 B: +32 B (+40.0 %)",
        "  buffer      + 64 B temporary float32[4] dot   m.py:3",
        "  buffer      + 40 B output f32[10] add",
        "  buffer      - 16 B constant s32[4]",
        "  also grew   jit > vmap   110 B, was 100 B: +10 B (+10.0 %)",
        "  accept      pytest 't.py::test_x[a b]' --nnx-baseline 'a b.txt' --nnx-baseline-update",
        "  replay      pytest 't.py::test_x[a b]' --nnx-baseline 'a b.txt' --nnx-nesting 'jit > scan'",
    ]


def test_the_message_names_the_target_that_grew():
    known = {"jit": on_v5e(Entry(100), 100), "jit > scan": on_v5e(Entry(100), 100)}
    now = now_on_v5e(101, 120)
    lines = text_of(
        known,
        {**now, "jit > scan": replace(measured("jit > scan", Split(200, 0, 0, 0, 0)), entry=on_v5e(Entry(200), 130))},
    )
    assert lines[2:6] == [
        "  nesting     jit   smallest of 2 that grew, 2 compared",
        "  v5e         120 B, was 100 B: +20 B (+20.0 %), tolerance 5%",
        "  also grew   jit > scan   200 B, was 100 B: +100 B (+100.0 %), v5e",
        "              130 B, was 100 B: +30 B (+30.0 %)",
    ]
    both = text_of({"jit": on_v5e(Entry(100), 100)}, now_on_v5e(110, 120))
    assert [line.split()[0] for line in both[3:6]] == ["peak", "v5e", "accept"]


def test_the_message_without_a_split():
    assert text_of(known_of(jit=0), now_of(jit=7))[3:] == [
        "  peak        7 B, was 0 B: +7 B, tolerance 5%",
        "  accept      pytest 't.py::test_x[a b]' --nnx-baseline-update",
        "  replay      pytest 't.py::test_x[a b]' --nnx-nesting jit",
    ]


def test_many_that_grew_are_counted():
    names = "jit jit_jit jit_remat jit_scan jit_vmap jit_cond jit_switch".split()
    lines = text_of(known_of(**dict.fromkeys(names, 1)), now_of(**dict.fromkeys(names, 2)))
    rows = [line for line in lines if line.startswith("  also grew")]
    assert len(rows) == 6
    assert rows[-1] == "  also grew   and 1 more"


def test_what_the_baseline_does_not_name_is_not_called_new():
    before = measured("jit", Split(0, 0, 99, 0, 0), *map(held, (64, 32, 16, 8)))
    now = measured("jit", Split(0, 0, 199, 0, 0), *map(held, (64, 32, 20, 16, 8, 4)))
    assert [*baseline_comparison.buffer_rows(before.entry, now)] == ["+ 20 B temporary float32[4] dot"]


def test_what_the_evidence_does_not_name_is_not_called_gone():
    before = measured("jit", Split(0, 0, 99, 0, 0), held(70), held(50), held(8))
    now = measured("jit", Split(0, 0, 199, 0, 0), *map(held, range(60, 50, -1)))
    rows = [*baseline_comparison.buffer_rows(before.entry, now)]
    assert [row for row in rows if row.startswith("-")] == ["- 70 B temporary float32[4] dot"]


FULL = Result("t", comparison=Comparison(9, ("jit",), ("a", "b"), ("c",)))
OTHER = Result("t", differences=DIFFERS, comparison=Comparison(9))
STAMPED = f"peaks is of another stamp, {DIFFERS}; "
COMPARED = "peaks: 9 nestings compared"
SHRANK = "2 nestings shrank by more than 5%: --nnx-baseline-update keeps the gain"


@pytest.mark.parametrize(
    "update, any_stamp, result, lines",
    [
        ("", False, FULL, [f"{COMPARED}, 1 grew by more than 5%", SHRANK, "1 nesting not in peaks: --nnx-baseline-update-new-only adds them"]),
        ("new", False, FULL, [f"{COMPARED}, 1 grew by more than 5%", SHRANK]),
        ("", False, OTHER, [STAMPED + "nothing was compared: --nnx-baseline-any-stamp compares all the same, --nnx-baseline-update measures all anew"]),
        ("", True, OTHER, [STAMPED + "compared all the same (--nnx-baseline-any-stamp)", COMPARED]),
        ("all", False, OTHER, []),
    ],
)  # fmt: skip
def test_the_summary_counts(update, any_stamp, result, lines):
    request = Request("peaks", FIVE, update, any_stamp)
    assert [*baseline_comparison.summary(request, [result], exists=True)] == lines


def test_the_summary_of_a_run_that_has_no_file_yet_counts_nothing():
    assert [*baseline_comparison.summary(Request("peaks", FIVE, "new"), [Result("t")], exists=False)] == []


# --- what a test hands over ----------------------------------------------------------------------------------------------


def result(test, stamp=OLD, *, replayed=False, **sizes):
    return Result(test, astuple(stamp), lines=baseline_comparison.lines_of(test, now_of(**sizes)), replayed=replayed)


def test_a_result_crosses_processes_as_plain_values():
    full = replace(result("t", jit=1, jit_scan=2), comparison=FULL.comparison, differences=DIFFERS)
    assert Result.from_wire(asdict(full)) == full
    assert {name: entry.peak for name, entry in full.entries().items()} == {"jit": 1, "jit > scan": 2}


def test_a_test_that_failed_after_all_keeps_its_counts_alone():
    full = replace(result("t", jit=1), comparison=replace(FULL.comparison, stale=("x",)), differences=DIFFERS)
    assert full.of_failure() == Result("t", differences=DIFFERS, comparison=Comparison(9, ("jit",)))


# --- what is stale -------------------------------------------------------------------------------------------------------

KNOWN = Baseline(OLD, {(test, "jit"): Entry(1) for test in ("a.py::test_x", "a.py::test_gone", "b.py::test_y")})
ALL = RunEnd(tests=frozenset({"a.py::test_x"}), whole_files=frozenset({"a.py", "b.py"}))
GONE = [("a.py::test_gone", "jit"), ("b.py::test_y", "jit")]


@pytest.mark.parametrize(
    "end, entries",
    [
        (ALL, GONE),
        (replace(ALL, whole_files=frozenset({"a.py"})), GONE[:1]),
        (replace(ALL, skipped=frozenset({"b.py"})), GONE[:1]),
        (replace(ALL, complete=False), []),
        (replace(ALL, narrowed=True), []),
        (replace(ALL, replayed=True), []),
        (replace(ALL, fewer_nestings=True), GONE),
    ],
)
def test_only_a_run_of_all_tests_knows_that_one_is_gone(end, entries):
    assert baseline_update.gone(KNOWN, end) == entries


MISSED = Result("a.py::test_x", comparison=Comparison(stale=("jit > scan", "jit > vmap")))
NO_SUCH = ["a.py::test_gone: there is no such test", "b.py::test_y: there is no such test"]
DID_NOT_RUN = ["a.py::test_x: did not run under jit > scan, jit > vmap"]


@pytest.mark.parametrize(
    "missed, end, lines",
    [
        (MISSED, ALL, NO_SUCH + DID_NOT_RUN),
        (replace(MISSED, replayed=True), ALL, NO_SUCH),
        (MISSED, replace(ALL, narrowed=True), NO_SUCH),
        (MISSED, replace(ALL, fewer_nestings=True), NO_SUCH),
        (replace(MISSED, differences=DIFFERS), ALL, []),
    ],
)
def test_what_is_told_of_stale_entries(missed, end, lines):
    assert [*baseline_update.stale_lines(GONE, [missed], end)] == lines


def test_a_name_stays_on_its_line():
    assert [*baseline_update.stale_lines([("a\nb", "jit")], [], ALL)] == [r"'a\nb': there is no such test"]


@pytest.mark.parametrize(
    "end, stale, reason",
    [
        (RunEnd(), False, ""),
        (RunEnd(exit_status=2, failures=3, interrupted=True, broken=True), True, "not every test could be collected"),
        (RunEnd(exit_status=2, failures=3, interrupted=True), True, "the run was interrupted"),
        (RunEnd(exit_status=1, failures=1), True, "1 test failed"),
        (RunEnd(exit_status=1, failures=3), False, "3 tests failed"),
        (RunEnd(exit_status=7), True, "the run failed (exit status 7)"),
        (RunEnd(), True, "it has stale entries, which only --nnx-baseline-update removes"),
    ],
)
def test_why_a_run_must_not_write(end, stale, reason):
    assert baseline_update.refusal(end, stale=stale) == reason


# --- an update -----------------------------------------------------------------------------------------------------------

BEFORE = Baseline(OLD, {("a", "jit"): Entry(1), ("a", "jit > vmap"): Entry(2, drawn=True), ("b", "jit"): Entry(3)})


def sizes_of(after):
    return {key: entry.peak for key, entry in after.entries.items()}


def test_an_update_replaces_the_tests_that_passed():
    after = renewed(BEFORE, [result("a", jit=9, jit_scan=8), Result("b")])
    assert sizes_of(after) == {("a", "jit"): 9, ("a", "jit > scan"): 8, ("b", "jit"): 3}
    assert baseline_update.changes(BEFORE, after) == "3 entries: 1 new, 1 changed, 1 removed"


def test_an_update_takes_out_what_is_gone():
    after = renewed(BEFORE, [result("a", jit=1)], removed=[("b", "jit")])
    assert sizes_of(after) == {("a", "jit"): 1}
    assert baseline_update.changes(after, after) == "1 entry: nothing changed"
    assert baseline_update.changes(None, after) == "1 entry: 1 new"


def test_a_replay_replaces_its_nesting_alone():
    after = renewed(BEFORE, [result("a", jit_vmap=9, jit_scan=8, replayed=True)])
    assert sizes_of(after) == {("a", "jit"): 1, ("a", "jit > vmap"): 9, ("a", "jit > scan"): 8, ("b", "jit"): 3}
    assert after.entries["a", "jit > vmap"].drawn


def on_targets(after):
    return {nesting: [(on.target, on.peak) for on in entry.targets] for (_, nesting), entry in after.entries.items()}


def of_targets(entry, *, replayed=False):
    line = baseline_file.format_line(("a", "jit"), entry)
    return Result("a", astuple(OLD), lines=(line,), replayed=replayed)


ON_TWO = Baseline(OLD, {("a", "jit"): on_v5e(on_v5e(Entry(1), 5, target="h100"), 7, target="v5e:2x4")})


def test_an_update_leaves_the_peaks_on_targets_that_the_run_has_none_of():
    assert on_targets(renewed(ON_TWO, [result("a", jit=9)])) == {"jit": [("h100", 5), ("v5e:2x4", 7)]}
    again = of_targets(on_v5e(Entry(9), 8))
    assert on_targets(renewed(ON_TWO, [again])) == {"jit": [("h100", 5), ("v5e", 8)]}, "of a chip all are replaced"
    assert sizes_of(renewed(ON_TWO, [again])) == {("a", "jit"): 9}
    other = Result("a", astuple(NEW), lines=result("a", jit=9).lines)
    assert on_targets(renewed(ON_TWO, [other])) == {"jit": []}, "all entries are of one stamp"


def test_new_only_adds_peaks_on_targets():
    after = renewed(ON_TWO, [of_targets(on_v5e(on_v5e(Entry(9), 8), 6, target="h100"))], new_only=True)
    assert on_targets(after) == {"jit": [("h100", 5), ("v5e", 8), ("v5e:2x4", 7)]}
    assert sizes_of(after) == {("a", "jit"): 1}


def test_new_only_adds_and_changes_nothing():
    after = renewed(BEFORE, [result("a", jit=9, jit_scan=8)], removed=[("b", "jit")], new_only=True)
    assert sizes_of(after) == {("a", "jit"): 1, ("a", "jit > vmap"): 2, ("a", "jit > scan"): 8, ("b", "jit"): 3}


@pytest.mark.parametrize(
    "results, new_only, reason",
    [
        ([result("a", NEW, jit=9)], False, f"its stamp would change, {DIFFERS}, and 1 test in it did not run (b): run all of them"),
        ([Result("x"), result("y", NEW)], False, f"its stamp would change, {DIFFERS}, and 2 tests in it did not run (a, ...): run all of them"),
        ([result("a", NEW, jit=9, replayed=True), result("b", NEW)], False, f"its stamp would change, {DIFFERS}, and 1 test in it did not run (a): run all of them"),
        ([result("c", NEW, jit=9)], True, f"its entries are of another stamp, {DIFFERS}: write all anew with --nnx-baseline-update"),
        ([result("a", OLD), result("b", NEW)], False, f"its processes are not of the same versions and devices: {DIFFERS}"),
    ],
)  # fmt: skip
def test_entries_of_two_stamps_never_stand_in_one_file(results, new_only, reason):
    with pytest.raises(Refused) as caught:
        renewed(BEFORE, results, new_only=new_only)
    assert str(caught.value) == reason


def test_another_stamp_is_written_from_a_run_of_all_tests():
    after = renewed(BEFORE, [result("a", NEW, jit=9)], removed=[("b", "jit")])
    assert (after.stamp, sizes_of(after)) == (NEW, {("a", "jit"): 9})
    # A test that the run came to, and skipped, was not measured under this stamp.
    assert sizes_of(renewed(BEFORE, [result("a", NEW, jit=9), Result("b")])) == {("a", "jit"): 9}


def test_a_run_that_measured_nothing():
    with pytest.raises(Refused, match=r"^no test that uses nnx_wrap passed$"):
        renewed(None, [])
    assert renewed(BEFORE, []) == BEFORE
