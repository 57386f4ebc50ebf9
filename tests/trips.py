"""Show how one check walks through the folders of the package: ``python tests/trips.py``, or with a nesting: ``python tests/trips.py vmap``.

A *stay* is a run of functions of one folder, each counted where it is first called. `core` and `compat` are left out: every folder asks them.
A *climb* is a call from a folder into one that may import it: a callback, which a reader cannot follow down. Few of both: data flow forward.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType

import jax.numpy as jnp
from flax import nnx

import pytest_nnxcheck

PACKAGE = Path(pytest_nnxcheck.__file__).parent
EVERYWHERE = {"core", "compat"}
START = "check_call"  # the function that a walk begins with


def order() -> list[str]:
    """The folders, each before those that it may import: the layers of the import contract in `pyproject.toml`."""
    contracts = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [name for row in contracts[0]["layers"] for name in row.split(" | ")]


def folder(frame: FrameType | None) -> str:
    """The folder of the innermost frame of the package; empty outside of it."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        frame = frame.f_back
    return ""


def walk(run: Callable[[], object]) -> tuple[list[tuple[str, list[str]]], set[str]]:
    """The stays of a run, each a folder with its functions, and the climbs."""
    layers, seen = order(), set[CodeType]()
    stays: list[tuple[str, list[str]]] = []
    climbs: set[str] = set()
    inside: list[FrameType] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and frame in inside:
            inside.clear()
        elif event == "call" and code.co_name == START and not inside:
            inside.append(frame)
        if event != "call" or not inside or PACKAGE not in Path(code.co_filename).parents:
            return
        here, caller = folder(frame), folder(frame.f_back)
        if frame not in inside and layers.index(here) < layers.index(caller):
            climbs.add(f"{caller} > {here}: {code.co_qualname}")
        if here in EVERYWHERE or code in seen or code.co_name.startswith("<"):
            return
        seen.add(code)
        stays.extend([] if stays and stays[-1][0] == here else [(here, [])])
        stays[-1][1].append(code.co_qualname)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return stays, climbs


if __name__ == "__main__":
    model, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((2, 8))
    nesting = sys.argv[1] if len(sys.argv) > 1 else "jit > scan"
    found, upwards = walk(lambda: pytest_nnxcheck.check(model, x, nesting=nesting))
    lines = [f"{name:<11}{' '.join(functions)}" for name, functions in found]
    lines += [f"climb {each}" for each in sorted(upwards)]
    print(*lines, f"{len(found)} stays, {len(upwards)} climbs", sep="\n")  # noqa: T201 - a program that reports
