"""The source of users' functions, as syntax trees.

In: a function. Out: its tree, and what is local to it.

    syntax_of(function)              # an ast.FunctionDef or ast.Lambda; None where the source can't be had

The file is taken to be the one that was imported, as torch.jit.script takes it to be.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import linecache
from types import FunctionType

from fxbatch.caches import cached

Function = ast.FunctionDef | ast.Lambda


@cached("functions of a file")
def _functions_in(source: str) -> dict[tuple[int, str], list[Function]]:
    """The functions of a file, by first line and name."""
    functions: dict[tuple[int, str], list[Function]] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            functions.setdefault((first, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            functions.setdefault((node.lineno, "<lambda>"), []).append(node)
    return functions


def names_of_arguments(a: ast.arguments) -> list[str]:
    rest = [x for x in (a.vararg, a.kwarg) if x is not None]
    return [x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs, *rest)]


def syntax_of(function: FunctionType) -> Function | None:
    """The syntax tree of a function; None where its source can't be had, or several functions of its line fit."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    try:
        fitting = _functions_in("".join(lines)).get((code.co_firstlineno, code.co_name), [])
    except SyntaxError:
        return None
    arguments = inspect.getargs(code)
    names = [*arguments.args, *(x for x in (arguments.varargs, arguments.varkw) if x is not None)]
    fitting = [node for node in fitting if names_of_arguments(node.args) == names]
    return fitting[0] if len(fitting) == 1 else None


def stored_names(node: Function) -> tuple[frozenset[str], frozenset[str]]:
    """The local variables of a function, and those that it declares to be others'."""
    stored, others = set(names_of_arguments(node.args)), set[str]()
    todo: list[ast.AST] = list(node.body) if isinstance(node.body, list) else [node.body]
    while todo:
        n = todo.pop()
        if isinstance(n, (ast.FunctionDef, ast.ClassDef)):
            stored.add(n.name)
            continue
        if isinstance(n, ast.Lambda):
            continue
        if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load):
            stored.add(n.id)
        elif isinstance(n, (ast.Global, ast.Nonlocal)):
            others.update(n.names)
        elif isinstance(n, ast.alias):
            stored.add((n.asname or n.name).partition(".")[0])
        elif isinstance(n, ast.ExceptHandler) and n.name:
            stored.add(n.name)
        todo += ast.iter_child_nodes(n)
    return frozenset(stored - others), frozenset(others)


def yields(statement: ast.stmt) -> bool:
    todo: list[ast.AST] = [statement]
    while todo:
        n = todo.pop()
        if isinstance(n, (ast.Yield, ast.YieldFrom, ast.Await)):
            return True
        if not isinstance(n, (ast.FunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(n)
    return False


def digest(node: ast.AST) -> str:
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:16]
