"""Progress on long runs: what is said, on a terminal (a pseudo terminal, and what is on its screen), and nothing in a pipe."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_nnxcheck.core.nesting import Nesting
from pytest_nnxcheck.core.outcome import Outcome
from pytest_nnxcheck.core.settings import Settings
from pytest_nnxcheck.plugin import progress
from pytest_nnxcheck.plugin.progress import Count, fit, planned, rounded, under_way, width

SLOW = """
import time
@marked(max_examples=4)
def test_slow(nnx_wrap):
    time.sleep(0.03)
    print("hello from the test")
    nnx_wrap(Model())(1)

@marked(max_examples=0)
def test_quick(nnx_wrap): nnx_wrap(Model())(1)
"""

# --- what is said --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "1 s"),
        (1.4, "1 s"),
        (9.6, "10 s"),
        (12, "10 s"),
        (43, "45 s"),
        (94, "95 s"),
        (96, "2 min"),
        (5000, "83 min"),
        (7200, "2 h"),
    ],
)
def test_no_more_digits_than_an_estimate_has(seconds, text):
    assert rounded(seconds) == text


def test_every_nesting_that_always_runs_has_its_place():
    places, total = planned(Settings(transforms=("jit", "scan"), styles=("argument",)))
    assert [str(nesting) for nesting in places] == [
        "un-nested", "jit", "scan", "jit > call_first", "jit > scan > scan",
    ]  # fmt: skip
    assert total == 5 + 3
    assert planned(Settings(transforms=("jit", "scan"), styles=("argument",), sweep="pairs"))[1] == 9 + 3
    assert planned(Settings(nesting=Nesting.parse("jit > scan")))[1] == 1
    assert planned(Settings(max_examples=0, modes=("graph", "tree")))[1] == 2 * planned(Settings(max_examples=0))[1]


def test_the_time_left_is_that_of_the_nestings_that_ran():
    count = Count(Settings(transforms=("jit", "scan"), styles=("argument",), max_examples=3, sweep="pairs"))
    texts = []
    for name in ("un-nested", "jit", "scan", "jit > scan", "scan > jit"):  # three in between were ruled out
        count.begin(Nesting.parse(name), sweeping=True)
        texts.append(str(count))
        count.end(2.0)
    assert texts == ["0 of 12", "1 of 12", "2 of 12", "6 of 12, about 10 s left", "7 of 12, about 10 s left"]
    for _ in range(6):
        count.begin(Nesting.parse("vmap > jit"), sweeping=False)
        texts.append(str(count))
        count.end(2.0)
    assert texts[5:] == [
        "9 of 12, about 6 s left",
        "10 of 12, about 4 s left",
        "11 of 12, about 2 s left",
        "12 done",
        "13 done",
        "14 done",
    ]


NESTING = Nesting.parse("jit > scan > remat")


def test_a_narrow_terminal_leaves_the_end():
    count = Count(Settings())
    assert under_way("test_block", NESTING, count, 80) == f"test_block  jit > scan > remat  0 of {count.total}"
    assert under_way("test_block", NESTING, count, 36) == f"test..  jit > scan > remat  0 of {count.total}"
    assert under_way("test_block", NESTING, count, 20) == "jit > scan > rema.."


@given(st.text(), st.integers(0, 60))
def test_the_line_never_wraps_nor_moves_the_cursor(name, columns):
    text = under_way(name, NESTING, Count(Settings()), columns)
    assert width(text) <= max(columns - 1, 0)
    assert text.isprintable()


def test_wide_letters_take_two_columns():
    assert fit("日本語テスト", 7) == "日本.."
    assert fit("a\u0301\x1b[2J", 80) == "a\u0301?[2J"


def test_the_line_of_a_nesting():
    outcome = Outcome(NESTING, "held", peak=2048)
    assert (
        progress.ended(NESTING, outcome, 0.314)
        == f"  {'jit > scan > remat':<38} held                 2.0 KiB    0.31 s"
    )
    assert progress.ended(NESTING, None, 12).split() == "jit > scan > remat not checked 12.00 s".split()


# --- a terminal ----------------------------------------------------------------------------------------------------------


class Screen:
    """What a terminal shows of what was written to it: the few movements that are used, and no others."""

    def __init__(self, text, columns):
        self.lines, self.row, self.column, self.columns = [""], 0, 0, columns
        self.seen = []
        for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|[\s\S]", text):
            self.feed(token)

    def feed(self, token):
        if token == "\n":
            self.row += 1
            self.lines += [""] * (self.row == len(self.lines))
        elif token == "\r":
            self.column = 0
        elif token.startswith("\x1b"):
            self.move(token[-1], int(token[2:-1] or 1) if token[-1] != "m" else 0)
        else:
            assert self.column < self.columns, "the line wraps"
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + token + line[self.column + 1 :]
            self.column += 1

    def move(self, kind, count):
        if kind == "K":
            self.seen.append(self.lines[self.row])
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif kind == "A":
            self.row -= count
        elif kind == "C":
            self.column += count
        else:
            assert kind == "m", f"an unknown movement {kind!r}"


@pytest.fixture
def on_terminal(run_inner, pytester, inner_args, monkeypatch):
    """Run a suite on a pseudo terminal, and give what is written to it."""
    for name in ("CI", "BUILD_NUMBER", "COLUMNS", "PYTEST_ADDOPTS", "NO_COLOR", "FORCE_COLOR", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def start(source, *args, columns=140, **environment):
        run_inner(source, "--collect-only", "-q")
        command = [sys.executable, "-m", "pytest", *inner_args, "-p", "no:cacheprovider", "--color=no", *args]
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        with subprocess.Popen(
            command, cwd=pytester.path, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **environment}
        ) as process:
            os.close(slave)
            text = b"".join(read_all(master))
        os.close(master)
        assert process.returncode in {0, 1}
        return text.decode().replace("\r\n", "\n\r")

    return start


def read_all(master):
    while select.select([master], [], [], 120)[0]:
        try:
            data = os.read(master, 65536)
        except OSError:  # the other side is closed
            return
        if not data:
            return
        yield data
    pytest.fail("nothing more was written for two minutes, and the run has not ended")


def settled(screen):
    """The lines at the end, without times."""
    return [re.sub(r" in \d.*s( =+)?|\d+\.\d+ s$", "", line).rstrip(" =") for line in screen.lines]


@pytest.mark.parametrize(
    "args",
    [
        (),
        *(
            pytest.param(args, marks=pytest.mark.full)
            for args in (("--capture=sys",), ("--nnx-max-depth=2", "--tb=short"))
        ),
    ],
)
def test_one_line_is_rewritten_and_taken_away(on_terminal, args):
    text = on_terminal(SLOW + "def test_bad(): assert 0\n", *args, columns=140)
    screen = Screen(text, 140)
    unattended = Screen(on_terminal(SLOW + "def test_bad(): assert 0\n", *args, columns=140, CI="true"), 140)
    assert settled(screen) == settled(unattended)
    assert any(line.startswith("test_inner.py ..F") for line in screen.lines)
    shown = [line for line in screen.seen if line.startswith("test_slow  ")]
    assert len(shown) > 5
    assert not any("test_quick" in line for line in screen.seen), "a short test shows nothing"
    for line in shown:
        assert re.fullmatch(r"test_slow  .+  \d+ of \d+(, about \d+ s left)?|test_slow  .+  \d+ done", line)
    assert any("left" in line for line in shown)
    counts = [int(line.split("  ")[2].split()[0]) for line in shown]
    assert counts == sorted(counts)
    assert not [line for line in unattended.seen if "test_slow" in line]


def test_a_narrow_terminal_is_not_wrapped(on_terminal):
    screen = Screen(
        on_terminal(SLOW.replace("test_slow", "test_with_a_name_that_is_long_enough_for_two"), columns=50), 10**6
    )
    shown = [line for line in screen.seen if " > " in line]
    assert len(shown) > 5
    assert max(map(len, shown)) <= 49


def test_a_line_a_nesting_with_v(on_terminal):
    screen = Screen(on_terminal(SLOW, "-v"), 10**6)
    done = [line for line in screen.lines if re.fullmatch(r"  \S.* held +([\d.]+ KiB +)?\d+\.\d\d s", line)]
    assert len(done) >= 2 * 39 + 4
    assert done[0].split()[:2] == ["un-nested", "held"]
    assert "  jit > call_first                       held                 2.9 KiB" in "\n".join(done)
    assert any(line.startswith("PASSED") for line in screen.lines)
    assert not any(line.startswith("test_slow") for line in screen.lines), "the line that is rewritten is gone"


def test_what_a_test_prints_itself_stays(on_terminal):
    screen = Screen(on_terminal(SLOW, "-s"), 10**6)
    assert sum("hello from the test" in line for line in screen.lines) > 39


def test_the_first_nesting_may_be_the_long_one(on_terminal):
    source = SLOW.replace("time.sleep(0.03)", "time.sleep(0 if RUNS else 1.5)")
    screen = Screen(on_terminal(source), 140)
    assert [line for line in screen.seen if line.startswith("test_slow  un-nested  0 of ")]


@pytest.mark.parametrize("args, environment", [(("-q",), {}), ((), {"TERM": "dumb"})])
def test_where_nobody_wants_it_there_is_nothing(on_terminal, args, environment):
    text = on_terminal(SLOW, *args, **environment)
    assert "\x1b" not in text
    assert not re.search(r"test_slow  .* of \d+,", text)


@pytest.mark.parametrize("args", [(), ("-n2", "-v")])
def test_in_a_pipe_a_short_test_shows_nothing(run_inner, args):
    result = run_inner(SLOW, *args, subprocess=True)
    result.assert_outcomes(passed=2)
    text = result.stdout.str() + result.stderr.str()
    assert "\x1b" not in text
    assert not re.search(r"\d+ of \d+|\d+\.\d\d s$", text, re.MULTILINE)


def test_in_a_pipe_there_is_a_line_a_nesting_with_v(run_inner):
    result = run_inner(SLOW, "-v", subprocess=True)
    result.assert_outcomes(passed=2)
    assert "\x1b" not in result.stdout.str()
    done = [line for line in result.outlines if re.fullmatch(r"  \S.* held +([\d.]+ KiB +)?\d+\.\d\d s", line)]
    assert len(done) >= 2 * 39 + 4
    first = result.outlines.index(done[0])
    assert result.outlines[first - 1].startswith("test_inner.py::test_slow")


def test_in_a_pipe_a_long_test_shows_a_line_now_and_then(run_inner):
    conftest = "from pytest_nnxcheck.plugin import progress\nprogress.LONG, progress.OFTEN = 0.5, 0.3\n"
    result = run_inner(SLOW, subprocess=True, conftest=conftest)
    result.assert_outcomes(passed=2)
    lines = [line for line in result.outlines if re.match(r"test_slow  .+  \d+ of \d+, about \d+ s left$", line)]
    assert 2 <= len(lines) <= 12
    assert not [line for line in result.outlines if line.startswith("test_quick  ")]


# --- what can go wrong ---------------------------------------------------------------------------------------------------


class Stream:
    def __init__(self, *, broken=False):
        self.text, self.broken = "", broken

    def write(self, text):
        if self.broken:
            raise BrokenPipeError
        self.text += text

    def flush(self):
        pass

    def fileno(self):
        raise OSError


class Quiet:
    sweeping = True
    outcomes = {}  # noqa: RUF012


def progress_on(stream, column=lambda: 14, *, quiet_tests=True, lines=False):
    made = progress.Progress(
        progress.Terminal(stream, column, quiet_tests=quiet_tests), "test_x", Settings(), lines=lines
    )
    made.first()
    return made


def test_a_terminal_that_is_gone_does_not_take_the_run_with_it():
    made = progress_on(Stream(broken=True))
    made.begin(Quiet(), NESTING)
    made.end(Quiet(), NESTING)
    made.close()


def test_the_cursor_goes_back_to_where_pytest_left_it():
    stream = Stream()
    made = progress_on(stream)
    made.begin(Quiet(), NESTING)
    made.close()
    assert stream.text.startswith("\n\r\x1b[Ktest_x  jit > scan > remat  0 of ")
    assert stream.text.endswith("\r\x1b[K\x1b[A\x1b[14C")


@pytest.mark.parametrize("quiet_tests, columns", [(False, [14, 14]), (True, [14, 0])])
def test_the_cursor_stays_where_somebody_else_may_have_written(quiet_tests, columns):
    stream, answers = Stream(), iter(columns)
    made = progress_on(stream, lambda: next(answers), quiet_tests=quiet_tests)
    made.begin(Quiet(), NESTING)
    made.close()
    assert stream.text.endswith("\r\x1b[K")


def test_what_runs_after_the_test_is_not_shown():
    stream = Stream()
    made = progress_on(stream, lines=True)
    made.close()
    made.begin(Quiet(), NESTING)
    made.end(Quiet(), NESTING)
    assert not stream.text


def test_a_test_without_nestings_writes_nothing():
    stream = Stream()
    progress_on(stream).close()
    progress_on(stream, lines=True).close()
    assert not stream.text
