"""The walk finds a tracer that code keeps: in closures, classes, defaults, caches, globals, generators and wrapped functions."""

from __future__ import annotations

import contextvars
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from kept_tracers import Boxed, Keep, X, check, found_in, leaky_and_healthy, whole

from pytest_nnxcheck.walk.walk import walk


@leaky_and_healthy
def test_closure_cell(kept: Keep) -> None:
    def make_norm() -> Callable[[Any], Any]:
        scale: Any = None

        def act(x: Any) -> Any:
            nonlocal scale
            scale = kept(x * 2)
            return x

        return act

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.act = make_norm()

        def __call__(self, x: Any) -> Any:
            return self.act(x)

    path = f"model.act (closure of {test_closure_cell.__name__}.<locals>.make_norm.<locals>.act: scale)"
    check(Net(), kept, path, "closure")


@leaky_and_healthy
@pytest.mark.parametrize(
    "make", [lambda base: type(base)("Made", (base,), {}), lambda base: types.new_class("Made", (base,))]
)
def test_class_attribute_of_a_class_that_a_call_made(kept: Keep, make: Callable[[type], type]) -> None:
    class Net(nnx.Module):
        largest: Any = None

        def __call__(self, x: Any) -> Any:
            type(self).largest = kept(x.max())
            return x

    check(make(Net)(), kept, "Made.largest", "class attribute")


@leaky_and_healthy
def test_default_argument(kept: Keep) -> None:
    class Net(nnx.Module):
        def __call__(self, x: Any, memo: dict[Any, Any] = {}, *, seen: list[Any] = []) -> Any:  # noqa: B006  # the bug
            memo[x.shape] = kept(x * 2)
            return x

    check(Net(), kept, "memo[(2, 3)] (default of test_default_argument.<locals>.Net.__call__)", "dict")


@leaky_and_healthy
@pytest.mark.parametrize("size", [None, 8])
def test_cached_function(kept: Keep, size: int | None) -> None:
    @functools.lru_cache(maxsize=size)
    def rotary(length: int, scale: int = 1) -> Any:
        return kept(jnp.arange(length) * traced[0])

    traced: list[Any] = []

    class Net(nnx.Module):
        def __call__(self, x: Any) -> Any:
            traced[:] = [x.sum()]
            rotary(4)
            traced.clear()
            return x

    check(Net(), kept, "rotary.cache[4] (closure of test_cached_function.<locals>.Net.__call__)", "cache")


LATEST: Any = None


def remember(y: Any) -> None:
    global LATEST  # noqa: PLW0603  # the bug
    LATEST = y


@leaky_and_healthy
def test_global_set_by_a_function_that_the_module_calls(kept: Keep) -> None:
    class Net(nnx.Module):
        def __call__(self, x: Any) -> Any:
            [remember(kept(y)) for y in [x * 2]]
            return x

    check(Net(), kept, "LATEST", "global")


@pytest.mark.parametrize(
    "spelling", ["import tables", "from lib import tables", "from lib.tables import CACHE", "inside"]
)
def test_global_of_another_module(spelling: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed packages are entered: users test them."""
    library = tmp_path / "site-packages" / "lib"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    (library / "tables.py").write_text("CACHE = {}\nOTHER = [object()]\n")
    inside = spelling == "inside"
    head = "import lib.tables as tables" if spelling == "import tables" else "" if inside else spelling
    use = "CACHE" if spelling.endswith("CACHE") else "tables.CACHE"
    body = f"    {'from lib import tables' if inside else 'pass'}\n    {use}[4] = y\n"
    (library / "use.py").write_text(f"{head}\ndef put(y):\n{body}")
    monkeypatch.syspath_prepend(str(library.parent))
    for name in ("lib", "lib.tables", "lib.use"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    __import__("lib.tables")  # a module that the call itself imports cannot be put back
    put = __import__("lib.use", fromlist=["put"]).put
    before = walk([("put", put)])
    jax.jit(put)(X)
    assert found_in(("put", put)) == [(f"{'lib.' * inside}{use}[4]", "dict")]
    before.places.restore()
    assert found_in(("put", put)) == []


SETTING: contextvars.ContextVar[Any] = contextvars.ContextVar("SETTING", default=None)


@leaky_and_healthy
def test_context_variable(kept: Keep) -> None:
    class Net(nnx.Module):
        def __call__(self, x: Any) -> Any:
            SETTING.set(kept(x * 2))
            return x

    check(Net(), kept, "SETTING.get()", "context variable")


@leaky_and_healthy
def test_generator(kept: Keep) -> None:
    def draws(y: Any) -> Iterator[int]:
        while y is not None:
            yield 1

    def put(box: Any, y: Any) -> None:
        box.content = draws(y)
        next(box.content)

    line = draws.__code__.co_firstlineno + 2
    check(Boxed(None, put, kept), kept, f"y (line {line} of draws, kept by model.box.content)", "generator")


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "jax.jit": jax.jit,
    "nnx.jit": nnx.jit,
    "jax.checkpoint": jax.checkpoint,
    "nnx.remat": nnx.remat,
    "jax.vmap": jax.vmap,
    "jax.custom_vjp": jax.custom_vjp,
    "jax.tree_util.Partial": jax.tree_util.Partial,
    "functools.wraps": lambda f: functools.wraps(f)(lambda x: f(x)),  # noqa: PLW0108  # the wrapper under test
}


def make_act(last: list[Any], kept: Keep) -> Callable[[Any], Any]:
    def act(x: Any) -> Any:
        last[:] = [kept(x * 2)]
        return x

    return act


@leaky_and_healthy
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrapped_functions_are_opened(name: str, kept: Keep) -> None:
    last: list[Any] = []
    wrapped = WRAPPERS[name](make_act(last, kept))
    jax.jit(make_act(last, kept))(X)
    paths = [path for path, _ in found_in(("wrapped", wrapped))]
    assert len(paths) == (kept is whole)
    assert all(path.startswith("wrapped") for path in paths)
    assert all(path.endswith(" (closure of make_act.<locals>.act: last[0])") for path in paths)


@pytest.mark.parametrize("kind", ["property", "staticmethod", "classmethod", "base class", "metaclass"])
def test_members_of_a_class(kind: str) -> None:
    last: list[Any] = []

    def act(*_: Any) -> Any:
        return last

    wrap: Any = {"property": property, "staticmethod": staticmethod, "classmethod": classmethod}.get(kind, lambda f: f)
    meta = type("Meta", (type,), {"act": act} if kind == "metaclass" else {})
    base = meta("Base", (), {"act": wrap(act)} if kind != "metaclass" else {})
    model = type("Net", (base,), {})()
    assert found_in(("model", model)) == []
    jax.jit(last.append)(X)
    assert [holder for _, holder in found_in(("model", model))] == ["list"]
