"""Progress on long runs: what is counted, what is said, and where nothing is."""

import re

import pytest
from healthy import FLAX

from pytest_nnxcheck import Nesting, Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.plugin import progress
from pytest_nnxcheck.plugin.progress import Count, rounded

SUITE = """
@marked(transforms="jit,scan", styles="argument", max_examples=0)
def test_block(nnx_wrap):
    print("hello from the test")
    nnx_wrap(Model())(1)
"""
OF_NESTING = re.compile(r"  (?:passed|failed|not supported by flax) +(?:[\d.]+ KiB +)?\d+\.\d\d s   (.+)")
NOW_AND_THEN = re.compile(r"test_block  (.+?)  \d+ of 5(, about \d+ s left)?")
SWEEP = ["un-nested", "jit", "scan", "jit > call_first", "jit > scan > scan"]
ON_TERMINAL = """
def pytest_sessionstart(session):
    session.config.pluginmanager.getplugin("terminalreporter").isatty = lambda: True
"""
WORKER = "def pytest_sessionstart(session): session.config.workerinput = {}\n"


def said(result, pattern):
    return [match[1] for line in result.outlines if (match := pattern.fullmatch(line))]


@pytest.fixture(autouse=True)
def attended(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")


@pytest.fixture
def patience(monkeypatch):
    """Set how long a test shows nothing; from then on, every nesting has a line."""

    def seconds(*, terminal=1e9, log=1e9):
        monkeypatch.setattr(progress, "TERMINAL", terminal)
        monkeypatch.setattr(progress, "LOG", log)
        monkeypatch.setattr(progress, "OFTEN", 0)

    return seconds


# --- what is counted -----------------------------------------------------------------------------------------------------


def test_an_estimate_has_few_digits():
    texts = {0: "1 s", 9.6: "10 s", 12: "10 s", 43: "45 s", 94: "95 s", 96: "2 min", 5000: "83 min", 7200: "2 h"}
    assert {seconds: rounded(seconds) for seconds in texts} == texts


def test_the_time_left_is_that_of_the_nestings_that_ran():
    count = Count(Settings(transforms=("jit", "scan"), styles=("argument",), max_examples=3, sweep="pairs"))
    texts = []
    for name in ("un-nested", "jit", "scan", "jit > scan", "scan > jit"):  # three in between were ruled out
        count.begin(Nesting.parse(name), sweeping=True)
        texts.append(str(count))
        count.end(2.0)
    assert texts == ["0 of 12", "1 of 12", "2 of 12", "6 of 12, about 10 s left", "7 of 12, about 10 s left"]
    texts.clear()
    for _ in range(5):
        count.begin(Nesting.parse("vmap > jit"), sweeping=False)
        texts.append(str(count))
        count.end(2.0)
    lefts = ["9 of 12, about 6 s left", "10 of 12, about 4 s left", "11 of 12, about 2 s left"]
    assert texts == [*lefts, "12 done", "13 done"]


def test_the_line_of_a_nesting():
    nesting = Nesting.parse("jit > scan > remat")
    lines = [
        progress.ended(nesting, Outcome(nesting, "held", peak=2048), 0.314),
        progress.ended(Nesting(), Outcome(Nesting(), "rejected"), 1234.5),
        progress.ended(nesting, None, 12),
    ]
    assert lines == [
        "  passed                   2.0 KiB     0.31 s   jit > scan > remat",
        "  not supported by flax             1234.50 s   un-nested",
        "  not checked                         12.00 s   jit > scan > remat",
    ]


# --- what is said --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conftest, where", [("", "log"), (ON_TERMINAL, "terminal")], ids=["log", "terminal"])
def test_a_long_test_says_what_is_under_way(run_inner, patience, conftest, where):
    patience(**{where: 0})
    result = run_inner(SUITE, conftest=conftest)
    result.assert_outcomes(passed=1)
    assert said(result, NOW_AND_THEN) == SWEEP
    assert "\x1b" not in result.stdout.str()


@pytest.mark.parametrize(
    "args, counted",
    [
        (["--nnx-nesting=jit > scan"], ["0 of 1"]),
        pytest.param(
            ["--nnx-modes=graph,tree"],
            [f"{done} of 10" for done in range(10)],
            marks=pytest.mark.skipif(FLAX < (0, 12, 7), reason="flax before 0.12.7 has one mode"),
        ),
        (["--nnx-sweep=pairs"], [f"{done} of 9" for done in range(9)]),
    ],
    ids=["replay", "modes", "pairs"],
)
def test_every_nesting_that_always_runs_has_its_place(run_inner, patience, args, counted):
    patience(log=0)
    result = run_inner(SUITE, *args)
    assert said(result, re.compile(r"test_block  .+?  (\d+ of \d+)(?:, .*)?")) == counted


def test_there_is_a_while_between_two_lines(run_inner, patience, monkeypatch):
    patience(log=0)
    monkeypatch.setattr(progress, "OFTEN", 1e9)
    assert said(run_inner(SUITE), NOW_AND_THEN) == ["un-nested"]


@pytest.mark.parametrize("name, value", [("CI", "true"), ("TERM", "dumb")])
def test_a_terminal_that_nobody_attends_is_a_log(run_inner, patience, monkeypatch, name, value):
    patience(terminal=0)
    monkeypatch.setenv(name, value)
    assert said(run_inner(SUITE, conftest=ON_TERMINAL), NOW_AND_THEN) == []


@pytest.mark.parametrize("args, conftest", [(["-q"], ""), ([], WORKER), (["-v"], WORKER)], ids=["-q", "worker", "-v"])
def test_where_nobody_wants_it_there_is_nothing(run_inner, patience, args, conftest):
    patience(log=0, terminal=0)
    result = run_inner(SUITE, *args, conftest=conftest)
    result.assert_outcomes(passed=1)
    assert said(result, NOW_AND_THEN) + said(result, OF_NESTING) == []


@pytest.mark.parametrize("args", [["-v"], ["-q", "-v"], ["-qq", "-v"]], ids=" ".join)
def test_v_shows_each_nesting_also_beside_q(run_inner, args):
    """An ini file may have ``-q`` among its options."""
    result = run_inner(SUITE, *args)
    assert said(result, OF_NESTING) == SWEEP
    assert "-v shows" not in result.stdout.str()


def test_what_runs_after_the_test_is_not_shown(run_inner):
    result = run_inner(SUITE.replace("Model()", "Model(tracers=has('scan'))"), "-v")
    result.assert_outcomes(failed=1)
    assert said(result, OF_NESTING) == SWEEP[:3]
    result.stdout.fnmatch_lines(["*passes *scan*functional*"])


# --- what can go wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capture", ["fd", "sys"])
@pytest.mark.parametrize("failing", [SUITE + "    assert 0\n", SUITE.replace("Model()", "Model(tracers=has('scan'))")])
def test_what_the_test_prints_stays_captured(run_inner, capture, failing):
    """The calls that explain a failure come when pytest captures no more of the test."""
    result = run_inner(failing, "-v", f"--capture={capture}")
    result.assert_outcomes(failed=1)
    assert result.outlines.count("hello from the test") >= 1
    first = result.outlines.index("hello from the test")
    assert any("Captured stdout call" in line for line in result.outlines[:first])


GONE = """
def pytest_sessionstart(session):
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    def write_line(line, **more):
        if line.startswith(("test_block", "  passed")) and "jit" in line:
            raise BrokenPipeError
        write(line, **more)
    write, reporter.write_line = reporter.write_line, write_line
"""


@pytest.mark.parametrize("args", [[], ["-v"]], ids=["now and then", "-v"])
def test_a_stream_that_is_gone_does_not_take_the_test_with_it(run_inner, patience, args):
    patience(log=0)
    result = run_inner(SUITE, *args, conftest=GONE)
    result.assert_outcomes(passed=1)
    assert said(result, NOW_AND_THEN) + said(result, OF_NESTING) == ["un-nested", "scan"]
