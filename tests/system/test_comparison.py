"""The comparison with other tools says what it measured: its verdicts, its tables, its page. What a tool finds, no test asserts but one of jax itself."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.children import ROOT
from benchmarks.comparison import __main__ as command
from benchmarks.comparison import results
from benchmarks.comparison.programs import PROGRAMS
from benchmarks.comparison.tools import NOTHING, TOOLS

LEAKS = next(tool for tool in TOOLS if tool.name == "jax.checking_leaks")
OURS = next(tool for tool in TOOLS if tool.name == "pytest-nnxcheck")


def facts(outcome, message="", shown=()):
    return {"outcome": outcome, "message": message, "shown": list(shown)}


# --- the verdicts


def test_a_failure_is_a_finding_where_the_tool_says_so_in_its_words():
    assert LEAKS.verdict(facts("failed", "Exception: Leaked trace DynamicJaxprTrace")) == "found"
    assert LEAKS.verdict(facts("failed", "TraceContextError: other trace level")) == "raises"
    assert LEAKS.verdict(facts("passed", "Leaked trace")) == "passes"
    assert OURS.verdict(facts("failed", "nnx invariant broken: memory  test_x")) == "found memory"
    assert NOTHING.verdict(facts("failed", "Leaked trace")) == "raises"


# --- the tables


def test_the_tables_of_the_page_are_those_of_its_data():
    text, data = command.DOCUMENT.read_text(), results.load(command.DATA)
    assert results.put_between(text, results.markdown(data)) == text
    newest = data[0]
    assert {cell.program for cell in newest.cells} == set(PROGRAMS)
    assert {cell.tool for cell in newest.cells} == {tool.name for tool in TOOLS}


def test_the_versions_that_were_compared_are_those_of_the_group():
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["comparison"]
    measured = results.load(command.DATA)[0].environment
    pinned = {package.replace("==", " ") for package in group}
    assert {tool.package for tool in TOOLS if tool.package} - {"pytest-nnxcheck"} <= {
        package.partition(" ")[0] for package in pinned
    }
    assert {package for package in pinned if not package.startswith("memray ")} <= set(measured.split(", "))


# --- the command


def test_what_is_not_installed_is_named_and_nothing_is_written(monkeypatch, capsys):
    monkeypatch.setattr(command, "TOOLS", (NOTHING, replace(NOTHING, name="other", package="no-such-package")))
    with pytest.raises(SystemExit, match="--write needs all of them"):
        command.main(["--write"])
    assert capsys.readouterr().out == (
        "not installed, and left out: no-such-package. Write: pip install . --group comparison\n"
    )


def test_every_program_and_its_twin_can_be_made():
    assert [name for name, make in PROGRAMS.items() if not (make("broken").args and make("healthy").state_bytes)] == []


def test_a_tool_runs_in_a_process_of_its_own_and_a_failure_is_a_result(tmp_path: Path):
    """The whole way once, with what jax itself has."""
    bare, leaks = (command.sample(tool, "tracer in an attribute", "broken", tmp_path) for tool in (NOTHING, LEAKS))
    assert NOTHING.verdict(bare.facts) == "passes"
    assert LEAKS.verdict(leaks.facts) == "found"
    assert 0 < bare.cpu < bare.process
