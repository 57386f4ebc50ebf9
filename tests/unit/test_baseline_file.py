"""The file of the memory baseline as data: written, read back, refused; what grew, as text; what an update keeps."""

import json
import os
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck.core.evidence import Evidence, Held, Split, Stamp
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.setting_values import SettingError
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import baseline_comparison, baseline_file, baseline_update
from pytest_nnxcheck.reporting.baseline_comparison import Measured
from pytest_nnxcheck.reporting.baseline_file import Baseline, Buffers, Entry
from pytest_nnxcheck.reporting.baseline_update import Refused, Result, renewed
from pytest_nnxcheck.reporting.report import Report

OLD = Stamp("0.5.3", "0.5.3", "0.10.2", "cpu", "cpu")
NEW = Stamp("0.6.2", "0.6.1", "0.10.7", "cpu", "cpu")
SPLIT = Split(arguments=64, outputs=16, temporaries=32, aliased=8, constants=4)
ENTRY = Entry(108, SPLIT, (Buffers(16, "temporary float32[4] dot", 2), Buffers(4, "constant")))
TEXT = """\
# pytest-nnxcheck memory baseline, format 1
# jax: 0.5.3
# jaxlib: 0.5.3
# flax: 0.10.2
# platform: cpu
# device: cpu
# devices: 1
tests/test_a.py::test_b | jit > scan | 108 B = 64 arguments + 16 outputs + 32 temporaries + 4 constants - 8 aliased | 2 x 16 B temporary float32[4] dot; 4 B constant
tests/test_a.py::test_b | jit[closure] > vmap (drawn) | 7 B
"""
KNOWN = Baseline(
    OLD,
    {
        ("tests/test_a.py::test_b", "jit > scan"): ENTRY,
        ("tests/test_a.py::test_b", "jit[closure] > vmap"): Entry(7, drawn=True),
    },
)


def error_of(text):
    with pytest.raises(SettingError) as caught:
        baseline_file.parse(text, "peaks.txt")
    return str(caught.value)


# --- the text ------------------------------------------------------------------------------------------------------------


def test_the_file_is_read_as_it_is_written():
    assert baseline_file.format_baseline(KNOWN) == TEXT
    assert baseline_file.parse(TEXT, "here") == KNOWN


SIZES = st.integers(0, 10**18)
# Any text at all: lone surrogates too, which a file name that is no UTF-8 leaves in a node id.
NAMES = st.text(st.characters(), min_size=1) | st.sampled_from(
    [
        "a | b",
        "a;b",
        " a",
        "a ",
        '"a"',
        '"',
        "#",
        "<<<<<<< ours",
        "=======",
        "a (drawn)",
        "\t\n\r",
        "ü[é-日本]",
        "\ud800",
        "\\u007c",
    ]
)
SPLITS = st.builds(
    lambda a, o, t, c, less: Split(a, o, t, min(less, a + o + t + c), c), SIZES, SIZES, SIZES, SIZES, SIZES
)
ENTRIES = SPLITS.flatmap(
    lambda split: st.builds(
        Entry,
        st.just(split.peak),
        st.just(split),
        st.lists(st.builds(Buffers, SIZES, NAMES, st.integers(1, 99)), max_size=3).map(tuple),
        st.booleans(),
    )
) | st.builds(Entry, SIZES, drawn=st.booleans())
STAMPS = st.builds(Stamp, NAMES, NAMES, NAMES, NAMES, NAMES, NAMES)


@given(st.builds(Baseline, STAMPS, st.dictionaries(st.tuples(NAMES, NAMES), ENTRIES, max_size=4)))
def test_any_baseline_round_trips(known):
    text = baseline_file.format_baseline(known)
    assert baseline_file.parse(text, "here") == known
    assert len(text.encode("utf-8").splitlines()) == 7 + len(known.entries) == text.count("\n")
    # What a text file may turn around is turned back.
    assert baseline_file.parse(text.encode("utf-8").decode("utf-8"), "here") == known


@given(st.text() | st.text(st.sampled_from(list(TEXT))).map(lambda text: TEXT + text))
def test_any_text_is_a_baseline_or_an_error_with_a_line(text):
    try:
        baseline_file.parse(text, "peaks.txt")
    except SettingError as error:
        name, number, _ = str(error).split(":", 2)
        assert name == "peaks.txt"
        assert 1 <= int(number) <= text.count("\n") + 1
        return
    assert baseline_file.format_baseline(baseline_file.parse(text, "peaks.txt"))


def test_lines_are_sorted_by_test_then_nesting():
    keys = [("b", "jit"), ("a", "jit > vmap"), ("a-b", "jit"), ("a", "jit")]
    lines = baseline_file.format_baseline(Baseline(OLD, {key: Entry(1) for key in keys})).splitlines()[7:]
    assert lines == ["a | jit | 1 B", "a | jit > vmap | 1 B", "a-b | jit | 1 B", "b | jit | 1 B"]


def test_plain_names_stay_readable_and_others_stay_on_their_line():
    assert baseline_file.quoted(r"tests/ä b.py::test_x[1-\u00e9]") == r"tests/ä b.py::test_x[1-\u00e9]"
    assert baseline_file.quoted("a|b;c\n\u2028") == r'"a\u007cb\u003bc\n\u2028"'


def replaced(old, new):
    assert old in TEXT
    return TEXT.replace(old, new, 1)


ANEW = ": take back what changed the file, or delete it and write it anew with --nnx-baseline-update"
FORM = "is not '96 B = 32 arguments + 32 outputs + 64 temporaries + 0 constants - 32 aliased'"
BAD = {
    "": "peaks.txt:1: this is no baseline of pytest-nnxcheck, it starts with an empty line: name another file,",
    "[project]\nname = 'x'\n": "peaks.txt:1: this is no baseline of pytest-nnxcheck, it starts with '[project]': name another file, or",
    replaced(
        "format 1", "format 2"
    ): "peaks.txt:1: this is format '2' of the baseline, and this version of pytest-nnxcheck reads 1:",
    replaced("# flax: 0.10.2\n", ""): "peaks.txt:4: '# platform: cpu' is not the line '# flax: ...' of the stamp"
    + ANEW,
    "# pytest-nnxcheck memory baseline, format 1\n": "peaks.txt:2: '' is not the line '# jax: ...' of the stamp" + ANEW,
    replaced(" (drawn) | 7 B", ""): (
        "peaks.txt:9: 'tests/test_a.py::test_b | jit[closure] > vmap' is not 'test | nesting | bytes | buffers'" + ANEW
    ),
    replaced("108 B", "109 B"): "peaks.txt:8: the parts of the peak add up to 108 B, and 109 B is written" + ANEW,
    replaced("7 B", "7 KB"): f"peaks.txt:9: '7 KB' {FORM}" + ANEW,
    replaced("7 B", "٣ B"): f"peaks.txt:9: '٣ B' {FORM}" + ANEW,
    replaced("7 B", "9" * 9999 + " B"): f"peaks.txt:9: '{'9' * 60}' {FORM}" + ANEW,
    replaced("; 4 B", "; 4"): "peaks.txt:8: '4 constant' is not '2 x 16 B temporary float32[4] dot'" + ANEW,
    replaced("jit[closure] > vmap (drawn)", '"jit'): "peaks.txt:9: '\"jit' has quotes that do not close" + ANEW,
    replaced("jit[closure] > vmap (drawn)", "jit > scan"): (
        "peaks.txt:9: a second entry for tests/test_a.py::test_b under jit > scan, the first is in line 8" + ANEW
    ),
    replaced("7 B\n", "7 B\n\n"): "peaks.txt:10: '' is not 'test | nesting | bytes | buffers'" + ANEW,
    replaced("7 B\n", "7 B\n# mine\n"): "peaks.txt:10: '# mine' is not 'test | nesting | bytes | buffers'" + ANEW,
    TEXT[:-1]: "peaks.txt:9: the file ends in the middle of a line, so something is missing" + ANEW,
    TEXT[:-40]: "peaks.txt:9: the file ends in the middle of a line",
    replaced(
        "# jax", "<<<<<<< HEAD\n# jax"
    ): "peaks.txt:2: a merge conflict, '<<<<<<< HEAD': take either side, then write the file anew",
    TEXT + "=======\n": "peaks.txt:10: a merge conflict, '=======': take either side, then write the file anew",
    ">>>>>>> theirs\n" + TEXT: "peaks.txt:1: a merge conflict, '>>>>>>> theirs': take either side",
}


@pytest.mark.parametrize("text, message", BAD.items(), ids=range(len(BAD)))
def test_what_is_wrong_with_a_file_is_said_with_its_line(text, message):
    assert error_of(text).startswith(message)
    assert "--nnx-baseline-update" in error_of(text)


# --- the file ------------------------------------------------------------------------------------------------------------


def test_a_file_is_read_whatever_its_line_ends(tmp_path):
    path = tmp_path / "peaks.txt"
    assert baseline_file.read(path, "peaks.txt") is None
    path.write_bytes(TEXT.replace("\n", "\r\n").encode())
    assert baseline_file.read(path, "peaks.txt") == KNOWN


def test_what_is_no_file_and_no_text(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match=r"^x is no text file: 'utf-8' codec can't decode .*, name another file, or"):
        baseline_file.read(tmp_path / "x", "x")
    with pytest.raises(SettingError, match=r"^cannot read here: Is a directory$"):
        baseline_file.read(tmp_path, "here")
    with pytest.raises(SettingError, match=r"^cannot read here: Not a directory$"):
        baseline_file.read(tmp_path / "x" / "y", "here")
    assert baseline_file.unwritable(tmp_path) == "Is a directory"
    assert baseline_file.unwritable(tmp_path / "x" / "y") == "Not a directory"
    assert baseline_file.unwritable(tmp_path / "no" / "y") == "No such file or directory"
    assert baseline_file.unwritable(tmp_path / "y") == baseline_file.unwritable(tmp_path / "x") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_file_is_written_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "päks of a b.txt"
    baseline_file.write(path, KNOWN)
    assert path.read_text(encoding="utf-8") == TEXT
    path.chmod(0o640)
    for owner, name in ((os, "fsync"), (type(path), "replace")):
        monkeypatch.setattr(owner, name, no_space)
        with pytest.raises(OSError, match="No space left"):
            baseline_file.write(path, Baseline(NEW))
        monkeypatch.undo()
        assert path.read_text(encoding="utf-8") == TEXT
        assert list(tmp_path.iterdir()) == [path]
    baseline_file.write(path, Baseline(NEW))
    assert "# jax: 0.6.2\n" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def no_space(*_):
    raise OSError(28, "No space left on device")


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "there" / "peaks.txt")
    baseline_file.write(link, KNOWN)
    assert link.is_symlink()
    assert (tmp_path / "there" / "peaks.txt").read_text() == TEXT


# --- what is kept of a nesting -------------------------------------------------------------------------------------------


def held(size, kind="temporary", shape="float32[4]", operation="dot", line="", name=""):
    return Held(size, shape, kind, operation, (line,) if line else (), name, whole=bool(name))


def test_an_entry_keeps_the_largest_buffers_those_that_are_alike_together():
    buffers = (held(64), held(64), held(64, name="model.k"), held(32, operation=""), held(16), held(8))
    split = Split(0, 0, 248, 0, 0)
    kept = baseline_file.entry(248, Evidence(split, buffers=buffers), drawn=True)
    assert kept == Entry(
        248,
        split,
        (
            Buffers(64, "temporary float32[4] dot", 2),
            Buffers(64, "temporary float32[4] dot, copy of model.k"),
            Buffers(32, "temporary float32[4]"),
        ),
        drawn=True,
    )


def test_a_peak_without_evidence_is_an_entry_too():
    assert baseline_file.entry(5, None, drawn=False) == Entry(5)
    # Of two calls in one nesting the peak may be that of another than the evidence.
    assert baseline_file.entry(5, Evidence(SPLIT, buffers=(held(16),)), drawn=False) == Entry(5)


# --- growth --------------------------------------------------------------------------------------------------------------

JIT, SCAN, VMAP = map(Nesting.parse, ("jit", "jit > scan", "jit > vmap"))


def measured(nesting, split, *buffers):
    known = Evidence(split, buffers=buffers)
    return Measured(
        Outcome(nesting, "held", peak=split.peak, evidence=known), baseline_file.entry(split.peak, known, drawn=False)
    )


def peaks(**sizes):
    return {str(Nesting.parse(name.replace("_", " > "))): Entry(size) for name, size in sizes.items()}


def found(**sizes):
    return {
        (nesting := Nesting.parse(name.replace("_", " > "))): measured(nesting, Split(size, 0, 0, 0, 0))
        for name, size in sizes.items()
    }


@pytest.mark.parametrize(
    "before, now, tolerance, grew, shrank",
    [
        (100, 105, "5%", False, False),
        (100, 106, "5%", True, False),
        (100, 95, "5%", False, False),
        (100, 94, "5%", False, True),
        (100, 100, "0%", False, False),
        (10**17, 10**17 + 1, "0%", True, False),
        (10**17, 10**17 - 1, "0%", False, True),
        (0, 0, "5%", False, False),
        (0, 1, "5%", True, False),
        (1000, 1006, "0.5%", True, False),
    ],
)
def test_what_grew_and_what_shrank(before, now, tolerance, grew, shrank):
    part = Fraction(tolerance.rstrip("%")) / 100
    result = baseline_comparison.compare(peaks(jit=before), found(jit=now), part)
    assert (result.grew, result.shrank) == ((JIT,) if grew else (), ("jit",) if shrank else ())
    assert (result.compared, result.new) == (1, ())


def test_what_is_not_in_the_baseline_is_new():
    result = baseline_comparison.compare(peaks(jit=1, jit_remat=5), found(jit=1, jit_scan=9), Fraction(0))
    assert (result.compared, result.grew, result.new) == (1, (), ("jit > scan",))


def text_of(known, now, **more):
    tolerance = Fraction(1, 20)
    result = baseline_comparison.compare(known, now, tolerance)
    checked = Report((), Settings(), test_id="t.py::test_x[a b]", **more)
    return baseline_comparison.message(result, known, now, tolerance=tolerance, checked=checked).splitlines()


def test_the_message_says_what_grew():
    before = measured(SCAN, Split(100, 20, 80, 20, 0), held(64, line="m.py:3"), held(16, "constant", "s32[4]", ""))
    now = measured(
        SCAN,
        Split(100, 28, 112, 20, 0),
        held(64, line="m.py:3"),
        held(64, line="m.py:9"),
        held(40, "output", "f32[10]", "add"),
    )
    known = {"jit > scan": before.entry, **peaks(jit_vmap=100, jit=50)}
    lines = text_of(known, {SCAN: now, **found(jit_vmap=110, jit=50)}, options="--nnx-baseline 'a b.txt'")
    assert lines == [
        "nnx memory baseline exceeded                       t.py::test_x[a b]",
        "  nesting     jit > scan                             smallest of 2 that grew, 3 compared",
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


def test_the_message_without_a_split():
    lines = text_of(peaks(jit=0), found(jit=7))
    assert lines[2:] == [
        "  peak        7 B, was 0 B: +7 B, tolerance 5%",
        "  accept      pytest 't.py::test_x[a b]' --nnx-baseline-update",
        "  replay      pytest 't.py::test_x[a b]' --nnx-nesting jit",
    ]


def test_many_that_grew_are_counted():
    names = ["jit", "jit_jit", "jit_remat", "jit_scan", "jit_vmap", "jit_while_loop", "jit_eval_shape"]
    before = {str(n): Entry(1) for n in map(Nesting.parse, (name.replace("_", " > ", 1) for name in names))}
    now = {Nesting.parse(name): measured(Nesting.parse(name), Split(2, 0, 0, 0, 0)) for name in before}
    rows = [line for line in text_of(before, now) if line.startswith("  also grew")]
    assert len(rows) == 6
    assert rows[-1] == "  also grew   and 1 more"


def test_what_the_baseline_does_not_name_is_not_called_new():
    before = measured(JIT, Split(0, 0, 99, 0, 0), *(held(size) for size in (64, 32, 16, 8)))
    now = measured(JIT, Split(0, 0, 199, 0, 0), *(held(size) for size in (64, 32, 20, 16, 8, 4)))
    assert [*baseline_comparison.buffer_rows(before.entry, now)] == ["+ 20 B temporary float32[4] dot"]


def test_what_the_evidence_does_not_name_is_not_called_gone():
    before = measured(JIT, Split(0, 0, 99, 0, 0), held(70), held(50), held(8))
    now = measured(JIT, Split(0, 0, 199, 0, 0), *(held(size) for size in range(60, 50, -1)))
    assert [row for row in baseline_comparison.buffer_rows(before.entry, now) if row.startswith("-")] == [
        "- 70 B temporary float32[4] dot"
    ]


# --- an update -----------------------------------------------------------------------------------------------------------


def result(stamp=OLD, *, replayed=False, **sizes):
    return Result(stamp, peaks(**sizes), replayed)


def sizes_of(made):
    return {key: entry.peak for key, entry in made.entries.items()}


BEFORE = Baseline(OLD, {("a", "jit"): Entry(1), ("a", "jit > vmap"): Entry(2, drawn=True), ("b", "jit"): Entry(3)})


def test_an_update_replaces_the_tests_that_ran():
    made = renewed(BEFORE, {"a": result(jit=9, jit_scan=8)}, seen={"a"})
    assert sizes_of(made) == {("a", "jit"): 9, ("a", "jit > scan"): 8, ("b", "jit"): 3}
    assert baseline_update.changes(BEFORE, made) == "3 entries: 1 new, 1 changed, 1 removed"


def test_an_update_takes_out_what_is_gone():
    made = renewed(BEFORE, {"a": result(jit=1)}, gone=[("b", "jit")], seen={"a"})
    assert sizes_of(made) == {("a", "jit"): 1}
    assert baseline_update.changes(made, made) == "1 entry: nothing changed"


def test_a_replay_replaces_its_nesting_alone():
    made = renewed(BEFORE, {"a": result(jit_vmap=9, jit_scan=8, replayed=True)}, seen={"a"})
    assert sizes_of(made) == {("a", "jit"): 1, ("a", "jit > vmap"): 9, ("a", "jit > scan"): 8, ("b", "jit"): 3}
    assert made.entries["a", "jit > vmap"].drawn


def test_new_only_adds_and_changes_nothing():
    made = renewed(BEFORE, {"a": result(jit=9, jit_scan=8)}, gone=[("b", "jit")], seen={"a"}, new_only=True)
    assert sizes_of(made) == {("a", "jit"): 1, ("a", "jit > vmap"): 2, ("a", "jit > scan"): 8, ("b", "jit"): 3}


def refusal(*args, **more):
    with pytest.raises(Refused) as caught:
        renewed(*args, **more)
    return str(caught.value)


DIFFERS = "jax 0.5.3 -> 0.6.2, jaxlib 0.5.3 -> 0.6.1, flax 0.10.2 -> 0.10.7"


def test_entries_of_two_stamps_never_stand_in_one_file():
    text = f"its stamp would change, {DIFFERS}, and 1 test in it did not run (b): run all of them"
    assert refusal(BEFORE, {"a": result(NEW, jit=9)}, seen={"a"}) == text
    replay = {"a": result(NEW, jit=9, replayed=True), "b": result(NEW)}
    assert "1 test in it did not run (a)" in refusal(BEFORE, replay, seen={"a", "b"})
    text = f"its entries are of another stamp, {DIFFERS}: write all anew with --nnx-baseline-update"
    assert refusal(BEFORE, {"c": result(NEW, jit=9)}, seen={"c"}, new_only=True) == text
    text = f"its processes are not of the same versions and devices: {DIFFERS}"
    assert refusal(BEFORE, {"a": result(OLD), "b": result(NEW)}) == text


def test_another_stamp_is_written_from_a_run_of_all_tests():
    made = renewed(BEFORE, {"a": result(NEW, jit=9)}, gone=[("b", "jit")], seen={"a"})
    assert (made.stamp, sizes_of(made)) == (NEW, {("a", "jit"): 9})
    # A test that the run came to, and skipped, was not measured under this stamp.
    assert sizes_of(renewed(BEFORE, {"a": result(NEW, jit=9)}, seen={"a", "b"})) == {("a", "jit"): 9}


def test_a_run_that_measured_nothing():
    assert refusal(None, {}) == "no test that uses nnx_wrap passed"
    assert renewed(BEFORE, {}) == BEFORE


def test_entries_cross_processes_as_lines():
    lines = json.loads(json.dumps([baseline_file.format_line(*pair) for pair in KNOWN.entries.items()]))
    assert dict(map(baseline_file.parse_line, lines)) == KNOWN.entries
