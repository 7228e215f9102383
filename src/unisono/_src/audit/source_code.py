"""The user's source, by statements: which names a statement reads, calls and assigns."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator

from unisono._src.audit.audit_report import Source
from unisono._src.audit.trace_comparison import Place

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
CHANGING = ("append", "add", "update", "pop", "extend")
"""Methods that change a list, a set or a dict."""


class SourceFile:
    """A file of the user's."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lines = linecache.getlines(path)
        try:
            self._tree = ast.parse("".join(self._lines))
        except SyntaxError:
            self._tree = ast.Module([], [])
        self._parents = {child: node for node in ast.walk(self._tree) for child in ast.iter_child_nodes(node)}
        self._functions = [node for node in ast.walk(self._tree) if isinstance(node, FUNCTIONS)]

    def read_line(self, line: int) -> str:
        """Return a line without the space around it; empty where the file has no such line."""
        return self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""

    def find_statement(self, line: int) -> ast.stmt | None:
        """Return the smallest statement that covers a line."""
        covering = [
            node for node in ast.walk(self._tree) if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
        ]
        return min(covering, key=lambda node: (node.end_lineno or 0) - node.lineno, default=None)

    def find_expressions(self, line: int) -> list[ast.AST]:
        """Return what is evaluated on a line itself: the statement, or the head of a block without its body."""
        statement = self.find_statement(line)
        return [] if statement is None else list_heads(statement)

    def find_function(self, name: str) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the function with a name, or a method with this name."""
        bare = name.rpartition(".")[2]
        return next((node for node in self._functions if node.name == bare), None)

    def find_function_at(self, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the function, not the lambda, that begins on a line."""
        return next((node for node in self._functions if line in (node.lineno, *(d.lineno for d in node.decorator_list))), None)

    def find_enclosing_function(self, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """Return the innermost function around a line."""
        around = [node for node in self._functions if node.lineno <= line <= (node.end_lineno or 0)]
        return max(around, key=lambda node: node.lineno, default=None)

    def find_condition(self, line: int) -> int | None:
        """Return the line of the innermost `if`, `while` or `for` around a statement; None where there is none in its function."""
        node: ast.AST | None = self.find_statement(line)
        while node is not None:
            node = self._parents.get(node)
            if isinstance(node, FUNCTIONS):
                return None
            if isinstance(node, (ast.If, ast.While, ast.For)) and node.lineno < line:
                return node.lineno
        return None

    def iterate_statements(self, function: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements of a function, in order, those inside of blocks and of functions inside it too."""
        statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node is not function]
        yield from sorted(statements, key=lambda node: node.lineno)


@functools.cache
def read_source(path: str) -> SourceFile:
    return SourceFile(path)


def quote_line(place: Place) -> Source:
    """Return a line of the user's as reports quote it."""
    return Source(place.file, place.line, read_source(place.file).read_line(place.line), place.function)


def list_heads(statement: ast.stmt) -> list[ast.AST]:
    """Return what a statement evaluates itself: of a block its condition, its iterator or its context, of a definition nothing."""
    if isinstance(statement, (ast.If, ast.While)):
        return [statement.test]
    if isinstance(statement, (ast.For, ast.AsyncFor)):
        return [statement.target, statement.iter]
    if isinstance(statement, (ast.With, ast.AsyncWith)):
        return list(statement.items)
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef, ast.Try)):
        return []
    return [statement]


def list_read_names(expressions: list[ast.AST]) -> list[str]:
    """Return the names that are read: variables, and attributes of `self` as "self.name"."""
    names: list[str] = []
    for node in (node for expression in expressions for node in ast.walk(expression)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            if isinstance(node.ctx, ast.Load):
                names.append(f"self.{node.attr}")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id != "self":
            names.append(node.id)
    augmented = [expression.target for expression in expressions if isinstance(expression, ast.AugAssign)]
    names += [spell_name(target) for target in augmented]
    return list(dict.fromkeys(names))


def spell_name(node: ast.AST) -> str:
    """Return a dotted name as it is written; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        before = spell_name(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return node.id if isinstance(node, ast.Name) else ""


def spell_last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name."""
    return spell_name(node).rpartition(".")[2]


def list_assigned_names(statement: ast.AST) -> set[str]:
    """Return the variables that a statement assigns."""
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def list_assigned_attributes(statement: ast.AST) -> set[str]:
    """Return the attributes of `self` that a statement assigns or changes in place, as "self.name"."""
    changed: set[str] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and spell_name(node.value) == "self":
            changed.add(f"self.{node.attr}")
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and spell_name(node.value).startswith("self."):
            changed.add(spell_name(node.value))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGING:
            changed |= {name for name in (spell_name(node.func.value),) if name.startswith("self.")}
    return changed
