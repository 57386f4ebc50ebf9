"""The tools: the file that uses each, what it needs installed, and the words by which its own finding is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
INVARIANTS = "tracers,memory,donation,parity"
VISIBLE = 1.05
"""A figure that a tool shows is called visible where the broken program's is so many times the healthy one's."""


@dataclass(frozen=True)
class Tool:
    """One column of the table."""

    name: str
    file: str
    says: str
    package: str = ""
    options: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The file that uses it."""
        return HERE / f"{self.file}.py"

    @property
    def release(self) -> str:
        """The installed version, empty where there is none."""
        try:
            return version(self.package) if self.package else ""
        except PackageNotFoundError:
            return ""

    def verdict(self, facts: Mapping[str, Any]) -> str:
        """What the tool made of one program: ``passes``, ``raises``, which is the program's own exception, or ``found``, with its kind."""
        if facts["outcome"] == "passed":
            return "passes"
        match = re.search(self.says, facts["message"])
        return " ".join(["found", *match.groups()]) if match else "raises"


NOTHING = Tool("nothing", "with_nothing", r"(?!)")
TOOLS = (
    NOTHING,
    Tool("jax.checking_leaks", "with_checking_leaks", r"Leaked (?:trace|sublevel|level)"),
    Tool("chex.assert_max_traces", "with_chex_traces", r"is traced > 1 times", "chex"),
    Tool("chex.assert_trees_all_close", "with_chex_trees", r"assert_trees_all_close failed", "chex"),
    Tool("equinox.debug.assert_max_traces", "with_equinox", r"can only be traced 1 times", "equinox"),
    Tool("pytest-memray", "with_memray", r"Test was limited to", "pytest-memray", ("--memray",)),
    Tool("pytest-jax-bench", "with_jax_bench", r"(?!)", "pytest-jax-bench"),
    Tool("pytest-nnxcheck", "with_nnxcheck", r"nnx invariant broken: (\w+)", "pytest-nnxcheck"),
    Tool(
        "pytest-nnxcheck with parity",
        "with_nnxcheck",
        r"nnx invariant broken: (\w+)",
        "pytest-nnxcheck",
        (f"--nnx-invariants={INVARIANTS}",),
    ),
)


def visible(broken: Mapping[str, Any], healthy: Mapping[str, Any]) -> bool:
    """Whether a figure that the tool writes down tells the twins apart; bytes alone, since times differ from run to run."""
    pairs = zip(broken["shown"], healthy["shown"], strict=False)
    return any(more > VISIBLE * max(less, 1) for more, less in pairs)
