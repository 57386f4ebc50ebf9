"""Places that are filled on purpose before the call: by code that runs before it in every process, and that calls the function which fills the place.

Such code is a constructor, the top level of a module, the body of the test, a fixture of the test. To call the model itself is no such purpose.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import functools
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from pytest_nnxcheck.compat import graph
from pytest_nnxcheck.compat.owner import is_library, owner
from pytest_nnxcheck.walk.raw_access import (
    MISSING,
    LruCache,
    cell_content,
    class_dict,
    layout,
    mro,
    top_package,
)

CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "setup")
MUTATORS = frozenset("setdefault update append appendleft extend insert add __setitem__ set".split())
"""Methods that put something into a container or a context variable."""
FILLING = frozenset(("STORE_SUBSCR", "MAP_ADD", "BUILD_CONST_KEY_MAP", "DICT_UPDATE"))
"""Operations of Python's that put something into a container."""
RUNS = (FunctionType, MethodType, functools.partial, LruCache, ModuleType)
"""Types of values that say themselves what code runs."""
SETTERS = frozenset(("setattr", "__setattr__"))
STORES = frozenset(("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"))


class InstanceOf(NamedTuple):
    """An object that is known by its class alone."""

    cls: type


class Code(NamedTuple):
    """The code of a function of the user's, and the globals that it names."""

    code: CodeType
    names: dict[str, Any]
    known: Mapping[str, Any] = {}
    """The values of local variables that are known, or `InstanceOf` their class."""


class Called(NamedTuple):
    """A call in some code."""

    path: tuple[str, ...]
    """The names of what is called: ``("tables", "build")``. A path that starts with something else than a name starts with an empty one."""
    handed: tuple[str, ...]
    """The names among its arguments."""
    made_by: tuple[str, ...] = ()
    """The path of the call that made the local object whose method it is: ``("Tables",)`` of ``tables = Tables()``."""


NO_CODE = compile("", "", "exec")
BODY: list[Code] = []
"""The code of the test that runs."""
FIXTURES: dict[str, list[Code]] = {}
"""The code of its fixtures, by their names."""
SETUPS: list[Code] = []
"""Other code that runs before it: functions such as ``setup_module``, or whoever calls `check`."""


@contextlib.contextmanager
def prepared_by(
    setups: Iterable[Code], fixtures: Mapping[str, list[Code]] | None = None, body: Iterable[Code] = ()
) -> Iterator[None]:
    """Count some code to what runs before a call in every process."""
    before, named_before = [(codes, [*codes]) for codes in (BODY, SETUPS)], {**FIXTURES}
    SETUPS.extend(setups)
    FIXTURES.update(fixtures or {})
    BODY.extend(body)
    try:
        yield
    finally:
        for codes, held in before:
            codes[:] = held
        FIXTURES.clear()
        FIXTURES.update(named_before)


def of_frames(frame: FrameType | None) -> Iterator[Code]:
    """The code of the frames of the user's functions, from the innermost on."""
    while frame is not None:
        if not is_library(frame.f_globals.get("__name__")) and frame.f_code.co_name != "<module>":
            yield Code(frame.f_code, frame.f_globals, {name: in_short(held) for name, held in frame.f_locals.items()})
        frame = frame.f_back


def in_short(value: Any) -> Any:
    """A value as far as it says what code runs, so that it is not kept alive: a function or a class, or `InstanceOf` the class of another object."""
    return value if isinstance(value, (type, *RUNS)) else InstanceOf(type(value))


def codes_behind(value: Any, receiver: Any = None) -> Iterator[Code]:
    """The code of a function of the user's, or of the constructors of a class; ``receiver`` is the object or class whose attribute it is."""
    first: Any = None
    if isinstance(value, MethodType):
        first = in_short(value.__self__)
    elif isinstance(receiver, InstanceOf | type) and not isinstance(value, staticmethod):
        cls = receiver.cls if isinstance(receiver, InstanceOf) else receiver
        first = cls if isinstance(value, classmethod) else InstanceOf(cls)
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    with contextlib.suppress(Exception):  # `unwrap` asks the user's object for an attribute
        value = inspect.unwrap(value)
    if type(value) is LruCache:
        value = wrapped(value)
    if type(value) is FunctionType and not is_library(dict.get(value.__globals__, "__name__")):
        names = value.__code__.co_varnames[: value.__code__.co_argcount]
        yield Code(
            value.__code__,
            value.__globals__,
            {**cells(value), **({} if first is None else dict.fromkeys(names[:1], first))},
        )
    elif isinstance(value, functools.partial):
        yield from codes_behind(value.func)
    elif isinstance(value, type) and not is_library(top_package(value)):
        for name in CONSTRUCTORS:
            yield from codes_behind(member(value, name), InstanceOf(value))


def cells(function: FunctionType) -> dict[str, Any]:
    """The values that a closure holds, in short."""
    held = zip(function.__code__.co_freevars, map(cell_content, function.__closure__ or ()), strict=True)
    return {name: in_short(value) for name, value in held if value is not MISSING}


def member(cls: type, name: str) -> Any:
    """The value that a class has under a name; `None` if it has none."""
    return next((class_dict(base)[name] for base in mro(cls) if name in class_dict(base)), None)


def wrapped(cache: Any) -> Any:
    """The function behind a `functools.lru_cache`."""
    return dict.get(class_dict(LruCache)["__dict__"].__get__(cache), "__wrapped__")


def constructors(classes: Iterable[type]) -> list[Code]:
    """The constructors of classes."""
    return [
        code
        for cls in classes
        for name in CONSTRUCTORS
        for code in codes_behind(class_dict(cls).get(name), InstanceOf(cls))
    ]


def reached(start: Iterable[Code], classes: Iterable[type], left_out: Iterable[CodeType] = ()) -> list[Code]:
    """Code, and what it calls: functions and classes that its globals name, and methods of ``classes``; what is ``left_out`` is not entered."""
    methods: dict[str, list[Any]] = {}
    for cls in classes:
        for name, item in class_dict(cls).items():
            methods.setdefault(name, []).append(item)
    left, ahead = {id(code) for code in left_out}, [*start]
    found: dict[tuple[int, type | None], Code] = {}
    while ahead:
        code = ahead.pop()
        key = id(code.code), own_class(code)
        if id(code.code) in left or key in found:
            continue
        found[key] = code
        for called in calls(code.code):
            # To call the model itself fills no place on purpose.
            if called.path[-1] != "__call__":
                ahead += resolved(called, code, methods)
        for name in code.code.co_names:
            for item in methods.get(name, ()):
                ahead += read_by(item)
    return [*found.values()]


def read_by(item: Any) -> Iterator[Code]:
    """The code that runs where an attribute is read: of a property, or of a descriptor of the user's."""
    if isinstance(item, property):
        yield from codes_behind(item.fget)
    elif not isinstance(item, (type, *RUNS)):
        yield from codes_behind(member(type(item), "__get__"))


def resolved(called: Called, code: Code, methods: Mapping[str, list[Any]]) -> Iterator[Code]:
    """The code that a call in some code may run; of an object whose class is not known, any of the ``methods`` of that name."""
    root, *attributes = called.path
    value = named(root, code)
    if value is None and called.made_by:
        made = value_of(called.made_by, code)
        value = InstanceOf(made) if isinstance(made, type) else None
    if root == "super" and attributes:
        own = own_class(code)
        value = (
            None if own is None else next((base for base in mro(own)[1:] if attributes[-1] in class_dict(base)), None)
        )
    elif owner_of(value) not in ("user", "ours"):
        # A transform or a builtin, that calls what it is handed: ``jax.vmap(table)``.
        yield from handed(called, code)
        return
    receiver = None
    for attribute in attributes:
        receiver, value = value, attribute_of(value, attribute)
    if value is not None:
        yield from codes_behind(value, receiver)
        cls = value.cls if isinstance(value, InstanceOf) else type(value)
        if graph.kind_of(cls) != "node" and not is_library(top_package(cls)):
            yield from codes_behind(member(cls, "__call__"), InstanceOf(cls))
    elif attributes and receiver is None:
        for item in methods.get(attributes[-1], ()):
            yield from codes_behind(item)


def handed(called: Called, code: Code) -> Iterator[Code]:
    """The functions that a call is handed."""
    for name in called.handed:
        yield from codes_behind(named(name, code))


def handed_by(code: Code) -> Iterator[Code]:
    """The functions that some code hands to what it calls."""
    for called in calls(code.code):
        yield from handed(called, code)


def value_of(path: tuple[str, ...], code: Code) -> Any:
    """The value of a path in some code; `None` if it is not known."""
    value = named(path[0], code)
    for attribute in path[1:]:
        value = attribute_of(value, attribute)
    return value


def named(name: str, code: Code) -> Any:
    """The value of a name in some code; `None` if it is not known."""
    if name in (*code.code.co_varnames, *code.code.co_cellvars, *code.code.co_freevars):
        return code.known.get(name)
    return dict.get(code.names, name, vars(builtins).get(name))


def attribute_of(value: Any, name: str) -> Any:
    """An attribute, read without the user's code; `None` if it is not known."""
    if value is None:
        return None
    if isinstance(value, ModuleType):
        return dict.get(vars(value), name)
    if isinstance(value, InstanceOf | type):
        return member(value.cls if isinstance(value, InstanceOf) else value, name)
    own = layout(type(value)).read(value) or {}
    return dict.get(own, name, member(type(value), name))


def own_class(code: Code) -> type | None:
    """The class of the object whose method some code is, as far as it is known."""
    own = code.known.get(code.code.co_varnames[0]) if code.code.co_argcount else None
    return own.cls if isinstance(own, InstanceOf) else own if isinstance(own, type) else None


def owner_of(value: Any) -> str:
    """Whose a value is; one that is not known is the user's."""
    if value is None:
        return "user"
    value = value.cls if isinstance(value, InstanceOf) else value
    module = None
    with contextlib.suppress(Exception):  # the user's code may raise anything
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return owner(module if type(module) is str else type(value).__module__)


@functools.lru_cache(maxsize=4096)
def calls(code: CodeType) -> tuple[Called, ...]:
    """The calls in a code object; of one whose source is not known, every name that it has."""
    node = definitions(code.co_filename).get((code.co_firstlineno, code.co_name))
    if node is None:
        names = [name for each in nested(code, functions=False) for name in each.co_names]
        return tuple(Called(path, ()) for name in names for path in (("", name), (name,)))
    return tuple(calls_in(ast.iter_child_nodes(node)))


@functools.lru_cache(maxsize=256)
def definitions(file: str) -> dict[tuple[int, str], ast.AST]:
    """The functions of a file by their first line, that of a decorator, and name."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    return {
        (min([node.lineno, *(each.lineno for each in node.decorator_list)]), node.name): node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def calls_in(nodes: Iterable[ast.AST]) -> Iterator[Called]:
    """The calls in syntax."""
    within = [*own_nodes(nodes)]
    made_by = makers(within)
    for node in within:
        if isinstance(node, ast.Call) and (path := path_of(node.func)):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            handed = tuple(each.id for each in arguments if isinstance(each, ast.Name))
            yield Called(path, handed, made_by.get(path[0], ()))


def makers(nodes: Iterable[ast.AST]) -> dict[str, tuple[str, ...]]:
    """The variables that are assigned once, as the result of a call, each with the path of what is called."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    once = {name: values[0] for name, values in assigned.items() if len(values) == 1}
    return {name: path_of(made.func) for name, made in once.items() if isinstance(made, ast.Call)}


def own_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Syntax and what is in it, but not in functions that it defines: they may be the model's own."""
    ahead = [*nodes]
    while ahead:
        node = ahead.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            ahead += ast.iter_child_nodes(node)


def path_of(node: ast.AST) -> tuple[str, ...]:
    """The names of what is called; the root of a chain of calls is its own: ``jnp.zeros(3).sum()`` is jnp's. Empty for ``array.at[0].set``."""
    attributes: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "at":
            return ()
        elif isinstance(node, ast.Call | ast.Subscript) and attributes:
            node = node.func if isinstance(node, ast.Call) else node.value
            attributes[1:] = []
        else:
            return ("", *attributes[:1]) if attributes else ()
    return (node.id, *reversed(attributes))


def called_at_import(names: Iterable[str]) -> list[Code]:
    """The functions that the top-level code of modules calls."""
    return [
        code
        for name in sorted({*names})
        if (module := sys.modules.get(name)) is not None
        for called in calls_at_import(module)
        for code in resolved(called, Code(NO_CODE, vars(module)), {})
    ]


@functools.cache
def calls_at_import(module: ModuleType) -> tuple[Called, ...]:
    """The calls of the top-level code of a module; none where its source is not known."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return ()
    return tuple(calls_in([tree]))


def fills(code: Code, label: str, *, attribute: bool) -> bool:
    """True if some code puts something into the place of a name: an ``attribute`` or a variable, or else a container.

    An attribute that a constructor sets does not count: it sets most of them to `None`.
    """
    is_constructor = code.code.co_name in CONSTRUCTORS
    if not attribute and not is_constructor and (containers := filled_containers(code.code)) is not None:
        return label in containers
    stores = STORES - {"STORE_ATTR"} if is_constructor else STORES
    for each in nested(code.code, functions=False):
        operations = [*dis.get_instructions(each)]
        names = {*each.co_names, *each.co_freevars, *each.co_cellvars}
        if attribute:
            # What is set to a constant is not filled.
            before = [None, *operations]
            stored = any(
                op.opname in stores and op.argval == label and not (earlier and earlier.opname == "LOAD_CONST")
                for earlier, op in zip(before, operations, strict=False)
            )
            by_name = bool(names & SETTERS) and label in each.co_consts and not is_constructor
            # A descriptor keeps its value under a name of its own.
            if stored or by_name or (each.co_name == "__get__" and names & {*SETTERS, "__dict__", "vars"}):
                return True
        elif label in names and (
            names & MUTATORS or any(op.opname in FILLING or (op.opname == "BUILD_MAP" and op.arg) for op in operations)
        ):
            return True
    return False


def of_another(code: Code, label: str, cls: type) -> bool:
    """True if some code is a method of other classes than ``cls``, and puts something into the attribute of its own object alone."""
    own = own_class(code)
    if own is None or own in mro(cls) or cls in mro(own):
        return False
    node = definitions(code.code.co_filename).get((code.code.co_firstlineno, code.code.co_name))
    owners = {
        path_of(each.value)
        for each in own_nodes(ast.iter_child_nodes(node) if node is not None else ())
        if isinstance(each, ast.Attribute) and each.attr == label
    }
    return owners == {code.code.co_varnames[:1]}


@functools.lru_cache(maxsize=4096)
def filled_containers(code: CodeType) -> frozenset[str] | None:
    """The last names of the containers that a function puts something into; `None` where its source is not known."""
    # Not by its operations: those of a test have the dicts with which pytest explains its assertions.
    node = definitions(code.co_filename).get((code.co_firstlineno, code.co_name))
    if node is None:
        return None
    places: list[ast.AST] = []
    for each in own_nodes(ast.iter_child_nodes(node)):
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
            places.append(each.value)
        elif isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr in MUTATORS:
            places.append(each.func.value)
        elif isinstance(each, ast.AugAssign | ast.Assign) and not is_literal(each.value):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            places += [
                target for target in targets if not isinstance(target, ast.Name) or target.id not in code.co_varnames
            ]
    return frozenset(filter(None, map(last_name, places)))


def attributes_of(code: CodeType) -> Iterator[str]:
    """The attributes that a function sets, of whatever object."""
    yield from (op.argval for op in dis.get_instructions(code) if op.opname == "STORE_ATTR")
    if SETTERS & {*code.co_names}:
        yield from (name for name in code.co_consts if type(name) is str and name.isidentifier())


def literals(code: CodeType) -> dict[str, Any]:
    """The attributes that a function sets to a literal, which may be a tuple of literals, with its value."""
    found: dict[str, Any] = {}
    node = definitions(code.co_filename).get((code.co_firstlineno, code.co_name))
    for each in own_nodes(ast.iter_child_nodes(node)) if node is not None else ():
        if not isinstance(each, ast.Assign | ast.AnnAssign) or each.value is None:
            continue
        for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
            pairs = [(target, each.value)]
            if (
                isinstance(target, ast.Tuple)
                and isinstance(each.value, ast.Tuple)
                and len(target.elts) == len(each.value.elts)
            ):
                pairs = [*zip(target.elts, each.value.elts, strict=True)]
            for place, value in pairs:
                with contextlib.suppress(ValueError, TypeError):
                    if isinstance(place, ast.Attribute):
                        found[place.attr] = ast.literal_eval(value)
    return found


def is_literal(node: ast.AST) -> bool:
    """True for a value that has no array in it, such as ``[None]``."""
    try:
        ast.literal_eval(node)
    except ValueError:
        return False
    return True


def last_name(node: ast.AST) -> str:
    """The last name of a path: ``tables`` of ``self.tables["a"][0]``."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def nested(code: CodeType, *, functions: bool = True) -> Iterator[CodeType]:
    """A code object and those inside it; or, without ``functions``, comprehensions alone."""
    yield code
    for constant in code.co_consts:
        if type(constant) is CodeType and (functions or constant.co_name.endswith("comp>")):
            yield from nested(constant, functions=functions)
