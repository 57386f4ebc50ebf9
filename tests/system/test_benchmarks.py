"""The benchmarks measure what they say: their order, their figures, their tables. How fast anything is, no test asserts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import figures, table, tasks
from benchmarks.children import FACTS, Child, ChildError, Sample, measure, start
from benchmarks.figures import Ratio, Result, Series

RATIO = Ratio("block", "default", "32001ee", (3.0, 1.0, 2.5), (10.0, 10.0, 5.0))
SERIES = Series("scanned", "layers", (2, 4), ((1.0, 3.0, 2.0), (4.0, 4.5, 5.0)))
RESULT = Result("before", "jax 1", (RATIO,), (SERIES,), ("quick is left out",))


def sample(label, cpu=1.0, **facts):
    return Sample(label, cpu, 10 * cpu, 100 * cpu, facts)


# --- the order


def test_a_side_that_refuses_is_asked_once():
    asked = []

    def run(child):
        asked.append(child.label)
        return sample(child.label, **({"refused": "unknown setting x, write another"} if child.label == "B" else {}))

    samples = measure([Child(label, (), Path()) for label in "AB"], 3, run)
    assert "".join(asked) == "ABAA"
    assert figures.refusals(samples) == ("B is left out, unknown setting x",)


# --- the figures


def test_a_ratio_is_the_median_of_its_rounds_and_a_series_has_one_a_size():
    assert RATIO.ratios == pytest.approx((0.3, 0.1, 0.5))
    assert (RATIO.median, RATIO.spread) == (pytest.approx(0.3), pytest.approx((0.1, 0.5)))
    assert Ratio("", "", "", (1.0, 3.0), (1.0, 1.0)).median == 2.0
    assert SERIES.medians == (2.0, 4.5)


def test_subjects_together_cost_the_sums_of_their_medians():
    rows = [
        Ratio("linear", "default", "floor", (1.0, 2.0, 9.0), (4.0, 4.0, 4.0)),
        Ratio("block", "default", "floor", (10.0,), (20.0,)),
        Ratio("block", "quick", "floor", (1.0,), (20.0,)),
        Ratio("3 marked", "default", "floor", (100.0,), (1.0,)),
    ]
    (summed,) = figures.together(rows, ("linear", "block"))
    assert (summed.over, summed.under, summed.median) == ("default", "floor", 12 / 24)


# --- the tables


def test_a_run_replaces_its_own_results_and_keeps_the_others(tmp_path):
    figures.save([RESULT], tmp_path / "speed.json")
    assert figures.load(tmp_path / "speed.json") == (RESULT,)
    floor, again = replace(RESULT, benchmark="floor"), replace(RESULT, ratios=())
    assert figures.merge([RESULT, floor], again) == (again, floor)
    # Of some subjects alone: the rows of the others stay, unless they are of other versions.
    linear, anew = replace(RATIO, case="linear"), replace(RATIO, numerators=(1.0, 1.0, 1.0))
    some = replace(RESULT, ratios=(anew,), series=(), notes=("noted",))
    (both,) = figures.merge([replace(RESULT, ratios=(RATIO, linear))], some, partial=True)
    assert (both.ratios, both.series, both.notes) == ((anew, linear), (SERIES,), (*RESULT.notes, "noted"))
    elsewhere = replace(RESULT, environment="jax 2", ratios=())
    assert figures.merge([RESULT], elsewhere, partial=True) == (elsewhere,)


def test_the_tables_of_the_document_are_those_of_its_data():
    text = command.DOCUMENT.read_text()
    assert table.put_between(text, table.in_document(figures.load(command.DATA))) == text


# --- the children


def test_a_child_is_measured_and_says_what_it_found_or_why_it_failed(tmp_path):
    code = f"import json, os; json.dump({{'cpu': 7, 'nestings': 3}}, open(os.environ['{FACTS}'], 'w'))"
    told, silent = start(Child("told", ("-c", code), tmp_path)), start(Child("silent", ("-c", ""), tmp_path))
    assert (told.cpu, told.facts["nestings"], told.refused) == (7, 3, "")
    assert silent.cpu == silent.process > 0
    with pytest.raises(ChildError, match=r"broken ended with 1:[\s\S]*no such subject"):
        start(Child("broken", ("-c", "raise SystemExit('no such subject')"), tmp_path))


def test_a_check_and_the_loops_run_the_same_nestings(tmp_path):
    """The whole way once, with the smallest subject: the check in a child, the loops over its nestings here."""
    nestings = str(tmp_path / "nestings.json")
    settings = {"transforms": "jit", "styles": "functional", "max_examples": 0}
    check = start(Child.task("check", "check", tmp_path, subject="linear", settings=settings, nestings=nestings))
    assert check.facts["verdict"] == "held"
    assert 0 < check.cpu < check.process
    for way in ("floor", "by_hand"):
        facts = tasks.loop(way, "linear", nestings)
        assert (facts["nestings"], facts["raised"]) == (check.facts["nestings"], 0)
        assert facts["peaks"] == check.facts["judged"] > 0
    assert "no_such" in tasks.check("linear", {"no_such": 1})["refused"]


# --- the command


def test_the_command_line_makes_the_plan(tmp_path):
    def planned(*words):
        return command.plan_of(command.parser().parse_args(words), tmp_path)

    asked = planned("before", "--rounds=5", "--subjects=linear,block", "--against=HEAD")
    assert (asked.rounds, asked.subjects, asked.against) == (5, ("linear", "block"), "HEAD")
    for word in ("speed", "--subjects=resnet", "--rounds=0"):
        with pytest.raises(SystemExit, match=r"no benchmark 'speed'|no subject 'resnet'|--rounds 0: at least 1"):
            planned(word)
