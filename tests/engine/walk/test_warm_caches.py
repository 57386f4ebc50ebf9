"""A cache that an earlier call has filled decides no verdict: it is empty before the check, as in a fresh process, and works afterwards."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checking import flat, some
from flax import nnx
from healthy import numbers, rngs
from wild_training import apply_gradients, optimizer_of

from pytest_nnxcheck import check
from pytest_nnxcheck.subject import on_purpose

X = numbers((2, 4))
QUICK = {"effort": "quick", "transforms": "jit,scan", "styles": "argument"}


@functools.cache
def cached(length: int) -> jax.Array:
    return jnp.arange(float(length))


@functools.lru_cache(maxsize=2)
def bounded(length: int) -> tuple[jax.Array]:
    return (jnp.arange(float(length)),)


MEMO: dict[int, jax.Array] = {}


def in_global(length: int) -> jax.Array:
    if length not in MEMO:
        MEMO[length] = jnp.arange(float(length))
    return MEMO[length]


def in_default(length: int, memo: dict[int, jax.Array] = {}) -> jax.Array:  # noqa: B006 - the form
    if length not in memo:
        memo[length] = jnp.arange(float(length))
    return memo[length]


class Table:
    """Keeps a table in one way or another."""

    def __init__(self) -> None:
        self.memo: dict[int, jax.Array] = {}
        self._lazy: jax.Array | None = None

    @functools.cached_property
    def table(self) -> jax.Array:
        return jnp.arange(4.0)

    def in_dict(self) -> jax.Array:
        if 4 not in self.memo:
            self.memo[4] = jnp.arange(4.0)
        return self.memo[4]

    def lazy(self) -> jax.Array:
        if self._lazy is None:
            self._lazy = jnp.arange(4.0)
        return self._lazy


class Filled(Table):
    """Fills it in the constructor, as each process does."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.in_dict(), self.lazy(), made_at_once(4)


@functools.cache
def made_at_once(length: int) -> jax.Array:
    return jnp.arange(float(length))


@functools.cache
def on_host(length: int) -> Any:
    return np.arange(float(length), dtype=np.float32)


@functools.cache
def at_compile_time(length: int) -> jax.Array:
    with jax.ensure_compile_time_eval():
        return jnp.arange(float(length))


CONSTANTS = {"a": jnp.arange(4.0)}


class Adds(nnx.Module):
    """Adds a table to what a layer gives."""

    def __init__(self, table_of: Callable[[Any], Any], helper: Any = None) -> None:
        self.linear, self.helper = nnx.Linear(4, 4, rngs=rngs()), helper
        self.table_of = table_of

    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = self.linear(x) + self.table_of(self.helper)
        return y


LEAKY: dict[str, tuple[Callable[[], Any], str]] = {
    "cache": (lambda: Adds(lambda _: cached(4)), "cached.cache[4]"),
    "bounded": (lambda: Adds(lambda _: bounded(4)[0]), "bounded.cache[4][0]"),
    "property": (lambda: Adds(lambda helper: helper.table, Table()), "model.helper.table"),
    "global": (lambda: Adds(lambda _: in_global(4)), "MEMO[4]"),
    "default": (lambda: Adds(lambda _: in_default(4)), "memo[4] (default of in_default)"),
    "dict": (lambda: Adds(lambda helper: helper.in_dict(), Table()), "model.helper.memo[4]"),
    "lazy": (lambda: Adds(lambda helper: helper.lazy(), Table()), "model.helper._lazy"),
}
HEALTHY: dict[str, Callable[[], Any]] = {
    "filled property": lambda: Adds(lambda helper: helper.table, Filled()),
    "filled dict": lambda: Adds(lambda helper: helper.in_dict(), Filled()),
    "filled attribute": lambda: Adds(lambda helper: helper.lazy(), Filled()),
    "filled cache": lambda: Adds(lambda _: made_at_once(4), Filled()),
    "host": lambda: Adds(lambda _: on_host(4)),
    "compile time": lambda: Adds(lambda _: at_compile_time(4)),
    "constants": lambda: Adds(lambda _: CONSTANTS["a"]),
}


# Whether it is warm matters to what keeps the value of a function, of a property, or of a name; the forms of each are looked at cold.
@pytest.mark.parametrize(
    "form, warm", [*((form, False) for form in LEAKY), *((form, True) for form in ("cache", "property", "global"))]
)
def test_a_cache_that_keeps_a_tracer_is_found_warm_or_cold_and_works_afterwards(form: str, warm: bool) -> None:
    make, path = LEAKY[form]
    cached.cache_clear()
    bounded.cache_clear()
    MEMO.clear()
    model = make()
    before = model(X) if warm else None
    report = check(model, X, **QUICK)
    assert f"tracers remain in {path}" in flat(str(report))
    after = model(X)
    assert before is None or jnp.array_equal(before, after)


@pytest.mark.parametrize("form", some(HEALTHY, ("filled property", "filled cache", "host"), pytest.mark.slow))
def test_a_cache_that_a_constructor_fills_or_that_keeps_no_tracer_holds(form: str) -> None:
    model = HEALTHY[form]()
    model(X)
    report = check(model, X, **QUICK)
    assert report.ok, str(report)


@functools.cache
def at_import(length: int) -> jax.Array:
    return jnp.arange(float(length))


def warm_up() -> None:
    for length in (2, 4):
        at_import(length)


warm_up()


def test_a_cache_that_its_module_fills_while_it_is_imported_holds() -> None:
    found = check(lambda model, x: model(x) + at_import(4), nnx.Linear(4, 4, rngs=rngs()), X, **QUICK)
    assert found.ok, found


@pytest.mark.slow
def test_what_was_in_a_cache_is_put_back() -> None:
    helper, linear = Table(), nnx.Linear(4, 4, rngs=rngs())

    def held() -> tuple[jax.Array | None, ...]:
        return vars(helper)["table"], helper.memo[4], helper._lazy, MEMO[4]

    def step(model: Any, x: jax.Array) -> jax.Array:
        return model(x) + helper.table + helper.in_dict() + helper.lazy() + in_global(4)

    step(linear, X)
    before = held()
    assert not check(step, linear, X, **QUICK).ok
    assert all(one is other for one, other in zip(before, held(), strict=True))


class Lazy:
    """A property that keeps its value in the object."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = f"_{name}"

    def __get__(self, holder: Any, cls: type) -> Any:
        if self.name not in vars(holder):
            vars(holder)[self.name] = holder.make(4)
        return vars(holder)[self.name]


class Keeps:
    """An object that keeps a table, by one of its methods."""

    lazily = Lazy()

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make
        self.seen, self.rows = 0, None
        self.known: tuple[int | None, Any] = (None, None)
        self.first: list[Any] = [None]
        self.more: list[Any] = []

    def as_property(self) -> Any:
        return self.lazily

    def counted(self) -> Any:
        if self.seen < 4:
            self.seen, self.rows = 4, self.make(4)
        return self.rows

    def in_pair(self) -> Any:
        if self.known[0] != 4:
            self.known = (4, self.make(4))
        return self.known[1]

    def in_list(self) -> Any:
        if self.first[0] is None:
            self.first[0] = self.make(4)
        return self.first[0]

    def appended(self) -> Any:
        if not self.more:
            self.more.append(self.make(4))
        return self.more[0]

    def __call__(self) -> Any:
        return self.counted()


@dataclasses.dataclass
class Rows:
    """A dataclass that keeps a table."""

    make: Callable[[int], Any]
    seen: int = 0
    rows: Any = None

    def counted(self) -> Any:
        if self.seen < 4:
            self.seen, self.rows = 4, self.make(4)
        return self.rows


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass that keeps a table nevertheless."""

    make: Callable[[int], Any]
    rows: Any = None

    def kept(self) -> Any:
        if self.rows is None:
            object.__setattr__(self, "rows", self.make(4))
        return self.rows


class Fills:
    """Fills its own attribute in the constructor, under the name of one that another class fills in the call."""

    def __init__(self) -> None:
        self.rows: Any = None
        self.build()

    def build(self) -> None:
        self.rows = jnp.arange(4.0)


class FillsAndKeeps(Keeps):
    """Has an object of that class."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        super().__init__(make)
        self.filled = Fills()

    def both(self) -> Any:
        return self.counted() + self.filled.rows


def closure(make: Callable[[int], Any]) -> Callable[[], Any]:
    kept = None

    def get() -> Any:
        nonlocal kept
        if kept is None:
            kept = make(4)
        return kept

    return get


def of_jax(length: int) -> jax.Array:
    return jnp.arange(float(length))


def of_numpy(length: int) -> Any:
    return np.arange(float(length), dtype=np.float32)


KEEPS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    "property": lambda make: Keeps(make).as_property,
    "counted": lambda make: Keeps(make).counted,
    "pair": lambda make: Keeps(make).in_pair,
    "list": lambda make: Keeps(make).in_list,
    "appended": lambda make: Keeps(make).appended,
    "fields": lambda make: Rows(make).counted,
    "frozen": lambda make: Frozen(make).kept,
    "beside another": lambda make: FillsAndKeeps(make).both,
    "closure": closure,
}


@pytest.mark.parametrize("form", some(KEEPS, ("property", "counted", "beside another", "closure"), pytest.mark.slow))
def test_an_object_that_was_made_later_is_as_its_constructor_leaves_it(form: str) -> None:
    for make in (of_jax, of_numpy):
        kept = KEEPS[form](make)
        model = Adds(lambda _, kept=kept: kept())
        model(X)
        assert check(model, X, **QUICK).ok == (make is of_numpy)


def doubled(x: jax.Array) -> jax.Array:
    return 2 * x


def test_no_source_is_parsed_of_functions_that_do_not_name_a_list_of_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may have thousands of functions, in hundreds of files."""
    rows, parsed, filled = [jnp.ones(4)], set[str](), on_purpose.filled_containers
    monkeypatch.setattr(on_purpose, "filled_containers", lambda code: (parsed.add(code.co_name), filled(code))[1])

    def shifted(x: jax.Array) -> jax.Array:
        return doubled(x) + rows[0]

    assert check(shifted, X, **QUICK).ok
    assert parsed == {"shifted"}


def test_an_object_whose_table_is_made_on_purpose_stays_as_it_is() -> None:
    called, read = Keeps(of_jax), Keeps(of_jax)
    called()
    read.lazily  # noqa: B018 - the read fills it
    for table_of in (lambda _: called.counted(), lambda _: read.as_property()):
        model = Adds(table_of)
        model(X)
        found = check(model, X, **QUICK)
        assert found.ok, found


class Unordered:
    """A helper whose dict has keys without an order, and leads to itself."""

    def __init__(self) -> None:
        self.rows: dict[Any, Any] = {"layers": [1, 2], 3: "x"}
        self.rows["self"] = [self.rows]

    def grow(self) -> None:
        self.rows = {**self.rows, "more": 1}


class WithUnordered(nnx.Module):
    """A layer beside such a helper."""

    def __init__(self) -> None:
        self.linear, self.table = nnx.Linear(4, 4, rngs=rngs()), Unordered()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x) * len(self.table.rows["layers"])


def test_a_dict_that_jax_cannot_flatten_is_looked_at_too():
    assert check(WithUnordered(), X, **QUICK).ok


def test_the_moments_of_an_optimizer_are_no_cache(capsys: pytest.CaptureFixture[str]) -> None:
    """A step with them is traced as often as one without: no trace looks whether it fills their dicts again."""

    def step(model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear], x: jax.Array) -> jax.Array:
        sys.stdout.write("traced\n")  # a number that the step counts up is put back
        loss, gradients = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        apply_gradients(optimizer, model, gradients)
        return loss

    def traces(rule: Any) -> int:
        model = nnx.Linear(4, 4, rngs=rngs())
        assert check(step, *optimizer_of(model, rule), numbers((2, 4)), nesting="jit").ok
        return capsys.readouterr().out.count("traced")

    assert traces(optax.adam(1e-3)) == traces(optax.sgd(1e-3)) > 0
