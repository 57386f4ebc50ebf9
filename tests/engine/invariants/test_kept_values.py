"""What a call keeps of a trace is told where to keep it instead: with that change all nestings of the default sweep hold."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import leaky
import pytest
from checking import call, hint, line, near, needs_kept_tracers, text
from flax import nnx
from healthy import BATCH, FLAX, WIDTH, assign, numbers, rngs
from leaky import Keeps, KeepsLast, KeepsLastInVariable, KeepsLastSetInInit, sets

from pytest_nnxcheck import check

LEAKS_BY_CLOSURE = FLAX < (0, 10, 7)


# --- plain values, and what the hints say of them


def zeros() -> jax.Array:
    return jnp.zeros(BATCH)


class KeepsLastInData(KeepsLastSetInInit):
    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.last = nnx.data(None)


class KeepsLastAsData(KeepsLast):
    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.linear(x)
        self.last = nnx.data(y)
        return y


def none_list() -> Any:
    return nnx.List([None])


class Box:
    """A plain object."""

    last: Any = None


def in_box(make: Callable[[jax.Array], Any]) -> Keeps:
    return Keeps(Box, lambda module, y: setattr(module.kept, "last", make(y)))


# --- functions that captured what a trace made


def adds(start: jax.Array) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x + start


def adds_default(start: jax.Array) -> Callable[..., jax.Array]:
    return lambda x, start=start: x + start


def adds_keyword(start: jax.Array) -> Callable[..., jax.Array]:
    return lambda x, *, start=start: x + start


def wrapped(f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    @functools.wraps(f)
    def wrapper(x: jax.Array) -> jax.Array:
        return f(x)

    return wrapper


HOOKS: dict[str, Any] = {}
LATEST: Any = None


def becomes_global(module: Keeps, y: jax.Array) -> None:
    global LATEST  # noqa: PLW0603  # the leak itself
    LATEST = adds(y)


IN_CLOSURE = "(closure of adds.<locals>.<lambda>: start)"
IN_DEFAULT = "(default of {}.<locals>.<lambda>: start)"
FUNCTIONS: dict[str, tuple[Callable[[], Keeps], str]] = {
    "attribute of the module": (lambda: Keeps(lambda: None, sets(adds)), f"model.kept {IN_CLOSURE}"),
    "attribute of an object": (lambda: in_box(adds), f"model.kept.last {IN_CLOSURE}"),
    "list of an object": (lambda: in_box(lambda y: [0, adds(y)]), f"model.kept.last[1] {IN_CLOSURE}"),
    "dict of an object": (lambda: in_box(lambda y: {"f": adds(y)}), f"model.kept.last['f'] {IN_CLOSURE}"),
    "closure in a list": (lambda: in_box(lambda y: adds([y])), f"model.kept.last {IN_CLOSURE[:-1]}[0])"),
    "default": (lambda: in_box(adds_default), f"model.kept.last {IN_DEFAULT.format('adds_default')}"),
    "keyword default": (lambda: in_box(adds_keyword), f"model.kept.last {IN_DEFAULT.format('adds_keyword')}"),
    "wrapped": (lambda: in_box(lambda y: wrapped(adds(y))), f"model.kept.last {IN_CLOSURE}"),
    "jitted": (lambda: in_box(lambda y: jax.jit(adds(y))), f"model.kept.last {IN_CLOSURE}"),
    "partial of it": (lambda: in_box(lambda y: functools.partial(adds(y))), f"model.kept.last.func {IN_CLOSURE}"),
    "dict of the globals": (lambda: Keeps(Box, lambda _, y: HOOKS.update(f=adds(y))), f"HOOKS['f'] {IN_CLOSURE}"),
    "global": (lambda: Keeps(Box, becomes_global), f"LATEST {IN_CLOSURE}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kept", FUNCTIONS)
def test_a_function_that_was_kept_is_told_by_what_keeps_it(kept):
    make, path = FUNCTIONS[kept]
    found = call(make(), numbers(BATCH), nesting="jit")
    keeper = path.partition(" (")[0]
    cause = "kept function" if keeper.startswith("model") else "kept function, outside"
    assert found.outcome.violations[0].hint == hint(cause, path=keeper)
    (first, row), (second, line), *_ = found.outcome.violations[0].details
    assert (first, row.partition("   ")[0]) == ("leaked", path)
    assert second == ""
    assert line.startswith(f"created at {near(leaky.__file__)}:{Keeps.__call__.__code__.co_firstlineno + 1} ("), line


class Trainer:
    """A plain object with a model and a box."""

    def __init__(self) -> None:
        self.model = nnx.Linear(WIDTH, WIDTH, rngs=rngs())
        self.model.box = self.box = Box()

    def step(self, x: jax.Array) -> jax.Array:
        self.box.last = adds(x.mean())
        return self.box.last(self.model(x))


def test_the_keeper_of_a_function_is_told_by_the_name_of_the_model():
    found = call(Trainer().step, numbers(BATCH), nesting="jit")
    assert found.outcome.violations[0].hint == hint("kept function", path="self.model.box.last"), text(found)


def steps_with(box: Box) -> Callable[[Any, jax.Array], jax.Array]:
    def step(model: Any, x: jax.Array) -> jax.Array:
        box.last = adds(x.mean())
        return box.last(model(x))

    return step


def test_an_object_that_the_function_captured_is_told_by_its_name_there():
    found = call(steps_with(Box()), nnx.Linear(WIDTH, WIDTH, rngs=rngs()), numbers(BATCH), nesting="jit")
    assert f"box.last {IN_CLOSURE}" in text(found)


# --- each hint, followed


class Followed(NamedTuple):
    """A module that keeps what it may not, and the cause and the path that the hint names."""

    leaky: Callable[[], Any]
    cause: str
    filled: dict[str, str]


def in_variable() -> nnx.Module:
    return KeepsLastInVariable(rngs())


def in_variable_list() -> nnx.Module:
    return Keeps(lambda: nnx.Variable([zeros()]), lambda module, y: assign(module.kept, [y]))


def in_container(container: Callable[[Any], Any], key: Any) -> Callable[[], nnx.Module]:
    return lambda: Keeps(lambda: container(nnx.Variable(zeros())), lambda module, y: assign(module.kept[key], y))


OF_ATTRIBUTES: dict[str, Followed] = {
    "attribute": Followed(lambda: KeepsLastSetInInit(rngs()), "plain value, data", {"path": "model.last"}),
    "list": Followed(
        lambda: Keeps(list, lambda module, y: module.kept.append(y)),
        "plain value, container", {"path": "model.kept[0]", "holder": "list"},
    ),
    "dict": Followed(
        lambda: Keeps(dict, lambda module, y: module.kept.update(y=y)),
        "plain value, container", {"path": "model.kept['y']", "holder": "dict"},
    ),
    "tuple": Followed(
        lambda: Keeps(tuple, sets(lambda y: (y,))),
        "plain value, container", {"path": "model.kept[0]", "holder": "tuple"},
    ),
    "nnx.List in the call": Followed(
        lambda: Keeps(lambda: None, sets(lambda y: nnx.List([y]))),
        "plain value, nnx container", {"path": "model.kept[0]", "holder": "nnx.List"},
    ),
    "nnx.List that grows": Followed(
        lambda: Keeps(lambda: nnx.List([]), lambda module, y: module.kept.append(y)),
        "plain value, nnx container", {"path": "model.kept[0]", "holder": "nnx.List"},
    ),
    "nnx.List of None": Followed(
        lambda: Keeps(none_list, lambda module, y: module.kept.__setitem__(0, y)),
        "plain value, nnx container", {"path": "model.kept[0]", "holder": "nnx.List"},
    ),
    "nnx.Dict": Followed(
        lambda: Keeps(lambda: None, sets(lambda y: nnx.Dict(y=y))),
        "plain value, nnx container", {"path": "model.kept['y']", "holder": "nnx.Dict"},
    ),
}  # fmt: skip
OF_ALL: dict[str, Followed] = {
    "plain object": Followed(lambda: in_box(lambda y: y), "plain object", {"path": "model.kept.last"}),
    "function": Followed(lambda: in_box(adds), "kept function", {"path": "model.kept.last"}),
    "function outside": Followed(lambda: Keeps(Box, becomes_global), "kept function, outside", {"path": "LATEST"}),
}
FOLLOWED = {**OF_ALL, **OF_ATTRIBUTES}
CURED: dict[str, Callable[[], Any]] = {
    "Variable": in_variable,
    "Variable of a list": in_variable_list,
    "nnx.data(None) in __init__": lambda: KeepsLastInData(rngs()),
    "nnx.data(y) in the call": lambda: KeepsLastAsData(rngs()),
    "Variable in nnx.List": in_container(lambda kept: nnx.List([kept]), 0),
    "Variable in nnx.Dict": in_container(lambda kept: nnx.Dict(y=kept), "y"),
}
"""Modules that do what the hints say."""


def where_kept(names: Iterable[str], everywhere: Container[str]) -> list[Any]:
    """Forms for ``parametrize``: those beside ``everywhere`` need a flax that keeps tracers in attributes."""
    return [name if name in everywhere else pytest.param(name, marks=needs_kept_tracers) for name in names]


@pytest.mark.slow
@pytest.mark.parametrize("kept", where_kept(FOLLOWED, OF_ALL))
def test_what_is_kept_has_the_hint_of_its_cause(kept):
    followed = FOLLOWED[kept]
    found = check(followed.leaky(), numbers(BATCH), nesting="jit")
    assert found.violations[0].hint == hint(followed.cause, **followed.filled)


@pytest.mark.slow
@pytest.mark.parametrize("cure", where_kept(CURED, {"Variable"}))
def test_with_what_the_hints_say_all_default_nestings_hold(cure):
    # Before flax 0.10.7 the closures leak every Variable that the call writes.
    styles = {"styles": "argument,functional"} if LEAKS_BY_CLOSURE else {}
    report = check(CURED[cure](), numbers(BATCH), max_examples=0, **styles)
    assert report.ok, str(report)


# --- an argument that is kept: jax made its tracer, and the line that keeps it is the one to know

ARGUMENTS: list[Any] = []
LAST: dict[str, Any] = {}


class Noted:
    x = None


def keeps(x):
    ARGUMENTS.append(x)


class KeepsItsInput(nnx.Module):
    def __init__(self):
        self.linear, self.noted = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), Noted()

    def in_a_list(self, x):
        y = self.linear(x)
        ARGUMENTS.append(x)
        return y

    def in_a_dict(self, x):
        LAST["x"] = x
        return self.linear(x)

    def in_an_object(self, x):
        self.noted.x = x
        return self.linear(x)

    def by_a_helper(self, x):
        keeps(x)
        return self.linear(x)

    def of_its_state(self, x):
        ARGUMENTS.append(self.linear.kernel[...])
        return self.linear(x)

    def in_its_own_jit(self, x):
        @jax.jit
        def inner(x):
            ARGUMENTS.append(x)
            return x * 2

        return inner(x)


KEEPING = {
    "in_a_list": "ARGUMENTS.append(x)",
    "in_a_dict": 'LAST["x"] = x',
    "in_an_object": "self.noted.x = x",
    "of_its_state": "ARGUMENTS.append(self",
    "in_its_own_jit": "ARGUMENTS.append(x)",
}


@pytest.mark.parametrize("nesting", ["jit", "jit > scan"])
def test_an_argument_that_is_used_alone_is_not_told(nesting):
    assert call(KeepsItsInput().linear, jnp.ones((2, 4)), nesting=nesting).outcome.verdict == "held"


@pytest.mark.parametrize(
    "method, nesting",
    [
        *((method, "jit") for method in (*KEEPING, "by_a_helper")),
        ("in_a_list", "jit > scan"),
        ("of_its_state", "jit > scan"),
    ],
)
def test_an_argument_that_is_kept_is_told_with_the_line_that_keeps_it(method, nesting):
    function = keeps if method == "by_a_helper" else getattr(KeepsItsInput, method)
    where = line(function, KEEPING.get(method, "ARGUMENTS.append"))
    found = call(getattr(KeepsItsInput(), method), jnp.ones((2, 4)), nesting=nesting)
    ARGUMENTS.clear()
    LAST.clear()
    (violation,) = found.outcome.violations
    assert violation.invariant == "tracers"
    # Of an argument of an inner jit, jax before 0.6 has the line that calls that.
    told = [row for label, row in violation.details if not label]
    if method == "in_its_own_jit":
        assert told[0].endswith(where) or told[0].startswith("created at")
    else:
        assert told == [f"an argument, kept at {where}"]
