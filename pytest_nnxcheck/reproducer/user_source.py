"""The user's own code as text: a function and the definitions of its module that it needs, by name, from the first to the last.

What a test takes from other modules stays an import, unless those need pytest: then it is copied as well. Names of pytest, hypothesis
and this package are left out, decorators among them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import site
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_nnxcheck.reproducer.own_source import bound_by, globals_in, import_line, names_of

LEFT_OUT = frozenset(("pytest", "_pytest", "hypothesis", "pytest_nnxcheck", "conftest"))
"""Packages that a program does without; a conftest.py is pytest's file, its code is copied."""
EFFECTS = ("jax", "os", "nnx", "flax", "np", "numpy", "sys", "warnings")
"""What a statement at the top of a module is run for, if it starts with one of these: ``jax.config.update(...)``."""

CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.Call)
"""What other statements may write into: a registry, say."""


class NoSource(Exception):
    """Code that no file holds."""


@dataclass(frozen=True)
class UserModule:
    """One module of the user, taken apart."""

    name: str
    package: str
    lines: tuple[str, ...]
    tree: ast.Module
    bound: dict[str, list[ast.stmt]]
    """The statements at the top that bind a name."""
    left_out: frozenset[str]
    """Names that are nothing without pytest."""
    future: bool

    def text(self, node: ast.stmt, test: str = "") -> str:
        """The source of a statement without what is left out, at the left margin; of a class of tests with one ``test`` alone."""
        lines, left = {number: self.lines[number - 1] for number in lines_of(node)}, dict[int, str]()
        for inner in ast.walk(node):
            needless = [
                decorator for decorator in getattr(inner, "decorator_list", ()) if names_of(decorator) & self.left_out
            ]
            if test and isinstance(inner, ast.ClassDef):
                parts = [part for part in inner.body if self.is_needless(part, test)]
                needless += parts
                if len(parts) == len(inner.body):
                    left[parts[0].lineno] = " " * parts[0].col_offset + "pass"
            for number in (number for decorator in needless for number in lines_of(decorator)):
                lines.pop(number, None)
        return textwrap.dedent("\n".join(line for _, line in sorted({**lines, **left}.items()))).rstrip()

    @functools.cached_property
    def read_by_definitions(self) -> dict[str, set[str]]:
        """The names of the module that each function and class at its top uses."""
        definitions = [node for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        return {node.name: globals_in(self.text(node)) for node in definitions}

    def is_needless(self, part: ast.stmt, test: str) -> bool:
        """Whether a part of a class of tests is another test, or is for pytest."""
        if isinstance(part, ast.FunctionDef):
            return part.name.startswith("test") and part.name != test
        return isinstance(part, ast.Assign) and bool(names_of(part.value) & self.left_out)


def lines_of(node: ast.stmt | ast.expr) -> range:
    """The numbers of the lines of code, decorators included."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return range(first, (node.end_lineno or node.lineno) + 1)


@functools.lru_cache(maxsize=64)
def read_module(module: ModuleType) -> UserModule:
    """Take a module apart. Raises `NoSource`."""
    try:
        text = inspect.getsource(module)
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError) as error:
        raise NoSource(f"the source of {module.__name__} cannot be read") from error
    bound: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in bound_by(statement):
            bound.setdefault(name, []).append(statement)
    future = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    package = getattr(module, "__package__", "") or ""
    return UserModule(module.__name__, package, tuple(text.splitlines()), tree, bound, left_out(tree), future)


def left_out(tree: ast.Module) -> frozenset[str]:
    """Names that are imported from pytest and its like, and those that are made of them: ``marked = pytest.mark.nnx_invariants``."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            aliases = [alias for alias in statement.names if alias.name.partition(".")[0] in LEFT_OUT]
            names.update(alias.asname or alias.name.partition(".")[0] for alias in aliases)
        elif isinstance(statement, ast.ImportFrom) and is_left_out(statement.module):
            names.update(alias.asname or alias.name for alias in statement.names)
        elif (
            isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value and names & names_of(statement.value)
        ):
            names.update(bound_by(statement))
    return frozenset(names)


def is_left_out(module: str | None) -> bool:
    return (module or "").partition(".")[0] in LEFT_OUT - {"conftest"}


def function_node(module: UserModule, function: Any) -> ast.stmt:
    """The definition of a function, wherever in the module it stands. Raises `NoSource`."""
    code = getattr(function, "__code__", None) or getattr(function, "f_code", None)
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef) and code is not None and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if code.co_firstlineno in (first, node.lineno):
                return node
    raise NoSource(f"the source of {getattr(function, '__qualname__', function)} cannot be found")


@dataclass
class Sources:
    """Collects what a program needs of the user's modules."""

    imports: dict[str, None] = field(default_factory=dict)
    folders: dict[str, None] = field(default_factory=dict)
    missing: dict[str, None] = field(default_factory=dict)
    """Names that cannot be copied: what they are bound to needs pytest."""
    _modules: dict[str, UserModule] = field(default_factory=dict)
    _taken: dict[str, dict[int, ast.stmt]] = field(default_factory=dict)
    _extra: list[str] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    @property
    def future(self) -> bool:
        """Whether annotations must not be evaluated."""
        return any(module.future for module in self._modules.values())

    @property
    def names(self) -> frozenset[str]:
        """The names that the user's code binds, imports included."""
        return frozenset(self._names)

    def chunks(self) -> list[str]:
        """The statements, module by module, in the order in which they stand."""
        texts: list[str] = []
        for name, taken in self._taken.items():
            module = self._modules[name]
            texts += [module.text(node) for node in sorted(taken.values(), key=lambda node: node.lineno)]
        return [*dict.fromkeys(texts), *self._extra]

    def take(self, module: ModuleType, names: Iterable[str]) -> None:
        """Copy definitions of a module, and what they need; names that it does not bind are left to Python. Raises `NoSource`."""
        user = self._register(module)
        for name in names:
            self._take_name(user, module, name)

    def take_function(self, function: Any) -> str:
        """Copy a function, however deep it is defined, and what it needs; its name. Raises `NoSource`."""
        module = inspect.getmodule(function)
        if module is None:
            raise NoSource(f"{getattr(function, '__qualname__', function)} is in no module")
        user = self._register(module)
        node = function_node(user, function)
        if node in user.tree.body:
            self._take_node(user, module, node)
        else:
            self._extra.append(user.text(node))
            self._needs(user, module, user.text(node))
        self._names.add(function.__name__)
        return str(function.__name__)

    def take_definition(self, module: ModuleType, node: ast.stmt) -> None:
        """Copy a statement at the top of a module, and what it needs. Raises `NoSource`."""
        self._take_node(self._register(module), module, node)

    def take_test_class(self, cls: type, method: str) -> str:
        """Copy the class of a test without its other tests; the expression that names it. Raises `NoSource`."""
        module = inspect.getmodule(cls)
        if module is None or "<locals>" in cls.__qualname__:
            raise NoSource(f"{cls.__qualname__} is in no module")
        user = self._register(module)
        outermost = cls.__qualname__.partition(".")[0]
        node = next(
            (node for node in user.tree.body if isinstance(node, ast.ClassDef) and node.name == outermost), None
        )
        if node is None:
            raise NoSource(f"the source of {cls.__qualname__} cannot be found")
        text = user.text(node, method)
        self._needs(user, module, text)
        self._names.add(outermost)
        self._extra.append(text)
        return cls.__qualname__

    def _register(self, module: ModuleType) -> UserModule:
        user = read_module(module)
        if user.name not in self._modules:
            self._modules[user.name] = user
            self._taken.setdefault(user.name, {})
            for statement in user.tree.body:
                if has_effect(statement, user):
                    self._take_node(user, module, statement)
        return user

    def _take_name(self, user: UserModule, module: ModuleType, name: str) -> None:
        statements = user.bound.get(name, ())
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                self._take_import(user, statement, name)
            elif name in user.left_out:
                self.missing[name] = None
            else:
                self._take_node(user, module, statement)
        if not statements:
            self._take_star(user)

    def _take_star(self, user: UserModule) -> None:
        for statement in user.tree.body:
            if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
                self._import_line(user, statement, statement.names[0])

    def _take_node(self, user: UserModule, module: ModuleType, node: ast.stmt) -> None:
        taken = self._taken[user.name]
        if id(node) not in taken:
            taken[id(node)] = node
            self._names.update(bound_by(node))
            self._needs(user, module, user.text(node))
            for statement in fillers(user, node):
                self._take_node(user, module, statement)

    def _needs(self, user: UserModule, module: ModuleType, text: str) -> None:
        for name in sorted(globals_in(text)):
            self._take_name(user, module, name)

    def _take_import(self, user: UserModule, statement: ast.Import | ast.ImportFrom, name: str) -> None:
        alias = next(
            (
                candidate
                for candidate in statement.names
                if (candidate.asname or candidate.name.partition(".")[0]) == name
            ),
            None,
        )
        if alias is None:
            return
        if name in user.left_out:
            self.missing[name] = None
            return
        self._names.add(name)
        source = absolute(user, statement)
        module = sys.modules.get(source)
        if (
            isinstance(statement, ast.ImportFrom)
            and module is not None
            and alias.asname is None
            and needs_pytest(module)
        ):
            try:
                self.take(module, [alias.name])
            except NoSource:
                pass
            else:
                return
        self._import_line(user, statement, alias)

    def _import_line(self, user: UserModule, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> None:
        source = absolute(user, statement)
        if source != "__future__":
            self.imports[import_line(statement, source, alias)] = None
            self._remember_folder(alias.name if isinstance(statement, ast.Import) else source)

    def take_reference(self, module: str, name: str) -> None:
        """Import, or copy, a definition that the text of a value names."""
        imported = sys.modules.get(module)
        if imported is not None and (module in self._modules or needs_pytest(imported) or module == "__main__"):
            self.take(imported, [name])
        elif module not in self._modules:
            self.imports[f"from {module} import {name}"] = None
            self._names.add(name)
            self._remember_folder(module)

    def _remember_folder(self, module: str) -> None:
        folder = folder_of(module.partition(".")[0])
        if folder is not None:
            self.folders[folder] = None


def has_effect(statement: ast.stmt, user: UserModule) -> bool:
    """Whether a statement at the top of a module sets up jax, or the like: it binds no name, and is run all the same."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if not isinstance(statement, ast.Expr | ast.Assign) or any(isinstance(target, ast.Name) for target in targets):
        return False
    first = re.match(r"\w*", ast.unparse(statement))
    return first is not None and first[0] in EFFECTS and not names_of(statement) & user.left_out


def fillers(user: UserModule, node: ast.stmt) -> Iterator[ast.stmt]:
    """The statements at the top that write into a container which a statement binds: ``MODELS.update(...)``, and ``@register("a")`` where that names it."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if value is None or not any(isinstance(part, CONTAINERS) for part in ast.walk(value)):
        return
    bound = bound_by(node)
    # What needs pytest fills nothing that a program can have: ``@over_models``, which parametrizes.
    reading = {name: read for name, read in user.read_by_definitions.items() if not read & user.left_out}
    writers = bound | {name for name, read in reading.items() if read & bound}
    for statement in user.tree.body:
        roots = [names_of(root) for root in written_by(statement)]
        if any(names & writers and not names & user.left_out for names in roots):
            yield statement


def written_by(statement: ast.stmt) -> list[ast.expr]:
    """What a statement at the top calls without keeping the result: decorators, or the function of a call."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [part.func if isinstance(part, ast.Call) else part for part in statement.decorator_list]
    value = statement.value if isinstance(statement, ast.Expr) else None
    return [value.func] if isinstance(value, ast.Call) else []


def absolute(user: UserModule, statement: ast.Import | ast.ImportFrom) -> str:
    """The module of an import, relative ones as from outside the package."""
    if isinstance(statement, ast.Import):
        return statement.names[0].name
    if not statement.level:
        return statement.module or ""
    base = user.package.rsplit(".", statement.level - 1)[0] if statement.level > 1 else user.package
    return ".".join(part for part in (base, statement.module) if part)


def needs_pytest(module: ModuleType) -> bool:
    """Whether a module of the user imports pytest or its like at its top, so that a program cannot import it."""
    if is_installed(module) or is_left_out(module.__name__):
        return False
    if module.__name__.rpartition(".")[2] == "conftest":
        return True
    try:
        return bool(read_module(module).left_out)
    except NoSource:
        return False


@functools.cache
def _installed_folders() -> tuple[str, ...]:
    folders = [sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({str(Path(folder).resolve()) for folder in [*folders, *site.getsitepackages()]})


def is_installed(module: ModuleType) -> bool:
    """Whether a module is found from everywhere: the standard library, or an installed package."""
    file = getattr(module, "__file__", None)
    if file is None:
        return not getattr(module, "__path__", None)
    return str(Path(file).resolve()).startswith(_installed_folders())


def folder_of(package: str) -> str | None:
    """The folder from which a package or module of the user is imported, `None` for installed ones."""
    module = sys.modules.get(package)
    if module is None or is_installed(module):
        return None
    file = getattr(module, "__file__", None)
    if file is None:
        places = list(getattr(module, "__path__", ()))
        return str(Path(places[0]).resolve().parent) if places else None
    path = Path(file).resolve()
    return str(path.parent.parent if path.name == "__init__.py" else path.parent)
