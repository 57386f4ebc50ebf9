"""The way in which a test, or the caller of a check, makes its calls: the user's own code, and the values of its arguments as text."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from pytest_nnxcheck.paste.slicer import LEFT_OUT, NoSource, Slice, globals_in, names_of, read

BUILT_IN = {"nnx_wrap": "nnx_wrap", "tmp_path": "__import__('pathlib').Path(__import__('tempfile').mkdtemp())"}
"""Fixtures that a line is written for."""
STAND_IN = ("check", "assert_invariants")
"""Functions of this package that a program replaces with a few lines of its own."""
MOST_ELEMENTS = 64
"""The most elements of an array that a program writes out. In place of a larger array it makes one of the same shape."""


@dataclass(frozen=True)
class Origin:
    """The data that pytest has of a test: the functions of its fixtures, its parameters, and the names and values of each ``parametrize``."""

    fixtures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    lists: Sequence[tuple[Any, Any]] = ()


class Fixture:
    """Takes the place of the value of a fixture that another fixture asks for: only pytest has it."""


@dataclass
class Usage:
    """The user's part of a program: what is copied, the lines that make the arguments, and the line that calls."""

    origin: Origin = field(default_factory=Origin)
    slice: Slice = field(default_factory=Slice)
    setup: dict[str, None] = field(default_factory=dict)
    call: str = ""

    def value(self, name: str, value: Any, test: Any = None) -> str:
        """Write an argument as text, in the first way that works.

        The ways are a call of its fixture, a literal, the name of a definition, its place in a list of parameters, an array like it, and a place to fill in.
        """
        if name in BUILT_IN:
            return BUILT_IN[name]
        fixture, parameter = functools.partial(self._fixture, name), functools.partial(self._parameter, name, test)
        for way in (fixture, literal, self.reference, parameter, array_like):
            # A value may be an array that is deleted, or a tracer.
            with contextlib.suppress(NoSource, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
                if text := way(value):
                    return text
        return self.hole(name, value)

    def hole(self, name: str, value: Any) -> str:
        """Mark a place to fill in. Nothing has the name ``FILL_IN``, so the program ends at that line."""
        place = re.sub(r"\W", "_", name)
        self.setup[f"{place} = FILL_IN  # {place} was a {type(value).__qualname__}: write a value here"] = None
        return place

    def reference(self, value: Any) -> str:
        """The name of a function or a class that a module has: it is copied, or imported."""
        name, home = value.__qualname__, sys.modules[value.__module__]
        if operator.attrgetter(name)(home) is not value:
            return ""
        self.slice.take_from(home, name.partition(".")[0])
        return str(name)

    def _fixture(self, name: str, _value: Any) -> str:
        function = self.origin.fixtures.get(name)
        plain = inspect.unwrap(function) if function is not None and not inspect.ismethod(function) else None
        if plain is None or plain.__module__.partition(".")[0] in LEFT_OUT:
            return ""
        own, parameters, made = self.slice.take_function(plain), self.origin.parameters, f"fixture_{name}"
        given = []
        for each in inspect.signature(plain).parameters:
            if each == "request":
                param = self.value(f"{name}.param", parameters.get(name))
                given.append(f"request=__import__('types').SimpleNamespace(param={param})")
            elif each == name:  # the fixture that it overrides
                given.append(f"{each}={self.hole(f'overridden_{each}', Fixture())}")
            else:
                given.append(f"{each}={self.value(each, parameters.get(each, Fixture()))}")
        line = f"{own}({', '.join(given)})"
        if inspect.isgeneratorfunction(plain):
            self.setup[f"{made}_steps = {line}"] = None
            # Not when the modules that it needs are gone already.
            self.setup[f"__import__('atexit').register({made}_steps.close)"] = None
            line = f"next({made}_steps)"
        self.setup[f"{made} = {line}"] = None
        return made

    def _parameter(self, name: str, test: Any, value: Any) -> str:
        """The place in the list that ``parametrize`` was given, as the test's own source has it."""
        source = read(sys.modules[test.__module__])
        calls = [each for each in source.definition(test).decorator_list if isinstance(each, ast.Call)]
        for call in (each for each in calls if ast.unparse(each.func).endswith("parametrize")):
            names, values = call.args[:2]
            words = words_in(ast.literal_eval(names))
            lists = [rows for given, rows in self.origin.lists if name in words and words_in(given) == words]
            for number, row in enumerate(lists[0] if lists and not names_of(values) & source.left_out else ()):
                if (row[words.index(name)] if len(words) > 1 else row) is value:
                    self.slice.take(source.module, globals_in(ast.unparse(values)))
                    return f"[*{ast.unparse(values)}][{number}]" + (f"[{words.index(name)}]" if len(words) > 1 else "")
        return ""


def words_in(names: Any) -> list[str]:
    """The names that a ``parametrize`` gives: ``"a, b"`` or ``["a", "b"]``."""
    return [word.strip() for word in names.split(",") if word.strip()] if isinstance(names, str) else [*names]


def one_line(text: str) -> str:
    """Text for a comment: nothing in it ends the line."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def literal(value: Any) -> str:
    """The text that reads back as the same value: Python's own values, and small arrays; empty where no short text does."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if isinstance(value, jax.ShapeDtypeStruct):
        return f"jax.ShapeDtypeStruct({value.shape}, {value.dtype.name!r})"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"jax.random.wrap_key_data({literal(jax.random.key_data(value))})"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        short = value.size <= MOST_ELEMENTS
        return f"jnp.array({np.asarray(value).tolist()!r}, {value.dtype.name!r})" if short else ""
    with contextlib.suppress(ValueError, SyntaxError):
        return text if ast.literal_eval(text := ascii(value)) == value else ""
    return ""


def array_like(value: Any) -> str:
    """An array of the same shape and type; empty for anything else."""
    import jax
    import numpy as np

    return f"jnp.ones({value.shape}, {value.dtype.name!r})" if isinstance(value, jax.Array | np.ndarray) else ""


# --- a test of pytest, and a check outside of it


def of_test(body: Callable[..., object], origin: Origin) -> Usage:
    """The way in which a test calls the object that it wrapped. Raises `NoSource`."""
    usage, call = Usage(origin), functools.partial(body)
    plain = inspect.unwrap(getattr(call.func, "__func__", call.func))
    given = inspect.signature(plain).bind_partial(*call.args, **call.keywords).arguments
    first = next(iter(given.values()), None)  # older hypothesis gives ``self`` by name
    cls: Any = first if isinstance(first, type) else type(first)
    if plain.__qualname__.rpartition(".")[0] in [base.__qualname__ for base in cls.__mro__]:
        given.pop(next(iter(given)))
        name = method_of(usage, cls, plain.__name__, of_class=isinstance(first, type))
    else:
        name = usage.slice.take_function(plain)
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


def of_check(frame: FrameType | None, subject: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Usage:
    """The call that the caller of a ``check`` made: the function that it is in, or that line of a script; else with its arguments written out."""
    usage, code = Usage(), None if frame is None else frame.f_code
    with contextlib.suppress(NoSource, AttributeError, TypeError):
        if frame is not None and code is not None:
            module: Any = inspect.getmodule(code)
            function: Any = inspect.unwrap(getattr(module, code.co_name, of_check))
            if getattr(function, "__code__", None) is code:
                here = {name: frame.f_locals.get(name) for name in inspect.signature(function).parameters}
                return of_test(functools.partial(function, **here), Origin())
            if code.co_name == "<module>":
                usage.call = check_in(usage, module, frame.f_lineno)
    if not usage.call:
        given = {f"argument_{number}": value for number, value in enumerate(args)}
        values = [*map(usage.value, given, given.values())]
        values += [f"{key}={usage.value(key, value)}" for key, value in kwargs.items()]
        usage.call = f"nnx_wrap({usage.value('subject', subject)})({', '.join(values)})"
    return usage


def check_in(usage: Usage, module: ModuleType, line: int) -> str:
    """The ``check`` in a line of a script; empty where it is in a function. Raises `NoSource`."""
    for call in (node for node in ast.walk(read(module).tree) if isinstance(node, ast.Call)):
        if call.lineno <= line <= (call.end_lineno or 0) and ast.unparse(call.func) in STAND_IN:
            usage.slice.take(module, globals_in(ast.unparse(call)))
            return ast.unparse(call)
    return ""
