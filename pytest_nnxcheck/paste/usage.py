"""How a test, or the caller of a check, makes its calls: the user's own code, and the values of its arguments as text."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from pytest_nnxcheck.paste.slicer import LEFT_OUT, NoSource, Slice, globals_in, is_copied, names_of, read

FILL_IN = "FILL_IN"
BUILT_IN = {"nnx_wrap": "nnx_wrap", "tmp_path": "__import__('pathlib').Path(__import__('tempfile').mkdtemp())"}
"""Fixtures that a line is written for."""
STAND_IN = ("check", "assert_invariants")
"""Functions of this package that a program replaces with a few lines of its own."""
MOST_ELEMENTS = 64
"""The most elements of an array that a program writes out. In place of a larger array it makes one of the same shape."""


@dataclass(frozen=True)
class Origin:
    """What pytest knows of a test: the functions of its fixtures, its parameters, and the names and values of each ``parametrize``."""

    fixtures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    lists: Sequence[tuple[Any, Any]] = ()

    def rows(self, words: list[str]) -> Iterator[tuple[int, Sequence[Any]]]:
        """The numbered rows of the ``parametrize`` that gives these names."""
        for number, row in enumerate(next((values for names, values in self.lists if words_in(names) == words), ())):
            given = isinstance(row, tuple) and getattr(row, "values", None)  # of a pytest.param
            yield number, given or (row if len(words) > 1 else [row])


@dataclass
class Usage:
    """The user's part of a program: what is copied, the lines that make the arguments, the line that calls, and places to fill in."""

    origin: Origin = field(default_factory=Origin)
    slice: Slice = field(default_factory=Slice)
    setup: dict[str, None] = field(default_factory=dict)
    holes: dict[str, None] = field(default_factory=dict)
    call: str = ""

    def value(self, name: str, value: Any, test: Any = None) -> str:
        """Write an argument as text, in the first way that works.

        The ways are a literal, the name of a definition, a call of its fixture, its place in a list of parameters, an array like it, and a place to fill in.
        """
        if name in BUILT_IN:
            return BUILT_IN[name]
        fixture, parameter = functools.partial(self._fixture, name), functools.partial(self._parameter, name, test)
        for way in (literal, self.reference, fixture, parameter, functools.partial(literal, like=True)):
            # A value may be an array that is deleted, or a tracer.
            with contextlib.suppress(NoSource, AttributeError, KeyError, RuntimeError, TypeError, ValueError):
                if text := way(value):
                    return text
        return self.hole(name, f"a {type(value).__qualname__}, which cannot be written here")

    def hole(self, name: str, why: str) -> str:
        """A marked place to fill in."""
        place = name if name.isidentifier() else f"{name}_value"
        self.holes[place] = None
        self.setup[f"{place} = {FILL_IN}  # {name} was {one_line(why)}: write a value here"] = None
        return place

    def reference(self, value: Any) -> str:
        """The name of a function or a class that a module has: it is copied, or imported."""
        name, home = value.__qualname__, sys.modules[value.__module__]
        if operator.attrgetter(name)(home) is not value:
            return ""
        root = name.partition(".")[0]
        if is_copied(home) or home in self.slice.texts:
            self.slice.take(home, [root])
        elif home.__name__ != "builtins":
            self.slice.import_line(f"from {home.__name__} import {root}", home.__name__)
        return str(name)

    def _fixture(self, name: str, _value: Any) -> str:
        function = self.origin.fixtures.get(name)
        plain = inspect.unwrap(function) if function is not None and not inspect.ismethod(function) else None
        if plain is None or plain.__module__.partition(".")[0] in LEFT_OUT:
            return ""
        own, made = self.slice.take_function(plain), f"fixture_{name}"
        line = f"{own}({', '.join(f'{each}={self._dependency(name, each)}' for each in inspect.signature(plain).parameters)})"
        if inspect.isgeneratorfunction(plain):
            self.setup[f"{made}_steps = {line}"] = None
            # Not when the modules that it needs are gone already.
            self.setup[f"__import__('atexit').register({made}_steps.close)"] = None
            line = f"next({made}_steps)"
        self.setup[f"{made} = {line}"] = None
        return made

    def _dependency(self, of: str, name: str) -> str:
        if name == "request":
            return f"__import__('types').SimpleNamespace(param={self.value(f'{of}.param', self.origin.parameters.get(of))})"
        if name in self.origin.fixtures:
            return BUILT_IN.get(name) or self._fixture(name, None) or self.hole(name, "a fixture")
        return self.value(name, self.origin.parameters.get(name))

    def _parameter(self, name: str, test: Any, value: Any) -> str:
        """The place in the list that ``parametrize`` was given, as the test's own source has it."""
        source = read(sys.modules[test.__module__])
        for decorator in source.definition(test).decorator_list:
            if not isinstance(decorator, ast.Call) or not ast.unparse(decorator.func).endswith("parametrize"):
                continue
            names, values = decorator.args[:2]
            words = words_in(ast.literal_eval(names))
            for number, row in self.origin.rows(words) if not names_of(values) & source.left_out else ():
                if name in words and row[words.index(name)] is value:
                    self.slice.take(source.module, globals_in(ast.unparse(values)))
                    return f"[*{ast.unparse(values)}][{number}]" + (f"[{words.index(name)}]" if len(words) > 1 else "")
        return ""


def words_in(names: Any) -> list[str]:
    """The names that a ``parametrize`` gives: ``"a, b"`` or ``["a", "b"]``."""
    return [word.strip() for word in names.split(",") if word.strip()] if isinstance(names, str) else [*names]


def one_line(text: str) -> str:
    """Text for a comment: nothing in it ends the line."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


class Text(str):
    """What a container prints as it is."""

    __slots__ = ()
    __repr__ = str.__str__


def literal(value: Any, *, like: bool = False) -> str:
    """What reads back as the same value; empty where no short text does. Of a large array a ``like`` one is of its shape."""
    import jax

    leaves, tree = jax.tree.flatten(value, is_leaf=lambda leaf: type(leaf) not in (list, tuple, dict))
    texts = [Text(leaf_text(leaf, like=like)) for leaf in leaves]
    text = ascii(jax.tree.unflatten(tree, texts)) if all(texts) else ""
    with contextlib.suppress(SyntaxError):
        return text if names_of(ast.parse(text)) <= {"jax", "jnp"} else ""
    return ""


def leaf_text(value: Any, *, like: bool) -> str:
    """The same of what is no container."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if isinstance(value, jax.ShapeDtypeStruct):
        return f"jax.ShapeDtypeStruct({value.shape}, {value.dtype.name!r})"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return f"jax.random.wrap_key_data({leaf_text(jax.random.key_data(value), like=like)})"
        if value.size > MOST_ELEMENTS:
            return f"jnp.ones({value.shape}, {value.dtype.name!r})" if like else ""
        return f"jnp.array({np.asarray(value).tolist()!r}, {value.dtype.name!r})"
    with contextlib.suppress(ValueError, SyntaxError, TypeError):
        return text if ast.literal_eval(text := ascii(value)) == value else ""
    return ""


# --- a test of pytest, and a check outside of it


def of_test(body: Callable[..., object], origin: Origin, own: Sequence[Callable[..., Any]] = ()) -> Usage:
    """How a test calls what it wrapped; ``own`` are the functions of the user's own transforms."""
    usage, call = usage_with(own, origin), functools.partial(body)
    plain = inspect.unwrap(getattr(call.func, "__func__", call.func))
    given = inspect.signature(plain).bind_partial(*call.args, **call.keywords).arguments
    first = next(iter(call.args), None)
    cls: Any = first if isinstance(first, type) else type(first)
    try:
        if plain.__qualname__.rpartition(".")[0] in [base.__qualname__ for base in cls.__mro__]:
            given.pop(next(iter(given)))
            name = method_of(usage, cls, plain.__name__, of_class=isinstance(first, type))
        else:
            name = usage.slice.take_function(plain)
    except NoSource as error:
        name, given = usage.hole("test", f"a function whose source cannot be had ({error})"), {"nnx_wrap": None}
    arguments = [f"{key}={usage.value(key, value, plain)}" for key, value in given.items()]
    for key, value in inspect.getclosurevars(plain).nonlocals.items():
        usage.setup[f"{key} = {usage.value(key, value, plain)}"] = None
    usage.call = f"{name}({', '.join(arguments)})"
    return usage


def method_of(usage: Usage, cls: Any, name: str, *, of_class: bool) -> str:
    """A method of a class of tests, which is copied: the class's own, or that of an instance. Raises `NoSource`."""
    usage.slice.take(sys.modules[cls.__module__], [cls.__qualname__.partition(".")[0]])
    if of_class:
        return f"{cls.__qualname__}.{name}"
    usage.setup[f"instance = {cls.__qualname__}()"] = None
    if (set_up := getattr(cls, "setup_method", None)) is not None:
        given = f"instance.{name}" if len(inspect.signature(set_up).parameters) > 1 else ""
        usage.setup[f"instance.setup_method({given})"] = None
    return f"instance.{name}"


def of_check(
    frame: FrameType | None, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], own: Sequence[Any] = ()
) -> Usage:
    """How the caller of a ``check`` made the call: the function that it is in, or that line of a script; else with its arguments written out."""
    usage, module = usage_with(own), inspect.getmodule(frame.f_code) if frame is not None else None
    with contextlib.suppress(NoSource, TypeError):
        if frame is not None and module is not None:
            function: Any = inspect.unwrap(getattr(module, frame.f_code.co_name, of_check))
            if getattr(function, "__code__", None) is frame.f_code:
                given = {name: frame.f_locals.get(name) for name in inspect.signature(function).parameters}
                return of_test(functools.partial(function, **given), Origin(), own)
            if frame.f_code.co_name == "<module>":
                usage.call = check_in(usage, module, frame.f_lineno)
    if not usage.call:
        owner = getattr(subject, "__self__", subject)
        made = f"a {type(owner).__qualname__}"
        with contextlib.suppress(NoSource, AttributeError, KeyError):
            usage.reference(type(owner))
        text = usage.value("subject", subject) if inspect.isfunction(subject) else usage.hole("model", made)
        text += "" if owner is subject else f".{subject.__name__}"
        given = {f"argument_{number}": value for number, value in enumerate(args)}
        values = [*map(usage.value, given, given.values())]
        values += [f"{key}={usage.value(key, value)}" for key, value in kwargs.items()]
        usage.call = f"nnx_wrap({text})({', '.join(values)})"
    return usage


def check_in(usage: Usage, module: ModuleType, line: int) -> str:
    """The ``check`` in a line of a script; empty where it is in a function. Raises `NoSource`."""
    for call in (node for node in ast.walk(read(module).tree) if isinstance(node, ast.Call)):
        if call.lineno <= line <= (call.end_lineno or 0) and ast.unparse(call.func) in STAND_IN:
            usage.slice.take(module, globals_in(ast.unparse(call)))
            return ast.unparse(call)
    return ""


def usage_with(own: Sequence[Callable[..., Any]], origin: Origin | None = None) -> Usage:
    """A new one, with the transforms that the user registered."""
    usage = Usage(origin or Origin())
    for transform in own:
        name, copied = str(getattr(transform, "__name__", "transform")), ""
        with contextlib.suppress(NoSource):
            copied = usage.slice.take_function(inspect.unwrap(transform))
        if name.isidentifier() and (copied != name or getattr(transform, "__closure__", None)):
            usage.hole(name, "a transform whose source cannot be copied")
    return usage
