"""The rows about memory, from evidence that is made by hand: short, complete, and their shares add up."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_evidence import KiB, MiB

from pytest_nnxcheck.core.facts import Evidence
from pytest_nnxcheck.core.peak import Buffer, Memory, PeakLine, Split, by_line, marked_as_added
from pytest_nnxcheck.reporting import memory_breakdown

COPY = Buffer(
    bytes=8 * MiB,
    shape="float32[8,512,512]",
    kind="temporary",
    operation="dynamic_update_slice",
    stack=("model.py:12", "model.py:20", "test.py:5"),
    name="model.kernel",
    whole=True,
    through=("while", "dynamic-slice", "dynamic-update-slice"),
    added=True,
)
KNOWN = Evidence(
    split=Split(arguments=8 * MiB, outputs=2 * KiB, temporaries=17 * MiB, aliased=0, constants=0),
    un_nested=Split(arguments=8 * MiB, outputs=2 * KiB, temporaries=9 * MiB, aliased=0, constants=0),
    buffers=(
        COPY,
        dataclasses.replace(COPY, added=False),
        Buffer(MiB, "float32[512,512]", "temporary", "copy", ("model.py:30",), inserted=True),
        Buffer(2 * KiB, "float32[512]", "output", "copy", inserted=True),
    ),
    places=(
        PeakLine("model.py:12", ("model.py:20", "test.py:5"), False, 2, 16 * MiB, 0, 0, 8 * MiB),
        PeakLine("model.py:30", (), True, 1, MiB, 0, 0, 0),
        PeakLine("", (), True, 1, 0, 2 * KiB, 0, 2 * KiB),
    ),
)


def test_the_story_of_a_copy():
    assert memory_breakdown.rows(KNOWN) == (
        (
            "un-nested",
            "peak 17.0 MiB under a plain jax.jit, which is not judged; the nesting adds 8.0 MiB (temporaries +8.0 MiB)",
        ),
        (
            "line",
            "model.py:12 (called from model.py:20, test.py:5)   16.0 MiB, 94 % of the temporaries; 8.0 MiB in the un-nested program",
        ),
        (
            "buffer",
            (
                "2 x 8.0 MiB temporary float32[8,512,512] dynamic_update_slice   copy of model.kernel"
                " (XLA: while, dynamic-slice, dynamic-update-slice)   1 of the 2 also in the un-nested program"
            ),
        ),
        ("line", "model.py:30   1.0 MiB, 6 % of the temporaries; not in the un-nested program"),
        ("buffer", "1.0 MiB temporary float32[512,512] copy   inserted by XLA for this loop"),
    )


def test_a_buffer_says_by_name_which_arguments_it_is_made_of():
    joined = Buffer(8, "float32[2]", "temporary", "concatenate", through=("concatenate",), parameters=(0, 2))
    of_no_argument = dataclasses.replace(joined, parameters=(3,))  # a leaked tracer, which jax makes a further one
    memory = Memory(0, 0, 16, 0, 0, (joined, of_no_argument)).with_names(("model.q", "model.k", "model.v"))
    assert [(buffer.name, buffer.joined, buffer.through) for buffer in memory.made] == [
        ("model.q", ("model.v",), ("concatenate",)),
        ("", (), ()),
    ]


HELD = st.builds(
    Buffer,
    bytes=st.integers(1, 2**40),
    shape=st.sampled_from(["float32[8]", "float32[2,4]"]),
    kind=st.sampled_from(["temporary", "output", "constant"]),
    operation=st.sampled_from(["copy", "dot"]),
    stack=st.lists(st.sampled_from(["a.py:1", "a.py:2", "b.py:1"]), max_size=3, unique=True).map(tuple),
    name=st.sampled_from(["", "model.kernel"]),
    whole=st.booleans(),
    layer=st.sampled_from(["", "scan"]),
    inserted=st.booleans(),
)
SEVERAL = st.lists(HELD, max_size=30).map(tuple)


@given(after=SEVERAL, before=SEVERAL)
def test_places_are_a_partition_of_the_buffers(after, before):
    found = by_line(after, before)
    sums = {
        kind: sum(each.bytes for each in after if each.kind == kind) for kind in ("temporary", "output", "constant")
    }
    assert sum(place.temporaries for place in found) == sums["temporary"]
    assert sum(place.outputs for place in found) == sums["output"]
    assert sum(place.constants for place in found) == sums["constant"]
    assert sum(place.count for place in found) == len(after)
    assert sum(place.un_nested for place in found) <= sum(each.bytes for each in before)
    assert list(found) == sorted(found, key=lambda place: -place.bytes)
    for each in after:
        (home,) = [place for place in found if each.group == place.group]
        assert set(home.outer) <= set(each.stack) or each.bytes < 0.05 * home.bytes


@pytest.mark.slow
@given(after=SEVERAL, before=SEVERAL)
def test_a_story_is_short_and_its_shares_add_up(after, before):
    split = Split(
        0, *(sum(each.bytes for each in after if each.kind == kind) for kind in ("output", "temporary")), 0, 0
    )
    known = Evidence(split=split, un_nested=Split(0, 0, 0, 0, 0), buffers=after[:10], places=by_line(after, before))
    found = memory_breakdown.rows(known)
    assert len(found) <= 9
    assert all(len(label) <= 11 and "\n" not in row for label, row in found)
    shares = [int(row.partition(" % of the temporaries")[0].split()[-1]) for _, row in found if "% of the temp" in row]
    assert sum(shares) <= 100 + len(shares)


@pytest.mark.slow
@given(after=SEVERAL, before=SEVERAL)
def test_added_are_the_buffers_that_have_no_partner(after, before):
    def keys(held):
        return [(each.place, each.shape, each.name) for each in held]

    found = marked_as_added(after, before)
    assert keys(found) == keys(after)
    for key in set(keys(after)):
        marked = sum(each.added for each in found if (each.place, each.shape, each.name) == key)
        assert marked == max(0, keys(after).count(key) - keys(before).count(key))
