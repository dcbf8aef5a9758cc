"""Measurements of ``house.py``: code lines of functions, executed functions, and the import graph."""

from __future__ import annotations

import ast
import gc
import io
import linecache
import sys
import threading
import tokenize
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import cadenza

PACKAGE = Path(cadenza.__file__).resolve().parent

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}
_STARTS_A_THREAD = ("start_new_thread", "start_joinable_thread")
AnyDef = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Function:
    """A ``def`` of the package. Lambdas and comprehensions belong to the ``def`` that holds them."""

    file: str
    """Relative to the package; ``<...>`` for a generated function."""
    name: str
    body: frozenset[int]
    """The numbers of the code lines of its body: no signature, no docstring, no comment, no blank line."""
    whole: frozenset[int]
    """The numbers of all its lines, from the first decorator to the end."""
    wrapper: bool
    """Whether it replaces another function: its ``def`` is decorated with `functools.wraps`."""

    def __str__(self) -> str:
        return f"{len(self.body):4} {len(self.whole):4}  {self.file}: {self.name}"


@cache
def source_of(file: str) -> str:
    """Return the source of a file, or of generated code that `linecache` knows."""
    return "".join(linecache.getlines(file))


def _docstrings(tree: ast.AST) -> set[int]:
    """Return the lines of expressions that are only a string, which are docstrings of functions, classes and attributes."""
    strings = (n for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
    return {
        line
        for node in strings
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


@cache
def code_lines(file: str) -> frozenset[int]:
    """Return the numbers of the lines that hold code: no docstring, no comment, no blank line."""
    source = source_of(file)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return frozenset(lines - _docstrings(ast.parse(source)))


@cache
def _definitions(file: str) -> list[tuple[int, int, str, AnyDef]]:
    found: list[tuple[int, int, str, AnyDef]] = []

    def visit(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = outer
            if isinstance(child, AnyDef | ast.ClassDef):
                name = f"{outer}.{child.name}" if outer else child.name
            if isinstance(child, AnyDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.append((first, child.end_lineno or child.lineno, name, child))
            visit(child, name)

    visit(ast.parse(source_of(file)), "")
    return found


@cache
def function_of(code: CodeType) -> Function | None:
    """Return the function of the package that a code object belongs to; None if it is not the package's or not a function.

    Functions without source, such as the ``__init__`` of a dataclass, do not count.
    """
    file = code.co_filename
    generated = file.startswith("<cadenza") and file in linecache.cache
    if code.co_name == "<module>" or not (generated or Path(file).resolve().is_relative_to(PACKAGE)):
        return None
    around = [definition for definition in _definitions(file) if definition[0] <= code.co_firstlineno <= definition[1]]
    if not around:
        return None  # the body of a class, or a lambda of a module
    first, last, name, node = max(around, key=lambda span: span[0])
    if not code.co_name.startswith("<") and code.co_name != node.name:
        return None  # the body of a class inside a function
    body = code_lines(file) & set(range(node.body[0].lineno, last + 1))
    wrapper = any("wraps" in ast.dump(decorator) for decorator in node.decorator_list)
    shown = file if generated else str(Path(file).resolve().relative_to(PACKAGE))
    return Function(shown, name, body, frozenset(range(first, last + 1)), wrapper)


def body(functions: Iterable[Function]) -> int:
    """Return the number of code lines of their bodies. A line of a nested function counts once."""
    return len({(function.file, line) for function in functions for line in function.body})


def whole(functions: Iterable[Function]) -> int:
    """Return the number of all their lines, with signatures, docstrings, comments and blank lines."""
    return len({(function.file, line) for function in functions for line in function.whole})


def files(functions: Iterable[Function]) -> list[str]:
    """Return the files that hold these functions, without generated ones: their templates are in a file of the package."""
    return sorted({function.file for function in functions if not function.file.startswith("<")})


class Executed:
    """The distinct functions of the package that are executed while this is open, on this thread and on those it starts.

    A thread that starts another one is recorded until then: its later calls belong to other work.

    Args:
        opens: Looks at each call of a package function and returns whether recording starts with it. None: at once.
        closes: Looks at each call and each return, and returns whether recording ends before it.
    """

    def __init__(
        self,
        opens: Callable[[FrameType], bool] | None = None,
        closes: Callable[[], bool] | None = None,
    ) -> None:
        self.functions: dict[Function, None] = {}
        """In the order of their first call."""
        self.open = opens is None
        self.closed = threading.Event()
        self.complete = False
        self.done: set[int] = set()
        """Threads whose recording is over."""
        self._opens, self._closes = opens, closes

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event of `sys.setprofile`."""
        thread = threading.get_ident()
        if event == "c_call" and getattr(argument, "__name__", "") in _STARTS_A_THREAD:
            self.leave()
        if self.closed.is_set() or thread in self.done or event not in ("call", "return"):
            return
        function = function_of(frame.f_code)
        if function is None:
            return
        if not self.open:
            if event != "call" or self._opens is None or not self._opens(frame):
                return
            self.open = True
        if self._closes is not None and self._closes():
            self.close()
        elif event == "call":
            self.functions[function] = None

    def leave(self) -> None:
        """End the recording of this thread, if it has begun. Other threads are still recorded."""
        if self.open:
            self.done.add(threading.get_ident())

    def close(self, *, with_stack: bool = False) -> None:
        """End the recording. With `with_stack`, functions that this thread is in count too, although they began before."""
        if with_stack and not self.closed.is_set():
            self.functions |= dict.fromkeys(stack())
        self.closed.set()

    def result(self) -> list[Function]:
        """Return the functions in the order of their first call.

        Raises:
            RuntimeError: The call that opens or closes the recording did not occur.
        """
        if not self.complete:
            raise RuntimeError("the recording did not open, or did not close before the run ended")
        return list(self.functions)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what is executed inside, and in threads that are started inside."""
        gc.collect()  # else the end of an earlier run may be recorded, wherever its objects are collected
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            self.complete = self.open and (self.closed.is_set() or self._opens is None)
            self.closed.set()


def stack() -> list[Function]:
    """Return the functions of the package that this thread is in, the innermost first."""
    found: list[Function] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if (function := function_of(frame.f_code)) is not None:
            found.append(function)
        frame = frame.f_back
    return found


def modules() -> dict[str, Path]:
    """Return the file of each module of the package by its full name; the front page of the package is left out."""
    named: dict[str, Path] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        named[".".join(parts).removesuffix(".__init__")] = path
    del named[PACKAGE.name]
    return named


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the parsed source of a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(*, functions: bool, run_for_types: bool) -> dict[str, set[str]]:
    """Return for each module the modules of the package that it imports, those for type checkers included.

    Args:
        functions: Imports inside functions count.
        run_for_types: ``from cadenza.run import Run`` counts also if it stands under ``if TYPE_CHECKING``.
    """
    known = modules()
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        graph[module] = set()
        for node, for_types in _imports_in(tree_of(path), functions=functions):
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                if for_types and not run_for_types and node.module == "cadenza.run" and names == ["Run"]:
                    continue
                names = [f"{node.module}.{name}" for name in names]
            graph[module] |= {target for name in names if (target := _inside(name, known))}
        graph[module].discard(module)
    return graph


def _imports_in(
    tree: ast.AST, *, functions: bool, for_types: bool = False
) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, for_types
        elif functions or not isinstance(node, AnyDef):
            guarded = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
            yield from _imports_in(node, functions=functions, for_types=for_types or guarded)


def session_attributes() -> list[str]:
    """Return the attributes of `Session` that other modules use. Session expressions are recognized by their names."""
    trees = {module: tree_of(path) for module, path in modules().items()}
    holder = next(module for module, tree in trees.items() if any(_is_session_class(node) for node in tree.body))
    definition = next(node for node in trees[holder].body if _is_session_class(node))
    assert isinstance(definition, ast.ClassDef)
    own = {node.target.id for node in definition.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    own |= {node.name for node in definition.body if isinstance(node, AnyDef)}
    others = (tree for module, tree in trees.items() if module != holder)
    return sorted({name for tree in others for name in _attributes_of_sessions(tree)} & own)


def _is_session_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == "Session"


def _attributes_of_sessions(tree: ast.Module) -> Iterator[str]:
    nodes = list(ast.walk(tree))
    annotated = [(node.arg, node.annotation) for node in nodes if isinstance(node, ast.arg) and node.annotation is not None]
    named = {"session", "_session", *(name for name, kind in annotated if _names_session(kind))}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            value = node.value
            called = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "session_of"
            by_name = isinstance(value, ast.Name) and value.id in named
            if called or by_name or (isinstance(value, ast.Attribute) and value.attr in ("session", "_session")):
                yield node.attr


def _names_session(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Name) and node.id == "Session" for node in ast.walk(annotation))


def callbacks_with_session() -> list[str]:
    """Return the modules of ``callbacks`` that import the session."""
    graph = imports(functions=True, run_for_types=True)
    return sorted(m for m, others in graph.items() if ".callbacks." in m and any(n.endswith(".session") for n in others))


def _inside(name: str, known: Iterable[str]) -> str | None:
    parts = name.split(".")
    while len(parts) > 1:
        if ".".join(parts) in known:
            return ".".join(parts)
        parts.pop()
    return None


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module, the largest first."""
    reached = {name: _reached(graph, name) for name in graph}
    found = {frozenset({name, *(other for other in reached[name] if name in reached[other])}) for name in graph}
    return sorted((sorted(group) for group in found if len(group) > 1), key=lambda group: (-len(group), group))


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for other in graph[waiting.pop()] - reached:
            reached.add(other)
            waiting.append(other)
    return reached
