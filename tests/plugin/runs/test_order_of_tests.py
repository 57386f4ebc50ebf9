"""The verdict on a marked test is the same after another test, before it, and alone: a cache that the other test fills decides nothing."""

from __future__ import annotations

import pytest

from pytest_nnxcheck.subject import after_import

HEAD = """
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


class Model(nnx.Module):
    def __init__(self, table):
        self.linear, self.table = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), table

    def __call__(self, x):
        return self.linear(x) + self.table(4)
"""

TESTS = """
def test_eager():
    for table in (table_of_jax, table_of_numpy):
        assert Model(table)(jnp.ones((2, 4))).shape == (2, 4)


marked = pytest.mark.nnx_invariants(effort="quick", transforms="jit", styles="argument")


@marked
def test_leaky(nnx_wrap):
    assert nnx_wrap(Model(table_of_jax))(jnp.ones((2, 4))).shape == (2, 4)


@marked
def test_healthy(nnx_wrap):
    assert nnx_wrap(Model(table_of_numpy))(jnp.ones((2, 4))).shape == (2, 4)
"""

CACHES = {
    "cache": """
@functools.cache
def table_of_jax(length):
    return jnp.arange(float(length))


@functools.cache
def table_of_numpy(length):
    return np.arange(float(length), dtype=np.float32)
""",
    "cached property": """
class Tables:
    @functools.cached_property
    def of_jax(self):
        return jnp.arange(4.0)

    @functools.cached_property
    def of_numpy(self):
        return np.arange(4.0, dtype=np.float32)


TABLES = Tables()


def table_of_jax(length):
    return TABLES.of_jax


def table_of_numpy(length):
    return TABLES.of_numpy
""",
    "dict": """
TABLES = {}


def table_of_jax(length):
    if ("jax", length) not in TABLES:
        TABLES["jax", length] = jnp.arange(float(length))
    return TABLES["jax", length]


def table_of_numpy(length):
    if ("numpy", length) not in TABLES:
        TABLES["numpy", length] = np.arange(float(length), dtype=np.float32)
    return TABLES["numpy", length]
""",
}

KEPT = {"cache": "model.table.cache[4]", "cached property": "TABLES.of_jax", "dict": "TABLES[('jax', 4)]"}
"""The path of the tracer that each cache keeps."""

ORDERS = {
    "after": ["test_eager", "test_leaky", "test_healthy"],
    "before": ["test_healthy", "test_leaky", "test_eager"],
    "leaky alone": ["test_leaky"],
    "healthy alone": ["test_healthy"],
}


@pytest.mark.parametrize(
    "cache, order",
    [
        *(("cache", order) for order in ("after", "before")),
        ("dict", "after"),
        *(pytest.param("cache", order, marks=pytest.mark.slow) for order in list(ORDERS)[2:]),
        ("cached property", "after"),
        *(pytest.param("cached property", order, marks=pytest.mark.slow) for order in list(ORDERS)[1:]),
        *(pytest.param("dict", order, marks=pytest.mark.slow) for order in list(ORDERS)[1:]),
    ],
)
def test_a_verdict_does_not_depend_on_the_tests_before_it(pytester, inner_args, cache, order):
    tests = ORDERS[order]
    pytester.makepyfile(test_model=HEAD + CACHES[cache] + TESTS)
    chosen = [f"test_model.py::{test}" for test in tests]
    result = pytester.runpytest_inprocess(*inner_args, "-v", "-p", "no:randomly", "-p", "no:cacheprovider", *chosen)
    ends = {test: "FAILED" if test == "test_leaky" else "PASSED" for test in tests}
    result.stdout.fnmatch_lines([f"test_model.py::{test} {end}*" for test, end in ends.items()])
    if "test_leaky" in tests:
        assert f"FAILED test_model.py::test_leaky - nnx tracers: {KEPT[cache]}" in result.stdout.str()


MODEL = """
import jax.numpy as jnp
import pytest
from flax import nnx

X = jnp.ones((6, 8))
marked = pytest.mark.nnx_invariants(transforms="jit", sweep="singles", max_examples=0, styles="argument")


class Model(nnx.Module):
    def __init__(self, table):
        self.linear, self.table = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), table

    def __call__(self, x):
        return self.table(x.shape[0]) * self.linear(x)
"""

FORMS = {
    "variable": """
_TABLE = None

def table(length):
    global _TABLE
    if _TABLE is None:
        _TABLE = make(length)
    return _TABLE
""",
    "two_variables": """
_SEEN, _TABLE = 0, None

def table(length):
    global _SEEN, _TABLE
    if length > _SEEN:
        _SEEN, _TABLE = length, make(length)
    return _TABLE
""",
    "ordered": """
import collections
TABLES = collections.OrderedDict()

def table(length):
    if length not in TABLES:
        TABLES[length] = make(length)
    return TABLES[length]
""",
    "class_attribute": """
class Rope:
    _table = None

    @classmethod
    def get(cls, length):
        if cls._table is None:
            cls._table = make(length)
        return cls._table

table = Rope.get
""",
    "attribute": """
class Rope:
    def get(self, length):
        if not hasattr(self, "_table"):
            self._table = make(length)
        return self._table

table = Rope().get
""",
    "two_attributes": """
class Rope:
    def __init__(self):
        self.seen, self.table = 0, None

    def get(self, length):
        if length > self.seen:
            self.seen, self.table = length, make(length)
        return self.table

table = Rope().get
""",
    "slot": """
class Rope:
    __slots__ = ("_table",)

    def get(self, length):
        try:
            return self._table
        except AttributeError:
            self._table = make(length)
            return self._table

table = Rope().get
""",
    "closure": """
def make_table():
    kept = None

    def get(length):
        nonlocal kept
        if kept is None:
            kept = make(length)
        return kept

    return get

table = make_table()
""",
    "list": """
LAST = [None]

def table(length):
    if LAST[0] is None:
        LAST[0] = make(length)
    return LAST[0]
""",
    "context_variable": """
import contextvars
TABLE = contextvars.ContextVar("TABLE", default=None)

def table(length):
    if TABLE.get() is None:
        TABLE.set(make(length))
    return TABLE.get()
""",
    "thread_local": """
import threading
HERE = threading.local()

def table(length):
    if not hasattr(HERE, "table"):
        HERE.table = make(length)
    return HERE.table
""",
    "attribute_of_a_function": """
def table(length):
    if not hasattr(table, "kept"):
        table.kept = make(length)
    return table.kept
""",
    "singleton": """
class Rope:
    _one = None

    def __init__(self, length):
        self.table = make(length)

def table(length):
    if Rope._one is None:
        Rope._one = Rope(length)
    return Rope._one.table
""",
    "method": """
import functools

class Rope:
    @functools.cache
    def get(self, length):
        return make(length)

table = Rope().get
""",
}
"""Caches by other means: ``table`` keeps what it makes."""

MAKERS = """
import jax.numpy as jnp
import numpy as np

def of_jax(length):
    return jnp.arange(float(length))[:, None]

def of_numpy(length):
    return np.arange(float(length), dtype=np.float32)[:, None]
"""

OF_FORMS = """
import importlib

TABLES = {name: importlib.import_module(name).table for name in NAMES}
WARM = {}


@pytest.mark.parametrize("name", NAMES)
def test_eager(name):
    Model(TABLES[name])(X)
    WARM[name] = TABLES[name](6)


@marked
@pytest.mark.parametrize("name", NAMES)
def test_marked(nnx_wrap, name):
    assert nnx_wrap(Model(TABLES[name]))(X).shape == (6, 8)


@pytest.mark.parametrize("name", NAMES)
def test_after(name):
    if name in WARM:
        assert TABLES[name](6) is WARM[name]
"""


@pytest.fixture
def verdicts_of(pytester, inner_args):
    """A function that runs tests and gives the names of those that failed and of those that passed."""

    def run(*args):
        result = pytester.runpytest_inprocess(
            *inner_args, "-p", "no:randomly", "-p", "no:cacheprovider", "-rpf", "--tb=no", *args
        )
        lines = [
            line.split(" - ")[0].partition("::") for line in result.outlines if line.startswith(("FAILED", "PASSED"))
        ]
        return {
            ended: {test for start, _, test in lines if start.startswith(ended)} for ended in ("FAILED", "PASSED")
        }.values()

    return run


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(), ("-k", "marked")], ids=["after", "alone"])
def test_a_cache_by_any_means_is_cold_for_the_check_and_warm_again_afterwards(pytester, verdicts_of, chosen):
    names = []
    for form, source in FORMS.items():
        for maker in ("jax", "numpy"):
            names.append(f"{form}_{maker}")
            pytester.makepyfile(**{names[-1]: f"from makers import of_{maker} as make\n{source}"})
    pytester.makepyfile(makers=MAKERS, test_forms=f"{MODEL}\nNAMES = {names}\n{OF_FORMS}")
    failed, _ = verdicts_of(*chosen)
    assert failed == {f"test_marked[{form}_jax]" for form in FORMS}


SHARED = """
class Rope:
    def __init__(self):
        self.seen, self.cos = 0, None

    def get(self, length):
        if length > self.seen:
            self.seen, self.cos = length, jnp.cos(jnp.arange(float(length)))[:, None]
        return self.cos[:length]


@pytest.fixture(scope="module")
def model():
    return Model(Rope().get)


def test_eager(model):
    model(X)


@marked
def test_marked(nnx_wrap, model):
    nnx_wrap(model)(X)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(), ("-k", "marked")], ids=["after", "alone"])
def test_an_object_that_tests_share_is_as_its_fixture_left_it(pytester, verdicts_of, chosen):
    pytester.makepyfile(test_shared=MODEL + SHARED)
    failed, _ = verdicts_of(*chosen)
    assert failed == {"test_marked"}


MASKS = """
import functools


@functools.cache
def mask(length):
    return jnp.arange(float(length))[:, None]


TABLES = {}


def table(length):
    if length not in TABLES:
        TABLES[length] = jnp.arange(float(length))[:, None]
    return TABLES[length]
"""
"""Masks that are kept by their length: in a `functools.cache`, and in a dict."""

ANOTHER_KEY = (
    MASKS
    + """

class ByName(Model):
    def __init__(self, length):
        super().__init__(mask)
        self.made = nnx.Variable(mask(length))


class OfTable(Model):
    def __init__(self, length):
        super().__init__(table)
        self.made = nnx.Variable(table(length))


def test_eager():
    ByName(32)(X)
    OfTable(32)(X)


@marked
def test_marked(nnx_wrap):
    nnx_wrap(ByName(32))(X)


@marked
def test_marked_table(nnx_wrap):
    nnx_wrap(OfTable(32))(X)


@marked
def test_marked_the_same_length(nnx_wrap):
    nnx_wrap(ByName(6))(X)
    nnx_wrap(OfTable(6))(X)


@pytest.fixture
def models():
    return ByName(6), OfTable(6)


@marked
def test_marked_of_a_fixture(nnx_wrap, models):
    for model in models:
        nnx_wrap(model)(X)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(), ("-k", "marked")], ids=["after", "alone"])
def test_a_constructor_fills_what_it_fills_in_a_fresh_process(pytester, verdicts_of, chosen):
    pytester.makepyfile(test_keys=MODEL + ANOTHER_KEY)
    failed, _ = verdicts_of(*chosen)
    assert failed == {"test_marked", "test_marked_table"}


ON_PURPOSE = """
class Rope:
    def __init__(self):
        self.kept = None

    def build(self, length):
        self.kept = jnp.arange(float(length))[:, None]

    def get(self, length):
        if self.kept is None:
            self.build(length)
        return self.kept


class Rotary(Model):
    def __init__(self):
        self.rope = Rope()
        super().__init__(self.rope.get)

    def setup_caches(self, length):
        self.rope.build(length)

    @classmethod
    def from_pretrained(cls):
        model = cls()
        model.rope.get(6)
        return model


TABLES = {}


def table(length):
    if length not in TABLES:
        TABLES[length] = jnp.arange(float(length))[:, None]
    return TABLES[length]


@marked
def test_method(nnx_wrap):
    model = Rotary()
    model.setup_caches(6)
    nnx_wrap(model)(X)


@marked
def test_classmethod(nnx_wrap):
    nnx_wrap(Rotary.from_pretrained())(X)


@pytest.fixture
def model():
    model = Rotary()
    model.setup_caches(6)
    return model


@marked
def test_fixture(nnx_wrap, model):
    nnx_wrap(model)(X)


@marked
def test_body(nnx_wrap):
    table(6)
    nnx_wrap(Model(table))(X)


def test_check():
    table(6)
    pytest_nnxcheck.assert_invariants(Model(table), X, transforms="jit", sweep="singles", max_examples=0, styles="argument")
"""

EAGERLY = """
@pytest.fixture
def called():
    model = Rotary()
    model(X)
    return model


@marked
def test_fixture_calls_the_model(nnx_wrap, called):
    nnx_wrap(called)(X)


@marked
def test_body_calls_the_model(nnx_wrap):
    model = Model(table)
    expected = model(X)
    assert (nnx_wrap(model)(X) == expected).all()
"""

SERVED = """
@pytest.fixture(scope="session", autouse=True)
def server():
    table(6)


@marked
def test_served(nnx_wrap):
    nnx_wrap(Model(table))(X)


@marked
def test_served_again(nnx_wrap):
    nnx_wrap(Model(table))(X)
"""


def test_what_the_test_or_a_fixture_fills_on_purpose_stays_and_what_an_eager_call_fills_does_not(pytester, verdicts_of):
    pytester.makepyfile(test_filled=f"import pytest_nnxcheck\n{MODEL}{ON_PURPOSE}{EAGERLY}")
    failed, passed = verdicts_of()
    assert failed == {"test_fixture_calls_the_model", "test_body_calls_the_model"}
    assert len(passed) == 5


def test_a_session_fixture_fills_for_every_test(pytester, verdicts_of):
    pytester.makepyfile(test_served=MODEL + ON_PURPOSE.partition("@marked")[0] + SERVED)
    failed, passed = verdicts_of()
    assert (failed, passed) == (set(), {"test_served", "test_served_again"})


@pytest.mark.parametrize("checked", [False, True])
def test_a_run_without_a_checked_test_remembers_nothing(pytester, inner_args, monkeypatch, checked):
    asked = []
    monkeypatch.setattr(after_import, "remember", lambda roots: asked.append(roots) or (lambda: None))
    pytester.makepyfile(f"{'from pytest_nnxcheck import check' if checked else 'import jax'}\n\ndef test_plain(): pass")
    pytester.runpytest_inprocess(*inner_args).assert_outcomes(passed=1)
    assert bool(asked) == checked


INTERRUPTED = """
import functools

STOPS = [False]
TABLES, LAST = {}, None


def make(length):
    if STOPS[0]:
        raise KeyboardInterrupt
    return jnp.arange(float(length))[:, None]


@functools.cache
def cached(length):
    return make(length)


def table(length):
    if length not in TABLES:
        TABLES[length] = make(length)
    return TABLES[length]


def last(length):
    global LAST
    if LAST is None:
        LAST = make(length)
    return LAST


KEPT = {cached: lambda: cached(6), table: lambda: TABLES[6], last: lambda: LAST}


@pytest.mark.parametrize("fill", KEPT)
def test_check(fill):
    model = Model(fill)
    model(X)
    warm = KEPT[fill]()
    STOPS[0] = True
    try:
        pytest_nnxcheck.check(model, X, transforms="jit", sweep="singles", max_examples=0)
        interrupted = False
    except KeyboardInterrupt:
        interrupted = True
    STOPS[0] = False
    assert interrupted and KEPT[fill]() is warm
"""


def test_an_interrupted_check_leaves_the_caches_warm(pytester, verdicts_of):
    pytester.makepyfile(test_interrupted=f"import pytest_nnxcheck\n{MODEL}{INTERRUPTED}")
    failed, passed = verdicts_of()
    assert (failed, len(passed)) == (set(), 3)


IMPORTED = """
import functools


@functools.lru_cache(maxsize=8)
def mask(length):
    return jnp.arange(float(length))[:, None]


mask(6)


def test_eager():
    Model(mask)(jnp.ones((4, 8)))


@marked
def test_marked(nnx_wrap):
    nnx_wrap(Model(mask))(X)
"""


OF_FIXTURES = (
    MASKS
    + """

LAST = None


def last(length):
    global LAST
    if LAST is None or LAST.shape[0] != length:
        LAST = jnp.arange(float(length))[:, None]
    return LAST


class Named(Model):
    def __init__(self, length):
        super().__init__(table)
        self.made = nnx.Variable(table(length))


FILL = {"mask": mask, "table": table, "last": last}


def test_eager():
    for fill in FILL.values():
        Model(fill)(X)


@pytest.fixture
def model(request):
    name, length = request.param
    if name == "made":
        return Named(length)
    mask(length), table(length), last(length)
    return {"mask": Model(mask), "table": Model(table), "last": Model(last)}[name]


@marked
@pytest.mark.parametrize("model", [(name, 32) for name in (*FILL, "made")], indirect=True, ids=[*FILL, "made"])
def test_another_length(nnx_wrap, model):
    nnx_wrap(model)(X)


@marked
@pytest.mark.parametrize("model", [(name, 6) for name in (*FILL, "made")], indirect=True, ids=[*FILL, "made"])
def test_the_same_length(nnx_wrap, model):
    nnx_wrap(model)(X)


@pytest.fixture(scope="session")
def shared():
    return [mask(6), table(6)]


@pytest.fixture(scope="session")
def shared_of_another_length():
    return [mask(32), table(32)]


@pytest.fixture
def more(shared):
    return [mask(32), table(32)]


@marked
def test_shared(nnx_wrap, shared):
    nnx_wrap(Model(mask))(X)
    nnx_wrap(Model(table))(X)


@marked
def test_shared_and_more(nnx_wrap, more):
    nnx_wrap(Model(mask))(X)
    nnx_wrap(Model(table))(X)


@marked
def test_shared_of_another_length(nnx_wrap, shared_of_another_length):
    nnx_wrap(Model(mask))(X)


def test_after(shared):
    assert {6, 32} <= TABLES.keys() and shared == [mask(6), table(6)]
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(), ("-k", "not eager")], ids=["after", "alone"])
def test_a_fixture_fills_what_it_fills_in_a_fresh_process(pytester, verdicts_of, chosen):
    pytester.makepyfile(test_of_fixtures=MODEL + OF_FIXTURES)
    failed, passed = verdicts_of(*chosen)
    names = ("mask", "table", "last", "made")
    assert failed == {*(f"test_another_length[{name}]" for name in names), "test_shared_of_another_length"}
    assert len(passed - {"test_eager"}) == 7


LOADED = """
import functools

LOADS = []


@functools.cache
def weights():
    LOADS.append(1)
    return jnp.ones((8, 8))


@pytest.fixture
def model():
    model = Model(lambda length: 1.0)
    model.linear.kernel.value = weights() + 0.0
    return model


@marked
@pytest.mark.parametrize("number", [1, 2])
def test_marked(nnx_wrap, model, number):
    nnx_wrap(model)(X)


def test_loads():
    assert len(LOADS) == 1
"""


def test_what_a_fixture_alone_keeps_stays(pytester, verdicts_of):
    pytester.makepyfile(test_loaded=MODEL + LOADED)
    failed, passed = verdicts_of()
    assert (failed, len(passed)) == (set(), 3)


RECEIVERS = (
    MASKS
    + """

class Filler:
    def prepare(self, length):
        table(length)


class Loader:
    def prepare(self, length):
        return length


class Both(Model):
    def __init__(self):
        super().__init__(table)
        self.parts = nnx.static((Filler(), Loader())) if hasattr(nnx, "static") else ()

    def prepare(self, length):
        return length


class Filling(Both):
    def prepare(self, length):
        self.fill(length)

    def fill(self, length):
        Filler().prepare(length)


@marked
def test_bad_method(nnx_wrap):
    loader = Loader()
    loader.prepare(6)
    nnx_wrap(Model(table))(X)


@marked
def test_bad_method_of_the_model(nnx_wrap):
    model = Both()
    model.prepare(6)
    Filling, nnx_wrap(model)(X)


@marked
def test_method(nnx_wrap):
    filler = Filler()
    filler.prepare(6)
    nnx_wrap(Model(table))(X)


@marked
def test_method_of_the_model(nnx_wrap):
    model = Filling()
    model.prepare(6)
    nnx_wrap(model)(X)


@pytest.fixture
def make():
    def build(length):
        table(length)
        return Model(table)

    return build


@marked
def test_factory(nnx_wrap, make):
    nnx_wrap(make(6))(X)


@marked
def test_bad_factory(nnx_wrap, make):
    nnx_wrap(make(32))(X)


class TestHelpers:
    def build(self, length):
        table(length)
        return Model(table)

    @marked
    def test_own_method(self, nnx_wrap):
        nnx_wrap(self.build(6))(X)


@marked
@pytest.mark.parametrize("fill", [table, mask])
def test_parameter(nnx_wrap, fill):
    fill(6)
    nnx_wrap(Model(fill))(X)


def test_bad_check():
    loader = Loader()
    loader.prepare(6)
    assert pytest_nnxcheck.check(Model(table), X, **SMALL).ok


def test_check():
    filler = Filler()
    filler.prepare(6)
    assert pytest_nnxcheck.check(Model(table), X, **SMALL).ok
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(), ("-k", "bad")], ids=["all", "alone"])
def test_the_code_that_fills_is_known_by_the_object_that_it_is_called_of(pytester, verdicts_of, chosen):
    small = "SMALL = dict(transforms='jit', sweep='singles', max_examples=0, styles='argument')"
    pytester.makepyfile(test_receivers=f"import pytest_nnxcheck\n{MODEL}{small}\n{RECEIVERS}")
    failed, passed = verdicts_of(*chosen)
    assert all("bad" in name for name in failed)
    assert not any("bad" in name for name in passed)
    assert len(failed) == 4


@pytest.mark.slow
def test_a_bounded_cache_that_the_import_fills_stays(pytester, verdicts_of):
    pytester.makepyfile(test_imported=MODEL + IMPORTED)
    failed, passed = verdicts_of()
    assert (failed, passed) == (set(), {"test_eager", "test_marked"})


SHORT_LIVED = """
import gc
import weakref

ALIVE = []


@pytest.fixture(scope="class")
def model():
    model = Model(lambda length: 1.0)
    ALIVE.append(weakref.ref(model))
    return model


class TestUses:
    @marked
    def test_marked(self, nnx_wrap, model):
        nnx_wrap(model)(X)


def test_gone():
    gc.collect()
    assert ALIVE[0]() is None
"""


@pytest.mark.slow
def test_what_a_fixture_made_is_not_kept_alive(pytester, verdicts_of):
    pytester.makepyfile(test_short_lived=MODEL + SHORT_LIVED)
    failed, _ = verdicts_of()
    assert failed == set()
