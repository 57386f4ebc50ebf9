"""Our own functions as text: the source of each, and of all that it names, without this package.

The layers of `transforms` use names of jax and flax only, so their source is the program that ran. What they, and the
functions of `runtime`, name in other rooms is copied along: a definition, an import of a library as one line, and
``graph.zeros`` as ``zeros``. What does nothing in a program is left out: docstrings, comments, annotations.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from pytest_nnxcheck.core.errors import Unfit

PACKAGE = __name__.partition(".")[0]
EVERYWHERE = ("import jax", "import jax.numpy as jnp", "from flax import nnx")
"""What every program imports at its top."""
GUARDS = ("needs_graph_updates",)
"""Functions that only refuse a call that a layer cannot take: a nesting of which there is a program has none."""

Place = tuple[str, str]
"""Module and name of a definition."""


@dataclass(frozen=True)
class Room:
    """One module of ours: its definitions by name, its imports of libraries as lines, and what it takes from other rooms, which themselves have no name."""

    definitions: dict[str, ast.stmt]
    imports: dict[str, str]
    ours: dict[str, Place]


@dataclass
class Extract:
    """The text of some functions: import lines, and definitions in an order in which they can be executed.

    ``taken`` are names that mean something else in the program: a definition of ours that has one of them goes by another, see ``aliases``.
    """

    taken: frozenset[str] = frozenset()
    imports: set[str] = field(default_factory=set)
    definitions: dict[Place, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    _names: dict[str, Place] = field(default_factory=dict)
    _begun: set[Place] = field(default_factory=set)

    def add(self, module: str, name: str) -> str:
        """Copy a definition and all that it names; the name that it goes by."""
        room = read_room(module)
        if name in room.ours:
            return self.add(*room.ours[name])
        if name in room.imports:
            self.imports.add(room.imports[name])
            return name
        mine = self._name(module, name)
        if (module, name) in self._begun:
            return mine
        self._begun.add((module, name))
        at_once, later = names_of_definition(module, name)
        # What a definition needs when it is executed comes before it, what it needs when it is called after it.
        self._add_named(module, at_once)
        self.definitions[module, name] = ""
        new = {name: mine, **self._add_named(module, later)}
        self.definitions[module, name] = text_of_definition(module, name, tuple(new.items()))
        return mine

    def _add_named(self, module: str, names: Iterable[str]) -> dict[str, str]:
        """Copy what code names; the names that those go by."""
        room, new = read_room(module), {}
        for used in names:
            base, _, attribute = used.partition(".")
            if attribute:
                new[used] = self.add(room.ours[base][0], attribute)
            elif base in room.definitions or base in room.imports or base in room.ours:
                new[base] = self.add(module, base)
        return new

    def _name(self, module: str, name: str) -> str:
        """A name that nothing else in the program has."""
        free = name
        while free in self.taken or self._names.get(free, (module, name)) != (module, name):
            free = f"{free}_"
        self._names[free] = (module, name)
        if name in self.taken:
            self.aliases[name] = free
        return free


@functools.lru_cache(maxsize=256)
def extract(wanted: tuple[Place, ...], taken: frozenset[str] = frozenset()) -> Extract:
    """The text of definitions, with all that they need."""
    result = Extract(taken)
    for module, name in wanted:
        result.add(module, name)
    return result


def place(definition: Callable[..., Any]) -> Place:
    """Where a function or class of ours is defined."""
    return definition.__module__, definition.__name__


# --- one definition


@functools.cache
def names_of_definition(module: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of its module that a definition needs when it is executed, and all that it needs. Read once: programs are many."""
    room = read_room(module)
    statement = room.definitions[name]

    def of_rooms(nodes: Iterable[ast.AST], names: set[str]) -> tuple[str, ...]:
        rooms = {base for base, (_, name) in room.ours.items() if not name}
        attributes = [node for tree in nodes for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        dotted = {
            ast.unparse(node) for node in attributes if isinstance(node.value, ast.Name) and node.value.id in rooms
        }
        return tuple(sorted(names - rooms | dotted))

    parts = [*needed_at_once(statement)]
    return of_rooms(parts, names_of(*parts)), of_rooms([statement], globals_in(ast.unparse(statement)))


def needed_at_once(statement: ast.AST) -> Iterator[ast.AST]:
    """The parts of a definition that are executed with it: decorators, defaults, bases; not the bodies of functions."""
    if isinstance(statement, ast.FunctionDef):
        yield from (*statement.decorator_list, statement.args)
    elif isinstance(statement, ast.ClassDef):
        yield from (*statement.decorator_list, *statement.bases)
        for inner in statement.body:
            yield from needed_at_once(inner)
    else:
        yield statement


@functools.lru_cache(maxsize=4096)
def text_of_definition(module: str, name: str, new: tuple[tuple[str, str], ...]) -> str:
    """The text of a definition, with other names for some that it uses."""
    return renamed(read_room(module).definitions[name], dict(new))


def renamed(code: ast.AST | str, names: Mapping[str, str]) -> str:
    """The text of code with other names; a local that has one of them already gives way."""
    changed = {old: new for old, new in names.items() if old != new}
    if isinstance(code, str) and not changed:
        return code
    tree = ast.parse(code) if isinstance(code, str) else copy.deepcopy(code)
    local = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    local |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    changed |= {name: f"{name}_" for name in local & {*changed.values()}}
    return ast.unparse(Renamed(changed).visit(tree)).replace(":\n\n", ":\n")


class Renamed(ast.NodeTransformer):
    """Gives names, attributes of our rooms and definitions other names."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit(self, node: ast.AST) -> Any:
        self.generic_visit(node)
        match node:
            case ast.Attribute(value=ast.Name(id=base), attr=attribute) if f"{base}.{attribute}" in self.names:
                return ast.Name(self.names[f"{base}.{attribute}"], node.ctx)
            case ast.Name(id=name) if name in self.names:
                node.id = self.names[name]
            case ast.arg(arg=name) if name in self.names:
                node.arg = self.names[name]
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) if name in self.names:
                node.name = self.names[name]
        return node


# --- one module


@functools.cache
def read_room(name: str) -> Room:
    """Read one module of this package."""
    module = importlib.import_module(name)
    room = Room({}, {}, {})
    for statement in ast.parse(inspect.getsource(module)).body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            read_import(statement, module, room)
        elif (bare := Bare().visit(statement)) is not None:
            room.definitions.update(dict.fromkeys(bound_by(statement), bare))
    return room


def read_import(statement: ast.Import | ast.ImportFrom, module: ModuleType, room: Room) -> None:
    """Note what each name that an import binds stands for."""
    for alias in statement.names:
        bound = alias.asname or alias.name.partition(".")[0]
        source = alias.name if isinstance(statement, ast.Import) else statement.module or ""
        if source.partition(".")[0] == PACKAGE:
            value = getattr(module, bound, None)
            room.ours[bound] = (value.__name__, "") if isinstance(value, ModuleType) else (source, alias.name)
        else:
            room.imports[bound] = import_line(statement, source, alias)


def import_line(statement: ast.Import | ast.ImportFrom, source: str, alias: ast.alias) -> str:
    """An import of one name."""
    return ast.unparse(ast.Import([alias]) if isinstance(statement, ast.Import) else ast.ImportFrom(source, [alias], 0))


def import_lines(imports: Iterable[str]) -> list[str]:
    """Imports in order: those of the standard library in one line, and those of one module."""
    plain, named = set(), dict[str, set[str]]()
    for line in imports:
        module, is_from, names = line.partition(" import ")
        of_standard = line.removeprefix("import ") in sys.stdlib_module_names
        if is_from or of_standard:
            named.setdefault(module if is_from else "", set()).add(names or line.removeprefix("import "))
        else:
            plain.add(line)
    joined = [f"{module} import {', '.join(sorted(names))}".strip() for module, names in sorted(named.items())]
    return sorted([*plain, *joined], key=lambda line: (line.startswith("from"), line in plain, line))


class Bare(ast.NodeTransformer):
    """Leaves out what does nothing in a program: texts, annotations, imports that it has at its top, guards against calls that a layer cannot take."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self._filled(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._filled(node)

    def _filled(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(node.arg)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return node.value and ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        guards = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in GUARDS
        return None if guards or is_text(node) else node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        guards = isinstance(node.body[0], ast.Raise) and Unfit.__name__ in names_of(node.body[0])
        return None if guards else self.generic_visit(node)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> ast.AST | None:
        return None if ast.unparse(node) in EVERYWHERE else node

    visit_ImportFrom = visit_Import  # noqa: N815 - the name that ast looks for


# --- the names in code


def names_of(*nodes: ast.AST) -> set[str]:
    """The names that code uses, decorators, annotations and bodies alike."""
    return {node.id for tree in nodes for node in ast.walk(tree) if isinstance(node, ast.Name)}


def globals_in(text: str) -> set[str]:
    """The names that code takes from its module: those of its functions' own are not among them."""

    def of(table: symtable.SymbolTable) -> Iterator[str]:
        top = table.get_type() == "module"
        yield from (
            symbol.get_name()
            for symbol in table.get_symbols()
            if symbol.is_referenced() and (top or symbol.is_global())
        )
        for inner in table.get_children():
            yield from of(inner)

    return set(of(symtable.symtable(text, "<code>", "exec")))


def bound_in(text: str) -> set[str]:
    """The names that code binds in its module."""
    return {name for statement in ast.parse(text).body for name in bound_by(statement)}


def is_text(statement: ast.stmt | None) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def bound_by(statement: ast.stmt) -> set[str]:
    """The names that a statement at the top of a module binds, or changes: ``Model.size = 4``."""
    table = symtable.symtable(ast.unparse(statement), "<code>", "exec")
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", ast.Pass())]
    return {
        symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()
    } | names_of(*targets)
