"""The benchmarks of targets: their rows come from checks, go to JSON and back, and their tables into the document."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.on_targets import commands, rows
from benchmarks.on_targets.rows import Row, Table, There

MIB, GIB = 2**20, 2**30
THERE = There("v5e", 16 * GIB, True, 150 * MIB, 160 * MIB, 64 * MIB, 3, 1, "", 1.26)
SMALLER = There("h100", 60 * GIB, True, 50 * MIB, 50 * MIB, 0, 3, 0, "", 0.5)
ROW = Row("a step", 32 * MIB, 100 * MIB, 2.0, (THERE, SMALLER))
TABLE = Table("jax 1", (ROW, Row("no state", 0, 50 * MIB, 1.0, (THERE, SMALLER))))


def test_a_table_goes_to_json_and_back(tmp_path):
    rows.save({"targets": TABLE}, tmp_path / "targets.json")
    assert rows.load(tmp_path / "targets.json") == {"targets": TABLE}
    assert rows.load(tmp_path / "nothing.json") == {}


def test_the_table_of_programs_has_the_spread_of_the_ratios_to_the_cpu():
    lines = rows.programs(TABLE).splitlines()
    assert lines[-4:-1] == ["| v5e | 1.50 | 2.25 | 3.00 |", "| h100 | 0.50 | 0.75 | 1.00 |", ""]
    assert lines[-1].startswith("jax 1. ")


def test_plain_compiles_are_counted_where_both_agree_and_named_where_not():
    same = replace(THERE, plain=150 * MIB, plain_kept=2)
    programs = {
        "same": same,
        "other": replace(THERE, peak=90 * MIB, plain=100 * MIB, plain_fits=False, plain_kept=3),
        "neither": replace(THERE, peak=None, donated=0, lost=0, said="a callback", plain_said="a callback"),
        "alone": replace(same, plain=None, plain_kept=0, plain_said="no such device"),
    }
    table = Table("jax 1", tuple(Row(name, 0, MIB, 1.0, (there,)) for name, there in programs.items()))
    assert rows.beside_plain(table).splitlines()[:-2] == [
        "* Programs: 4 on v5e. Verdicts: 3 fits, 0 does not fit, 1 left out.",
        "* The same verdict in 2 of 4.",
        "* Another verdict: other on v5e (fits, plain: does not fit), alone on v5e (fits, plain: left out).",
        "* The same number of donated leaves that keep their buffer in 1 of the 2 that both compile.",
        "* Peaks at the same effort: 1.000 to 1.000 times the plain one.",
        "* Another peak: other on v5e (0.900).",
    ]


@pytest.mark.skipif(not commands.DOCUMENT.exists(), reason="the document is not there")
def test_the_tables_of_the_document_are_those_of_its_data():
    text = commands.DOCUMENT.read_text()
    assert commands.document(text, rows.load(commands.DATA)) == text


def test_their_process_has_the_devices_of_the_largest_mesh(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_one")
    assert commands.environment()["XLA_FLAGS"] == "--xla_one --xla_force_host_platform_device_count=16"
    assert commands.environment()["JAX_PLATFORMS"] == "cpu"
