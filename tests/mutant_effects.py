"""What a mutant does to the syntax tree of a function, a class or a constant of the package."""

from __future__ import annotations

import ast
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Returns:
    """The function does nothing but return this value."""

    value: str

    def __str__(self) -> str:
        return f"returns {self.value}"

    def change(self, scope: ast.AST) -> None:
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            scope.body = [ast.Return(node_of(self.value))]


@dataclass(frozen=True, slots=True)
class Replaces:
    """Every expression, statement or keyword argument that reads ``old`` becomes ``new``, however both are laid out."""

    old: str
    new: str

    def __str__(self) -> str:
        return f"has {self.new} for {self.old}"

    def change(self, scope: ast.AST) -> None:
        _Replacement((node_of(self.old), node_of(self.new))).generic_visit(scope)


@dataclass(frozen=True, slots=True)
class Swaps:
    """Two expressions, or two statements, change places."""

    one: str
    other: str

    def __str__(self) -> str:
        return f"has {self.one} and {self.other} swapped"

    def change(self, scope: ast.AST) -> None:
        one, other = node_of(self.one), node_of(self.other)
        if not all(any(is_same(node, each) for node in ast.walk(scope)) for each in (one, other)):
            return  # half of it would be another mutant
        _Replacement((one, other), (other, one)).generic_visit(scope)


@dataclass(frozen=True, slots=True)
class Never:
    """The condition never holds."""

    condition: str

    def __str__(self) -> str:
        return f"never {self.condition}"

    def change(self, scope: ast.AST) -> None:
        Replaces(self.condition, "False").change(scope)


@dataclass(frozen=True, slots=True)
class Always:
    """The condition always holds."""

    condition: str

    def __str__(self) -> str:
        return f"always {self.condition}"

    def change(self, scope: ast.AST) -> None:
        Replaces(self.condition, "True").change(scope)


@dataclass(frozen=True, slots=True)
class Negates:
    """The condition holds where it does not, and the other way round."""

    condition: str

    def __str__(self) -> str:
        return f"negates {self.condition}"

    def change(self, scope: ast.AST) -> None:
        Replaces(self.condition, f"not ({self.condition})").change(scope)


@dataclass(frozen=True, slots=True)
class Drops:
    """Leave a part out.

    A statement becomes ``pass``. An argument leaves its call, an element its collection, an operand its ``and``, ``or`` or
    pattern, a condition its comprehension; an entry leaves its dict with its key.
    """

    part: str

    def __str__(self) -> str:
        return f"without {self.part}"

    def change(self, scope: ast.AST) -> None:
        _Removal(node_of(self.part)).visit(scope)


Effect = Returns | Replaces | Swaps | Never | Always | Negates | Drops


def node_of(text: str) -> ast.AST:
    """The expression, the statement, or the keyword argument (which is written without spaces) that a text is."""
    (statement,) = ast.parse(text).body
    if isinstance(statement, ast.Assign) and " " not in text.partition("=")[0]:
        (call,) = ast.parse(f"_({text})").body
        return call.value.keywords[0]
    return statement.value if isinstance(statement, ast.Expr) else statement


class _Replacement(ast.NodeTransformer):
    def __init__(self, *pairs: tuple[ast.AST, ast.AST]) -> None:
        self.pairs = pairs

    def visit(self, node: ast.AST) -> ast.AST:
        return next((new for old, new in self.pairs if is_same(node, old)), None) or self.generic_visit(node)


class _Removal(ast.NodeTransformer):
    def __init__(self, part: ast.AST) -> None:
        self.part = part

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.stmt) and self._is_part(node):
            return ast.Pass()
        if isinstance(node, ast.Dict):
            entries = [pair for pair in zip(node.keys, node.values, strict=True) if not self._is_part(pair[0])]
            node.keys, node.values = [key for key, _ in entries], [value for _, value in entries]
        for field, values in ast.iter_fields(node):
            if isinstance(values, list):
                kept = [value for value in values if isinstance(value, ast.stmt) or not self._is_part(value)]
                setattr(node, field, kept)
        self.generic_visit(node)
        match node:
            case ast.BoolOp(values=[operand]) | ast.MatchOr(patterns=[operand]):
                return operand
        return node

    def _is_part(self, node: ast.AST | None) -> bool:
        inner = node.value if isinstance(node, ast.Expr | ast.MatchValue) else node
        return is_same(node, self.part) or is_same(inner, self.part)


def is_same(one: ast.AST | None, other: ast.AST) -> bool:
    """Do two pieces of code differ in nothing but their layout?"""
    return type(one) is type(other) and ast.dump(one) == ast.dump(other)
