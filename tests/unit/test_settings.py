"""The table of settings: parsing, precedence between parsed sources, the texts made from it."""

import re
from dataclasses import fields
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck.core import settings as table
from pytest_nnxcheck.core.catalogue import STYLES, TRANSFORMS
from pytest_nnxcheck.core.errors import CheckError, SettingError
from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.setting_values import PATH, PERCENTAGE, REPORT_PATHS, Budget
from pytest_nnxcheck.core.settings import DEFAULTS, EFFORTS, SWEEPS, TABLE, Settings


def parse(name, value):
    return table.parse_given({name: value}, lambda name: "here")[name]


def text_of(name, value):
    with pytest.raises(SettingError) as caught:
        parse(name, value)
    return str(caught.value)


@pytest.mark.parametrize(
    "value, size",
    [
        ("1", 1),
        ("512B", 512),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 * 1024**2),
        ("512 MiB", 512 * 1024**2),
        (" 1.5GB ", 1_500_000_000),
        ("2TiB", 2 * 1024**4),
        (1048576, 1048576),
    ],
)
def test_budget_in_bytes(value, size):
    assert parse("memory_budget", value) == Budget(bytes=size)


@pytest.mark.parametrize(
    "value, written", [("1KB", "1KB"), (" 1.5GB ", "1.5GB"), ("1KiB", ""), ("1000", ""), (1000, "")]
)
def test_a_budget_in_powers_of_1000_is_kept_as_it_was_written(value, written):
    assert parse("memory_budget", value).written == written


@pytest.mark.parametrize("value, factor", [("2x", 2.0), ("1.25x", 1.25), ("0.5x", 0.5), ("2 x", 2.0)])
def test_budget_as_multiple_of_the_expected_peak(value, factor):
    assert parse("memory_budget", value) == Budget(factor=factor)


BAD_BUDGETS = [
    *["", "-1", "0", "0x", "0MiB", "0.0x", "x", "5MBfoo", "foo5MB", "5 5MB", "1e3", "nan", "inf", "infx", "-2x", "5mb"],
    *[
        "5iB",
        "0.1B",
        "1_000",
        "٣MB",
        "2x\n2x",
        "9" * 400 + "x",
        -1,
        0,
        True,
        False,
        1.5,
        float("nan"),
        float("inf"),
        [1],
        b"1",
    ],
]


@pytest.mark.parametrize("value", BAD_BUDGETS, ids=repr)
def test_bad_budget_names_the_value_and_what_to_write(value):
    text = text_of("memory_budget", value)
    assert text.startswith(f"here: memory_budget={value!r} is ")
    assert "'512MiB'" in text
    assert "'2x'" in text


@given(st.builds(Budget, bytes=st.integers(1, 10**18)) | st.builds(Budget, factor=st.floats(1e-6, 1e15)))
def test_budget_text_round_trips(budget):
    assert Budget.parse(str(budget)) == budget


@given(st.text(alphabet="0123456789.xKMGTiB +-en", max_size=12))
def test_any_text_is_a_positive_budget_or_a_setting_error(text):
    try:
        budget = Budget.parse(text)
    except SettingError:
        return
    assert (budget.bytes is None) != (budget.factor is None)
    assert (budget.bytes or budget.factor) > 0


def test_budget_text_is_short():
    assert [str(Budget.parse(text)) for text in ("1024MiB", "1500KB", "2.0x", "0.25x")] == [
        "1GiB",
        "1500000B",
        "2x",
        "0.25x",
    ]


@pytest.mark.parametrize(
    "value", ["scan,jit", "scan, jit", "scan jit", ["scan", "jit"], ("jit", "scan"), ["jit,scan"], {"jit", "scan"}]
)
def test_lists_come_in_many_spellings_and_are_kept_plainest_first(value):
    assert parse("transforms", value) == ("jit", "scan")


def test_lists_of_words_are_checked():
    assert "unknown transform 'scna', did you mean 'scan'?" in text_of("transforms", "jit,scna")
    assert "unknown style 'jax_closur', did you mean 'jax_closure'?" in text_of("styles", ["jax_closur"])
    assert "unknown invariant 'tracer', did you mean 'tracers'?" in text_of("invariants", "tracer")
    assert "transforms='' is empty, write some of jit," in text_of("transforms", "")
    assert "styles=3 is not a list of words" in text_of("styles", 3)
    assert "invariants=None is not a list of words" in text_of("invariants", None)
    assert "styles=[1] is not a list of words" in text_of("styles", [1])


def test_call_first_is_a_transform_only_where_it_is_named():
    assert "call_first" not in DEFAULTS.transforms
    assert parse("transforms", "jit,call_first") == ("jit", "call_first")


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_depth", 0),
        ("max_depth", "0"),
        ("max_depth", True),
        ("max_depth", 2.0),
        ("max_depth", "two"),
        ("max_examples", -1),
        ("max_examples", "1.0"),
        ("max_examples", None),
    ],
)
def test_bad_numbers(name, value):
    assert f"{name}={value!r} is not a whole number of at least" in text_of(name, value)


@pytest.mark.parametrize(
    "value",
    ["9" * 5000, " -9999999999", 10**5000, -(10**5000), 10**9],
    ids=lambda value: str(value)[:4] if isinstance(value, str) else "int",
)
@pytest.mark.parametrize("name", ["max_depth", "max_examples"])
def test_numbers_of_too_many_digits(name, value):
    """Python reads and shows none of thousands of them."""
    assert text_of(name, value).endswith("too many digits, write a whole number below a billion")


@pytest.mark.parametrize("value", [0, "-3", "x", 4097, "100000", 10**8, 10**9, "9" * 5000])
def test_devices_have_a_bound(value):
    """XLA would start simulating them, and say nothing for hours."""
    assert text_of("devices", value).endswith(" a whole number from 1 to 4096")


@pytest.mark.parametrize("value", [10**5000, "9" * 5000, "9" * 5000 + "GB"], ids=["int", "digits", "GB"])
def test_sizes_of_too_many_digits(value):
    assert "is out of range, write bytes such as" in text_of("memory_budget", value)


def test_numbers():
    assert (parse("max_depth", "4"), parse("max_examples", 0), parse("devices", "8")) == (4, 0, 8)
    assert (parse("devices", None), parse("devices", "4096")) == (None, 4096)


@pytest.mark.parametrize(
    "name, word, near",
    [
        ("sweep", "pair", "pairs"),
        ("effort", "quik", "quick"),
        ("shortcuts", "of", "off"),
        ("all", "onn", "on"),
        ("donate", "stat", "state"),
        ("on_rejection", "reports", "report"),
        ("on_too_few_devices", "skipp", "skip"),
    ],
)
def test_choices(name, word, near):
    assert parse(name, near) == near
    assert f"unknown {name} {word!r}, did you mean {near!r}?" in text_of(name, word)
    assert f"{name}=None is not a word" in text_of(name, None)


def test_the_name_of_an_argument_alone_is_told_how_it_is_donated():
    assert text_of("donate", "cache").endswith(
        "unknown donate 'cache', write one of state, all, none (an argument of that name is donated with 'state,cache')"
    )
    assert text_of("donate", "opt_state").endswith(
        "did you mean 'state'? (an argument of that name is donated with 'state,opt_state')"
    )
    also = " ('state,NAME' donates an argument too)"
    assert text_of("donate", "no-name").endswith(f"did you mean 'none'?{also}")
    assert text_of("donate", "").endswith(f"unknown donate '', write one of state, all, none{also}")


def test_nesting():
    assert parse("nesting", "jit > scan[closure]") == Nesting.parse("jit > scan[closure]")
    assert parse("nesting", Nesting()) == Nesting()
    assert "unknown transform 'jitt', did you mean 'jit'?" in text_of("nesting", "jitt > scan")
    assert "an empty nesting" in text_of("nesting", "")
    assert "nesting=3 is not a nesting" in text_of("nesting", 3)


def test_unknown_setting_names_the_nearest():
    assert text_of("memory_buget", 1) == "here: unknown setting 'memory_buget', did you mean 'memory_budget'?"


def test_a_setting_that_another_place_gives_names_it():
    with pytest.raises(SettingError) as caught:
        table.parse_given({"nesting": "jit"}, lambda name: "here", "marker")
    assert str(caught.value) == "here: nesting='jit' is for the command line, --nnx-nesting"
    assert text_of("baseline", "x") == "here: baseline='x' is for the command line or the ini file, --nnx-baseline"


@pytest.mark.parametrize(
    "text, part",
    [("5%", "1/20"), ("0%", "0"), ("0.5%", "1/200"), (" 12.25 % ", "49/400"), ("250%", "5/2")],
)
def test_a_percentage_is_exact(text, part):
    assert PERCENTAGE.parse("memory_tolerance", text) == Fraction(part)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "5",
        "0.05",
        "-5%",
        "5%%",
        "%",
        "1e3%",
        "nan%",
        "inf%",
        "٣%",
        "5 percent",
        5,
        None,
        pytest.param("9" * 5000 + "%", id="digits"),
    ],
)
def test_what_is_no_percentage(value):
    with pytest.raises(SettingError) as caught:
        PERCENTAGE.parse("memory_tolerance", value)
    assert str(caught.value) == (
        f"memory_tolerance={value!r} is not a percentage, write '5%' or '0.5%', or '0%' to allow nothing"
    )


@pytest.mark.parametrize("value", ["", "  ", "a\0b", 3, None])
def test_what_is_no_path(value):
    with pytest.raises(SettingError, match="is not a path, write the name of a file"):
        PATH.parse("baseline", value)


def test_a_report_says_its_form_in_its_suffix():
    assert REPORT_PATHS.parse("report", "a b/Peaks.JSON") == "a b/Peaks.JSON"
    with pytest.raises(SettingError) as caught:
        REPORT_PATHS.parse("report", "out.pdf")
    assert str(caught.value) == (
        "report='out.pdf' ends in none of .json, .html, .md, write 'out.pdf.json', 'out.pdf.html', 'out.pdf.md'"
    )


@pytest.mark.parametrize(
    "value, first",
    [
        ("dir/", "dir/report.json"),
        ("dir/.json", "dir/report.json"),
        (".html", "report.json"),
        (".", "report.json"),
        ("a/..", "a/../report.json"),
        ("out", "out.json"),
        ("a.b/out.", "a.b/out..json"),
    ],
)
def test_what_is_written_of_a_report_is_accepted(value, first):
    with pytest.raises(SettingError) as caught:
        REPORT_PATHS.parse("report", value)
    written = re.findall(r"'([^']*)'", str(caught.value).partition(", write ")[2])
    assert written[0] == first
    assert [REPORT_PATHS.parse("report", path) for path in written] == written


def test_setting_errors_are_check_errors():
    assert issubclass(SettingError, CheckError)


@given(st.data())
def test_each_field_comes_from_the_last_source_that_gives_it(data):
    fields = st.fixed_dictionaries(
        {},
        optional={
            "max_depth": st.integers(1, 9),
            "max_examples": st.integers(0, 99),
            "sweep": st.sampled_from(SWEEPS),
            "memory_budget": st.none() | st.just(Budget(factor=2.0)),
        },
    )
    sources = data.draw(st.lists(fields, max_size=4))
    merged = table.merge(*sources)
    for name in table.names("check"):
        given_by = [source[name] for source in sources if name in source]
        assert getattr(merged, name) == (given_by or [getattr(DEFAULTS, name)])[-1]


@given(st.data())
def test_an_effort_stands_over_weaker_sources_and_under_its_own(data):
    fields = st.fixed_dictionaries(
        {},
        optional={
            "effort": st.sampled_from([*EFFORTS]),
            "max_examples": st.integers(0, 99),
            "sweep": st.sampled_from(SWEEPS),
        },
    )
    sources = data.draw(st.lists(fields, max_size=4))
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


def test_switches():
    for name in ("shortcuts", "all"):
        assert [parse(name, value) for value in ("on", "off", True, False)] == ["on", "off", "on", "off"]
        assert [parse(name, value) for value in ("True", "false")] == [
            "on",
            "off",
        ]  # of a TOML file, as pytest hands it on
        assert f"{name}=1 is not a word, write one of on, off" in text_of(name, 1)


def test_expected_failures_add_up_and_the_later_source_wins():
    sources = [
        {"expected_failures": parse("expected_failures", given)}
        for given in ({"memory": "a", "jit": "b"}, {"memory": "c"})
    ]
    merged = table.merge(sources[0], {"max_depth": 2}, sources[1]).expected_failures
    assert {entry.key: entry.reason for entry in merged} == {"memory": "c", "jit": "b"}
    assert "'memry' names no known invariant or nesting" in text_of("expected_failures", {"memry": "x"})
    assert "expected_failures='memory' is no mapping" in text_of("expected_failures", "memory")


def test_defaults():
    check = DEFAULTS.invariants, DEFAULTS.transforms, DEFAULTS.styles, DEFAULTS.modes, DEFAULTS.max_depth
    assert check == (("tracers", "memory", "donation"), TRANSFORMS, STYLES, ("current",), 3)
    assert (DEFAULTS.effort, DEFAULTS.max_examples, DEFAULTS.sweep) == ("default", 3, "chains")
    assert (DEFAULTS.shortcuts, DEFAULTS.all, DEFAULTS.memory_budget) == ("on", "off", None)
    assert (DEFAULTS.memory_advice, DEFAULTS.donate, DEFAULTS.on_rejection) == ("note", "state", "report")
    assert (DEFAULTS.devices, DEFAULTS.on_too_few_devices, DEFAULTS.nesting) == (None, "skip", None)
    assert Settings() == DEFAULTS


def test_the_fields_of_a_check_are_the_rows_of_its_scope():
    assert table.names("check") == tuple(entry.name for entry in fields(Settings))
    assert {name: TABLE[name].default for name in table.names("check")} == {
        name: getattr(DEFAULTS, name) for name in table.names("check")
    }
    assert {*table.names()} == {*table.names("check"), *table.names("run")}


def test_where_a_setting_may_be_given():
    assert table.names(place="command line") == table.names()
    assert {*table.names("check")} - {*table.names(place="marker")} == {"nesting"}
    assert {*table.names("run")} & {*table.names(place="marker")} == set()
    assert {*table.names("run")} - {*table.names(place="ini file")} == {
        name for name in table.names("run") if not TABLE[name].kind.metavar
    }


def test_every_default_can_be_read_back_from_its_text():
    for name, row in TABLE.items():
        if row.default not in (None, ()):
            assert row.kind.parse(name, table.show(row.default)) == row.kind.parse(name, row.default)


@pytest.mark.parametrize("scope", ["check", "run"])
def test_a_table_of_the_documents_has_a_row_a_setting(scope):
    lines = table.table_markdown(scope).splitlines()
    assert len(lines) == len(table.names(scope)) + 2
    assert all(line.count(" | ") == 4 for line in lines[2:])


def test_a_row_of_the_documents():
    lines = [*table.table_markdown("check").splitlines(), *table.table_markdown("run").splitlines()]
    starts = (
        "| [`max_depth`](nestings.md#how-much-is-run) | `3` | `--nnx-max-depth N` | `nnx_max_depth` | layers of the deepest",
        "| [`all`](nestings.md#nestings) | `off` | `--nnx-all` | `nnx_all` | ",
        "| [`nesting`](tutorial.md#run-one-nesting-again) | `none` | `--nnx-nesting NESTING` | - | ",
        "| [`memory_tolerance`](baseline.md) | `5%` | `--nnx-memory-tolerance PERCENT` | `nnx_memory_tolerance` | ",
        "| [`baseline_update`](baseline.md) | `off` | `--nnx-baseline-update` | - | ",
    )
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
    assert lines[-3].endswith("(for a pull request); may be repeated |")
    assert lines[-2].startswith("| [`watch`](watch.md) | `off` | `--nnx-watch[=report]` | `nnx_watch` | ")


def test_the_marker_line_has_every_setting_but_the_replay():
    line = table.marker_line()
    assert line.startswith("nnx_invariants(*, invariants=('tracers', 'memory', 'donation'), ")
    assert all(f" {name}=" in line for name in table.names(place="marker"))
    assert "nesting=" not in line
