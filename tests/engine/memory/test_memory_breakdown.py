"""Where the bytes of a peak are: by line, with the copy and the operations it went through, beside the un-nested program."""

from __future__ import annotations

from pathlib import Path

import bugs
import jax.numpy as jnp
import pytest
from checking import broken, call, line, near
from flax import nnx
from healthy import FLAX, numbers
from memory_evidence import KiB, rows, told

from pytest_nnxcheck import check
from pytest_nnxcheck.reporting import memory_breakdown

# google/flax#4871: at least 95 % of the temporaries are the copy, and the user's scan line


def attributed(found, name, where):
    """The share of the temporaries that are copies of a leaf, and the share that was made at a line."""
    known = told(found)
    copies = sum(each.bytes for each in known.buffers if each.kind == "temporary" and each.whole and each.name == name)
    at = sum(place.temporaries for place in known.places if place.line == where)
    return copies / known.split.temporaries, at / known.split.temporaries


SCAN_4871 = line(bugs.Report4871.__call__, "return through(")


@pytest.mark.skipif(FLAX >= (0, 10, 7), reason="flax 0.10.2 copies in silence, later versions refuse")
@pytest.mark.parametrize("nesting", ["jit[functional] > call_first > scan[jax_closure]"])
def test_4871_is_told_by_the_copy_and_the_line_of_the_scan(nesting):
    found = call(bugs.report_4871(nnx.Rngs(0)), 0.0, nesting=nesting)
    assert min(attributed(found, "model.blocks.param", SCAN_4871)) >= 0.95
    (where, *_), (buffer, *_) = rows(found, "line"), rows(found, "buffer")
    assert where.startswith(f"{SCAN_4871} ")
    assert "100 % of the temporaries" in where
    assert "copy of model.blocks.param (XLA: while, dynamic-slice, dynamic-update-slice)" in buffer
    shown = (Path(__file__).parents[3] / "docs" / "memory.md").read_text()
    for label, (row, *_) in {label: rows(found, label) for label in ("un-nested", "line", "buffer")}.items():
        assert f"{label:<11} {row}".replace(near(bugs.__file__), "bugs.py") in shown


SCAN = line(bugs.nnx_scanned, "return forward(")


def called_twice(nesting):
    """The program of google/flax#4871 in the form in which it lives on: each layer rematerialized inside the scan."""
    model = bugs.ScanOverRemat(nnx.Rngs(0), depth=40, width=64)
    return call(bugs.call_twice, model, numbers((1, 64)), nesting=nesting)


@pytest.mark.parametrize("nesting", ["jit", "jit[functional]", "jit > call_first"])
def test_the_live_form_of_4871_is_told_by_the_copy_and_the_line_of_the_scan(nesting):
    found = called_twice(nesting)
    assert broken(found) == ["memory"]
    assert min(attributed(found, "model.layers.kernel", SCAN)) >= 0.95
    assert rows(found, "line")[0].startswith(f"{SCAN} (called from {line(bugs.ScanOverRemat.__call__, 'return')}")
    assert "copy of model.layers.kernel (XLA: while, dynamic-slice, dynamic-update-slice)" in rows(found, "buffer")[0]


# What the nesting added


def test_the_same_line_is_held_against_the_un_nested_program():
    found = called_twice("jit")
    known = told(found)
    size = 40 * 64 * 64 * 4
    assert [(each.added, each.bytes) for each in known.buffers if each.whole] == [(False, size), (True, size)]
    # The un-nested program holds one copy of all layers, and what a step takes out of it.
    assert size < known.places[0].un_nested < 1.1 * size
    assert "1 of the 2 also in the un-nested program" in rows(found, "buffer")[0]
    assert (
        f"{memory_breakdown.format_bytes(known.places[0].un_nested)} in the un-nested program" in rows(found, "line")[0]
    )


def test_what_a_generated_layer_made_is_told_by_the_layer():
    found = call(
        nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((64, 64)), nesting="jit > scan > vmap", memory_budget="0.01x"
    )
    assert {place.line for place in told(found).places if place.bytes > KiB} == {"scan", "vmap"}
    assert rows(found, "line")[0].startswith("the layer scan of the nesting   ")
    assert "not in the un-nested program" in rows(found, "line")[0]


def test_the_un_nested_call_is_told_of_where_its_own_program_breaks_the_bound():
    report = check(nnx.Linear(64, 64, rngs=nnx.Rngs(0)), jnp.ones((2, 64)), nesting="jit", memory_budget="1KiB")
    assert report.verdict == "violated"
    labels = [label for label, _ in report.un_nested]
    assert labels[:1] == ["un-nested"]
