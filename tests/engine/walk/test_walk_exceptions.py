"""The walk finds a tracer that an exception keeps, in its frames, arguments and causes."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from flax import nnx
from kept_tracers import Box, Keep, check, found_in, jit_call, leaky_and_healthy, tracer_of, whole

from pytest_nnxcheck.walk.walk import walk


class Raises(nnx.Module):
    def __init__(self, kept: Keep) -> None:
        self.box = Box()
        self.box.last = None
        self.kept = kept

    def __call__(self, x: Any) -> Any:
        y = x * 2
        self.box.last = self.kept(y)
        raise RuntimeError("too late")


def caught(model: Any) -> BaseException:
    with pytest.raises(RuntimeError, match="too late") as info:
        jit_call(model)
    return info.value


@leaky_and_healthy
def test_kept_by_a_call_that_raises_afterwards(kept: Keep) -> None:
    model = Raises(kept)
    before = walk([("model", model)])
    error = caught(model)
    met = walk([("exception", error), ("model", model)]).tracers
    staying = [(found.path, found.holder) for found in met if not found.passing]
    assert staying == ([("model.box.last", "attribute")] if kept is whole else [])
    line = Raises.__call__.__code__.co_firstlineno + 3
    assert f"x (line {line} of __call__, kept by exception)" in [found.path for found in met if found.passing]
    before.places.restore()
    assert found_in(("model", model)) == []


@leaky_and_healthy
def test_exception_that_the_module_keeps(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.box = Box()
            self.box.errors = []

        def __call__(self, x: Any) -> Any:
            try:
                float(x)
            except TypeError as error:
                self.box.errors.append(error if kept is whole else str(error))
            return x

    line = Net.__call__.__code__.co_firstlineno + 2
    check(Net(), kept, f"x (line {line} of __call__, kept by model.box.errors[0])", "frame")


def test_frames_name_a_tracer_only_where_nothing_else_holds_it() -> None:
    box = Box()
    box.errors, box.a = [], {"b": {"c": [[None]]}}

    def act(x: Any) -> Any:
        box.a["b"]["c"][0][0] = x
        try:
            float(x)
        except TypeError as error:
            box.errors.append(error)
        return x

    jax.jit(act)(1.0)
    assert found_in(("box", box)) == [("box.a['b']['c'][0][0]", "list")]


def test_arguments_and_causes_of_exceptions_are_opened() -> None:
    tracer = tracer_of(jax.jit)
    error = KeyError("a")
    error.__cause__ = ExceptionGroup("b", [ValueError(tracer)])
    assert found_in(("error", error)) == [("error.__cause__.exceptions[0].args[0]", "exception")]
