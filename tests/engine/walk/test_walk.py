"""What the walk says about what it met: names, no false finds, hostile objects, and what it does inside a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kept_tracers import STATIC, Box, Slotted, X, found_in, look, tracer_of

from pytest_nnxcheck.compat import graph

# --- what the walk says about what it met ----------------------------------------------------------------------------------


def test_each_tracer_once_under_the_nearest_name() -> None:
    tracer, box = tracer_of(jax.jit), Box()
    box.far, box.near = {"a": {"b": tracer}}, [tracer]
    assert found_in(("box", box), ("again", [[[tracer]]])) == [("box.near[0]", "list")]


def test_arrays_are_listed_with_their_paths() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(X)
            self.box = Box()
            self.box.view = np.asarray(X)

    model = Net()
    arrays = dict(look(("model", model), ("x", X + 1)).arrays)
    assert sorted(arrays) == ["model.box.view", "model.w", "x"]
    assert arrays["model.w"] is X


def test_containers_of_nnx_read_as_the_user_writes_them() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            layers = [nnx.Linear(3, 3, rngs=rngs)]
            self.layers = nnx.List(layers) if STATIC else layers
            self.heads = (
                nnx.Dict({"a": nnx.Param(X)}) if "Dict" in vars(nnx) else {"a": nnx.Param(X)}
            )  # not in flax 0.11
            self.stack = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs))

    paths = {path for path, _ in look(("model", Net(nnx.Rngs(0)))).arrays}
    assert paths == {
        *("model.layers[0].kernel", "model.layers[0].bias", "model.heads['a']"),
        *("model.stack.layers[0].kernel", "model.stack.layers[0].bias"),
    }


def test_name_that_grows_without_end_is_cut() -> None:
    head: Any = [tracer_of(jax.jit)]
    for _ in range(5_000):
        head = [head]
    (found,) = look(("head", head)).tracers
    assert len(found.path) < 1_000
    assert found.path.startswith("head[0][0]")


# --- no false finds --------------------------------------------------------------------------------------------------------


def test_libraries_are_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_of(jax.jit)
    for library in (jax, jnp, flax, nnx, pytest, hypothesis, np, functools):
        monkeypatch.setattr(library, "planted", [tracer], raising=False)

    class Net(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return jax.planted, jnp.planted, flax.planted, nnx.planted, pytest.planted, hypothesis.planted, np.planted

    met = look(("model", Net()))
    assert met.tracers == []
    assert len(met.seen) < 100


@pytest.mark.parametrize("package, entered", [("beartype._check.code", False), ("jaxtyping", False), ("house", True)])
def test_a_decorator_that_checks_types_is_not_entered(package: str, entered: bool) -> None:
    """The function that it wraps is; so is a decorator of any other package, which may keep what it likes."""
    namespace: dict[str, Any] = {"__name__": package, "KEPT": [tracer_of(jax.jit)], "functools": functools}
    source = "def checked(f):\n @functools.wraps(f)\n def call(*a):\n  return f(*a) if KEPT else 0\n return call"
    exec(source, namespace)

    @namespace["checked"]
    def call(x: Any) -> Any:
        return x, OWN

    OWN = [tracer_of(jax.jit)]
    found = found_in(("call", call))
    assert ("OWN[0]", "list") in [(path.partition(" ")[0], holder) for path, holder in found]
    assert (("KEPT[0]", "list") in found) == entered


def test_the_marks_that_flax_keeps_are_not_opened() -> None:
    """They hold traces, live ones too."""
    layer, marks = nnx.Linear(3, 3, rngs=nnx.Rngs(0)), ("_object__state", "_pytree__state")
    (mark,) = (name for name in marks if name in vars(layer))
    vars(layer)[mark] = [tracer_of(jax.jit)]
    assert found_in(("layer", layer)) == []


# --- hostile objects -------------------------------------------------------------------------------------------------------


class Hostile:
    """Everything that a careless reader would call raises."""

    def refuse(self, *_: Any) -> Any:
        raise AssertionError("the walk ran user code")

    def __init__(self, held: Any) -> None:
        object.__setattr__(self, "held", held)

    __getattribute__ = __getattr__ = __setattr__ = __repr__ = __str__ = refuse
    __eq__ = __bool__ = __len__ = __iter__ = __getitem__ = __call__ = __contains__ = refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]
    broken = property(refuse)


class HostileMeta(type):
    def __hash__(cls) -> int:
        raise AssertionError("the walk ran user code")

    def __eq__(cls, other: object) -> bool:
        raise AssertionError("the walk ran user code")

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError("the walk ran user code")


class HostileClass(metaclass=HostileMeta):
    pass


class HostileList(list[Any]):
    __iter__ = __len__ = __getitem__ = Hostile.refuse  # type: ignore[assignment]


class HostileDict(dict[Any, Any]):
    items = keys = values = __iter__ = __getitem__ = __len__ = Hostile.refuse  # type: ignore[assignment]


class ShadowedDict:
    __dict__ = property(Hostile.refuse)  # type: ignore[assignment]


def hostile_instance(held: Any) -> Any:
    value = object.__new__(HostileClass)
    object.__setattr__(value, "held", held)
    return value


def shadowed(held: Any) -> Any:
    value = ShadowedDict()
    value.held = held
    return value


@pytest.mark.parametrize(
    "make", [Hostile, hostile_instance, lambda t: HostileList([t]), lambda t: HostileDict(a=t), shadowed]
)
def test_user_code_is_never_run(make: Callable[[Any], Any]) -> None:
    value = make(tracer_of(jax.jit))
    met = look(("value", value))
    assert len(met.tracers) == 1
    assert met.places.restore() == ()


def test_unset_slots_empty_cells_and_cycles() -> None:
    def outer(late: Any) -> Callable[[], Any]:
        def inner() -> Any:
            return late  # noqa: F821  # an empty cell

        del late
        return inner

    loop: list[Any] = [Slotted(), outer(1)]
    loop.append(loop)
    met = look(("loop", loop))
    assert (met.tracers, met.complete) == ([], True)
    assert met.places.restore() == ()


def test_what_is_too_much_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary is not: its words hold nothing."""
    monkeypatch.setattr("pytest_nnxcheck.walk.visit.MOST_OBJECTS", 1000)
    monkeypatch.setattr("pytest_nnxcheck.walk.visit.MOST_ITEMS", 3000)
    huge = look(("huge", [[] for _ in range(1010)]))
    assert not huge.complete
    assert len(huge.seen) <= 1003
    words = look(("words", {str(n): n for n in range(1010)}), ("x", [tracer_of(jax.jit)]))
    assert (words.complete, [found.path for found in words.tracers]) == (True, ["x[0]"])
    assert [look(("long", [*range(length)])).complete for length in (3000, 3001)] == [True, False]
    assert len(look(("n", 1), ("s", "s"), ("none", None)).seen) == len(look().seen), "they hold nothing"


# --- inside a trace --------------------------------------------------------------------------------------------------------


def test_the_walk_inside_a_trace_leaves_the_program_as_it_is() -> None:
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    met: list[Any] = []

    def plain(state: Any, x: Any) -> Any:
        return nnx.merge(graphdef, state)(x)

    def guarded(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        y = model(x)
        met.append(look(("model", model), ("x", x)))
        return y

    assert str(jax.make_jaxpr(guarded)(state, X)) == str(jax.make_jaxpr(plain)(state, X))
    assert sorted(found.path for found in met[0].tracers) == ["model.bias", "model.kernel", "x"]
    assert {found.holder for found in met[0].tracers} == {"Param", "input"}


def test_trace_identity_tells_a_dead_trace_from_the_live_one() -> None:
    seen: list[Any] = []

    def outer(x: Any) -> Any:
        jax.eval_shape(lambda y: (seen.append(y * 2), y)[1], x)
        seen.append(x * 3)
        return x

    jax.make_jaxpr(outer)(X)
    inner, live = map(graph.trace_identity, seen)
    assert graph.trace_key(inner) != graph.trace_key(live)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_line_that_created_a_tracer(transform: Callable[..., Any]) -> None:
    tracer = tracer_of(transform)
    line = tracer_of.__code__.co_firstlineno + 2
    assert f"kept_tracers.py:{line} (" in graph.tracer_line(tracer)


def test_line_of_a_grad_tracer_under_an_outer_trace() -> None:
    kept: list[Any] = []
    loss = jax.grad(lambda x: (kept.append(x * 2), x.sum())[1])
    jax.make_jaxpr(lambda x: loss(x * 1))(X)
    assert "test_walk.py:" in graph.tracer_line(kept[0])
    loss(X)
    assert graph.tracer_line(kept[1]) == ""
