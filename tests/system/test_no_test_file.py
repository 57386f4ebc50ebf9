"""The page on checks without a test file: each of its commands runs, and says what is shown below it."""

import re
import shlex
from pathlib import Path

import pytest
from healthy import FLAX

from pytest_nnxcheck import wheels

PAGE = (Path(__file__).parents[2] / "docs" / "no_test_file.md").read_text()
BLOCKS = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = [
    (shlex.split(command), shown.splitlines())
    for block in BLOCKS
    for command, shown in re.findall(r"^\$ pytest (.*)\n((?:(?!\$).*\n)*)", block, re.MULTILINE)
    if not {"package.", "tunix."} & {*re.findall(r"\w+\.", command)}
]


def test_the_page_shows_commands_and_what_they_say():
    assert len(COMMANDS) == PAGE.count("$ pytest") - 3
    assert sum(bool(shown) for _, shown in COMMANDS) >= 7


@pytest.mark.parametrize("words, shown", COMMANDS, ids=[" ".join(words) for words, _ in COMMANDS])
def test_a_command_of_the_page_says_what_is_shown(words, shown, pytester, inner_args):
    if "train" in str(words) and FLAX < (0, 11):
        pytest.skip("the step is written for flax 0.11 and later")
    if "Logging" in str(words) and FLAX < (0, 12):
        pytest.skip("an older flax refuses the attribute")
    targets = [word for before, word in zip(words, words[1:], strict=False) if before == "--nnx-target"]
    if targets and (missing := wheels.problem(targets)):
        pytest.skip(missing)
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    pytester.makepyfile(models=source)
    run = pytester.runpytest_subprocess if targets or "--nnx-mesh" in words else pytester.runpytest_inprocess
    result = run(*inner_args, "-p", "no:randomly", *words)
    fails = any(line.startswith("E ") for line in shown)
    assert result.ret == int(fails), result.stdout.str()
    said = [comparable(line) for line in result.outlines]
    assert [line for line in map(comparable, shown) if line not in said] == []


def comparable(line):
    """A line without its figures, which depend on the versions: how many nestings, and their bytes."""
    return re.sub(r"\d+ nestings: .*|worst peak .*", "", " ".join(line.split()))
