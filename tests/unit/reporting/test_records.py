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
from pytest_nnxcheck.reporting import earlier, records, report

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
def test_any_run_is_read_back_from_its_json_and_agrees_with_the_schema(found):
    document = records.document(documents.RUN, map(report.record, found))
    text = records.render(document)
    text.encode("utf-8")
    assert violates(json.loads(text)) == []
    assert earlier.parse(text) == document


def test_the_schema_refuses_what_is_wrong():
    found = json.loads(records.render(documents.mixed()))
    assert violates(found) == []
    assert violates(found | {"version": "one"})
    assert violates(found | {"nestings": [found["nestings"][0] | {"verdict": "fine"}]})
    del found["tests"][0]["message"]
    assert violates(found)


def test_a_run_as_json(golden):
    golden("report.json", records.render(documents.mixed()))


def test_a_nesting_that_is_left_out_as_expected_counts_as_expected():
    outcome = replace(documents.outcome("jit", "expected"), unfit=True)
    assert report.head(Report((outcome,), Settings())).counts == {"expected": 1}


@pytest.mark.parametrize("kind", [Evidence, Outcome])
def test_nothing_that_is_measured_is_left_out(kind):
    renamed = {"expected": {Evidence: "expected_peak", Outcome: "expected_failures"}[kind]}
    told_by = {"by_mode": "reason", "facts": "notes", "error": "reason", "misfit": "reason", "evidence": "split"}
    told_by |= {"peaks": "peak"}
    names = {renamed.get(each.name, told_by.get(each.name, each.name)) for each in fields(kind)}
    assert names <= {each.name for each in fields(records.NestingRecord)}


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
    assert Report(tuple(outcomes), merge(parse_given({"on_rejection": strict}, str))).verdict == said


def test_an_expected_failure_that_does_not_happen_fails():
    settings = merge(parse_given({"expected_failures": {"memory": "known"}}, str))
    assert Report(documents.HELD, settings).verdict == "failed"


def test_settings_are_shown_as_one_writes_them():
    given = parse_given({"expected_failures": {"memory": "known"}, "memory_budget": "2x"}, str)
    found = report.head(Report(documents.HELD, merge(given))).settings
    assert found["memory_budget"] == "2x"
    assert "memory" in found["expected_failures"]


def test_the_order_is_that_of_the_names_whatever_ended_first():
    one, two = documents.ended("test_a.py::test_b"), documents.ended("test_a.py::test_a")
    assert records.render(documents.document(one, two)) == records.render(documents.document(two, one))


def test_the_program_is_taken_in(tmp_path):
    (tmp_path / "program.py").write_text("print('grüße')\n", encoding="utf-8")
    found = Report((documents.outcome("jit", "violated", program="program.py"),), Settings())
    (nesting,) = report.record(found, tmp_path).nestings
    assert (nesting.program, nesting.program_text) == ("program.py", "print('grüße')\n")
    (tmp_path / "program.py").write_text("x" * (report.LONGEST_PROGRAM + 1))
    assert report.record(found, tmp_path).nestings[0].program_text == ""
    (tmp_path / "program.py").unlink()
    assert report.record(found, tmp_path).nestings[0].program_text == ""


def test_the_example_of_the_documentation_is_a_report():
    (block,) = re.findall(r"^```json\n(.*?)^```$", (DOCS / "report.md").read_text(), re.MULTILINE | re.DOTALL)
    example, made = json.loads(block), json.loads(records.render(documents.mixed()))
    assert violates(example) == []
    assert example["version"] == records.VERSION
    assert example["tests"][0].keys() == made["tests"][0].keys()
    assert example["nestings"][0].keys() == made["nestings"][0].keys()


def test_every_key_is_documented():
    text = (DOCS / "report.md").read_text()
    kinds = (records.Head, records.NestingRecord, records.RunRecord, records.BufferRecord, records.Place, Split)
    keys = {each.name for kind in kinds for each in fields(kind) if each.metadata.get("record", True)}
    assert [key for key in sorted(keys) if f"`{key}`" not in text] == []
