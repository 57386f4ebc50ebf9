"""A later walk looks only where something may have changed since an earlier one, and meets every tracer that a whole walk would.

`kept_tracers.check` asserts that of every place in which a module keeps a tracer; here stands what changes without a place that tells.
"""

from __future__ import annotations

import functools
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from checking import Example, call, full
from flax import nnx
from healthy import rngs
from kept_tracers import look, tracer_of

from pytest_nnxcheck.walk import visit
from pytest_nnxcheck.walk.walk import Walk, tracers_since

Kept = tuple[Any, Callable[[Any], object]]
"""An object, and what puts a value where it holds it."""


@pytest.fixture(autouse=True)
def _no_late_house() -> Iterator[None]:
    yield
    sys.modules.pop("late_house", None)


def met(found: Walk | None) -> list[int]:
    assert found is not None
    return [id(leak.tracer) for leak in found.tracers]


def since(earlier: Walk, roots: list[tuple[str, object]], matters: Callable[[Any], bool] = bool) -> list[Any]:
    """The tracers that matter, which are there since an earlier walk."""
    return [*tracers_since(earlier, roots, matters)]


def takes_from(box: Any) -> Iterator[None]:
    while True:
        held = box.last  # noqa: F841  # a local variable that the walk reads
        yield


def generator() -> Kept:
    box = SimpleNamespace(last=None)
    taking = takes_from(box)
    next(taking)

    def put(value: Any) -> None:
        box.last = value
        next(taking)
        box.last = None

    return taking, put


def exception() -> Kept:
    error = ValueError("kept")
    return error, lambda value: setattr(error, "args", (value,))


def raised() -> Kept:
    error = ValueError("kept")

    def put(value: Any) -> None:  # a local variable of a frame that the traceback keeps
        try:
            raise error
        except ValueError:
            return

    return error, put


def traceback() -> Kept:
    box = SimpleNamespace(last=None)
    taking = takes_on(box)
    next(taking)
    return box.error, lambda value: (setattr(box, "last", value), next(taking), setattr(box, "last", None))


def takes_on(box: Any) -> Iterator[None]:
    try:
        int("no number")
    except ValueError as error:
        box.error = error
    while True:
        held = box.last  # noqa: F841  # a local variable of a frame that goes on
        yield


def iterator() -> Kept:
    items: list[Any] = [None]
    return iter(items), lambda value: items.__setitem__(0, value)


def cycle() -> Kept:
    items: list[Any] = []
    return itertools.chain([1], items), items.append


FLEETING = (generator, exception, raised, traceback, iterator, cycle)


@pytest.mark.parametrize("kind", FLEETING)
def test_what_changes_without_a_place_that_tells_is_opened_anew(kind: Callable[[], Kept]) -> None:
    root, put = kind()
    box = SimpleNamespace(holds=root)
    earlier = look(("box", box))
    assert met(earlier.since([("box", box)])) == []
    tracer = tracer_of(jax.jit)
    put(tracer)
    assert met(look(("box", box))) == [id(tracer)]
    assert met(earlier.since([("box", box)])) == [id(tracer)]


class Holder:
    """A plain object of the user's."""


def uses(x: Any) -> Any:
    return x


def names_a_module(x: Any) -> Any:
    return NAMED.last if NAMED is not None else x


NAMED: Any = None


class Named(types.ModuleType):
    """A module of a class of its own, as lazy imports make them."""


def dict_of_a_function() -> Kept:
    def own(x: Any) -> Any:
        return x

    return own, lambda value: setattr(own, "__dict__", {"last": value})


def dict_of_a_cache() -> Kept:
    cached = functools.cache(uses)
    return cached, lambda value: setattr(cached, "__dict__", {"last": value})


def code_of_a_function() -> Kept:
    def own(x: Any) -> Any:
        return x

    def put(value: Any) -> None:
        house = types.ModuleType("house")
        own.__globals__["THERE"] = house
        vars(house)["last"] = value
        own.__code__ = (lambda x: THERE.last).__code__  # noqa: F821  # a name that is there when it runs

    return own, put


def class_of_an_object() -> Kept:
    held = Holder()
    return held, lambda value: setattr(held, "__class__", type("Other", (Holder,), {"last": value}))


def bases_of_a_class() -> Kept:
    class Base(Holder):
        pass

    class Derived(Base):
        pass

    return Derived(), lambda value: setattr(Derived, "__bases__", (type("Other", (Base,), {"last": value}),))


def state_of_a_partial() -> Kept:
    held = functools.partial(uses, 1)
    return held, lambda value: held.__setstate__((uses, (value,), {}, {}))


def function_of_a_library() -> Kept:
    wrapped = functools.wraps(uses)(jax.tree_util.Partial(uses).func)
    library = types.FunctionType(uses.__code__, {"__name__": "jax.numpy"})
    return [library, wrapped], lambda value: setattr(library, "__wrapped__", [value])


def module_of_a_class_of_its_own() -> Kept:
    def put(value: Any) -> None:
        module = Named("lazy")
        module.last = value
        names_a_module.__globals__["NAMED"] = module

    return names_a_module, put


def module_in_the_place_of_another() -> Kept:
    source = "def keeps():\n    import late_house\n    return late_house.KEPT\n"
    names: dict[str, Any] = {"__name__": "user"}
    exec(source, names)  # a function whose globals are its own
    sys.modules["late_house"] = types.ModuleType("late_house")

    def put(value: Any) -> None:
        sys.modules["late_house"] = types.ModuleType("late_house")
        vars(sys.modules["late_house"])["KEPT"] = value

    return names["keeps"], put


def name_that_is_gone() -> Kept:
    source = "def keeps():\n    return late_house.KEPT\n"
    names: dict[str, Any] = {"__name__": "user", "late_house": None}
    exec(source, names)  # a function whose globals are its own
    sys.modules["late_house"] = types.ModuleType("late_house")

    def put(value: Any) -> None:
        vars(sys.modules["late_house"])["KEPT"] = value
        del names["late_house"]

    return names["keeps"], put


REPLACED = (
    dict_of_a_function,
    dict_of_a_cache,
    code_of_a_function,
    class_of_an_object,
    bases_of_a_class,
    state_of_a_partial,
    function_of_a_library,
    module_of_a_class_of_its_own,
    module_in_the_place_of_another,
    name_that_is_gone,
)


@pytest.mark.parametrize("kind", REPLACED)
def test_parts_that_are_replaced_are_looked_through(kind: Callable[[], Kept], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "NAMED", None)
    monkeypatch.setitem(globals(), "THERE", None)
    root, put = kind()
    roots = [("root", [root])]
    earlier = look(*roots)
    assert not earlier.tracers
    assert not since(earlier, roots)
    tracer = tracer_of(jax.jit)
    put(tracer)
    assert [leak.tracer is tracer for leak in look(*roots).tracers] == [True]
    assert [leak.tracer is tracer for leak in since(earlier, roots)] == [True]


def test_nothing_is_told_after_a_walk_that_found_something_or_ended_early() -> None:
    assert look(("tracer", tracer_of(jax.jit))).since([]) is None
    assert look(("list", [[], [], []]), most=1).since([]) is None
    assert look(("list", [])).since([]) is not None


def test_a_module_that_was_imported_since_is_looked_through(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_house.py").write_text("KEPT = []\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = """
        def keeps(value):
            import late_house
            late_house.KEPT.append(value)
    """
    names: dict[str, Any] = {"__name__": "user"}
    exec(textwrap.dedent(source), names)  # a function whose globals are its own
    roots = [("keeps", names["keeps"])]
    earlier = look(*roots)
    names["keeps"](tracer_of(jax.jit))
    assert earlier.since(roots) is None
    assert [leak.path for leak in since(earlier, roots)] == ["late_house.KEPT[0]"]


def test_the_tracers_that_matter_are_named_as_a_whole_walk_names_them() -> None:
    model = SimpleNamespace(last=None)
    earlier = look(("model", model))
    model.last = tracer_of(jax.jit)
    assert [leak.path for leak in since(earlier, [("model", model)])] == ["model.last"]
    assert since(earlier, [("model", model)], lambda _: False) == []


X = jnp.ones((3, 4))
HOUSE = [SimpleNamespace(number=number) for number in range(3000)]


class KnowsManyObjects(nnx.Linear):
    def __call__(self, x: Any) -> Any:
        assert HOUSE
        return super().__call__(x)


@pytest.mark.parametrize("nesting", ["un-nested", "vmap > while_loop", *full("jit > scan > remat")])
def test_what_a_call_does_not_change_is_walked_through_once(nesting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    real = visit.Visit._open  # each object that is opened, counted

    def counted(self: Any, value: Any, holder: str, name: Any) -> None:
        opened.append(isinstance(value, SimpleNamespace))
        real(self, value, holder, name)

    model, example = KnowsManyObjects(4, 4, rngs=rngs()), Example()
    call(model, X, nesting=nesting, example=example)  # profiles the call, and imports what it needs
    monkeypatch.setattr(visit.Visit, "_open", counted)
    assert call(model, X, nesting=nesting, example=example).outcome.verdict == "held"
    assert sum(opened) == len(HOUSE)
