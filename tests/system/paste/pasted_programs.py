"""Programs to paste: run in an interpreter that has neither this plugin nor pytest, and found in the messages of the suites that wrote them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

CORPUS = Path(__file__).parents[2] / "corpus"
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("pytest", "_pytest", "hypothesis", "pytest_nnxcheck"):
            raise ModuleNotFoundError(f"{name} is not for pasted programs")
sys.meta_path.insert(0, Block())
"""
RUN_ALL = (
    BLOCK
    + """
import contextlib, io, json, runpy
for path in sys.argv[1:]:
    before = list(sys.path)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(path, run_name="__main__")
        found = ["", ""]
    except BaseException as error:
        found = [type(error).__name__, str(error)]
    sys.path[:] = before
    print(json.dumps([path, *found]), flush=True)
"""
)
RUN_ONE = BLOCK + "import runpy\nrunpy.run_path(sys.argv[1], run_name='__main__')"


def run_programs(paths):
    """{path: (type, text) of the exception that it ended with}, all in one fresh interpreter."""
    paths = list(map(str, paths))
    command = [sys.executable, "-W", "ignore", "-c", RUN_ALL, *paths]
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quick)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(paths), done.stderr
    return {Path(path): (kind, text) for path, kind, text in found}


def run_fresh(path):
    """One program in an interpreter of its own."""
    command = [sys.executable, "-W", "ignore", "-c", RUN_ONE, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def told(text):
    """What the messages of a run say: {test: (exception or invariant, first path, program)}."""
    found = {}
    text = re.sub(
        r"^=+ short test summary info =+$.*?(?=^=+ test session starts|\Z)", "", text, flags=re.MULTILINE | re.DOTALL
    )
    for block in re.split(r"^_{3,} .* _{3,}$", text, flags=re.MULTILINE)[1:]:
        lines = [line[1:].strip() for line in block.splitlines() if line.startswith("E ")]
        program = next((line.split(maxsplit=1)[1] for line in lines if re.match(r"program  ", line)), "")
        replay = re.search(r"replay +(pytest .+ --nnx.*)", block)
        broken = re.search(r"nnx invariant broken: (\w+)", block)
        leaf = re.search(r"^E +(?:leaked|pinned|donation) +(\S+)", block, re.MULTILINE)
        if replay:
            kind = broken[1] if broken else lines[0].partition(":")[0].rpartition(".")[2]
            found[shlex.split(replay[1])[1]] = (kind, leaf[1] if leaf and broken else "", program)
    return found


HEAD = f"""
import sys
sys.path.insert(0, {str(CORPUS)!r})
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from healthy import FLAX, assign, rngs
import bugs
marked = pytest.mark.nnx_invariants
"""
