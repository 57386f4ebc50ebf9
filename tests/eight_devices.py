"""A file of tests that need eight devices runs in a process of its own that has them."""

from __future__ import annotations

import re
import subprocess
import sys

import jax
import pytest

DEVICES = 8
on_eight_devices = pytest.mark.skipif(jax.device_count() < DEVICES, reason="runs in the process that has eight devices")
outside_of_them = pytest.mark.skipif(jax.device_count() >= DEVICES, reason="this is the process that has eight devices")


def passes(file: str, counts: str, *options: str) -> None:
    """Assert that a file passes on eight devices, with ``counts`` in the last line: a regular expression, ``8 passed, 1 skipped``."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nnx-devices", str(DEVICES)]
    done = subprocess.run([*command, *options, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert re.search(counts, done.stdout), done.stdout
