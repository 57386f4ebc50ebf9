"""The tutorial, followed to the letter: its files are written, its edits made, its commands run, and they say what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

TUTORIAL = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
STEP = re.compile(
    r"(?:^<!-- (?P<kind>file|edit): (?P<name>\S+) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
STEPS = [match.groupdict() for match in STEP.finditer(TUTORIAL)]


def test_its_commands_say_what_it_shows(tmp_path, inner_args):
    (tmp_path / "pytest.ini").touch()
    commands = 0
    for step in STEPS:
        if step["kind"] == "file":
            (tmp_path / step["name"]).write_text(step["text"])
        elif step["kind"] == "edit":
            file = tmp_path / step["name"]
            file.write_text(edited(file.read_text(), step["text"]))
        elif not step["text"].startswith("$ pip install"):  # that one is the session `readme` of nox
            commands += 1
            command, *shown = step["text"].splitlines()
            output, status = run(command, tmp_path, inner_args)
            assert_in_order(shown, output)
            assert status == int("broken" in step["text"]), output
    assert commands == 5


def edited(text: str, diff: str) -> str:
    """A text after a difference without line numbers, which must fit in one place."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if line[0] != "+")
    assert text.count(before) == 1
    return text.replace(before, "".join(line[1:] for line in lines if line[0] != "-"))


def run(command: str, folder: Path, inner_args: list[str]) -> tuple[str, int]:
    """What a command of the tutorial prints, and its exit status."""
    program, *arguments = shlex.split(command.removeprefix("$ "))
    if program == "pytest":
        arguments = ["-m", program, *inner_args, *arguments]
    done = subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).replace(f"{folder}/", ".../"), done.returncode


def assert_in_order(shown: list[str], output: str) -> None:
    """The output has the lines that are shown, in their order; figures depend on the version, and what a summary says behind its count."""
    lines = map(without_figures, output.splitlines())
    assert [line for line in shown if without_figures(line) not in lines] == [], output  # `in` goes on where it stopped


def without_figures(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"(nestings?:).*", r"\1", line.rstrip()))


def test_the_bug_is_as_the_tutorial_tells_it():
    names: dict = {}
    exec(next(step["text"] for step in STEPS if step["name"] == "attention.py"), names)
    model, x = names["Attention"](16, rngs=nnx.Rngs(0)), jnp.ones((2, 8, 16))
    right = model(x)
    names["causal_mask"].cache_clear()
    assert jnp.allclose(nnx.jit(lambda model, x: model(x))(model, x), right)
    with pytest.raises(jax.errors.UnexpectedTracerError):
        nnx.jit(lambda model, x: model(x).mean())(model, x)
