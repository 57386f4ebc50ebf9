"""The file of a baseline: every form in which it is read, and what is said of one that cannot be."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.facts import Stamp
from pytest_nnxcheck.core.on_target import OnTarget
from pytest_nnxcheck.core.peak import Split
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.reporting import baseline
from pytest_nnxcheck.reporting.records import BufferRecord, Head, NestingRecord, Record, plain
from pytest_nnxcheck.reporting.report import Report

FIRST_FORM = """\
{"pytest-nnxcheck memory baseline": 2, "jax": "0.5.3", "jaxlib": "0.5.3", "flax": "0.10.2", "platform": "cpu", "device": "cpu", "devices": "1"}
{"test": "test_a.py::test_b", "nesting": "jit > scan", "peak": 108, "split": {"arguments": 60, "outputs": 40, "temporaries": 28, "aliased": 20, "constants": 0}, "buffers": [{"bytes": 16, "label": "temporary float32[4] dot, copy of model.k", "count": 2}], "drawn": false}
{"test": "test_a.py::test_b", "nesting": "jit", "peak": 7, "split": null, "buffers": [], "drawn": false, "targets": [{"target": "v5e", "peak": 9, "wheel": "libtpu 1"}]}
{"test": "größe.py::test", "nesting": "vmap", "peak": 1, "split": null, "buffers": [], "drawn": true}
"""
KNOWN = """\
{"schema": "pytest-nnxcheck report", "version": 2, "run": {"stamp": {"jax": "0.5.3", "jaxlib": "0.5.3", "flax": "0.10.2", "platform": "cpu", "device": "cpu", "devices": "1"}},
"tests": [
{"nodeid": "test_a.py::*", "expected_failures": [{"key": "memory", "reason": "jax#926"}]}
],
"nestings": [
{"nodeid": "größe.py::test", "nesting": "vmap", "drawn": true, "peak": 1},
{"nodeid": "test_a.py::test_b", "nesting": "jit", "peak": 7, "targets": [{"target": "v5e", "peak": 9, "wheel": "libtpu 1"}]},
{"nodeid": "test_a.py::test_b", "nesting": "jit > scan", "peak": 108, "split": {"arguments": 60, "outputs": 40, "temporaries": 28, "aliased": 20, "constants": 0}, "buffers": [{"bytes": 16, "shape": "float32[4]", "kind": "temporary", "operation": "dot", "name": "model.k", "count": 2}]}
]}
"""


@pytest.fixture
def read(tmp_path):
    """Read a text as the file of a baseline."""

    def of(text):
        (tmp_path / "peaks.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        return baseline.read(tmp_path / "peaks.json", "peaks.json")

    return of


def test_a_baseline_is_written_as_it_was_read(read):
    for text in (KNOWN, KNOWN.replace("\n", "\r\n"), KNOWN.rstrip(), KNOWN.replace('"version": 2', '"version": 1')):
        assert baseline.render(read(text)) == KNOWN


def test_a_baseline_of_the_first_form_says_the_same(read):
    old, new = read(FIRST_FORM), read(KNOWN)
    assert (old.old_form, new.old_form) == (True, False)
    assert (old.stamp, old.tests) == (new.stamp, new.tests)


BAD = {
    "empty": "",
    "another file": "[tool]\n",
    "another report": '{"schema": "coverage"}',
    "a later version": KNOWN.replace('"version": 2', '"version": 3'),
    "before the first form": FIRST_FORM.replace('baseline": 2', 'baseline": 1'),
    "no stamp": '{"schema": "pytest-nnxcheck report", "version": 1, "run": {}, "tests": [], "nestings": []}',
    "a part of the stamp": KNOWN.replace('"flax": "0.10.2", ', ""),
    "no JSON": KNOWN.replace("108,", "108"),
    "no JSON in the first form": FIRST_FORM.replace("108,", "108"),
    "a line that is no object": FIRST_FORM + "7\n",
    "too deep": KNOWN.replace('"vmap"', "[" * 100_000),
    "no number": KNOWN.replace('"peak": 7', '"peak": "7"'),
    "true for 1": KNOWN.replace('"peak": 7', '"peak": true'),
    "negative": KNOWN.replace('"peak": 7', '"peak": -7'),
    "a key is missing": KNOWN.replace('"nesting": "vmap", ', ""),
    "no list": KNOWN.replace('"targets": [', '"targets": {"a": [').replace('libtpu 1"}]', 'libtpu 1"}]}'),
    "twice": KNOWN.replace('"jit > scan"', '"jit"'),
    "a conflict": f"<<<<<<< ours\n{KNOWN}",
    "between both": f"{KNOWN}=======\n{KNOWN}",
}


def test_what_is_wrong_with_a_file_is_said(read, golden):
    told = []
    for name, text in BAD.items():
        with pytest.raises(SettingError) as caught:
            read(text)
        told.append(f"{name}\n  {caught.value}\n")
    golden("bad_baselines.txt", "".join(told))


def test_what_is_no_file_and_no_text(tmp_path):
    assert baseline.read(tmp_path / "no", "no") is None
    (tmp_path / "x").write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match=r"^x is no text file: 'utf-8' codec can't decode .*: take back what"):
        baseline.read(tmp_path / "x", "x")
    with pytest.raises(SettingError, match=r"^cannot read here: Is a directory$"):
        baseline.read(tmp_path, "here")


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.text()
    | st.tuples(st.sampled_from([KNOWN, FIRST_FORM]), st.integers(0, 900), st.text(max_size=3)).map(
        lambda cut: f"{cut[0][: cut[1]]}{cut[2]}{cut[0][cut[1] :]}"
    )
)
def test_any_text_is_a_baseline_or_an_error_that_names_the_file(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "peaks.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        baseline.read(path, "peaks.json")
    except SettingError as error:
        told = str(error)
    else:
        told = "peaks.json"
    assert "peaks.json" in told


# --- what is kept of a test, and what a message says of its buffers

OLD, NEW = (Stamp(jax, "0.5.3", "0.10.2", "cpu", "cpu") for jax in ("0.5.3", "0.6.2"))


def temporaries(*sizes, **more):
    return tuple(BufferRecord(size, "float32[4]", "temporary", "dot", **more) for size in sizes)


def nesting(buffers, *, test="t", peak=0, targets=()):
    split = Split(0, 0, sum(each.bytes for each in buffers), 0, 0)
    return NestingRecord(
        test, "jit", verdict="held", peak=peak or split.peak, split=split, buffers=buffers, targets=targets
    )


def record(test, stamp, *nestings):
    return Record(Head(test, outcome="passed"), measured=nestings, stamp=stamp)


@pytest.mark.parametrize(
    "before, now, rows",
    [
        ((64, 64), (64, 64, 64, 64), ["+ 2 x 64 B temporary float32[4] dot"]),
        # A baseline names the three largest: a smaller one may have been there all along.
        ((64, 32, 16, 8), (64, 32, 20, 16, 8, 4), ["+ 20 B temporary float32[4] dot"]),
        # A report names the ten largest: a smaller one may be there still.
        ((70, 50, 8), range(60, 50, -1), ["- 70 B temporary float32[4] dot"]),
    ],
)
def test_a_buffer_that_nobody_named_is_neither_new_nor_gone(before, now, rows):
    old, new = baseline.kept(nesting(temporaries(*before))), nesting(temporaries(*now))
    request = baseline.Request("peaks.json", Fraction(0))
    compared = baseline.compare(record("t", OLD, new), baseline.Baseline(OLD, {"t": {"jit": old}}), request)
    text = baseline.message(compared, {"jit": old}, {"jit": new}, request, Report((), Settings(), test_id="t"))
    told = [line.partition(" buffer ")[2].strip() for line in text.splitlines() if " buffer " in line]
    assert [row for row in told if row[0] == rows[0][0]] == rows


def test_what_is_kept_of_a_nesting():
    buffers = (
        *temporaries(64, 64, 16, 8),
        *temporaries(64, name="model.k"),
        BufferRecord(32, "float32[4]", "temporary", ""),
    )
    there = OnTarget("v5e", peak=4096, wheel="libtpu 0.0.50.1")
    unmeasured = OnTarget("h100", left_out="a callback", wheel="jax-cuda12-pjrt 0.12.0.1")
    found = baseline.kept(nesting(buffers, targets=(there, unmeasured, OnTarget("h200", peak=7))))
    labels = [
        "temporary float32[4] dot",
        "temporary float32[4] dot, copy of model.k",
        "temporary float32[4]",
    ]
    assert [(each.count, baseline.label(each)) for each in found.buffers] == [*zip([2, 1, 1], labels, strict=True)]
    assert found.targets == (there,), "a target without a peak is not kept, nor one whose compiler nobody knows"
    # Of two calls in one nesting the peak may be that of another than the parts.
    other = baseline.kept(nesting(buffers, peak=5))
    assert (other.peak, other.split, other.buffers) == (5, None, ())


def test_a_baseline_is_of_processes_with_one_stamp():
    records = [record("a", OLD, nesting(())), record("b", NEW, nesting((), test="b"))]
    with pytest.raises(baseline.Refused, match=r"^its processes are not of the same versions .*: jax 0.5.3 -> 0.6.2$"):
        baseline.renewed(None, records, baseline.Request("peaks.json", Fraction(0)))


@pytest.mark.parametrize("name", ["\udcff", "a\u2028b", "\t\x1b[31m", "größe [é-日本]", '"\\u007c'])
def test_a_test_of_any_name_is_on_one_line_that_a_terminal_can_show(read, name):
    written = baseline.render(baseline.Baseline(OLD, {plain(name): {"jit": nesting((), test=plain(name))}}))
    assert "".join(written.splitlines()).isprintable()
    assert len(written.splitlines()) == 4 + written.count("nodeid")
    assert [*read(written).tests] == [plain(name)]
    assert baseline.on_one_line(name).isprintable()
