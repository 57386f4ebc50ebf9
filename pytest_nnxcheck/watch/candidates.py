"""A marked test for each test that calls a module outside of any transform: what its source says for certain is copied, the rest is a gap."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import itertools
import math
import unittest
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from pytest_nnxcheck.core.settings import MARKER
from pytest_nnxcheck.core.text import some
from pytest_nnxcheck.reproducer.own_source import globals_in
from pytest_nnxcheck.watch.calls import Call, Span

WRAP = "nnx_wrap"
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Assert, ast.Import, ast.ImportFrom, ast.Return)
_DEFINITIONS = (ast.FunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A test that calls a module: its own function, and what pytest would give a test of the new file.

    Names of its file can be imported from ``module``; where they cannot, ``no_module`` says why. Of its fixtures ``own`` are to be imported
    too, and ``given`` are there. ``marks`` are those of its class and its file: names, arguments and keywords. An ``obstacle`` says why it is not
    certain what the test needs.
    """

    nodeid: str
    function: FunctionType
    module: str
    no_module: str
    own: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()
    marks: tuple[tuple[str, tuple[Any, ...], Mapping[str, Any]], ...] = ()
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class Draft:
    """A test to write: source that stands for itself, or a ``gap`` that says what is to be written and why."""

    nodeid: str
    name: str
    call: str
    imports: tuple[tuple[str, str], ...] = ()
    fixed: tuple[str, ...] = ()
    """Those of the imported names that decorators and pytest need at the top of the file."""
    collected: tuple[str, ...] = ()
    """Those that pytest would take for tests of the new file: a class of tests that has a helper in it, say."""
    source: str = ""
    gap: str = ""


class Gap(Exception):
    """What is not certain."""


def draft(candidate: Candidate, call: Call) -> Draft:
    """The statements of a test up to the call, with the module wrapped."""
    empty = Draft(
        candidate.nodeid,
        candidate.function.__name__,
        f"{call.type} in line {call.span[0]} of {Path(call.code.co_filename).name}",
    )
    try:
        return _copied(candidate, call, empty)
    except Gap as gap:
        return Draft(empty.nodeid, empty.name, empty.call, gap=str(gap))
    except (RecursionError, SyntaxError, ValueError):
        return Draft(empty.nodeid, empty.name, empty.call, gap="its source cannot be written anew")


def _copied(candidate: Candidate, call: Call, empty: Draft) -> Draft:
    code = candidate.function.__code__
    if candidate.obstacle:
        raise Gap(candidate.obstacle)
    if call.code is not code:
        raise Gap("the test does not call it itself")
    tree = _parsed(code.co_filename)
    test = _definition(tree, candidate.function.__name__, code.co_firstlineno)
    is_method = test.args.args[:1] and test.args.args[0].arg == "self"
    arguments = [argument.arg for argument in (*test.args.args[bool(is_method) :], *test.args.kwonlyargs)]
    decorators = [*_outer_marks(candidate), *_marks(test)]
    for name in arguments:
        if name not in {*_parametrized(decorators), *candidate.own, *candidate.given}:
            raise Gap(f"its argument {name} would not be there")
    function = ast.FunctionDef(
        name=test.name,
        args=ast.arguments([], [ast.arg(name) for name in [WRAP, *arguments]], None, [], [], None, []),
        body=[*_until(test, call.span, _names(candidate.function))],
        decorator_list=[],
        returns=None,
        type_comment=None,
    )
    # from Python 3.12 on a function has type parameters
    function.type_params = []  # type: ignore[attr-defined,unused-ignore]
    body = ast.unparse(ast.fix_missing_locations(function))
    marks = [ast.unparse(decorator) for decorator in decorators]
    fixed = {*globals_in("\n".join(marks)), *candidate.own}
    imports = [(name, _import(tree, name, candidate)) for name in sorted({*globals_in(body), *fixed})]
    return Draft(
        empty.nodeid,
        empty.name,
        empty.call,
        tuple((name, line) for name, line in imports if line),
        tuple(fixed),
        tuple(name for name, _ in imports if name not in fixed and _is_collected(name, candidate.function)),
        "".join(f"@{mark}\n" for mark in marks) + body,
    )


@functools.lru_cache(maxsize=8)
def _parsed(path: str) -> ast.Module:
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        raise Gap("its source cannot be read") from None


def _definition(tree: ast.Module, name: str, line: int) -> ast.FunctionDef:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first != line:
                continue
            if isinstance(node, ast.AsyncFunctionDef):
                raise Gap("it is async, which a marked test cannot be")
            return node
    raise Gap("its source cannot be found")


def _outer_marks(candidate: Candidate) -> Iterator[ast.expr]:
    """The marks of class and file, which have to say with plain values what they say: a condition was true or false on this machine alone."""
    for name, args, keywords in candidate.marks:
        if name in ("skipif", "xfail") or not _is_plain([args, keywords]):
            raise Gap(f"its class or its file has the mark {name}")
        words = [*map(repr, args), *(f"{keyword}={value!r}" for keyword, value in keywords.items())]
        yield ast.parse(f"pytest.mark.{name}" + (f"({', '.join(words)})" if words else ""), mode="eval").body


def _is_plain(value: Any) -> bool:
    """Whether the repr of a value is an expression for it."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return value is None or type(value) in (str, int, bool) or (type(value) is float and math.isfinite(value))


def _marks(test: ast.FunctionDef) -> Iterator[ast.expr]:
    """The decorators, which have to be marks of pytest: any other may do anything."""
    for decorator in test.decorator_list:
        if not ast.unparse(decorator).startswith("pytest.mark."):
            raise Gap(f"it is decorated with {ast.unparse(decorator).partition('(')[0]}")
        yield decorator


def _until(test: ast.FunctionDef, span: Span, names: Mapping[str, Any]) -> Iterator[ast.stmt]:
    """The statements up to the one with the call, which is wrapped; none may branch, loop or need the instance of the test."""
    for number, statement in enumerate(test.body):
        if not number and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        if not isinstance(statement, _SIMPLE + _DEFINITIONS):
            raise Gap(f"the call comes after, or in, the block in line {statement.lineno}")
        if _needs_self(statement):
            raise Gap(f"line {statement.lineno} needs the instance of the test")
        wrapper = _Wrapper(span, names)
        yield wrapper.visit(copy.deepcopy(statement))
        if wrapper.done:
            return
    raise Gap("the call is in no statement of its own")


def _needs_self(node: ast.AST) -> bool:
    """Whether a statement has the ``self`` of the test in it; a method of a class that it defines has its own."""
    if isinstance(node, ast.FunctionDef | ast.Lambda) and any(argument.arg == "self" for argument in node.args.args):
        return False
    return (isinstance(node, ast.Name) and node.id == "self") or any(map(_needs_self, ast.iter_child_nodes(node)))


class _Wrapper(ast.NodeTransformer):
    """Wraps what one call calls; ``names`` are those of the file."""

    def __init__(self, span: Span, names: Mapping[str, Any]) -> None:
        self.span = span
        self.names = names
        self.done = False

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == self.span:
            handed = [argument.func for argument in node.args if isinstance(argument, ast.Call)]
            callers = [function for function in handed if hasattr(_meaning(function, self.names), "__next__")]
            if _is_builtin(_meaning(node.func, self.names)):
                callers.append(node.func)
            for function in callers[:1]:
                raise Gap(f"{ast.unparse(function)} calls it")
            node.func = ast.Call(ast.Name(WRAP, ast.Load()), [node.func], [])
            self.done = True
        return node


def _meaning(function: ast.expr, names: Mapping[str, Any]) -> Any:
    """What a name is, or an attribute of a module; None for any other expression."""
    path = ast.unparse(function).split(".")
    value = names.get(path[0])
    for name in path[1:]:
        value = getattr(value, name, None) if isinstance(value, ModuleType) else None
    return value


def _is_builtin(value: Any) -> bool:
    """Whether a function is written in C, as `list` or `functools.reduce`: it has no frame, and calls what it was handed, or what an iterator such as `map` was."""
    return isinstance(value, BuiltinFunctionType) or (isinstance(value, type) and not value.__flags__ & _HEAP_TYPE)


_HEAP_TYPE = 1 << 9
"""Of ``type.__flags__``: a class that was made by a statement, or as if by one."""


def _names(function: FunctionType) -> dict[str, Any]:
    """What the names mean that a function reads from its file: those of its own variables hide them."""
    code = function.__code__
    own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    return {name: value for name, value in {**vars(builtins), **function.__globals__}.items() if name not in own}


def _parametrized(decorators: Iterable[ast.expr]) -> Iterator[str]:
    """The arguments that a mark gives values to, without a fixture in between."""
    for decorator in decorators:
        if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func) != "pytest.mark.parametrize":
            continue
        keywords = {keyword.arg: keyword.value for keyword in decorator.keywords}
        names = decorator.args[0] if decorator.args else keywords.get("argnames")
        if "indirect" in keywords or names is None:
            continue
        given = names.elts if isinstance(names, ast.Tuple | ast.List) else [names]
        for part in given:
            if isinstance(part, ast.Constant):
                yield from (name.strip() for name in str(part.value).split(","))


def _is_collected(name: str, function: FunctionType) -> bool:
    value = function.__globals__.get(name)
    return name.lower().startswith("test") or (isinstance(value, type) and issubclass(value, unittest.TestCase))


def _import(tree: ast.Module, name: str, candidate: Candidate) -> str:
    """The lines that bind a name as the file of the test does; none for a builtin."""
    lines = []
    for statement in tree.body:
        if isinstance(statement, ast.Import) or (isinstance(statement, ast.ImportFrom) and not statement.level):
            for alias in statement.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    statement_of_one = copy.copy(statement)
                    statement_of_one.names = [alias]
                    lines.append(ast.unparse(statement_of_one))
    if lines:
        return "\n".join(lines)
    if name in candidate.function.__globals__:
        if not candidate.module:
            raise Gap(f"{name} cannot be imported: {candidate.no_module}")
        return f"from {candidate.module} import {name}"
    if hasattr(builtins, name):
        return ""
    raise Gap(f"{name} is nothing that its file has at the top")


_HEAD = f'''"""Tests marked with {MARKER}, from tests that call a module outside of any transform: read them before you keep them."""'''
_HOW = "write here how the model is built, and call it: nnx_wrap(model)(x)"


def file_text(drafts: Collection[Draft]) -> str:
    """The new file. One test for each function; of two names that mean different things the second is imported inside of it, as is what pytest would collect."""
    bound, texts, names = {"pytest": "import pytest"}, [], set()
    for draft in {(draft.nodeid.rpartition("::")[0], draft.name): draft for draft in drafts}.values():
        clashes = [name for name, line in draft.imports if bound.get(name, line) != line]
        if {*clashes} & {*draft.fixed}:
            draft = replace(draft, gap=f"{some(clashes)} means something else in another test of this file")  # noqa: PLW2901
        inside = {name: line for name, line in draft.imports if name in {*clashes, *draft.collected}}
        if not draft.gap:
            bound |= {name: line for name, line in draft.imports if name not in inside}
        name = next(name for name in _numbered(draft.name) if name not in names)
        names.add(name)
        texts.append(_test(draft, name, inside))
    return "\n\n".join([_HEAD + "\n\n" + "\n".join(_import_lines(bound.values())), *texts]) + "\n"


def _import_lines(statements: Iterable[str]) -> Iterator[str]:
    """Each once, and the names of one module in one line."""
    lines = sorted({line for statement in statements for line in statement.splitlines()})
    yield from (line for line in lines if line.startswith("import "))
    named = [line.removeprefix("from ").split(" import ") for line in lines if line.startswith("from ")]
    for module, group in itertools.groupby(named, key=lambda parts: parts[0]):
        yield f"from {module} import {', '.join(name for _, name in group)}"


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


def _test(draft: Draft, name: str, imports: Mapping[str, str]) -> str:
    comment = f"# {draft.nodeid.partition('[')[0]} calls {draft.call}"
    if draft.gap:
        body = f"def {name}({WRAP}):\n    raise NotImplementedError({_HOW!r})"
        return f"\n{comment}; {draft.gap}\n@pytest.mark.{MARKER}\n{body}"
    *marks, head, body = _parts(draft.source)
    inside = "".join(f"    {line}\n" for lines in imports.values() for line in lines.splitlines())
    return "\n".join(["", comment, f"@pytest.mark.{MARKER}", *marks, head.replace(draft.name, name, 1), inside + body])


def _parts(source: str) -> list[str]:
    """The decorators, the line of the ``def``, and what follows it: as `ast.unparse` writes them, a line each."""
    lines = source.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("def "))
    return [*lines[: start + 1], "\n".join(lines[start + 1 :])]
