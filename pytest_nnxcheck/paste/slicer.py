"""Copy the source of definitions with all that they name, the user's own and ours, by one rule.

`Slice` copies each statement that binds a name which the program needs. It follows the names in that statement, through imports as well. It keeps an
import where a program can do it. A program cannot import a module that is ours, or that imports pytest: `Slice` copies statements from there.
"""

from __future__ import annotations

import ast
import copy
import functools
import graphlib
import importlib.util
import inspect
import symtable
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_nnxcheck.compat.owner import of_file, owner

LEFT_OUT = frozenset(("pytest", "_pytest", "hypothesis", "pytest_nnxcheck"))
"""Packages that a program does without."""


class NoSource(Exception):
    """Code that no file holds."""


@dataclass
class Slice:
    """The parts that a program copies: of each module the text of statements by their lines, and imports.

    ``missing`` are names that cannot be copied: they are pytest's, or made with it.
    """

    imports: dict[str, None] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    texts: dict[ModuleType, dict[int, str]] = field(default_factory=dict)
    _needs: dict[ModuleType, dict[ModuleType, None]] = field(default_factory=dict)

    @property
    def future(self) -> bool:
        """True if annotations of the user's must not be evaluated."""
        features = (getattr(module, "annotations", None) for module in self.texts if not is_ours(module))
        return any(hasattr(feature, "compiler_flag") for feature in features)

    def take(self, module: ModuleType, names: Iterable[str]) -> None:
        """Copy the statements that bind names in a module, and what those need. Raises `NoSource`."""
        source = read(module)
        if module not in self.texts:
            self.texts[module], self._needs[module] = {}, {}
            for statement in source.effects:
                self.take_statement(module, statement)
        for name in names:
            if name in source.left_out:
                self.missing[name] = None
                continue
            for statement in source.bound.get(name, ()):
                if isinstance(statement, ast.Import | ast.ImportFrom):
                    self._take_import(module, statement, name)
                else:
                    self.take_statement(module, statement)

    def take_statement(self, module: ModuleType, node: ast.stmt) -> None:
        """Copy a statement, at the top of a module or deeper in it, and what it needs. Raises `NoSource`."""
        if module not in self.texts:
            self.take(module, ())
        if node.lineno not in self.texts[module]:
            text, rooms = read(module).text(node)
            self.texts[module][node.lineno] = text
            self.take(module, sorted(globals_in(text) - {name for _, name in rooms}))
            for room, name in rooms:
                self._needs[module][room] = None
                self.take(room, [name])

    def take_function(self, function: Any) -> str:
        """Copy a function, however deep it is defined; its name. Raises `NoSource`."""
        module = inspect.getmodule(function)
        if module is None:
            raise NoSource(f"{getattr(function, '__qualname__', function)} is in no module")
        self.take_statement(module, read(module).definition(function))
        return str(function.__name__)

    def chunks(self, *, ours: bool) -> list[str]:
        """The statements of our modules, or of the user's: what a module needs of another comes before it."""
        order = graphlib.TopologicalSorter(self._needs).static_order()
        mine = [self.texts[module] for module in order if is_ours(module) == ours]
        return [text for texts in mine for _, text in sorted(texts.items())]

    def _take_import(self, module: ModuleType, node: ast.Import | ast.ImportFrom, name: str) -> None:
        alias = next((each for each in node.names if name == bound_name(each)), ast.alias(name))  # or a star
        home = home_of(module, node, alias)
        source = sys.modules.get(home)
        if isinstance(node, ast.ImportFrom) and source is not None and is_copied(source):
            self._needs[module][source] = None
            self.take(source, [alias.name])
            if alias.asname:
                self.texts[module][node.lineno] = f"{alias.asname} = {alias.name}"
        elif home != "__future__":
            line = ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(home, [alias], 0)
            self.import_line(ast.unparse(line), home)

    def take_from(self, module: ModuleType, name: str) -> None:
        """Copy a name of a module that a program cannot import, or that is copied anyway; else import it. Raises `NoSource`."""
        if is_copied(module) or module in self.texts:
            self.take(module, [name])
        elif module.__name__ != "builtins":
            self.import_line(f"from {module.__name__} import {name}", module.__name__)

    def import_line(self, line: str, home: str) -> None:
        """Import from a module; one of the user's is found in its folder."""
        self.imports[line] = None
        module = sys.modules.get(home.partition(".")[0])
        if module is not None and not is_installed(module):
            self.folders[str(place_of(module).parent)] = None


@dataclass(frozen=True, eq=False)
class SourceModule:
    """One module, taken apart: the statements at its top by the names that they bind, and the names that are nothing without pytest."""

    module: ModuleType
    lines: tuple[str, ...]
    tree: ast.Module
    bound: dict[str, list[ast.stmt]]
    left_out: frozenset[str]

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - sources live as long as `read` knows them; programs are many
    def text(self, node: ast.stmt) -> tuple[str, list[tuple[ModuleType, str]]]:
        """The text of a statement, and what it takes as attributes of our modules. What needs pytest is left out: decorators, and settings of a class."""
        if is_ours(self.module):
            bare = Stripped(self.module)
            return ast.unparse(bare.visit(ast.parse(ast.unparse(node)))).replace(":\n\n", ":\n"), bare.rooms
        lines = {number: self.lines[number - 1] for number in lines_of(node)}
        for inner in ast.walk(node):
            parts: list[Any] = list(getattr(inner, "decorator_list", ()))
            if isinstance(inner, ast.ClassDef):
                parts += [part for part in inner.body if isinstance(part, ast.Assign)]
            for part in (part for part in parts if names_of(part) & self.left_out):
                for number in lines_of(part):
                    lines.pop(number, None)
                if isinstance(part, ast.Assign):
                    lines[part.lineno] = " " * part.col_offset + "pass"
        return textwrap.dedent("\n".join(line for _, line in sorted(lines.items()))).rstrip(), []

    def definition(self, function: Any) -> ast.FunctionDef:
        """The definition of a function. Raises `NoSource`."""
        code = getattr(function, "__code__", None)
        name, line = getattr(code, "co_name", ""), getattr(code, "co_firstlineno", 0)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef) and node.name == name and line in (lines_of(node)[0], node.lineno):
                return node
        raise NoSource(f"the source of {getattr(function, '__qualname__', function)} cannot be found")

    @functools.cached_property
    def effects(self) -> tuple[ast.stmt, ...]:
        """The statements that a module of the user's runs for their effect: they bind no name, or their decorator is a function of the module, as ``@register``."""
        found = list[ast.stmt]()
        functions = {name for name, nodes in self.bound.items() if isinstance(nodes[-1], ast.FunctionDef)}
        for node in () if is_ours(self.module) else self.tree.body:
            decorators = [names_of(each) for each in getattr(node, "decorator_list", ())]
            names = {name for each in decorators if each & functions for name in each}
            if isinstance(node, ast.Expr | ast.Assign) and not bound_by(node, changed=False):
                names |= names_of(node)
            reads = [globals_in(self.text(self.bound[name][-1])[0]) for name in names & functions]
            if names and not names.union(*reads) & {*self.left_out, "__name__"}:
                found.append(node)
        return tuple(found)


@functools.lru_cache(maxsize=256)
def read(module: ModuleType) -> SourceModule:
    """Take a module apart. Raises `NoSource`."""
    try:
        text = inspect.getsource(module)
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError) as error:
        raise NoSource(f"the source of {module.__name__} cannot be read") from error
    bound: dict[str, list[ast.stmt]] = {}
    left: set[str] = set()
    for node in tree.body:
        names = bound_by(node)
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names = {*vars(sys.modules[home_of(module, node, node.names[0])])}
        for name in names:
            bound.setdefault(name, []).append(node)
        if isinstance(node, ast.Import | ast.ImportFrom):
            left.update(
                bound_name(each) for each in node.names if home_of(module, node, each).split(".")[0] in LEFT_OUT
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value and left & names_of(node.value):
            left.update(names)
    left_out = frozenset[str]() if is_ours(module) else frozenset(left)
    return SourceModule(module, tuple(text.splitlines()), tree, bound, left_out)


class Stripped(ast.NodeTransformer):
    """Leaves out of our code what does nothing in a program: texts, annotations, guards. ``graph.zeros`` becomes ``zeros``."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.rooms = module, list[tuple[ModuleType, str]]()

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Expr(value=ast.Call(func=ast.Name("needs_graph_updates"))):
                return None
            case ast.If(body=[ast.Raise(exc=ast.Call(func=ast.Name("Unfit")))]):
                return None
            case ast.AnnAssign(value=value):
                return value and ast.fix_missing_locations(ast.Assign([node.target], value))
            case ast.Attribute(value=ast.Name(room)) if is_ours(getattr(self.module, room, ast)):
                self.rooms.append((getattr(self.module, room), node.attr))
                return ast.Name(node.attr, node.ctx)
            case ast.arg():
                node.annotation = None
            case ast.FunctionDef() | ast.ClassDef():
                node.body = node.body or [ast.Pass()]
                if isinstance(node, ast.FunctionDef):
                    node.returns = None
        return node


def source_of(module: ModuleType, *names: str) -> str:
    """The source of definitions of ours, with all that they name in their own module and others of ours."""
    alone = Slice()
    alone.take(module, names)
    return "\n\n".join(alone.chunks(ours=True))


# --- modules


def is_ours(module: Any) -> bool:
    return isinstance(module, ModuleType) and owner(module.__name__) == "ours"


def is_copied(module: ModuleType) -> bool:
    """True if a program cannot import a module: it is ours, or the user's and imports pytest; a conftest.py is pytest's own."""
    if is_ours(module) or module.__name__ == "__main__" or module.__name__.rpartition(".")[2] == "conftest":
        return True
    try:
        return not is_installed(module) and bool(read(module).left_out)
    except NoSource:
        return False


def place_of(module: ModuleType) -> Path:
    """The file of a module, or the folder of a package."""
    return Path([*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""][0]).resolve()


@functools.lru_cache(maxsize=256)
def is_installed(module: ModuleType) -> bool:
    """True if a module is found from everywhere: the standard library, or an installed package."""
    built_in = not (getattr(module, "__file__", None) or getattr(module, "__path__", None))
    return built_in or of_file(str(place_of(module))) != "user"


def home_of(module: ModuleType, node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """The module of an import, a relative one as from outside the package."""
    if isinstance(node, ast.Import):
        return alias.name
    return importlib.util.resolve_name("." * node.level + (node.module or ""), module.__package__)


# --- names


def bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def lines_of(node: Any) -> range:
    """The numbers of the lines of code, decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return range(first, node.end_lineno + 1)


def names_of(*nodes: ast.AST) -> set[str]:
    """The names that code uses."""
    return {node.id for tree in nodes for node in ast.walk(tree) if isinstance(node, ast.Name)}


@functools.lru_cache(maxsize=4096)
def globals_in(text: str) -> frozenset[str]:
    """The names that code takes from its module."""

    def inside(table: symtable.SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        yield from (
            each.get_name() for each in table.get_symbols() if each.is_referenced() and (top or each.is_global())
        )
        for inner in table.get_children():
            yield from inside(inner)

    return frozenset(inside(symtable.symtable(text, "<code>", "exec")))


@functools.lru_cache(maxsize=4096)
def bound_in(text: str) -> frozenset[str]:
    """The names that code binds in its module."""
    return frozenset(name for statement in ast.parse(text).body for name in bound_by(statement))


def bound_by(statement: ast.AST, *, changed: bool = True) -> set[str]:
    """The names that a statement at the top of a module binds, or changes: ``Model.size = 4``."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        statement = copy.copy(statement)
        statement.body = [ast.Pass()]  # it binds nothing outside, and takes most of the time
    table = symtable.symtable(ast.unparse(statement), "<code>", "exec")
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", ast.Pass())]
    bound = {each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported()}
    return bound | (names_of(*targets) if changed else set())
