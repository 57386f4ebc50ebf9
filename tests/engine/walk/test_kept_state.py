"""An `nnx.State` in a plain container of a module leaks, as its arrays do; what holds it can be data."""

from __future__ import annotations

from typing import Any

import pytest
from flax import nnx
from healthy import BATCH, FLAX, WIDTH, numbers, rngs

from pytest_nnxcheck import check


class KeepsState(nnx.Module):
    """Keeps the state of a part of it in a container of its own."""

    def __init__(self, container: Any) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.container = container

    def __call__(self, x: Any) -> Any:
        self.container["last"] = nnx.state(self.linear)
        return self.linear(x)


@pytest.mark.slow
@pytest.mark.skipif(FLAX < (0, 12), reason="nnx.data came with flax 0.12")
@pytest.mark.parametrize("empty", [dict, lambda: nnx.State({})])
def test_what_holds_a_state_is_declared_as_data(empty):
    found = check(KeepsState(empty()), numbers(BATCH), nesting="jit")
    said = "in nnx.data(...), where it is set first, what holds the nnx.State: model.container['last']"
    assert said in str(found)
    assert check(KeepsState(nnx.data(empty())), numbers(BATCH), nesting="jit").ok
