"""The benchmarks measure what they say: their order, their figures, their tables. How fast anything is, no test asserts."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import figures, plan, suites, table, tasks
from benchmarks.children import FACTS, FOREIGN, ROOT, Child, ChildError, Sample, interleaved, measure, start
from benchmarks.figures import Ratio, Result, Series

RATIO = Ratio("block", "default", "32001ee", (3.0, 1.0, 2.5), (10.0, 10.0, 5.0))
SERIES = Series("scanned", "layers", (2, 4), ((1.0, 3.0, 2.0), (4.0, 4.5, 5.0)))
RESULT = Result("before", "jax 1", (RATIO,), (SERIES,), ("quick is left out",))
DOCUMENT = f"above\n\n{table.START}\nold\n{table.END}\n\nbelow\n"


def sample(label, cpu=1.0, **facts):
    return Sample(label, cpu, 10 * cpu, 100 * cpu, facts)


def children(*labels):
    return [Child(label, (), Path()) for label in labels]


# --- the order


def test_sides_take_turns():
    assert "".join(interleaved("AB", 3)) == "ABABAB"


def test_a_side_that_refuses_is_asked_once():
    asked = []

    def run(child):
        asked.append(child.label)
        return sample(
            child.label, **({"refused": "unknown setting (..., x=...), write another"} if child.label == "B" else {})
        )

    samples = measure(children("A", "B"), 3, run)
    assert "".join(asked) == "ABAA"
    assert (len(samples["A"]), len(samples["B"])) == (3, 1)
    assert figures.ratio("linear", samples, "A", "B") is None
    assert figures.refusals(samples) == ("B is left out, unknown setting (..., x=...)",)


def test_a_short_side_has_more_rounds_but_not_when_it_must_be_quick(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "measure", lambda children, rounds: rounds)
    assert plan.Plan(tmp_path, rounds=3).measure() == 3
    assert plan.Plan(tmp_path, rounds=3).measure(times=10) == 30
    assert plan.Plan(tmp_path, rounds=1, quick=True).measure(times=10) == 1


# --- the figures


def test_a_ratio_is_the_median_of_its_rounds():
    assert RATIO.ratios == pytest.approx((0.3, 0.1, 0.5))
    assert RATIO.median == pytest.approx(0.3)
    assert RATIO.spread == pytest.approx((0.1, 0.5))


def test_the_median_of_two_rounds_is_their_mean():
    assert Ratio("", "", "", (1.0, 3.0), (1.0, 1.0)).median == 2.0


def test_subjects_together_cost_the_sums_of_their_medians():
    rows = [
        figures.Ratio("linear", "default", "floor", (1.0, 2.0, 9.0), (4.0, 4.0, 4.0)),
        figures.Ratio("block", "default", "floor", (10.0,), (20.0,)),
        figures.Ratio("block", "quick", "floor", (1.0,), (20.0,)),
        figures.Ratio("3 marked", "default", "floor", (100.0,), (1.0,)),
    ]
    (summed,) = figures.together(rows, ("linear", "block"))
    assert (summed.case, summed.over, summed.under) == ("all 2 together", "default", "floor")
    assert summed.median == 12 / 24


def test_a_series_has_a_median_for_each_size():
    assert SERIES.medians == (2.0, 4.5)


@pytest.mark.parametrize(
    "figure, expected, unit", [("cpu", 1, "CPU s"), ("process", 10, "CPU s"), ("wall", 100, "wall s")]
)
def test_a_ratio_is_of_the_figure_that_was_asked_for(figure, expected, unit):
    samples = {"A": (sample("A", 1.0),), "B": (sample("B", 2.0),)}
    ratio = figures.ratio("linear", samples, "A", "B", figure)
    assert (ratio.numerators, ratio.denominators, ratio.unit) == ((expected,), (2 * expected,), unit)


def test_sides_that_came_to_another_verdict_are_told():
    same = {"A": (sample("A", verdict="held"),), "B": (sample("B", verdict="held"), sample("B", refused="no"))}
    other = {**same, "B": (sample("B", verdict="failed"),)}
    assert plan.disagreements("block", same, "verdict") == ()
    assert plan.disagreements("block", other, "verdict") == ("block: verdict differs, A ['held']; B ['failed']",)


def test_the_size_of_a_process_is_read_when_so_many_nestings_are_done():
    sizes = sample("tests", sizes=[[0, 50e6], [79, 100e6], [158, 200e6], [1003, 300e6]])
    grown = suites.grown([sizes], 100, 1000)
    assert (grown.denominators, grown.numerators, grown.median) == ((200.0,), (300.0,), 1.5)


# --- the tables


def test_results_survive_their_file(tmp_path):
    figures.save([RESULT], tmp_path / "speed.json")
    assert figures.load(tmp_path / "speed.json") == (RESULT,)
    assert figures.load(tmp_path / "none.json") == ()


def test_a_run_of_some_benchmarks_keeps_the_others():
    floor, again = replace(RESULT, benchmark="floor"), replace(RESULT, ratios=())
    assert figures.merge([RESULT, floor], again) == (again, floor)
    assert figures.merge([], again) == (again,)


def test_a_run_of_some_subjects_keeps_the_rows_of_the_others():
    linear, again = replace(RATIO, case="linear"), replace(RATIO, numerators=(1.0, 1.0, 1.0))
    some = replace(RESULT, ratios=(again,), series=(), notes=("noted",))
    (both,) = figures.merge([replace(RESULT, ratios=(RATIO, linear))], some, partial=True)
    assert both.ratios == (again, linear)
    assert both.series == (SERIES,)
    assert both.notes == (*RESULT.notes, "noted")


def test_rows_of_other_versions_do_not_stay_beside_new_ones():
    elsewhere = replace(RESULT, environment="jax 2", ratios=())
    assert figures.merge([RESULT], elsewhere, partial=True) == (elsewhere,)


def test_the_tables_show_ratios_series_and_what_was_left_out():
    lines = table.markdown([RESULT]).splitlines()
    assert lines[0] == table.HEAD
    assert lines[2] == (
        "| before | block | default | 32001ee | **0.30** | 0.10 to 0.50 | 2.50 CPU s | 10.0 CPU s | 3 |"
    )
    assert lines[4:7] == ["| layers | 2 | 4 |", "|---|---|---|", "| scanned, CPU s | 2.0 | 4.5 |"]
    assert lines[-2:] == ["* before: jax 1.", "* before: quick is left out."]


def test_the_rows_of_a_table_have_as_many_cells():
    rows = [line for line in table.markdown([RESULT]).splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows[:3]} == {10}
    assert {row.count("|") for row in rows[3:]} == {4}


def test_a_table_goes_between_the_markers_and_leaves_the_rest():
    once = table.put_between(DOCUMENT, "new\n")
    assert once == f"above\n\n{table.START}\n\nnew\n\n{table.END}\n\nbelow\n"
    assert table.put_between(once, "new\n") == once


@pytest.mark.parametrize("text", ["", table.START, table.END + table.START, DOCUMENT * 2])
def test_a_document_without_its_markers_is_an_error(text):
    with pytest.raises(ValueError, match="speed table"):
        table.put_between(text, "new")


def test_the_document_has_the_markers():
    table.put_between(command.DOCUMENT.read_text(), "")


def test_the_tables_of_the_document_are_those_of_its_data():
    text = command.DOCUMENT.read_text()
    assert table.put_between(text, table.markdown(figures.load(command.DATA))) == text


# --- the children


def test_a_task_is_a_module_of_the_benchmarks_with_its_arguments(tmp_path):
    child = Child.task("quick", "check", tmp_path, subject="linear", settings={"effort": "quick"})
    *words, arguments = child.command()
    assert words == [sys.executable, "-P", "-m", "benchmarks.tasks", "check"]
    assert json.loads(arguments) == {"subject": "linear", "settings": {"effort": "quick"}}


def test_pytest_runs_in_its_folder(tmp_path):
    child = Child.pytest("collect", tmp_path, "--collect-only")
    assert child.command()[1:3] == ["-m", "pytest"]
    assert child.command()[-1] == "--collect-only"
    assert child.directory == tmp_path


def test_a_child_imports_the_package_that_it_measures(tmp_path):
    now, then = (Child.task("", "check", tmp_path, library) for library in (ROOT, tmp_path))
    outer = {"PATH": "/bin", "PYTHONPATH": "/elsewhere", **dict.fromkeys(FOREIGN, "x")}
    assert now.environment(outer, tmp_path)["PYTHONPATH"] == str(ROOT)
    assert then.environment(outer, tmp_path)["PYTHONPATH"].split(":") == [str(tmp_path), str(ROOT)]
    assert then.environment(outer, tmp_path)["PATH"] == "/bin"
    assert not {*FOREIGN} & then.environment(outer, tmp_path).keys()


def test_a_child_is_measured_and_says_what_it_found(tmp_path):
    code = f"import json, os; json.dump({{'cpu': 7, 'nestings': 3}}, open(os.environ['{FACTS}'], 'w'))"
    told, silent = start(Child("told", ("-c", code), tmp_path)), start(Child("silent", ("-c", ""), tmp_path))
    assert (told.cpu, told.facts["nestings"], told.refused) == (7, 3, "")
    assert silent.cpu == silent.process > 0
    assert silent.wall > 0


def test_a_child_that_fails_says_why(tmp_path):
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
        assert facts["cpu"] > 0


def test_a_setting_that_a_version_lacks_is_refused():
    assert "no_such" in tasks.check("linear", {"no_such": 1})["refused"]


# --- the command


def planned(*words, tmp_path):
    return command.plan_of(command.parser().parse_args(words), tmp_path)


def test_the_command_line_makes_the_plan(tmp_path):
    asked = planned("before", "--rounds=5", "--subjects=linear,block", "--against=HEAD", tmp_path=tmp_path)
    assert (asked.rounds, asked.subjects, asked.against) == (5, ("linear", "block"), "HEAD")
    assert planned(tmp_path=tmp_path).subjects == plan.FIVE
    assert planned("--quick", tmp_path=tmp_path).rounds == 1


@pytest.mark.parametrize("word", ["speed", "--subjects=resnet", "--rounds=0"])
def test_what_there_is_not_is_said(word, tmp_path):
    with pytest.raises(SystemExit, match=r"no benchmark 'speed'|no subject 'resnet'|--rounds 0: at least 1"):
        planned(word, tmp_path=tmp_path)
