"""How the module was built and called: the test's own code, with the values of its arguments, as the main part of a pasted program."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from pytest_nnxcheck.reproducer.literals import Literals, NotLiteral
from pytest_nnxcheck.reproducer.own_source import bound_in, names_of
from pytest_nnxcheck.reproducer.user_source import NoSource, Sources, function_node, read_module

FIXTURE = "nnx_wrap"
BUILT_IN = {"tmp_path": "__import__('pathlib').Path(__import__('tempfile').mkdtemp())"}
"""Fixtures of pytest that a line stands for."""
FILL_IN = "FILL_IN"


@dataclass(frozen=True)
class Origin:
    """What pytest knows of a test: its fixtures' functions, its parameters, and their positions in the lists they come from."""

    fixtures: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    positions: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Usage:
    """The user's part of a program: definitions, the lines that make the arguments, the line that calls, and places to fill in."""

    sources: Sources
    setup: tuple[str, ...]
    call: str
    holes: tuple[str, ...]

    @property
    def names(self) -> frozenset[str]:
        """The names that mean something of the user's."""
        return self.sources.names | bound_in("\n".join(self.setup)) | {*self.sources.missing}


@dataclass
class Writer:
    """Collects the lines that make the arguments of a test."""

    origin: Origin
    sources: Sources = field(default_factory=Sources)
    setup: list[str] = field(default_factory=list)
    holes: list[str] = field(default_factory=list)
    _made: dict[str, str] = field(default_factory=dict)

    def finish(self, call: str) -> Usage:
        return Usage(self.sources, tuple(self.setup), call, tuple(self.holes))

    def value(self, name: str, value: Any, test: Any = None) -> str:
        """The text of an argument: a literal, its fixture called, its place in a list of parameters, or a place to fill in."""
        if name == FIXTURE:
            return FIXTURE
        ways = (self._exact, self._fixture, functools.partial(self._parameter, function=test), self._like)
        for way in ways:
            try:
                return way(name, value)
            except (NotLiteral, NoSource):
                continue
        return self.hole(name, f"{kind_of(value)}, which cannot be written here")

    def transform(self, function: Any) -> None:
        """Copy a registered transform."""
        name = str(getattr(function, "__name__", "transform"))
        with contextlib.suppress(NoSource):
            if self.sources.take_function(inspect.unwrap(function)) == name and not getattr(
                function, "__closure__", ()
            ):
                return
        if name.isidentifier():
            self.hole(name, "a transform whose source cannot be copied")

    def hole(self, name: str, why: str) -> str:
        """A marked place to fill in."""
        place = f"{name}_value" if not name.isidentifier() or name in self.sources.names else name
        if place not in self.holes:
            self.holes.append(place)
            self.setup.append(f"{place} = {FILL_IN}  # {name} was {one_line(why)}: write a value here")
        return place

    def _exact(self, _name: str, value: Any) -> str:
        writer = Literals()
        text = writer.write(value)
        if writer.stand_ins:
            raise NotLiteral
        self._named(writer)
        return text

    def _like(self, name: str, value: Any) -> str:
        """An array of the same shape."""
        writer = Literals()
        text = writer.write(value)
        self._named(writer)
        place = f"{name}_like"
        self.setup.append(f"{place} = {text}  # of the shape of {name}; its values are not written here")
        return place

    def _named(self, writer: Literals) -> None:
        for module, name in sorted(writer.named):
            self.sources.take_reference(module, name)

    def _fixture(self, name: str, _value: Any) -> str:
        function = self.origin.fixtures.get(name)
        if name in self._made:
            return self._made[name]
        if function is not None and name in BUILT_IN:
            return BUILT_IN[name]
        if function is None or inspect.ismethod(function):
            raise NotLiteral
        plain = inspect.unwrap(function)
        if plain.__module__.partition(".")[0] in ("_pytest", "pytest", "hypothesis"):
            raise NotLiteral
        own = self.sources.take_function(plain)
        given = [
            f"{parameter}={self._dependency(name, parameter)}" for parameter in inspect.signature(plain).parameters
        ]
        made = f"fixture_{name}"
        line = f"{own}({', '.join(given)})"
        if inspect.isgeneratorfunction(plain):
            self.setup.append(f"{made}_steps = {line}")
            # Not when the modules that it needs are gone already.
            self.setup.append(f"__import__('atexit').register({made}_steps.close)")
            line = f"next({made}_steps)"
        self.setup.append(f"{made} = {line}")
        self._made[name] = made
        return made

    def _dependency(self, of: str, name: str) -> str:
        if name == "request":
            return f"__import__('types').SimpleNamespace(param={self._exact(of, self.origin.parameters.get(of))})"
        if name in self.origin.parameters and name not in self.origin.fixtures:
            return self.value(name, self.origin.parameters[name])
        try:
            return self._fixture(name, None)
        except NotLiteral:
            return self.hole(name, "a fixture")

    def _parameter(self, name: str, _value: Any, *, function: Any) -> str:
        """The element of the list that ``parametrize`` was given, as the test's own source has it."""
        position = self.origin.positions.get(name)
        module = inspect.getmodule(function)
        if position is None or module is None:
            raise NotLiteral
        user = read_module(module)
        element = parameter_of(function_node(user, function), name, position)
        if element is None or names_of(element) & user.left_out:
            raise NotLiteral
        self.sources.take(module, names_of(element))
        return ast.unparse(element)


def parameter_of(node: ast.AST, name: str, position: int) -> ast.expr | None:
    """The element for one argument, out of a ``parametrize`` whose list is written out."""
    for decorator in getattr(node, "decorator_list", ()):
        if not (isinstance(decorator, ast.Call) and ast.unparse(decorator.func).endswith("parametrize")):
            continue
        given = dict(enumerate(decorator.args))
        given |= {
            {"argnames": 0, "argvalues": 1}.get(str(keyword.arg), 9): keyword.value for keyword in decorator.keywords
        }
        names = argument_names(given.get(0))
        values = given.get(1)
        if name not in names or not isinstance(values, ast.List | ast.Tuple) or position >= len(values.elts):
            continue
        element = values.elts[position]
        if isinstance(element, ast.Call) and ast.unparse(element.func).endswith("param"):
            parts = element.args
        elif len(names) > 1 and isinstance(element, ast.List | ast.Tuple):
            parts = element.elts
        else:
            parts = [element]
        return parts[names.index(name)] if len(parts) == len(names) else None
    return None


def argument_names(node: ast.expr | None) -> list[str]:
    """The names that a ``parametrize`` gives: ``"a, b"`` or ``["a", "b"]``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [name.strip() for name in node.value.split(",") if name.strip()]
    if isinstance(node, ast.List | ast.Tuple):
        return [str(element.value) for element in node.elts if isinstance(element, ast.Constant)]
    return []


def kind_of(value: Any) -> str:
    return f"a {type(value).__qualname__}"


def one_line(text: str) -> str:
    """Text for a comment: nothing in it ends the line."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


# --- a test of pytest


def of_test(body: Callable[..., object], origin: Origin, own: Sequence[Callable[..., Any]] = ()) -> Usage:
    """How a test calls what it wrapped. Where its source cannot be had, a place to fill in.

    ``own`` are the functions of the user's own transforms.
    """
    writer = writer_of(own, origin)
    call = functools.partial(body)
    plain = inspect.unwrap(getattr(call.func, "__func__", call.func))
    given_to = inspect.signature(plain).bind_partial(*call.args, **call.keywords).arguments
    first = next(iter(call.args), None)  # of a method its instance or its class, of a static method a fixture
    classes = (first if isinstance(first, type) else type(first)).__mro__
    is_bound = plain.__qualname__.rpartition(".")[0] in [cls.__qualname__ for cls in classes]
    instance = given_to.pop(next(iter(given_to))) if is_bound else None
    try:
        name = target(writer, plain, instance)
    except NoSource as error:
        writer.hole("test", f"a function whose source cannot be had ({error})")
        return writer.finish("test(nnx_wrap=nnx_wrap)")
    given = [f"{key}={writer.value(key, value, plain)}" for key, value in given_to.items()]
    for key, value in inspect.getclosurevars(plain).nonlocals.items():
        writer.setup.append(f"{key} = {writer.value(key, value, plain)}")
    return writer.finish(f"{name}({', '.join(given)})")


def target(writer: Writer, function: Any, instance: object | None) -> str:
    """The expression that is called: a function, or the method of a class, or of a new instance of it. Raises `NoSource`."""
    if isinstance(instance, type):
        return f"{writer.sources.take_test_class(instance, function.__name__)}.{function.__name__}"
    if instance is None:
        return writer.sources.take_function(function)
    cls = type(instance)
    name = writer.sources.take_test_class(cls, function.__name__)
    writer.setup.append(f"instance = {name}()")
    if hasattr(cls, "setup_method"):
        wants = len(inspect.signature(cls.setup_method).parameters) > 1
        writer.setup.append(f"instance.setup_method({f'instance.{function.__name__}' if wants else ''})")
    return f"instance.{function.__name__}"


# --- a check outside pytest


def of_check(
    frame: FrameType | None,
    subject: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    own: Sequence[Callable[..., Any]] = (),
) -> Usage:
    """How the caller of a ``check`` made the call: his own statement, or his function; else the call with its arguments written out."""
    for way in (from_statement, from_function):
        try:
            if frame is not None:
                return way(frame, own)
        except NoSource:
            continue
    writer = writer_of(own)
    name = subject_text(writer, subject)
    given = [writer.value(f"argument_{number}", value) for number, value in enumerate(args)]
    given += [f"{key}={writer.value(key, value)}" for key, value in kwargs.items()]
    return writer.finish(f"nnx_wrap({name})({', '.join(given)})")


def subject_text(writer: Writer, subject: Any) -> str:
    """A function or class by name; of an object its class, for the reader to build."""
    owner = getattr(subject, "__self__", None)
    cls = type(subject) if owner is None else type(owner)
    if inspect.isfunction(subject):
        try:
            return writer.sources.take_function(subject)
        except NoSource:
            return writer.hole("subject", f"the function {subject.__qualname__}")
    with contextlib.suppress(NoSource):
        writer.sources.take_reference(cls.__module__, cls.__qualname__.partition(".")[0])
    name = writer.hole("model", f"a {cls.__qualname__}")
    return name if owner is None else f"{name}.{subject.__name__}"


def writer_of(own: Sequence[Callable[..., Any]], origin: Origin | None = None) -> Writer:
    writer = Writer(origin or Origin())
    for transform in own:
        writer.transform(transform)
    return writer


def from_statement(frame: FrameType, own: Sequence[Callable[..., Any]]) -> Usage:
    """A check at the top of a module or script. Raises `NoSource`."""
    if frame.f_code.co_name != "<module>":
        raise NoSource("in a function")
    module = inspect.getmodule(frame.f_code)
    if module is None:
        raise NoSource("in no module")
    user = read_module(module)
    calls = [
        node
        for node in ast.walk(user.tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in ("check", "assert_invariants")
        and node.lineno <= frame.f_lineno <= (node.end_lineno or node.lineno)
    ]
    if not calls or not calls[-1].args:
        raise NoSource("no call of check in this line")
    call = calls[-1]
    writer = writer_of(own)
    keywords = [node.value for node in call.keywords if node.arg == "kwargs"]
    writer.sources.take(module, names_of(*call.args, *keywords))
    rest = [ast.unparse(node) for node in call.args[1:]] + [f"**{ast.unparse(node)}" for node in keywords]
    return writer.finish(f"nnx_wrap({ast.unparse(call.args[0])})({', '.join(rest)})")


def from_function(frame: FrameType, own: Sequence[Callable[..., Any]]) -> Usage:
    """A check in a function: the function itself is called, with the arguments that it has. Raises `NoSource`."""
    module = inspect.getmodule(frame.f_code)
    if module is None or frame.f_code.co_name == "<module>":
        raise NoSource("in no function")
    user = read_module(module)
    node = function_node(user, frame)
    if node not in user.tree.body or not isinstance(node, ast.FunctionDef):
        raise NoSource("in a function of a function, or in a method")
    writer = writer_of(own)
    writer.sources.take_definition(module, node)
    names = [parameter.arg for parameter in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    given = [f"{name}={writer.value(name, frame.f_locals.get(name))}" for name in names]
    return writer.finish(f"{node.name}({', '.join(given)})")
