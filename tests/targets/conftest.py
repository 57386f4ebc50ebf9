"""What these tests ask of the machine: the wheels of the compilers, of the installed jax. ``nox -s targets`` has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_nnxcheck import wheels

HERE = Path(__file__).parent
PROBLEM = wheels.problem(["v5e", "h100"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PROBLEM and item.path.parent == HERE:
            item.add_marker(pytest.mark.skip(reason=PROBLEM))
