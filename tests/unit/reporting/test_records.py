"""A report as plain data: complete, JSON both ways, as the schema and the documentation say."""

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import documents
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_nnxcheck import Nesting, Outcome, Report, Violation
from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.peak import Buffer, Split
from pytest_nnxcheck.core.settings import Settings, merge, parse_given
from pytest_nnxcheck.reporting import records
from pytest_nnxcheck.reporting.report import properties

DOCS = Path(__file__).parents[3] / "docs"
TEXT = st.text(st.characters(), max_size=20)  # surrogates and controls too
BYTES = st.integers(0, 2**60)


def violates(found: object) -> list[str]:
    """What the published schema has against a document."""
    import jsonschema

    schema = json.loads((DOCS / "report.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(found)]


@st.composite
def reports(draw):
    nestings = draw(st.lists(st.sampled_from(["un-nested", "jit", "jit > scan", "tree: vmap[closure]"]), unique=True))
    outcomes = [draw(outcomes_of(nesting)) for nesting in nestings]
    return Report(
        tuple(outcomes),
        Settings(),
        notes=tuple(draw(st.lists(TEXT, max_size=2))),
        test_id=draw(TEXT),
        argument=draw(TEXT),
        not_run=draw(st.integers(0, 99)),
    )


@st.composite
def outcomes_of(draw, nesting):
    rows = tuple(draw(st.lists(st.tuples(TEXT, TEXT), max_size=2)))
    verdict = draw(st.sampled_from(["held", "violated", "rejected", "failed", "expected"]))
    broken = (Violation("memory", draw(TEXT), rows, draw(TEXT)),) if verdict == "violated" else ()
    split = Split(draw(BYTES), draw(BYTES), draw(BYTES), 0, draw(BYTES))
    held = Buffer(draw(BYTES), draw(TEXT), "temporary", draw(TEXT), (draw(TEXT),), draw(TEXT), True)
    evidence = draw(st.sampled_from([None, Evidence(split, draw(BYTES), buffers=(held,))]))
    peak = draw(st.none() | BYTES)
    return Outcome(
        Nesting.parse(nesting), verdict, broken, draw(TEXT), peak, evidence=evidence, seconds=draw(st.floats(0, 1e6))
    )


@pytest.mark.slow
@settings(max_examples=30)
@given(st.lists(reports(), max_size=3, unique_by=lambda report: records.plain(report.test_id)))
def test_any_run_survives_json_and_agrees_with_the_schema(found):
    document = records.document(documents.RUN, [records.of_report(report) for report in found])
    text = records.render(document)
    text.encode("utf-8")
    assert json.loads(text) == document
    assert violates(document) == []
    assert [len(each["nestings"]) for each in records.by_test(document)] == [
        len(report.outcomes) for report in sorted(found, key=lambda report: records.plain(report.test_id))
    ]


def test_the_schema_refuses_what_is_wrong():
    found = documents.mixed()
    assert violates(found) == []
    assert violates(found | {"version": "one"})
    assert violates(found | {"nestings": [found["nestings"][0] | {"verdict": "fine"}]})
    del found["tests"][0]["message"]
    assert violates(found)


def test_a_nesting_that_is_left_out_as_expected_counts_as_expected():
    outcome = replace(documents.outcome("jit", "expected"), unfit=True)
    assert records.of_report(Report((outcome,), Settings()))["test"]["counts"] == {"expected": 1}


def test_a_nesting_has_all_that_was_measured():
    (found,) = [each for each in documents.mixed()["nestings"] if each["nesting"] == "jit > scan"]
    assert found["nodeid"] == "test_model.py::test_broken"
    assert (found["layers"], found["mode"], found["verdict"]) == (["jit", "scan"], "current", "violated")
    assert (found["peak"], found["budget"], found["expected_peak"]) == (5 * 2**20 + 24, 4 * 2**20, 3 * 2**20)
    assert found["split"] == {
        "arguments": 2 * 2**20,
        "outputs": 2**20,
        "temporaries": 3 * 2**20,
        "aliased": 2**20,
        "constants": 24,
    }
    assert found["un_nested"]["temporaries"] == 2**20
    assert found["buffers"][0]["stack"] == ["model.py:7", "test_model.py:9"]
    assert (found["places"][0]["line"], found["places"][0]["un_nested"]) == ("model.py:7", 2**20)
    assert found["captured"][0]["name"] == "model.TABLE"
    assert [label for label, _ in found["story"]] == ["un-nested", "line", "buffer", "captured", ""]
    assert (found["leaks"][0]["path"], found["leaks"][0]["layer"]) == ("model.last", "scan")
    assert found["moves"] == [{"path": "model.kernel", "before": "float32[3]", "after": "bfloat16[3]"}]
    assert found["violations"][0]["details"] == [["buffer", "1.0 MiB temporary"]]
    assert found["seconds"] == 0.25
    assert found["replay"] == "pytest test_model.py::test_broken --nnx-nesting 'jit > scan'"


@pytest.mark.parametrize("kind", [Evidence, Outcome])
def test_nothing_that_is_measured_is_left_out(kind):
    renamed = {"expected": {Evidence: "expected_peak", Outcome: "expected_failures"}[kind]}
    told_by = {
        "by_mode": "reason",
        "facts": "notes",
        "error": "reason",
        "misfit": "reason",
        "evidence": "split",
    }
    names = {renamed.get(each.name, told_by.get(each.name, each.name)) for each in fields(kind)}
    assert names <= documents.mixed()["nestings"][0].keys()


def test_a_test_says_what_the_whole_check_found():
    broken, holds = documents.mixed()["tests"]
    assert (broken["verdict"], broken["shown"], holds["verdict"], holds["shown"]) == (
        "violated",
        "jit > scan",
        "held",
        "",
    )
    assert broken["counts"] == {"held": 2, "violated": 1, "failed": 1, "rejected": 1, "unfit": 1, "expected": 1}
    assert broken["message"].startswith("nnx invariant broken: memory")
    assert holds["message"] == ""
    assert broken["settings"]["transforms"] == "jit,remat,scan,vmap,while_loop,eval_shape"


@pytest.mark.parametrize(
    "verdicts, strict, said",
    [
        ("held", "report", "held"),
        ("held rejected", "report", "held"),
        ("held rejected", "fail", "rejected"),
        ("rejected", "report", "rejected"),
        ("held expected", "report", "held"),
        ("held failed rejected", "report", "failed"),
        ("failed violated held", "report", "violated"),
        ("", "report", "failed"),
    ],
)
def test_the_verdict_on_a_check_is_its_worst(verdicts, strict, said):
    nestings = ["jit", "scan", "vmap"]
    outcomes = [documents.outcome(*pair) for pair in zip(nestings, verdicts.split(), strict=False)]
    report = Report(tuple(outcomes), merge(parse_given({"on_rejection": strict}, str)))
    assert report.verdict == said
    assert dict(properties(report)).get("nnx_verdict") == (said if verdicts else None)


def test_an_expected_failure_that_does_not_happen_fails():
    settings = merge(parse_given({"expected_failures": {"memory": "known"}}, str))
    assert Report(documents.HELD, settings).verdict == "failed"


def test_settings_are_shown_as_one_writes_them():
    given = parse_given({"expected_failures": {"memory": "known"}, "memory_budget": "2x"}, str)
    found = records.of_report(Report(documents.HELD, merge(given)))["test"]
    assert found["settings"]["memory_budget"] == "2x"
    assert "memory" in found["settings"]["expected_failures"]


def test_the_order_is_that_of_the_names_whatever_ended_first():
    one, two = documents.ended("test_a.py::test_b"), documents.ended("test_a.py::test_a")
    assert documents.document(one, two) == documents.document(two, one)


def test_the_program_is_taken_in(tmp_path):
    (tmp_path / "program.py").write_text("print('grüße')\n", encoding="utf-8")
    found = Report((documents.outcome("jit", "violated", program="program.py"),), Settings())
    (nesting,) = records.of_report(found, tmp_path)["nestings"]
    assert (nesting["program"], nesting["program_text"]) == ("program.py", "print('grüße')\n")
    (tmp_path / "program.py").write_text("x" * (records.LONGEST_PROGRAM + 1))
    assert records.of_report(found, tmp_path)["nestings"][0]["program_text"] == ""
    (tmp_path / "program.py").unlink()
    assert records.of_report(found, tmp_path)["nestings"][0]["program_text"] == ""


def test_the_example_of_the_documentation_is_a_report():
    (block,) = re.findall(r"^```json\n(.*?)^```$", (DOCS / "report.md").read_text(), re.MULTILINE | re.DOTALL)
    example = json.loads(block)
    assert violates(example) == []
    assert example["version"] == records.VERSION
    made = documents.mixed()
    assert example["tests"][0].keys() == made["tests"][0].keys()
    assert example["nestings"][0].keys() == made["nestings"][0].keys()


def test_every_key_is_documented():
    text = (DOCS / "report.md").read_text()
    made = documents.mixed()
    keys = {*made["tests"][0], *made["nestings"][0], "file", "line"} | {each.name for each in fields(Split)}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []


def test_a_test_says_what_was_not_run():
    stopped = documents.document(documents.ended("t.py::t", documents.BROKEN, end="failed", not_run=12))
    assert stopped["tests"][0]["not_run"] == 12
    assert "12 not run" in stopped["tests"][0]["summary"]
    assert documents.mixed()["tests"][0]["not_run"] == 0
    assert violates(stopped) == []
    assert violates(stopped | {"tests": [stopped["tests"][0] | {"not_run": -1}]})
    del stopped["tests"][0]["not_run"]  # as reports had none
    assert violates(stopped) == []
