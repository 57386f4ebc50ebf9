"""The picture of a program's memory: when there is one, and what it shows."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck.core.memory_picture import COLUMNS, Picture
from pytest_nnxcheck.core.peak import Buffer, Live, Memory, Order

SVG = "{http://www.w3.org/2000/svg}"


def memory(*held, length=10, loops=(), temporaries=None):
    """The memory of a program that holds these buffers; ``temporaries`` is the compiler's figure."""
    order = Order(length, loops, held)
    buffers = tuple(
        Buffer(each.bytes, "float32[8]", each.kind, "sin", stack=("model.py:7",), live=each)
        for each in held
        if each.start <= order.peak <= each.end
    )
    arguments = sum(each.bytes for each in held if each.kind == "argument")
    most = max(order.totals("temporary")) if temporaries is None else temporaries
    return Memory(arguments, 0, most, 0, 0, buffers, order)


ARGUMENT, EARLY, LATE = (
    Live(100, "argument", 0, 10),
    Live(50, "temporary", 2, 4),
    Live(80, "temporary", 6, 7),
)


def test_the_columns_are_the_live_bytes_by_kind_and_the_bars_the_buffers_at_the_peak():
    picture = Picture.of(memory(ARGUMENT, EARLY, LATE))
    assert [column[2] for column in picture.columns] == [0, 0, 50, 50, 50, 0, 80, 80, 0, 0, 0]
    assert {column[0] for column in picture.columns} == {100}
    assert [(bar.bytes, bar.start, bar.end, bar.text) for bar in picture.bars] == [
        (80, 6, 7, "float32[8] sin, model.py:7")
    ]
    assert (picture.total, picture.live, picture.peak_at) == (180, 180, 6)


def test_a_buffer_of_less_than_a_hundredth_of_the_peak_has_no_bar():
    small, large = (Live(size, "temporary", 6, 7) for size in (1, 2))
    picture = Picture.of(memory(ARGUMENT, LATE, small, large))  # 183 bytes
    assert [bar.bytes for bar in picture.bars] == [80, 2]


@pytest.mark.parametrize("temporaries, drawn", [(80, True), (64, True), (63, False), (100, True), (101, False)])
def test_there_is_none_where_the_buffers_do_not_add_up_to_about_the_peak(temporaries, drawn):
    """180 bytes are alive."""
    assert (Picture.of(memory(ARGUMENT, EARLY, LATE, temporaries=temporaries)) is not None) == drawn


@given(st.lists(st.tuples(st.integers(1, 999), st.integers(0, 500), st.integers(0, 500)), min_size=1, max_size=30))
def test_a_long_program_keeps_its_peak(found):
    held = [Live(size, "temporary", min(one, other), max(one, other)) for size, one, other in found]
    picture = Picture.of(memory(*held, length=500))
    assert len(picture.columns) == COLUMNS
    assert max(map(sum, picture.columns)) == picture.live


def texts(svg):
    return [element.text for element in ET.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize("bound, shown", [(200, True), (360, False), (None, False)])
def test_a_bound_is_drawn_where_it_can_be_seen(bound, shown):
    svg = Picture.of(memory(ARGUMENT, EARLY, LATE)).svg(bound)
    assert ("budget 200 B" in texts(svg)) == shown


def test_the_svg_loads_nothing_escapes_its_words_and_names_what_no_buffer_explains():
    held = memory(ARGUMENT, EARLY, LATE, loops=((1, 5),), temporaries=90)
    buffers = [Buffer(80, "<b>", "temporary", "a & b", live=LATE)]
    svg = Picture.of(Memory(**held.parts, buffers=tuple(buffers), order=held.order)).svg()
    assert not re.search(r"script|href|url\(", svg)
    assert "80 B <b> a & b" in texts(svg)
    assert "not explained 10 B" in texts(svg)
    assert any("one step of a loop" in text for text in texts(svg))
