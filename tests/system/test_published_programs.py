"""The plain programs of docs/published.md, which have nothing of this plugin: each shows what it says, where its package and its versions are installed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
from healthy import FLAX

PAGE = Path(__file__).parents[2] / "docs" / "published.md"
PROGRAM = re.compile(
    r"(?:^<!-- from flax (?P<since>[\d.]+) -->\n)?(?:^<!-- before flax (?P<until>[\d.]+) -->\n)?^```py\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
FINDS = 19


@dataclass(frozen=True)
class Program:
    """A program, the heading above it, and the flax from which on, and up to which, it shows its find."""

    heading: str
    since: str
    until: str
    code: str

    @property
    def missing(self) -> list[str]:
        """The packages that it imports and that are not installed."""
        imported = re.findall(r"^(?:import|from) (\w+)", self.code, re.MULTILINE)
        return sorted({name for name in imported if find_spec(name) is None})


def programs() -> list[Program]:
    text = PAGE.read_text()
    heading = lambda place: re.findall(r"^## (.*)$", text[:place], re.MULTILINE)[-1]  # noqa: E731
    return [
        Program(heading(m.start()), m["since"] or "0", m["until"] or "999", m["code"]) for m in PROGRAM.finditer(text)
    ]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.filterwarnings("ignore")  # of the packages
@pytest.mark.parametrize("program", programs(), ids=lambda program: program.heading.partition(":")[0])
def test_a_program_shows_what_it_says(program):
    if program.missing:
        pytest.skip(f"{', '.join(program.missing)} is not installed")
    if not numbers(program.since) <= FLAX < numbers(program.until):
        pytest.skip(f"shown from flax {program.since} on, and before {program.until}")
    exec(compile(program.code, program.heading, "exec"), {"__name__": "__main__"})


def test_every_find_has_a_program():
    found = programs()
    assert PAGE.read_text().count("```py\n") == len(found) == FINDS
    assert len({program.heading for program in found}) == FINDS
