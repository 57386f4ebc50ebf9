"""Our own functions as text: the source of each, and of all that it names, without this package.

The layers of `transforms` use names of jax and flax only, so their source is the program that ran. What they, and the
functions of `runtime`, name in other rooms is copied along: a definition as it stands, an import of a library as one line, and
``compat.zeros`` as ``zeros``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

PACKAGE = __name__.partition(".")[0]
_AFTER_DOCSTRING = re.compile(r'(^    """.*"""$)\n\n(?=    )', re.MULTILINE)
_AGAIN = re.compile(r"^    (?:import jax|import jax.numpy as jnp|from flax import nnx)\n\n?", re.MULTILINE)
"""What every program imports at its top."""


@dataclass(frozen=True)
class Room:
    """One module of ours: its text, its definitions and imports by name."""

    name: str
    lines: tuple[str, ...]
    definitions: dict[str, tuple[ast.stmt, int]]
    """The statement that binds a name, and the last line of its text, a docstring of a constant included."""
    imports: dict[str, str]
    """Imports of libraries, each as one line."""
    ours: dict[str, tuple[str, str]]
    """What comes from another room: (module, name), with an empty name for the module itself."""


@dataclass
class Extract:
    """The text of some functions: import lines, and definitions in an order in which they can be executed.

    ``taken`` are names that mean something else in the program: a definition of ours that has one of them goes by another.
    """

    taken: frozenset[str] = frozenset()
    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[tuple[str, str], str] = field(default_factory=dict)
    _names: dict[str, tuple[str, str]] = field(default_factory=dict)
    _begun: set[tuple[str, str]] = field(default_factory=set)

    def add(self, module: str, name: str) -> str:
        """Copy a definition and all that it names; the name that it goes by."""
        room = read_room(module)
        if name in room.ours:
            return self.add(*room.ours[name])
        if name in room.imports:
            return self._take_import(name, room.imports[name])
        mine = self._name(module, name)
        if (module, name) in self._begun:
            return mine
        self._begun.add((module, name))
        at_once, later = names_of_definition(module, name)
        # What a definition needs when it is executed comes before it, what it needs when it is called after it.
        self._add_named(room, at_once)
        self.definitions[module, name] = ""
        new = {name: mine, **self._add_named(room, later)}
        changed = tuple((old, other) for old, other in new.items() if old != other)
        self.definitions[module, name] = text_of_definition(module, name, changed)
        return mine

    def _add_named(self, room: Room, names: Iterable[str]) -> dict[str, str]:
        """Copy what code names; the names that those go by."""
        new = {}
        for used in names:
            base, _, attribute = used.partition(".")
            if base in room.ours and not room.ours[base][1]:
                if attribute:
                    new[used] = self.add(room.ours[base][0], attribute)
            elif base in room.definitions or base in room.ours or base in room.imports:
                new[base] = self.add(room.name, base)
        return new

    @property
    def aliases(self) -> dict[str, str]:
        """The definitions that go by another name because the user's code has theirs."""
        return {name: free for free, (_, name) in self._names.items() if free != name and name in self.taken}

    def _name(self, module: str, name: str) -> str:
        """A name that nothing else in the program has."""
        free = name
        while free in self.taken or self._names.get(free, (module, name)) != (module, name):
            free = f"{free}_"
        self._names[free] = (module, name)
        return free

    def _take_import(self, name: str, line: str) -> str:
        self._names.setdefault(name, ("", name))
        self.imports[name] = line
        return name


@functools.cache
def names_of_definition(module: str, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that a definition needs when it is executed, and all that it needs. Read once: programs are many."""
    statement, _ = read_room(module).definitions[name]
    at_once = {used for part in needed_at_once(statement) for used in names_in(part)}
    return tuple(sorted(at_once)), tuple(sorted(names_in(statement)))


@functools.lru_cache(maxsize=4096)
def text_of_definition(module: str, name: str, new: tuple[tuple[str, str], ...]) -> str:
    """The text of a definition, with other names for some that it uses."""
    room = read_room(module)
    statement, end = room.definitions[name]
    start = min([statement.lineno, *(each.lineno for each in getattr(statement, "decorator_list", ()))])
    text = "\n".join(shortened(room, statement, start, end))
    text = _AGAIN.sub("", _AFTER_DOCSTRING.sub(r"\1\n", text))
    for used, other in new:
        if "." in used:
            text = re.sub(rf"\b{re.escape(used)}\b", other, text)
    return renamed(text, {old: other for old, other in new if "." not in old})


def shortened(room: Room, statement: ast.stmt, start: int, end: int) -> list[str]:
    """The lines of a statement, of a long docstring its first paragraph: the rest is about versions, and for those who work on this."""
    lines = list(room.lines[start - 1 : end])
    first = statement.body[0] if isinstance(statement, ast.FunctionDef | ast.ClassDef) else None
    if first is None or not is_text(first) or not isinstance(first, ast.Expr) or first.end_lineno == first.lineno:
        return lines
    text = lines[first.lineno - start : (first.end_lineno or first.lineno) - start + 1]
    blank = next((number for number, line in enumerate(text) if not line.strip()), None)
    if blank is None:
        return lines
    kept = [*text[: blank - 1], f'{text[blank - 1]}"""']
    return [*lines[: first.lineno - start], *kept, *lines[(first.end_lineno or first.lineno) - start + 1 :]]


def import_lines(imports: Iterable[str]) -> list[str]:
    """Imports in order, those of one module in one line."""
    plain, named = set(), dict[str, set[str]]()
    for line in imports:
        module, found, names = line.partition(" import ")
        if found:
            named.setdefault(module, set()).add(names)
        else:
            plain.add(line)
    return [*sorted(plain), *(f"{module} import {', '.join(sorted(names))}" for module, names in sorted(named.items()))]


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with other names; attributes, fields of classes, keywords of calls and what stands in strings stay."""
    if not names:
        return text
    lines = text.splitlines(keepends=True)
    tokens = list(tokenize.generate_tokens(iter([*lines, ""]).__next__))
    depth = 0
    places = []
    for before, token, after in zip([tokens[0], *tokens], tokens, [*tokens[1:], tokens[-1]], strict=False):
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        keyword = depth > 0 and after.string == "="
        of_class = (
            after.string == ":" and token.start[1] > 0 and not lines[token.start[0] - 1][: token.start[1]].strip()
        )
        named = token.type == tokenize.NAME and token.string in names and before.string != "."
        if named and not keyword and not of_class:
            places.append((token.start, token.string))
    for (row, column), name in reversed(places):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + names[name] + line[column + len(name) :]
    return "".join(lines)


def needed_at_once(statement: ast.AST) -> Iterator[ast.AST]:
    """The parts of a definition that are executed with it: decorators, defaults, annotations, bases; not the bodies of functions."""
    if isinstance(statement, ast.FunctionDef):
        yield from (*statement.decorator_list, statement.args, *([statement.returns] if statement.returns else []))
    elif isinstance(statement, ast.ClassDef):
        yield from (*statement.decorator_list, *statement.bases)
        for inner in statement.body:
            yield from needed_at_once(inner)
    else:
        yield statement


def names_in(statement: ast.AST) -> set[str]:
    """The names that a statement uses; with the attribute where it is taken of a name."""
    found: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            found.add(node.id)
    return found


@functools.cache
def read_room(name: str) -> Room:
    """Read one module of this package."""
    module: ModuleType = importlib.import_module(name)
    text = inspect.getsource(module)
    room = Room(name, tuple(text.splitlines()), {}, {}, {})
    body = ast.parse(text).body
    for number, statement in enumerate(body):
        if imports := imports_in(statement):
            for bound, line, ours in (each for one in imports for each in imported(one, module)):
                if ours is None:
                    room.imports[bound] = line
                else:
                    room.ours[bound] = ours
            continue
        after = body[number + 1] if number + 1 < len(body) else None
        documented = isinstance(statement, ast.Assign | ast.AnnAssign) and is_text(after)
        end = (after if documented and after is not None else statement).end_lineno or statement.lineno
        room.definitions.update(dict.fromkeys(bound_by(statement), (statement, end)))
    return room


def imports_in(statement: ast.stmt) -> list[ast.Import | ast.ImportFrom]:
    """The import that a statement is, or those that are for types only."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
        return [each for each in statement.body if isinstance(each, ast.Import | ast.ImportFrom)]
    return [statement] if isinstance(statement, ast.Import | ast.ImportFrom) else []


def is_text(statement: ast.stmt | None) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def imported(
    statement: ast.Import | ast.ImportFrom, module: ModuleType
) -> Iterator[tuple[str, str, tuple[str, str] | None]]:
    """(name, the import as one line, what it is of ours) for each name that an import binds."""
    for alias in statement.names:
        renamed = f" as {alias.asname}" if alias.asname else ""
        if isinstance(statement, ast.Import):
            bound = alias.asname or alias.name.partition(".")[0]
            yield bound, f"import {alias.name}{renamed}", (alias.name, "") if alias.name.startswith(PACKAGE) else None
            continue
        source = statement.module or ""
        bound = alias.asname or alias.name
        ours = None
        if source.partition(".")[0] == PACKAGE:
            value = getattr(module, bound, None)
            ours = (value.__name__, "") if isinstance(value, ModuleType) else (source, alias.name)
        yield bound, f"from {source} import {alias.name}{renamed}", ours


def bound_by(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement at the top of a module binds."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
    elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif not isinstance(statement, ast.Expr):
        for inner in ast.iter_child_nodes(statement):
            if isinstance(inner, ast.stmt):
                yield from bound_by(inner)
            elif isinstance(inner, ast.ExceptHandler | ast.match_case):
                yield from (name for each in inner.body for name in bound_by(each))


@functools.lru_cache(maxsize=256)
def extract(
    wanted: tuple[tuple[str, str], ...], taken: frozenset[str] = frozenset(), given: tuple[tuple[str, str], ...] = ()
) -> Extract:
    """The text of (room, name), with all that it needs but what is ``given`` in another form."""
    found = Extract(taken, _begun={*given})
    for room, name in wanted:
        found.add(room, name)
    return found


def place(definition: Callable[..., Any]) -> tuple[str, str]:
    """Room and name of a function or class of ours."""
    return definition.__module__, definition.__name__
