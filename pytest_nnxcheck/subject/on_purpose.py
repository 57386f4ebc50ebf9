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
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from pytest_nnxcheck.compat.owner import is_library, owner
from pytest_nnxcheck.walk.raw_access import LruCache, class_dict, code_names, mro, top_package

CONSTRUCTORS = ("__init__", "__post_init__", "__new__", "setup")
MUTATORS = frozenset("setdefault update append appendleft extend insert add __setitem__ set".split())
"""Methods that put something into a container or a context variable."""
FILLING = frozenset(("STORE_SUBSCR", "MAP_ADD", "BUILD_CONST_KEY_MAP", "DICT_UPDATE"))
"""Operations of Python's that put something into a container."""
STORES = frozenset(("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "STORE_NAME"))


class Code(NamedTuple):
    """The code of a function of the user's, and the globals that it names."""

    code: CodeType
    names: dict[str, Any]


class Called(NamedTuple):
    """A call in some code."""

    path: tuple[str, ...]
    """The names of what is called: ``("tables", "build")``. A path that starts with something else than a name starts with an empty one."""
    handed: tuple[str, ...]
    """The names among its arguments."""


NO_CODE = compile("", "", "exec")
BODY: list[Code] = []
"""The code of the test that runs."""
PREPARING: list[Code] = []
"""The code of its fixtures, or of whoever calls `check`."""


@contextlib.contextmanager
def prepared_by(preparing: Iterable[Code], body: Iterable[Code] = ()) -> Iterator[None]:
    """Count some code to what runs before a call in every process."""
    before = [(codes, [*codes]) for codes in (BODY, PREPARING)]
    PREPARING.extend(preparing)
    BODY.extend(body)
    try:
        yield
    finally:
        for codes, held in before:
            codes[:] = held


def of_frames(frame: FrameType | None) -> Iterator[Code]:
    """The code of the frames of the user's functions, from the innermost on."""
    while frame is not None:
        if not is_library(frame.f_globals.get("__name__")) and frame.f_code.co_name != "<module>":
            yield Code(frame.f_code, frame.f_globals)
        frame = frame.f_back


def codes_behind(value: Any) -> Iterator[Code]:
    """The code of a function of the user's, or of the constructors of a class."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    with contextlib.suppress(Exception):  # `unwrap` asks the user's object for an attribute
        value = inspect.unwrap(value)
    if type(value) is LruCache:
        value = wrapped(value)
    if type(value) is FunctionType and not is_library(dict.get(value.__globals__, "__name__")):
        yield Code(value.__code__, value.__globals__)
    elif isinstance(value, functools.partial):
        yield from codes_behind(value.func)
    elif isinstance(value, type) and not is_library(top_package(value)):
        for name in CONSTRUCTORS:
            yield from codes_behind(member(value, name))


def member(cls: type, name: str) -> Any:
    """The value that a class has under a name; `None` if it has none."""
    return next((class_dict(base)[name] for base in mro(cls) if name in class_dict(base)), None)


def wrapped(cache: Any) -> Any:
    """The function behind a `functools.lru_cache`."""
    return dict.get(class_dict(LruCache)["__dict__"].__get__(cache), "__wrapped__")


def constructors(classes: Iterable[type]) -> list[Code]:
    """The constructors of classes."""
    return [code for cls in classes for name in CONSTRUCTORS for code in codes_behind(class_dict(cls).get(name))]


def reached(start: Iterable[Code], classes: Iterable[type], left_out: Iterable[CodeType] = ()) -> list[Code]:
    """Code, and what it calls: functions and classes that its globals name, and methods of ``classes``; what is ``left_out`` is not entered."""
    methods: dict[str, list[Any]] = {}
    for cls in classes:
        for name, item in class_dict(cls).items():
            methods.setdefault(name, []).append(item)
    seen, ahead, codes = {id(code) for code in left_out}, [*start], list[Code]()
    while ahead:
        code = ahead.pop()
        if id(code.code) in seen:
            continue
        seen.add(id(code.code))
        codes.append(code)
        for called in calls(code.code):
            # To call the model itself fills no place on purpose.
            for value in resolved(called, code, methods) if called.path[-1] != "__call__" else ():
                ahead += codes_behind(value)
    return codes


def resolved(called: Called, code: Code, methods: dict[str, list[Any]]) -> Iterator[Any]:
    """The functions that a call in some code may run."""
    root, *attributes = called.path
    own = code.code
    is_local = root in (*own.co_varnames, *own.co_cellvars, *own.co_freevars)
    value = None if is_local else dict.get(code.names, root, vars(builtins).get(root))
    if owner_of(value) not in ("user", "ours"):
        # A transform or a builtin, that calls what it is handed: ``jax.vmap(table)``.
        yield from (dict.get(code.names, name) for name in called.handed)
    elif not attributes:
        yield value
    elif value is None:
        yield from methods.get(attributes[-1], ())
    else:
        for attribute in attributes:
            if isinstance(value, ModuleType):
                value = dict.get(vars(value), attribute)
            else:
                value = member(value if isinstance(value, type) else type(value), attribute)
        yield from (value,) if value is not None else methods.get(attributes[-1], ())


def owner_of(value: Any) -> str:
    """Whose a global is; one that is not there is the user's."""
    if value is None:
        return "user"
    module = None
    with contextlib.suppress(Exception):  # the user's code may raise anything
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return owner(module if type(module) is str else type(value).__module__)


@functools.lru_cache(maxsize=4096)
def calls(code: CodeType) -> tuple[Called, ...]:
    """The calls in a code object; of one whose source is not known, every name that it has."""
    node = definitions(code.co_filename).get((code.co_firstlineno, code.co_name))
    if node is None:
        return tuple(Called(("", name), ()) for name in code_names(code)) + tuple(
            Called((name,), ()) for name in code_names(code)
        )
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
    for node in own_nodes(nodes):
        if isinstance(node, ast.Call) and (path := path_of(node.func)):
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            yield Called(path, tuple(each.id for each in arguments if isinstance(each, ast.Name)))


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
        for value in resolved(called, Code(NO_CODE, vars(module)), {})
        for code in codes_behind(value)
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
            stored = any(op.opname in stores and op.argval == label for op in operations)
            if stored or ("setattr" in names and label in each.co_consts):
                return True
        elif label in names and (
            names & MUTATORS or any(op.opname in FILLING or (op.opname == "BUILD_MAP" and op.arg) for op in operations)
        ):
            return True
    return False


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
        elif isinstance(each, ast.AugAssign):
            places.append(each.target)
        elif isinstance(each, ast.Assign) and ast.unparse(each.value) not in ("{}", "[]", "None"):
            places += each.targets
    return frozenset(filter(None, map(last_name, places)))


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
