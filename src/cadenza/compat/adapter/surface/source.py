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
    """Return the syntax tree of a function; None if it cannot be read: it is built in C, or was typed into an interpreter."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    names = [code.co_varnames[i] for i in range(code.co_argcount)]
    at_its_line = _functions_in(code.co_filename).get(code.co_firstlineno, ())
    fitting = [one for one in at_its_line if name_of(one) == code.co_name and parameters_of(one) == names]
    return fitting[0] if len(fitting) == 1 else None  # two lambdas of one line look alike


def names_around(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the names that a function uses from outside: those of its module, and of a function around it."""
    found = inspect.unwrap(getattr(function, "__func__", function))
    code, cells = getattr(found, "__code__", None), getattr(found, "__closure__", None) or ()
    around = dict(getattr(found, "__globals__", {}))
    for name, cell in zip(() if code is None else code.co_freevars, cells, strict=False):
        with suppress(ValueError):  # a name without a value yet
            around[name] = cell.cell_contents
    return around


def parameters_of(tree: Body) -> list[str]:
    """Return the names of the parameters that can be given by position."""
    return [one.arg for one in (*tree.args.posonlyargs, *tree.args.args)]


def name_of(tree: Body) -> str:
    """Return the name of a function."""
    return "<lambda>" if isinstance(tree, ast.Lambda) else tree.name


@lru_cache(maxsize=64)
def _functions_in(file: str) -> dict[int, list[Body]]:
    """Return the functions of a file, or of a cell of a notebook, by their first line; that of a decorator counts."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, list[Body]] = {}
    for node in ast.walk(tree):
        if isinstance(node, Body):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            found.setdefault(min([node.lineno, *(one.lineno for one in decorators)]), []).append(node)
    return found
