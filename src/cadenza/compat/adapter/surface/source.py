"""The source of functions and methods as syntax trees."""

from __future__ import annotations

import ast
import inspect
import linecache
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

Body = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def source_of(function: Callable[..., Any]) -> Body | None:
    """Return the syntax tree of a function; None if it has no source, as for C functions."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    names = [code.co_varnames[i] for i in range(code.co_argcount)]
    at_its_line = _functions_in(code.co_filename).get(code.co_firstlineno, ())
    fitting = [node for node in at_its_line if name_of(node) == code.co_name and parameters_of(node) == names]
    return fitting[0] if len(fitting) == 1 else None  # two lambdas on one line are indistinguishable


def names_around(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the global and enclosing names that a function uses."""
    found = inspect.unwrap(getattr(function, "__func__", function))
    code, cells = getattr(found, "__code__", None), getattr(found, "__closure__", None) or ()
    around = dict(getattr(found, "__globals__", {}))
    for name, cell in zip(() if code is None else code.co_freevars, cells, strict=False):
        with suppress(ValueError):  # a name that is still unbound
            around[name] = cell.cell_contents
    return around


def parameters_of(tree: Body) -> list[str]:
    """Return the names of the positional parameters."""
    return [argument.arg for argument in (*tree.args.posonlyargs, *tree.args.args)]


def name_of(tree: Body) -> str:
    """Return the name of a function."""
    return "<lambda>" if isinstance(tree, ast.Lambda) else tree.name


@lru_cache(maxsize=64)
def _functions_in(file: str) -> dict[int, list[Body]]:
    """Return the functions of a file or notebook cell by first line, counting decorators."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[Body]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Body):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            found.setdefault(min([node.lineno, *(decorator.lineno for decorator in decorators)]), []).append(node)
    return found
