"""The walk finds a tracer in data of every kind, in a Variable and in its metadata, and names the place."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import functools
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kept_tracers import (
    STATIC,
    Box,
    Boxed,
    Keep,
    Slotted,
    check,
    check_static,
    found_in,
    jit_call,
    leaky_and_healthy,
    whole,
)

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.walk.walk import walk


@leaky_and_healthy
def test_attribute_that_was_none(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.last = None

        def __call__(self, x: Any) -> Any:
            self.last = kept(x * 2)
            return x

    check_static(Net(), kept, "model.last", "attribute")


class Log:
    def __init__(self) -> None:
        self.items: list[Any] = []


class Pair(NamedTuple):
    first: Any
    second: Any


def set_private(box: Any, y: Any) -> None:
    box.content._Slotted__private = y


PLACES = {
    "opaque object": (lambda: None, lambda box, y: setattr(box, "content", y), "model.box.content", "attribute"),
    "list": (list, lambda box, y: box.content.append(y), "model.box.content[0]", "list"),
    "list in a tuple": (lambda: (1, []), lambda box, y: box.content[1].append(y), "model.box.content[1][0]", "list"),
    "tuple": (lambda: (), lambda box, y: setattr(box, "content", (1, y)), "model.box.content[1]", "tuple"),
    "dict": (dict, lambda box, y: box.content.update(a=y), "model.box.content['a']", "dict"),
    "ordered dict": (collections.OrderedDict, lambda box, y: box.content.update(a=y), "model.box.content['a']", "dict"),
    "defaultdict": (lambda: collections.defaultdict(list), lambda box, y: box.content[3].append(y), "model.box.content[3][0]", "list"),
    "enum-like key": (dict, lambda box, y: box.content.update({(1, "a"): y}), "model.box.content[(1, 'a')]", "dict"),
    "unprintable key": (dict, lambda box, y: box.content.update({Box: y}), "model.box.content[<type>]", "dict"),
    "inside a set": (set, lambda box, y: box.content.add(hashable(y)), "list(model.box.content)[0].held", "attribute"),
    "key of a dict": (dict, lambda box, y: box.content.update({hashable(y): 1}), "list(model.box.content)[0].held", "attribute"),
    "deque": (lambda: collections.deque(maxlen=2), lambda box, y: box.content.append(y), "model.box.content[0]", "deque"),
    "namedtuple": (lambda: None, lambda box, y: setattr(box, "content", Pair(1, y)), "model.box.content.second", "tuple"),
    "namespace": (types.SimpleNamespace, lambda box, y: setattr(box.content, "last", y), "model.box.content.last", "attribute"),
    "slots": (Slotted, lambda box, y: setattr(box.content, "value", y), "model.box.content.value", "attribute"),
    "private slot": (Slotted, set_private, "model.box.content._Slotted__private", "attribute"),
    "thread local": (threading.local, lambda box, y: setattr(box.content, "y", y), "model.box.content.y", "attribute"),
    "partial": (lambda: None, lambda box, y: setattr(box, "content", functools.partial(max, 0, default=y)), "model.box.content.keywords['default']", "dict"),
    "bound method": (lambda: None, lambda box, y: setattr(box, "content", hashable(y).method), "model.box.content.__self__.held", "attribute"),
    "built-in method": (lambda: None, lambda box, y: setattr(box, "content", [y].append), "model.box.content.__self__[0]", "list"),
    "iterator": (lambda: None, lambda box, y: setattr(box, "content", iter((y,))), "list(model.box.content)[0][0]", "tuple"),
    "object array": (lambda: np.array([None, 1]), lambda box, y: box.content.__setitem__(0, y), "model.box.content[0]", "array"),
    "future": (concurrent.futures.Future, lambda box, y: box.content.set_result(y), "model.box.content._result", "attribute"),
    "user dict": (collections.UserDict, lambda box, y: box.content.update(a=y), "model.box.content.data['a']", "dict"),
}  # fmt: skip


@contextlib.contextmanager
def scope(value: Any) -> Iterator[Any]:
    yield value


def entered(value: Any) -> Any:
    context = scope(value)
    context.__enter__()
    return context


class Hashable:
    def __init__(self, held: Any) -> None:
        self.held = held

    def method(self) -> None: ...


def hashable(held: Any) -> Hashable:
    return Hashable(held)


@leaky_and_healthy
@pytest.mark.parametrize("place", PLACES)
def test_places_of_data(place: str, kept: Keep) -> None:
    make, put, path, holder = PLACES[place]
    check(Boxed(make(), put, kept), kept, path, holder)


@leaky_and_healthy
@pytest.mark.parametrize(
    "put, path",
    [
        (lambda box, y: setattr(box, "content", entered(y)), "value (line"),
        (lambda box, y: box.content.callback(str, y), "_create_cb_wrapper.<locals>._exit_wrapper: args[0])"),
        (lambda box, y: box.content.enter_context(contextlib.nullcontext(y)), "enter_result"),
    ],
    ids=["generator", "callback", "null context"],
)
def test_contexts_that_are_still_entered(put: Any, path: str, kept: Keep) -> None:
    model = Boxed(contextlib.ExitStack(), put, kept)
    jit_call(model)
    assert [path in name for name, _ in found_in(("model", model))] == ([True] if kept is whole else [])


class CountsThenKeeps(nnx.Param):  # type: ignore[misc]  # flax is untyped on some versions
    """A Variable type of the user."""


@leaky_and_healthy
def test_value_of_a_variable_is_named_as_the_variable(kept: Keep) -> None:
    box = Box()
    box.w = CountsThenKeeps(jnp.zeros(3))
    model = Boxed(None, lambda _, y: graph.set_variable_value(box.w, y), kept)
    before = walk([("box", box)])
    jit_call(model)
    assert found_in(("box", box)) == ([("box.w", "CountsThenKeeps")] if kept is whole else [])
    before.places.restore()
    np.testing.assert_array_equal(graph.variable_value(box.w), jnp.zeros(3))


def set_metadata(variable: Any, norm: Any) -> None:
    if STATIC:
        variable.set_metadata(norm=norm)
    else:
        variable.norm = norm


@leaky_and_healthy
def test_metadata_of_the_modules_own_variable(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3), norm=None)

        def __call__(self, x: Any) -> Any:
            set_metadata(self.w, kept(x * 2))
            return x

    # nnx.jit of flax 0.10.7 and later drops new metadata, nnx.remat keeps it.
    check(Net(), kept, "model.w.norm (metadata)", "metadata", call=nnx.remat(Net.__call__))


@leaky_and_healthy
def test_list_in_the_metadata_of_a_variable(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3), log=Log())

        def __call__(self, x: Any) -> Any:
            self.w.log.items.append(kept(x * 2))
            return x

    check(Net(), kept, "model.w.log.items[0] (metadata)", "list")
