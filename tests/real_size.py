"""The examples at real size, run by their own command in a process whose memory is counted."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from healthy import FLAX

ROOT = Path(__file__).parents[1]
PYTEST = """
import sys, pytest
from pathlib import Path
code = pytest.main(sys.argv[1:])
print(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
sys.exit(code)
"""
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's figures are those of Linux")
with_its_optimizer = pytest.mark.skipif(FLAX < (0, 12), reason="before flax 0.11 an optimizer holds its model")
runs_4871 = pytest.mark.skipif(FLAX >= (0, 10, 7), reason="newer flax refuses the program, as test_reports.py shows")


@dataclass(frozen=True)
class Run:
    """What a pytest process printed, and its highest resident size in bytes, as the kernel counts it."""

    output: str
    resident: int

    def rows(self, label: str) -> list[str]:
        """The rows of the failures with this label."""
        whole = re.sub(r"\nE {15,}(?! )", " ", self.output)  # a long row goes on below its text
        return re.findall(rf"^E +{label} +(.*)$", whole, re.MULTILINE)

    def peaks(self) -> list[dict[str, str]]:
        """The parts of each peak: ``{"peak": "8.0 GiB", "temporaries": "4.0 GiB", ...}``."""
        return [
            {"peak": row.partition(" = ")[0], **dict(re.findall(r"(\w+) ([\d.]+ \w+)", row))}
            for row in self.rows("peak")
        ]


def run(example: str, *options: str) -> Run:
    command = [sys.executable, "-c", PYTEST, "-p", "no:cacheprovider", f"examples/real_size/{example}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
    return Run(done.stdout, int(kilobytes) * 1024)


def counts(result: Run) -> str:
    return re.sub(r" in .*", "", result.output.strip().splitlines()[-2].strip("= "))
