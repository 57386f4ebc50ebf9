"""The table of settings: parsing, precedence between parsed sources, the texts made from it."""

import re
from dataclasses import asdict, fields
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck import CheckError, Nesting
from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.catalogue import STYLES, TRANSFORMS
from pytest_nnxcheck.core.errors import SettingError
from pytest_nnxcheck.core.setting_values import (
    PATH,
    PERCENTAGE,
    REPORT_PATHS,
    UNITS,
    Budget,
    least_bytes,
    least_multiple,
)
from pytest_nnxcheck.core.settings import DEFAULTS, EFFORTS, SWEEPS, TABLE, Settings
from pytest_nnxcheck.core.text import format_bytes

MANY = "9" * 5000
"""More digits than Python reads or shows."""


def parse(name, value):
    return table.parse_given({name: value}, lambda name: "here")[name]


def error_of(name, value):
    with pytest.raises(SettingError) as caught:
        parse(name, value)
    return str(caught.value)


BUDGETS = {
    "1": Budget(bytes=1),
    "512B": Budget(bytes=512),
    "1KB": Budget(bytes=1000),
    "1KiB": Budget(bytes=1024),
    "512 MiB": Budget(bytes=512 * 1024**2),
    " 1.5GB ": Budget(bytes=1_500_000_000),
    "2TiB": Budget(bytes=2 * 1024**4),
    1048576: Budget(bytes=1048576),
    "2x": Budget(factor=2.0),
    "1.25x": Budget(factor=1.25),
    "2 x": Budget(factor=2.0),
}


@pytest.mark.parametrize("value, budget", BUDGETS.items())
def test_a_budget_is_bytes_or_a_multiple_of_the_expected_peak(value, budget):
    assert parse("memory_budget", value) == budget


def test_a_budget_in_powers_of_1000_is_kept_as_it_was_written():
    written = {value: parse("memory_budget", value).written for value in ("1KB", " 1.5GB ", "1KiB", "1000", 1000)}
    assert [*written.values()] == ["1KB", "1.5GB", "", "", ""]


@pytest.mark.parametrize(
    "value", ["", "0", "0x", "5MBfoo", "5 5MB", "1e3", "infx", "5mb", "0.1B", "1_000", "٣MB", "2x\n2x", -1, True, 1.5, [1]]
)  # fmt: skip
def test_a_bad_budget_names_the_value_and_what_to_write(value):
    text = error_of("memory_budget", value)
    assert text.startswith(f"here: memory_budget={value!r} is ")
    assert "'512MiB'" in text
    assert "'2x'" in text


@given(st.builds(Budget, bytes=st.integers(1, 10**18)) | st.builds(Budget, factor=st.floats(1e-6, 1e15)))
def test_budget_text_round_trips(budget):
    assert Budget.parse(str(budget)) == budget


@given(st.integers(1, 2**50))
def test_the_smallest_size_is_the_next_tenth_of_the_unit_of_messages(peak):
    size = Budget.parse(least_bytes(peak)).bytes
    number, unit = re.fullmatch(r"([\d.]+)(\D+)", least_bytes(peak)).groups()
    less = Decimal(number) - (1 if unit == "B" else Decimal("0.1"))
    assert peak <= size
    assert int(less * UNITS[unit]) < peak
    assert unit == format_bytes(peak).split()[1]


@given(st.lists(st.tuples(st.integers(1, 2**50), st.integers(1, 2**50)), min_size=1, max_size=3))
def test_the_smallest_multiple_is_the_next_tenth(programs):
    tenths = round(10 * Budget.parse(least_multiple(programs)).factor)
    assert all(peak <= round(tenths / 10 * expected) for peak, expected in programs)
    assert tenths == 1 or any(peak > round((tenths - 1) / 10 * expected) for peak, expected in programs)


@given(st.text(alphabet="0123456789.xKMGTiB +-en", max_size=12))
def test_any_text_is_a_positive_budget_or_a_setting_error(text):
    try:
        budget = Budget.parse(text)
    except SettingError:
        return
    assert (budget.bytes is None) != (budget.factor is None)
    assert (budget.bytes or budget.factor) > 0


def test_budget_text_is_short():
    budgets = map(Budget.parse, ("1024MiB", "1500KB", "2.0x", "0.25x"))
    assert [*map(str, budgets)] == ["1GiB", "1500000B", "2x", "0.25x"]


@pytest.mark.parametrize("value", ["scan,jit", "scan, jit", "scan jit", ("scan", "jit"), ["jit,scan"], {"jit", "scan"}])
def test_lists_come_in_many_spellings_and_are_kept_plainest_first(value):
    assert parse("transforms", value) == ("jit", "scan")


def test_call_first_is_a_transform_only_where_it_is_named():
    assert "call_first" not in DEFAULTS.transforms
    assert parse("transforms", "jit,call_first") == ("jit", "call_first")


def test_numbers_switches_words_and_nestings():
    assert (parse("max_depth", "4"), parse("max_examples", 0), parse("devices", "8")) == (4, 0, 8)
    assert (parse("devices", None), parse("devices", "4096")) == (None, 4096)
    # True and false are those of a TOML file, as pytest hands them on.
    assert [parse("all", value) for value in ("on", "off", True, False, "True", "false")] == ["on", "off"] * 3
    assert (parse("sweep", "pairs"), parse("donate", "none"), parse("effort", "quick")) == ("pairs", "none", "quick")
    assert parse("nesting", "jit > scan[closure]") == Nesting.parse("jit > scan[closure]")
    assert parse("nesting", Nesting()) == Nesting()


WHOLE = " is not a whole number of at least"
DIGITS = "too many digits, write a whole number below a billion"
DONATES = " (an argument of that name is donated with 'state,"
BAD = [
    ("transforms", "jit,scna", "unknown transform 'scna', did you mean 'scan'?"),
    ("transforms", "", "transforms='' is empty, write some of jit,"),
    ("styles", ["jax_closur"], "unknown style 'jax_closur', did you mean 'jax_closure'?"),
    ("styles", 3, "styles=3 is not a list of words"),
    ("styles", [1], "styles=[1] is not a list of words"),
    ("invariants", "tracer", "unknown invariant 'tracer', did you mean 'tracers'?"),
    *[("max_depth", value, f"max_depth={value!r}{WHOLE} 1") for value in ("0", True, 2.0, "two")],
    *[("max_examples", value, f"max_examples={value!r}{WHOLE} 0") for value in (-1, "1.0", None)],
    *[("max_depth", value, DIGITS) for value in (MANY, " -9999999999", 10**5000, 10**9)],
    # XLA would start simulating so many devices, and say nothing for hours.
    *[("devices", value, " a whole number from 1 to 4096") for value in (0, "x", 4097, 10**9, MANY)],
    *[("memory_budget", value, "is out of range, write bytes such as") for value in (10**5000, MANY, f"{MANY}GB")],
    ("sweep", "pair", "unknown sweep 'pair', did you mean 'pairs'?"),
    ("sweep", None, "sweep=None is not a word"),
    ("all", 1, "all=1 is not a word, write one of on, off"),
    ("donate", "cache", f"unknown donate 'cache', write one of state, all, none{DONATES}cache')"),
    ("donate", "opt_state", f"did you mean 'state'?{DONATES}opt_state')"),
    ("donate", "no-name", "did you mean 'none'? ('state,NAME' donates an argument too)"),
    ("nesting", "jitt > scan", "unknown transform 'jitt', did you mean 'jit'?"),
    ("nesting", 3, "nesting=3 is not a nesting"),
    ("expected_failures", {"memry": "x"}, "'memry' names no known invariant or nesting"),
    ("expected_failures", "memory", "expected_failures='memory' is no mapping"),
    ("memory_buget", 1, "here: unknown setting 'memory_buget', did you mean 'memory_budget'?"),
    ("baseline", "x", "here: baseline='x' is for the command line or the ini file, --nnx-baseline"),
]


@pytest.mark.parametrize("name, value, text", BAD, ids=[f"{n}-{name}" for n, (name, *_) in enumerate(BAD)])
def test_a_bad_value_says_what_to_write(name, value, text):
    assert text in error_of(name, value)


def test_a_setting_of_another_place_names_it():
    with pytest.raises(SettingError) as caught:
        table.parse_given({"nesting": "jit"}, lambda name: "here", "marker")
    assert str(caught.value) == "here: nesting='jit' is for the command line, --nnx-nesting"
    assert issubclass(SettingError, CheckError)


PERCENTAGES = {"5%": "1/20", "0%": "0", "0.5%": "1/200", " 12.25 % ": "49/400", "250%": "5/2"}


@pytest.mark.parametrize("text, part", PERCENTAGES.items())
def test_a_percentage_is_exact(text, part):
    assert PERCENTAGE.parse("memory_tolerance", text) == Fraction(part)


@pytest.mark.parametrize("value", ["", "5", "-5%", "5%%", "%", "1e3%", "nan%", "٣%", 5, pytest.param(f"{MANY}%", id="digits")])  # fmt: skip
def test_a_bad_percentage_says_what_to_write(value):
    with pytest.raises(SettingError, match=r" is not a percentage, write '5%' or '0.5%', or '0%' to allow nothing$"):
        PERCENTAGE.parse("memory_tolerance", value)


@pytest.mark.parametrize("value", ["", "  ", "a\0b", 3, None])
def test_a_bad_path_is_refused(value):
    with pytest.raises(SettingError, match="is not a path, write the name of a file"):
        PATH.parse("baseline", value)


REPORTS = {
    "out.pdf": "out.pdf.json",
    "dir/": "dir/report.json",
    "dir/.json": "dir/report.json",
    ".html": "report.json",
    "a/..": "a/../report.json",
    "a.b/out.": "a.b/out..json",
}


@pytest.mark.parametrize("value, first", REPORTS.items())
def test_a_report_without_its_suffix_is_told_names_that_are_accepted(value, first):
    with pytest.raises(SettingError, match=", write ") as caught:
        REPORT_PATHS.parse("report", value)
    written = re.findall(r"'([^']*)'", str(caught.value).partition(", write ")[2])
    assert written[0] == first
    assert [REPORT_PATHS.parse("report", path) for path in written] == written
    assert REPORT_PATHS.parse("report", "a b/Peaks.JSON") == "a b/Peaks.JSON"


# --- precedence


def sources_of(**optional):
    return st.lists(st.fixed_dictionaries({}, optional=optional), max_size=4)


@given(
    sources_of(max_depth=st.integers(1, 9), sweep=st.sampled_from(SWEEPS), memory_budget=st.none() | st.just(Budget(2)))
)
def test_each_field_comes_from_the_last_source_that_gives_it(sources):
    merged = table.merge(*sources)
    for name in table.names("check"):
        given_by = [source[name] for source in sources if name in source]
        assert getattr(merged, name) == (given_by or [getattr(DEFAULTS, name)])[-1]


@given(sources_of(effort=st.sampled_from([*EFFORTS]), max_examples=st.integers(0, 99), sweep=st.sampled_from(SWEEPS)))
def test_an_effort_stands_over_weaker_sources_and_under_its_own(sources):
    merged = table.merge(*sources)
    assert table.merge(table.lay_over(*sources)) == merged
    for name in ("max_examples", "sweep"):
        told = [
            source.get(name, EFFORTS[source["effort"]][name] if "effort" in source else None)
            for source in sources
            if name in source or "effort" in source
        ]
        assert getattr(merged, name) == (told or [getattr(DEFAULTS, name)])[-1]
    assert merged.effort == ([source["effort"] for source in sources if "effort" in source] or ["default"])[-1]
    assert table.merge({"effort": "default"}) == DEFAULTS


def test_expected_failures_add_up_and_the_later_source_wins():
    first, last = (
        {"expected_failures": parse("expected_failures", given)}
        for given in ({"memory": "a", "jit": "b"}, {"memory": "c"})
    )
    merged = table.merge(first, {"max_depth": 2}, last).expected_failures
    assert {entry.key: entry.reason for entry in merged} == {"memory": "c", "jit": "b"}


# --- the table


def test_the_defaults_are_the_rows_of_a_check():
    assert Settings() == DEFAULTS
    assert table.names("check") == tuple(entry.name for entry in fields(Settings))
    assert {name: TABLE[name].default for name in table.names("check")} == asdict(DEFAULTS)
    assert (DEFAULTS.transforms, DEFAULTS.styles) == (TRANSFORMS, STYLES)


def test_where_a_setting_may_be_given():
    check, run, marker = ({*table.names("check")}, {*table.names("run")}, {*table.names(place="marker")})
    named = {*table.names("named")}
    assert {*table.names()} == check | run | named
    assert not named & ({*table.names(place="ini file")} | marker)
    assert table.names(place="command line") == table.names()
    assert (check - marker, run & marker) == ({"nesting"}, set())
    assert run - {*table.names(place="ini file")} == {name for name in run if not TABLE[name].kind.metavar}
    assert all(f" {name}=" in table.marker_line() for name in marker)
    assert "nesting=" not in table.marker_line()
    assert max(map(len, f"@pytest.mark.{table.marker_line()}".splitlines())) <= 100
