"""The examples at real size fail as docs/abstract.md says, by their own command, in seconds and without memory. On targets: tests/targets."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from healthy import FLAX
from probes import remat_takes_graph_updates
from real_size import ROOT, counts, on_linux, run, runs_4871, with_its_optimizer

pytestmark = on_linux


@runs_4871
def test_20_gigabytes_of_flax_4871_fail_their_budget():
    result = run("flax_4871.py")
    assert counts(result) == "1 failed, 2 passed"
    (peak,) = result.peaks()
    # 19.0 GiB are 20.4 GB: the parameters a second time, and one layer.
    assert (peak["arguments"], peak["temporaries"]) == ("18.6 GiB", "19.0 GiB")
    assert "peak 37.6 GiB is over the budget of 23.3 GiB" in result.output
    assert "copy of state['layers']['param']" in result.rows("buffer")[0]
    assert result.resident < 1e9


@pytest.mark.skipif(FLAX < (0, 10, 7), reason="flax 0.10.2 runs the program")
def test_flax_4871_says_why_it_is_skipped():
    result = run("flax_4871.py")
    assert counts(result) == "1 passed, 2 skipped"
    assert "newer versions of flax refuse the program" in result.output


def test_2_gibibytes_of_jax_926_are_held_four_times_and_donated_twice():
    result = run("jax_926.py")
    assert counts(result) == "1 failed, 1 passed"
    (peak,) = result.peaks()
    assert (peak["peak"], peak["arguments"], peak["temporaries"]) == ("8.0 GiB", "2.0 GiB", "4.0 GiB")
    assert "::test_kept - nnx memory: " in result.output
    assert "::test_donated  5 nestings: 5 passed; worst peak 4.0 GiB (jit), budget 5.0 GiB" in result.output
    assert result.resident < 1e9


@with_its_optimizer
def test_the_steps_of_jax_26618_keep_their_budget_on_the_cpu():
    result = run("jax_26618.py")
    assert counts(result) == "1 passed"
    assert re.search(r"worst peak 8\d\d\.\d MiB \(.*\), budget 1\.0 GiB", result.output)


def test_mistral_7b_holds_a_second_copy_of_its_layers():
    result = run("mistral_7b.py")
    assert counts(result) == "2 failed"
    assert all(
        re.search(r"the program holds (0\.9\d|1\.0\d) extra copies of its state", row) for row in result.rows("memory")
    )
    cure = "graph_updates=False" if remat_takes_graph_updates() else "under jax.checkpoint"
    assert all(cure in row for row in result.rows("hint"))
    assert result.resident < 1e9


@pytest.mark.full
def test_what_fails_by_design_is_not_collected_unless_it_is_named():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", "examples"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "examples/test_language_model.py" in collected
    assert "real_size" not in collected
