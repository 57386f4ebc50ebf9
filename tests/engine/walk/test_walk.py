"""The walk finds a tracer wherever a user may keep one, names the place, and finds nothing in healthy modules.

Each kind of place is tried with a module that keeps a tracer (``kept=whole``) and with its twin that keeps the
shape only. The poison is made by a plain `nnx.jit` with the module as argument, and undone by `Places.restore`.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import replace_metadata
from flax import nnx

from pytest_nnxcheck import compat
from pytest_nnxcheck.inspection import visit
from pytest_nnxcheck.inspection.visit import Found
from pytest_nnxcheck.inspection.walk import Walk, walk

X = jnp.ones((2, 3))
STATIC = tuple(map(int, flax.__version__.split(".")[:2])) >= (0, 12)
"""Before flax 0.12 what a module puts in an attribute travels as state, or is refused: nothing is left behind."""

Keep = Callable[[Any], Any]


def whole(y: Any) -> Any:
    """The bug: the traced value itself is kept."""
    return y


def shape_only(y: Any) -> Any:
    """The cure: what is kept is not traced."""
    return y.shape


leaky_and_healthy = pytest.mark.parametrize("kept", [whole, shape_only])


class Box:
    """A plain Python object of the user: flax knows nothing of it."""


def jit_call(model: Any, x: Any = X) -> Any:
    return nnx.jit(lambda model, x: model(x))(model, x)


def found_in(*roots: tuple[str, object]) -> list[tuple[str, str]]:
    return [(found.path, found.holder) for found in walk(roots).tracers]


def check(model: Any, kept: Keep, path: str, holder: str, call: Any = jit_call, again: Any = None) -> None:
    """The walk is clean before; after the call it finds what is kept; and clean again, with a working module, once restored."""
    before = walk([("model", model)])
    assert (before.tracers, before.complete) == ((), True)
    call(model, X)
    assert found_in(("model", model)) == ([(path, holder)] if kept is whole else [])
    assert before.places.restore() == ()
    assert found_in(("model", model)) == []
    for works in (again or type(model).__call__, call):
        jax.clear_caches()  # a tracer in the structure of a module stays in the keys of jax's caches, where it meets the next call
        assert works(model, X).shape == X.shape
        assert before.places.restore() == ()
        assert found_in(("model", model)) == []


def check_static(model: Any, kept: Keep, path: str, holder: str) -> None:
    """The same for attributes that flax takes for state before 0.12: they leave no tracer there, or the call is refused."""
    if STATIC:
        # flax 0.12 refuses an array in such an attribute when the call is eager.
        check(model, kept, path, holder, again=jit_call)
        return
    with contextlib.suppress(ValueError):
        jit_call(model)
    assert found_in(("model", model)) == []


# --- data ----------------------------------------------------------------------------------------------------------------


@leaky_and_healthy
def test_attribute_that_was_none(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.last = None

        def __call__(self, x: Any) -> Any:
            self.last = kept(x * 2)
            return x

    check_static(Net(), kept, "model.last", "attribute")


@leaky_and_healthy
def test_plain_list(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.log = ["first"]

        def __call__(self, x: Any) -> Any:
            self.log.append(kept(x * 2))
            return x

    check_static(Net(), kept, "model.log[1]", "list")


@leaky_and_healthy
def test_plain_dict(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.debug = {"post": 1}

        def __call__(self, x: Any) -> Any:
            self.debug["pre"] = kept(x * 2)
            return x

    check_static(Net(), kept, "model.debug['pre']", "dict")


class Log:
    def __init__(self) -> None:
        self.items: list[Any] = []


class Boxed(nnx.Module):
    """Puts what is kept into a box, in a way that the test chooses."""

    def __init__(self, content: Any, put: Callable[[Any, Any], None], kept: Keep) -> None:
        self.box = Box()
        self.box.content = content
        self.put = put
        self.kept = kept

    def __call__(self, x: Any) -> Any:
        self.put(self.box, self.kept(x * 2))
        return x


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ("_Slotted__private", "value")


def set_private(box: Any, y: Any) -> None:
    box.content._Slotted__private = y


PLACES = {
    "opaque object": (lambda: None, lambda box, y: setattr(box, "content", y), "model.box.content", "attribute"),
    "list": (list, lambda box, y: box.content.append(y), "model.box.content[0]", "list"),
    "list in a tuple": (lambda: (1, []), lambda box, y: box.content[1].append(y), "model.box.content[1][0]", "list"),
    "tuple": (lambda: (), lambda box, y: setattr(box, "content", (1, y)), "model.box.content[1]", "tuple"),
    "dict": (dict, lambda box, y: box.content.update(a=y), "model.box.content['a']", "dict"),
    "ordered dict": (collections.OrderedDict, lambda box, y: box.content.update(a=y), "model.box.content['a']", "dict"),
    "defaultdict": (
        lambda: collections.defaultdict(list),
        lambda box, y: box.content[3].append(y),
        "model.box.content[3][0]",
        "list",
    ),
    "enum-like key": (dict, lambda box, y: box.content.update({(1, "a"): y}), "model.box.content[(1, 'a')]", "dict"),
    "unprintable key": (dict, lambda box, y: box.content.update({Box: y}), "model.box.content[<type>]", "dict"),
    "inside a set": (set, lambda box, y: box.content.add(hashable(y)), "list(model.box.content)[0].held", "attribute"),
    "key of a dict": (
        dict,
        lambda box, y: box.content.update({hashable(y): 1}),
        "list(model.box.content)[0].held",
        "attribute",
    ),
    "deque": (
        lambda: collections.deque(maxlen=2),
        lambda box, y: box.content.append(y),
        "model.box.content[0]",
        "deque",
    ),
    "namedtuple": (
        lambda: None,
        lambda box, y: setattr(box, "content", Pair(1, y)),
        "model.box.content.second",
        "tuple",
    ),
    "namespace": (
        types.SimpleNamespace,
        lambda box, y: setattr(box.content, "last", y),
        "model.box.content.last",
        "attribute",
    ),
    "slots": (Slotted, lambda box, y: setattr(box.content, "value", y), "model.box.content.value", "attribute"),
    "private slot": (Slotted, set_private, "model.box.content._Slotted__private", "attribute"),
    "thread local": (threading.local, lambda box, y: setattr(box.content, "y", y), "model.box.content.y", "attribute"),
    "partial": (
        lambda: None,
        lambda box, y: setattr(box, "content", functools.partial(max, 0, default=y)),
        "model.box.content.keywords['default']",
        "dict",
    ),
    "bound method": (
        lambda: None,
        lambda box, y: setattr(box, "content", hashable(y).method),
        "model.box.content.__self__.held",
        "attribute",
    ),
    "built-in method": (
        lambda: None,
        lambda box, y: setattr(box, "content", [y].append),
        "model.box.content.__self__[0]",
        "list",
    ),
    "iterator": (
        lambda: None,
        lambda box, y: setattr(box, "content", iter((y,))),
        "list(model.box.content)[0][0]",
        "tuple",
    ),
    "object array": (
        lambda: np.array([None, 1]),
        lambda box, y: box.content.__setitem__(0, y),
        "model.box.content[0]",
        "array",
    ),
    "user dict": (collections.UserDict, lambda box, y: box.content.update(a=y), "model.box.content.data['a']", "dict"),
}


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


class CountsThenKeeps(nnx.Param):  # type: ignore[misc]  # flax is untyped on some versions
    """A Variable type of the user."""


@leaky_and_healthy
def test_value_of_a_variable_is_named_as_the_variable(kept: Keep) -> None:
    box = Box()
    box.w = CountsThenKeeps(jnp.zeros(3))
    model = Boxed(None, lambda _, y: compat.set_variable_value(box.w, y), kept)
    before = walk([("box", box)])
    jit_call(model)
    assert found_in(("box", box)) == ([("box.w", "CountsThenKeeps")] if kept is whole else [])
    before.places.restore()
    np.testing.assert_array_equal(compat.variable_value(box.w), jnp.zeros(3))


@leaky_and_healthy
def test_metadata_of_a_variable(kept: Keep) -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.box = Box()
            self.box.w = nnx.Param(jnp.ones(3), norm=None)

        def __call__(self, x: Any) -> Any:
            replace_metadata(self.box.w, {"norm": kept(x * 2)})
            return x

    check(Net(), kept, "model.box.w.norm (metadata)", "metadata")


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


# --- code ----------------------------------------------------------------------------------------------------------------


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

    path = f"scale (closure of {test_closure_cell.__name__}.<locals>.make_norm.<locals>.act)"
    check(Net(), kept, path, "closure")


@leaky_and_healthy
def test_class_attribute(kept: Keep) -> None:
    class Net(nnx.Module):
        largest: Any = None

        def __call__(self, x: Any) -> Any:
            type(self).largest = kept(x.max())
            return x

    check(Net(), kept, "Net.largest", "class attribute")


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
def test_class_attribute_that_was_not_there(kept: Keep) -> None:
    class Net(nnx.Module):
        def __call__(self, x: Any) -> Any:
            Net.added = kept(x.max())
            return x

    model = Net()
    check(model, kept, "Net.added", "class attribute")
    assert not hasattr(Net, "added")


@leaky_and_healthy
def test_default_argument(kept: Keep) -> None:
    class Net(nnx.Module):
        def __call__(self, x: Any, memo: dict[Any, Any] = {}, *, seen: list[Any] = []) -> Any:  # noqa: B006  # the bug
            memo[x.shape] = kept(x * 2)
            return x

    check(Net(), kept, "memo[(2, 3)] (default of test_default_argument.<locals>.Net.__call__)", "dict")


@leaky_and_healthy
def test_keyword_default(kept: Keep) -> None:
    class Net(nnx.Module):
        def __call__(self, x: Any, *, seen: Any = None) -> Any:
            Net.__call__.__kwdefaults__["seen"] = kept(x * 2)
            return x

    check(Net(), kept, "seen (default of test_keyword_default.<locals>.Net.__call__)", "default argument")


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


def test_caches_that_did_not_change_keep_their_results() -> None:
    @functools.lru_cache
    def config(name: str) -> Any:
        return [name]

    first = config("a")
    walk([("config", config)]).places.restore()
    assert config("a") is first


TABLE: dict[str, Any] = {}
LATEST: Any = None


def remember(y: Any) -> None:
    global LATEST  # noqa: PLW0603  # the bug
    LATEST = y


@leaky_and_healthy
def test_global_that_code_names(kept: Keep) -> None:
    class Net(nnx.Module):
        def __call__(self, x: Any) -> Any:
            TABLE["x"] = kept(x * 2)
            return x

    check(Net(), kept, "TABLE['x']", "dict")


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
    check(Boxed(None, put, kept), kept, f"y (line {line} of draws, kept by model.box.content)", "frame")


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
    paths = ["last[0] (closure of make_act.<locals>.act)"] if kept is whole else []
    assert [path for path, _ in found_in(("wrapped", wrapped))] == paths


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


# --- exceptions ----------------------------------------------------------------------------------------------------------


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


# --- what the walk says about what it met ----------------------------------------------------------------------------------


def tracer_of(transform: Callable[..., Any]) -> Any:
    kept: list[Any] = []
    transform(lambda x: (kept.append(x * 2), x.sum())[1])(X)
    return kept[0]


def test_each_tracer_once_under_the_nearest_name() -> None:
    tracer, box = tracer_of(jax.jit), Box()
    box.far, box.near = {"a": {"b": tracer}}, [tracer]
    assert walk([("box", box), ("again", [[[tracer]]])]).tracers == (Found("box.near[0]", tracer, "list"),)


def test_a_tracer_among_the_inputs() -> None:
    assert found_in(("x", tracer_of(jax.vmap))) == [("x", "input")]


def test_arrays_are_listed_with_their_paths() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(X)
            self.box = Box()
            self.box.view = np.asarray(X)

    model = Net()
    arrays = dict(walk([("model", model), ("x", X + 1)]).arrays)
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

    paths = {path for path, _ in walk([("model", Net(nnx.Rngs(0)))]).arrays}
    assert paths == {
        *("model.layers[0].kernel", "model.layers[0].bias", "model.heads['a']"),
        *("model.stack.layers[0].kernel", "model.stack.layers[0].bias"),
    }


def test_state_reads_as_the_user_writes_it() -> None:
    state = nnx.state(nnx.Linear(3, 3, rngs=nnx.Rngs(0)))
    assert sorted(path for path, _ in walk([("state", state)]).arrays) == ["state['bias']", "state['kernel']"]


def test_name_that_grows_without_end_is_cut() -> None:
    head: Any = [tracer_of(jax.jit)]
    for _ in range(5_000):
        head = [head]
    (found,) = walk([("head", head)]).tracers
    assert len(found.path) < 1_000
    assert found.path.startswith("head[0][0]")


# --- no false finds --------------------------------------------------------------------------------------------------------

LAYERS: dict[str, Callable[[nnx.Rngs], Any]] = {
    "Linear": lambda rngs: nnx.Linear(3, 3, rngs=rngs),
    "BatchNorm": lambda rngs: nnx.BatchNorm(3, rngs=rngs),
    "Dropout": lambda rngs: nnx.Dropout(0.5, rngs=rngs),
    "MultiHeadAttention": lambda rngs: nnx.MultiHeadAttention(1, 3, decode=False, rngs=rngs),
    "LoRALinear": lambda rngs: nnx.LoRALinear(3, 3, lora_rank=2, rngs=rngs),
    "Sequential": lambda rngs: nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), jax.nn.relu),
    "RNN": lambda rngs: nnx.RNN(nnx.LSTMCell(3, 3, rngs=rngs)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_found_in_flax_layers(name: str) -> None:
    layer = LAYERS[name](nnx.Rngs(0))
    jit_call(layer, X[None] if name == "RNN" else X)
    met = walk([("model", layer), ("call", type(layer).__call__)])
    assert met.tracers == ()
    assert met.complete


def test_nothing_is_found_in_a_recurrent_cell() -> None:
    cell = nnx.LSTMCell(3, 3, rngs=nnx.Rngs(0))
    carry = cell.initialize_carry(X.shape, nnx.Rngs(0))
    nnx.jit(lambda cell, carry, x: cell(carry, x))(cell, carry, X)
    assert found_in(("cell", cell)) == []


def test_libraries_are_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer = tracer_of(jax.jit)
    for library in (jax, jnp, flax, nnx, pytest, hypothesis, np, functools):
        monkeypatch.setattr(library, "planted", [tracer], raising=False)

    class Net(nnx.Module):
        def __call__(self, x: Any) -> Any:
            return jax.planted, jnp.planted, flax.planted, nnx.planted, pytest.planted, hypothesis.planted, np.planted

    met = walk([("model", Net())])
    assert met.tracers == ()
    assert met.objects < 100


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
    met = walk([("value", value)])
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
    met = walk([("loop", loop)])
    assert (met.tracers, met.complete) == ((), True)
    assert met.places.restore() == ()


def test_the_fuse_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "MOST_OBJECTS", 1000)
    huge = [[] for _ in range(visit.MOST_OBJECTS + 10)]
    met = walk([("huge", huge)])
    assert not met.complete
    assert met.objects <= visit.MOST_OBJECTS + 2


def test_a_vocabulary_does_not_blow_the_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "MOST_OBJECTS", 1000)
    tracer = tracer_of(jax.jit)
    met = walk([("words", {str(n): n for n in range(visit.MOST_OBJECTS + 10)}), ("x", [tracer])])
    assert met.complete
    assert [found.path for found in met.tracers] == ["x[0]"]


def test_a_container_too_long_to_look_through_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "MOST_ITEMS", 100)
    assert not walk([("long", list(range(101)))]).complete
    assert walk([("long", list(range(100)))]).complete


# --- inside a trace --------------------------------------------------------------------------------------------------------


def test_the_walk_inside_a_trace_leaves_the_program_as_it_is() -> None:
    layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    met: list[Walk] = []

    def plain(state: Any, x: Any) -> Any:
        return nnx.merge(graphdef, state)(x)

    def guarded(state: Any, x: Any) -> Any:
        model = nnx.merge(graphdef, state)
        y = model(x)
        met.append(walk([("model", model), ("x", x)]))
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
    inner, live = map(compat.trace_identity, seen)
    assert compat.trace_key(inner) != compat.trace_key(live)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_line_that_created_a_tracer(transform: Callable[..., Any]) -> None:
    tracer = tracer_of(transform)
    line = tracer_of.__code__.co_firstlineno + 2
    assert f"test_walk.py:{line} (" in compat.tracer_line(tracer)
    assert compat.tracer_kind(tracer) == {jax.jit: "DynamicJaxprTracer", jax.vmap: "BatchTracer"}[transform]


def test_line_of_a_grad_tracer_under_an_outer_trace() -> None:
    kept: list[Any] = []
    loss = jax.grad(lambda x: (kept.append(x * 2), x.sum())[1])
    jax.make_jaxpr(lambda x: loss(x * 1))(X)
    assert "test_walk.py:" in compat.tracer_line(kept[0])
    loss(X)
    assert compat.tracer_line(kept[1]) == ""


def test_every_atom_is_a_type_that_holds_nothing() -> None:
    assert walk([("n", 1), ("s", "s"), ("none", None)]).objects == walk([]).objects
    assert id(list) not in visit.ATOMS
