"""`Places.restore` puts every mutable place back, in place, by identity, and without running the user's code."""

from __future__ import annotations

import collections
import contextvars
import functools
import sys
import threading
import types
from typing import Any

import jax
import numpy as np
import pytest
from kept_tracers import Box

from pytest_nnxcheck.walk import snapshot
from pytest_nnxcheck.walk.snapshot import PlaceKind
from pytest_nnxcheck.walk.walk import walk


class Slotted:
    __slots__ = ("first", "second")


class Quiet(list):
    """A list whose own methods must not be called."""

    def refuse(self, *_: Any) -> Any:
        raise AssertionError("user code ran")

    append = extend = clear = __setitem__ = __iter__ = __eq__ = refuse


def places(value: object) -> Any:
    return walk([("value", value)]).places


CONTAINERS = {
    "list": ([1, 2], lambda value: value.append(3)),
    "list that was reordered": ([1, 2], list.reverse),
    "dict": ({"a": 1}, lambda value: value.update(b=2)),
    "dict that lost a key": ({"a": 1, "b": 2}, lambda value: value.pop("a")),
    "dict that was reordered": ({"a": 1, "b": 2}, lambda value: value.update(a=value.pop("a"))),
    "ordered dict": (collections.OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "defaultdict": (collections.defaultdict(list, a=[]), lambda value: value["b"]),
    "set": ({1, 2}, lambda value: value.add(3)),
    "deque": (collections.deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "quiet list": (Quiet((1, 2)), lambda value: list.append(value, 3)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_containers_are_refilled_in_place(name: str) -> None:
    value, spoil = CONTAINERS[name]
    kept = places(value)
    content = list.__repr__(value) if isinstance(value, list) else repr(value)
    spoil(value)
    assert (list.__repr__(value) if isinstance(value, list) else repr(value)) != content
    assert kept.restore() == ()
    assert (list.__repr__(value) if isinstance(value, list) else repr(value)) == content


def test_attributes_slots_and_namespaces() -> None:
    box, slotted, space = Box(), Slotted(), types.SimpleNamespace(a=1)
    slotted.first, box.old = 1, 0
    kept = places([box, slotted, space])
    box.new, slotted.first, slotted.second, space.a = 1, 2, 3, 4
    del box.old
    assert kept.restore() == ()
    assert vars(box) == {"old": 0}
    assert slotted.first == 1
    assert not hasattr(slotted, "second")
    assert space.a == 1


def test_class_attributes() -> None:
    class Net:
        largest = None
        gone = 1

    kept = places(Net)
    Net.largest, Net.added = 1, 2
    del Net.gone
    assert kept.restore() == ()
    assert (Net.largest, Net.gone, hasattr(Net, "added")) == (None, 1, False)


def test_closure_cells_full_and_empty() -> None:
    def make() -> Any:
        scale = 1

        def set_both(value: Any) -> None:
            nonlocal scale, late
            scale = late = value

        def read() -> Any:
            return scale, late  # noqa: F821  # empty until set_both

        late = 0
        del late
        return set_both, read

    set_both, read = make()
    kept = places(read)
    set_both(2)
    assert read() == (2, 2)
    assert kept.restore() == ()
    with pytest.raises(NameError):
        read()
    set_both(3)
    kept.restore()
    cells = dict(zip(read.__code__.co_freevars, read.__closure__, strict=True))
    assert cells["scale"].cell_contents == 1


SCALE: Any = None


def set_globals(value: Any) -> None:
    global SCALE, ADDED  # noqa: PLW0603  # the place under test
    SCALE = ADDED = value


def test_globals_that_the_code_names() -> None:
    kept = places(set_globals)
    unrelated = globals().setdefault("_unrelated", Box())
    set_globals(3)
    assert kept.restore() == ()
    assert SCALE is None
    assert "ADDED" not in globals()
    assert globals()["_unrelated"] is unrelated


def test_an_import_stays(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text("X = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def load() -> Any:
        global late_module  # noqa: PLW0603  # a lazy import, as users write it
        import late_module  # type: ignore[import-not-found]  # written above

        return late_module

    kept = places(load)
    load()
    kept.restore()
    assert globals()["late_module"] is sys.modules["late_module"]


def test_caches_are_cleared_where_they_changed() -> None:
    @functools.lru_cache
    def rotary(n: int) -> Any:
        return [n]

    @functools.cache
    def config(n: int) -> Any:
        return [n]

    first, same = rotary(1), config(1)
    kept = places([rotary, config])
    rotary(2)
    assert kept.restore() == ()
    assert rotary.cache_info().currsize == 0
    assert rotary(1) is not first
    assert config(1) is same


SETTING: contextvars.ContextVar[Any] = contextvars.ContextVar("SETTING")
UNSET: contextvars.ContextVar[Any] = contextvars.ContextVar("UNSET")
WITH_DEFAULT: contextvars.ContextVar[Any] = contextvars.ContextVar("WITH_DEFAULT", default="usual")


def test_context_variables_and_thread_locals() -> None:
    def spoil() -> None:
        local, value = threading.local(), Box()
        local.items = [value]
        SETTING.set(value)
        kept = places([SETTING, UNSET, WITH_DEFAULT, local])
        SETTING.set(1)
        UNSET.set(1)
        WITH_DEFAULT.set(1)
        local.items, local.new = [], 1
        assert kept.restore() == ()
        assert SETTING.get() is value
        assert UNSET.get() is None
        assert WITH_DEFAULT.get() == "usual"
        assert vars(local)["items"][0] is value
        assert "new" not in vars(local)

    contextvars.copy_context().run(spoil)


def test_an_object_array_of_lists_gets_its_very_lists_back() -> None:
    """NumPy would make an array with one axis more of lists of one length."""
    value = np.fromiter([[1, 2], [3, 4]], dtype=object).reshape(1, 2)
    items = list(value.flat)
    kept = places(value)
    value[:] = None
    assert kept.restore() == ()
    assert value.shape == (1, 2)
    assert all(now is before for now, before in zip(value.flat, items, strict=True))


def test_a_place_that_cannot_be_put_back_is_named_and_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise TypeError("immutable")

    monkeypatch.setattr(snapshot, "LIST", PlaceKind(list.__iter__, refuse))
    value: dict[str, Any] = {"frozen": [], "other": {}}
    kept = places(value)
    value["frozen"].append(1)
    value["other"]["new"] = 1
    assert kept.restore() == ("value['frozen']",)
    assert value["other"] == {}


def test_restoring_runs_no_jax_operation() -> None:
    box = Box()

    def spoil(x: Any) -> Any:
        box.last = x * 2
        kept.restore()
        return x

    kept = places(box)
    assert len(jax.make_jaxpr(spoil)(1.0).eqns) == 1
    assert not hasattr(box, "last")
