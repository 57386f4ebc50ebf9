"""The file of the memory baseline as data: written, read back, refused; what is kept of a nesting."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nnxcheck.core import peak
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.facts import Evidence, Stamp
from pytest_nnxcheck.core.peak import Buffer, Split
from pytest_nnxcheck.reporting import baseline_file
from pytest_nnxcheck.reporting.baseline_file import Baseline, Buffers, Entry, TargetPeak

OLD = Stamp("0.5.3", "0.5.3", "0.10.2", "cpu", "cpu")
SPLIT = Split(arguments=64, outputs=16, temporaries=32, aliased=8, constants=4)
ON_V5E = TargetPeak("v5e", 4096, "libtpu 0.0.50.1")
KNOWN = Baseline(
    OLD,
    {
        "tests/test_ä.py::test_b": {"jit > vmap": Entry(7, drawn=True), "jit": Entry(7, targets=(ON_V5E,))},
        "tests/test_a.py::test_b": {
            "jit > scan": Entry(108, SPLIT, (Buffers(16, "temporary float32[4] dot", 2), Buffers(4, "constant")))
        },
    },
)
HEAD = '{"pytest-nnxcheck memory baseline": 2, "jax": "0.5.3", "jaxlib": "0.5.3", "flax": "0.10.2", "platform": "cpu", "device": "cpu", "devices": "1"}\n'
SCAN = (
    '{"test": "tests/test_a.py::test_b", "nesting": "jit > scan", "peak": 108, "split": {"arguments": 64, "outputs": 16, "temporaries": 32,'
    ' "aliased": 8, "constants": 4}, "buffers": [{"bytes": 16, "label": "temporary float32[4] dot", "count": 2}, {"bytes": 4, "label": "constant",'
    ' "count": 1}], "drawn": false}\n'
)
JIT = (
    '{"test": "tests/test_ä.py::test_b", "nesting": "jit", "peak": 7, "split": null, "buffers": [], "drawn": false,'
    ' "targets": [{"target": "v5e", "peak": 4096, "wheel": "libtpu 0.0.50.1"}]}\n'
)
VMAP = '{"test": "tests/test_ä.py::test_b", "nesting": "jit > vmap", "peak": 7, "split": null, "buffers": [], "drawn": true}\n'
TEXT = HEAD + SCAN + JIT + VMAP


def test_the_file_is_read_as_it_is_written_sorted_by_test_and_nesting():
    assert baseline_file.format_baseline(KNOWN) == TEXT
    assert baseline_file.parse(TEXT, "here") == KNOWN


def test_a_target_without_a_peak_is_not_kept():
    there = (
        peak.OnTarget("v5e", peak=4096, wheel="libtpu 0.0.50.1"),
        peak.OnTarget("h100", left_out="a callback", wheel="jax-cuda12-pjrt 0.12.0.1"),
    )
    assert baseline_file.entry_of(7, Evidence(targets=there), drawn=False) == Entry(7, targets=(ON_V5E,))


SIZES = st.integers(0, 10**18)
# What no terminal shows, and lone surrogates, which a file name that is no UTF-8 leaves in a node id.
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1) | st.sampled_from(
    ["<<<<<<< ours", "=======", "\t\n\r", "ü[é-日本]", "\udcff", "a\u2028b", '"', "\\u007c"]
)
SPLITS = st.tuples(SIZES, SIZES, SIZES, SIZES, SIZES).map(
    lambda s: Split(s[0], s[1], s[2], min(s[3], sum(s[:3])), s[4])
)
BUFFERS = st.lists(st.builds(Buffers, SIZES, NAMES, st.integers(1, 99)), max_size=3).map(tuple)
ON_TARGETS = st.lists(st.builds(TargetPeak, NAMES, SIZES, NAMES), max_size=2).map(tuple)
ENTRIES = st.builds(lambda split, *more: Entry(split.peak, split, *more), SPLITS, BUFFERS, st.booleans(), ON_TARGETS)
ENTRIES_OF_A_TEST = st.dictionaries(NAMES, ENTRIES, min_size=1, max_size=2)
STAMPS = st.builds(Stamp, NAMES, NAMES, NAMES, NAMES, NAMES, NAMES)


@settings(max_examples=40)
@given(st.builds(Baseline, STAMPS, st.dictionaries(NAMES, ENTRIES_OF_A_TEST, max_size=3)))
def test_any_baseline_round_trips_a_line_an_entry(known):
    text = baseline_file.format_baseline(known)
    assert baseline_file.parse(text.encode("utf-8").decode("utf-8"), "here") == known
    assert (
        len(text.splitlines()) == 1 + sum(map(len, known.tests.values())) == len([*map(json.loads, text.splitlines())])
    )


@settings(max_examples=40)
@given(st.text() | st.text(st.sampled_from(list(TEXT))).map(lambda text: TEXT + text))
def test_any_text_is_a_baseline_or_an_error_with_a_line(text):
    try:
        baseline_file.parse(text, "peaks.jsonl")
    except SettingError as error:
        name, number, _ = str(error).split(":", 2)
        assert name == "peaks.jsonl"
        assert 1 <= int(number) <= text.count("\n") + 1


def edited(old, new):
    assert TEXT.count(old) >= 1
    return TEXT.replace(old, new, 1)


UPDATE = "write it anew with --nnx-baseline-update, from a run of all tests"
ANEW = f": take back what changed the file, or delete it and {UPDATE}"
FOREIGN = f": name another file, or delete this one and {UPDATE}"
CONFLICT = ": take either side, then write the file anew from the merged code with --nnx-baseline-update"
FIELDS = "this line needs peak, split, buffers, drawn, and has "
BAD = {
    "empty": ("", f"1: this is no baseline of pytest-nnxcheck, it starts with an empty line{FOREIGN}"),
    "format 3": (
        edited('baseline": 2', 'baseline": 3'),
        f"1: this is format 3 of the baseline, and this version of pytest-nnxcheck reads 2: install the version that wrote the file, or delete it and {UPDATE}",
    ),
    "stamp": (
        edited('"flax": "0.10.2", ', ""),
        '1: this line needs jax, jaxlib, flax, platform, device, devices, and has ["jax", "jaxlib", "platform", "device", "devices"]' + ANEW,
    ),
    "no JSON": (edited("108,", "108"), "2: the line is not JSON (Expecting ',' delimiter, column 74)" + ANEW),
    "an empty line": (TEXT + "\n", "5: the line is not JSON (Expecting value, column 1)" + ANEW),
    "too deep": (TEXT + "[" * 10**5, "5: the line is not JSON that can be read ("),
    "no object": (TEXT + "7\n", "5: '7' is not an object of JSON" + ANEW),
    "a field is missing": (edited(', "drawn": true', ""), f'4: {FIELDS}["peak", "split", "buffers"]{ANEW}'),
    "no test": (edited('"test": "tests/test_a.py::test_b", ', ""), "2: test is null, not a text" + ANEW),
    "negative": (edited('"peak": 7', '"peak": -7'), "3: peak is -7, not a whole number" + ANEW),
    "true for 1": (edited('"peak": 7', '"peak": true'), "3: peak is true, not a whole number" + ANEW),
    "no list": (edited('"buffers": []', '"buffers": {}'), "3: buffers is {}, not a list" + ANEW),
    "split": (edited('"split": null', '"split": []'), "3: this line needs arguments, outputs, temporaries, aliased, constants, and has []" + ANEW),
    "sum": (edited("108", "109"), "2: the parts of the peak add up to 108 B, and 109 B is written" + ANEW),
    "twice": (
        TEXT + SCAN,
        "5: a second entry for 'tests/test_a.py::test_b' under 'jit > scan', the first is in line 2" + ANEW,
    ),
    "between": (TEXT + "=======\n", "5: a merge conflict, '======='" + CONFLICT),
    "theirs": (">>>>>>> theirs\n" + TEXT, "1: a merge conflict, '>>>>>>> theirs'" + CONFLICT),
}  # fmt: skip


@pytest.mark.parametrize("text, message", BAD.values(), ids=BAD)
def test_what_is_wrong_with_a_file_is_said_with_its_line(text, message):
    with pytest.raises(SettingError) as caught:
        baseline_file.parse(text, "peaks.jsonl")
    assert str(caught.value).startswith(f"peaks.jsonl:{message}")
    assert "--nnx-baseline-update" in str(caught.value)


def test_a_file_is_read_whatever_its_line_ends(tmp_path):
    path = tmp_path / "peaks.jsonl"
    assert baseline_file.read(path, "peaks.jsonl") is None
    for text in (TEXT, TEXT.replace("\n", "\r\n"), TEXT.rstrip("\n")):
        path.write_bytes(text.encode())
        assert baseline_file.read(path, "peaks.jsonl") == KNOWN


def test_what_is_no_file_and_no_text(tmp_path):
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match=r"^x is no text file: 'utf-8' codec can't decode .*, name another file, or"):
        baseline_file.read(tmp_path / "x", "x")
    with pytest.raises(SettingError, match=r"^cannot read here: Is a directory$"):
        baseline_file.read(tmp_path, "here")
    with pytest.raises(SettingError, match=r"^cannot read here: Not a directory$"):
        baseline_file.read(tmp_path / "x" / "y", "here")


# --- what is kept of a nesting -------------------------------------------------------------------------------------------


def held(size, kind="temporary", shape="float32[4]", operation="dot", name=""):
    return Buffer(size, shape, kind, operation, (), name, whole=bool(name))


def test_an_entry_keeps_the_largest_buffers_those_that_are_alike_together():
    buffers = (held(64), held(64), held(64, name="model.k"), held(32, operation=""), held(16), held(8))
    split = Split(0, 0, 248, 0, 0)
    kept = (
        Buffers(64, "temporary float32[4] dot", 2),
        Buffers(64, "temporary float32[4] dot, copy of model.k"),
        Buffers(32, "temporary float32[4]"),
    )
    assert baseline_file.entry_of(248, Evidence(split, buffers=buffers), drawn=True) == Entry(
        248, split, kept, drawn=True
    )


def test_a_peak_without_evidence_is_an_entry_too():
    assert baseline_file.entry_of(5, None, drawn=False) == Entry(5)
    # Of two calls in one nesting the peak may be that of another than the evidence.
    assert baseline_file.entry_of(5, Evidence(SPLIT, buffers=(held(16),)), drawn=False) == Entry(5)
