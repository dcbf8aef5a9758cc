"""Analyses the methods of a callback class and records how each event uses its arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cadenza.compat.adapter.description import Description
from cadenza.compat.adapter.surface.expressions import REST, Expressions, Names
from cadenza.compat.adapter.surface.source import Body, name_of, names_around, parameters_of, source_of
from cadenza.compat.adapter.surface.values import Function, Items, Keywords, Self, Value

_CATCHING = {"AttributeError", "Exception", "BaseException"}
_LEAVING = ast.Return | ast.Raise | ast.Continue | ast.Break
_DEPTH = 12  # maximum depth of nested helper calls


class Reader(Expressions):
    """Tracks the arguments of events through the methods of a class."""

    event: str
    conditions: int
    owner: type[Any]
    scope: Mapping[str, Any]

    def __init__(self, kind: type[Any], base: type[Any], description: Description) -> None:
        super().__init__(kind, base, description)
        self._calls: list[tuple[str, str]] = []  # the methods being analysed, with their arguments
        # the analysed methods of the event, with conditions and results
        self._read: dict[tuple[str, str], tuple[int, Value]] = {}

    def read(self, event: str, function: Callable[..., Any] | None = None) -> None:
        """Record the uses of an event.

        Args:
            event: The name of the event, or of another method.
            function: The instance's own function; None for the method of the class.
        """
        self.event, self.conditions, self._calls, self._read = event, 0, [], {}
        roles = self._roles(event)
        if function is not None:
            self.follow(Function(function, self.owner), roles)
        elif (owner := self.owner_of(event)) is not None:
            self.follow(Function(vars(owner)[event], owner, bound=True), roles)

    def _roles(self, event: str) -> list[Value]:
        """Return the arguments of an event by position, as the base class names them."""
        try:
            parameters = [*inspect.signature(getattr(self.base, event)).parameters.values()][1:]
        except (AttributeError, ValueError, TypeError):
            return []
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [self.argument(parameter.name) for parameter in parameters if parameter.kind in positional]

    def follow(self, function: Function, given: list[Value], named: Mapping[str, Value] = {}) -> Value:
        """Analyse a function with these arguments. Return its result if known."""
        source, label = _source(function), _label(function)
        if source is None:
            if label not in self.found.unreadable:
                self.found.unreadable.append(label)
            return None
        call = (label, repr((given, sorted(named.items()))))
        if call in self._calls or len(self._calls) > _DEPTH:
            return None
        if call in self._read and self._read[call][0] <= self.conditions:
            return self._read[call][1]
        bound = function.bound and not isinstance(function.function, staticmethod)
        names = {**function.names, **self._names(source, [Self(), *given] if bound else given, named)}
        before, conditions = (self.owner, self.scope), self.conditions
        self.owner, self.scope = function.owner, function.scope or names_around(function.function)
        self._calls = [*self._calls, call]
        result = self._body(source, names)
        (self.owner, self.scope), self.conditions, self._calls = before, conditions, self._calls[:-1]
        self._read[call] = conditions, result
        return result

    def can_follow(self, function: Function) -> bool:
        return _source(function) is not None

    def _names(self, source: Body, values: list[Value], named: Mapping[str, Value]) -> Names:
        parameters, rest = parameters_of(source), source.args
        names: Names = dict(zip(parameters, values, strict=False))
        others = [*parameters[len(values) :], *(parameter.arg for parameter in rest.kwonlyargs)]
        # arguments of an event may be passed by name; those of a helper are as passed
        by_name = len(self._calls) == 0 or isinstance(named.get(REST), Keywords)
        names |= {name: named.get(name, self.argument(name) if by_name else None) for name in others}
        if rest.vararg is not None:
            names[rest.vararg.arg] = Items(tuple(values[len(parameters) :]))
        if rest.kwarg is not None:
            names[rest.kwarg.arg] = Keywords()
        return names

    def _body(self, tree: Body, names: Names) -> Value:
        if isinstance(tree, ast.Lambda):
            return self.value(tree.body, names)
        returned: list[Value] = []
        self._statements(tree.body, names, returned)
        return next((value for value in returned if value is not None), None)

    # -- statements ----------------------------------------------------------------------------------------

    def _statements(self, body: list[ast.stmt], names: Names, returned: list[Value]) -> None:
        for index, statement in enumerate(body):
            self._statement(statement, names, returned)
            if _may_leave(statement):  # the method may have returned here
                tried = self.tried_in(statement.test, names, holds=False) if _leaves(statement) else ()  # type: ignore[attr-defined]
                with self.only_sometimes(tried=tried):
                    self._statements(body[index + 1 :], names, returned)
                return

    def _statement(self, statement: ast.stmt, names: Names, returned: list[Value]) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inner: Names = {**names, **dict.fromkeys(parameters_of(statement))}
                with self.only_sometimes():
                    self._statements(statement.body, inner, [])
                names[statement.name] = Function(statement, self.owner, names=names, scope=self.scope)
            case ast.Import() | ast.ImportFrom():
                self.imported(statement)
            case ast.ClassDef() | ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case ast.If(test=test, body=body, orelse=orelse):
                self.value(test, names)
                if not self.description.is_never(test):
                    with self.only_sometimes(tried=self.tried_in(test, names)):
                        self._statements(body, names, returned)
                with self.only_sometimes(tried=self.tried_in(test, names, holds=False)):
                    self._statements(orelse, names, returned)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                with self.guarded(any(map(_catches, handlers))):
                    self._statements(body, names, returned)
                with self.only_sometimes():
                    for part in (*(handler.body for handler in handlers), orelse):
                        self._statements(part, names, returned)
                self._statements(final, names, returned)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                suppresses = False
                for item in items:
                    self.assign(item.optional_vars, self.value(item.context_expr, names), names)
                    suppresses |= "suppress" in ast.unparse(item.context_expr)
                with self.guarded(suppresses):
                    self._statements(body, names, returned)
            case ast.For() | ast.While() | ast.Match():
                self._several(statement, names, returned)
            case _:
                self._simple(statement, names, returned)

    def _several(self, statement: ast.stmt, names: Names, returned: list[Value]) -> None:
        """Analyse a branch or a loop."""
        match statement:
            case ast.For(target=target, iter=expression, body=body, orelse=orelse):
                self.assign(target, self.elements(expression, names), names)
                with self.only_sometimes():
                    self._statements([*body, *orelse], names, returned)
            case ast.Match(subject=subject, cases=cases):
                self.value(subject, names)
                with self.only_sometimes():
                    for case in cases:
                        self._statements(case.body, names, returned)
            case ast.While(test=test, body=body, orelse=orelse):
                self.value(test, names)
                with self.only_sometimes():
                    self._statements([*body, *orelse], names, returned)

    def _simple(self, statement: ast.stmt, names: Names, returned: list[Value]) -> None:
        match statement:
            case ast.Assign(targets=targets, value=expression):
                value = self.value(expression, names)
                for target in targets:
                    self.assign(target, value, names)
            case ast.AnnAssign(target=target, value=expression):
                self.assign(target, None if expression is None else self.value(expression, names), names)
            case ast.AugAssign(target=target, value=expression):
                self.value(expression, names)
                if not isinstance(target, ast.Name):
                    self.value(_as_read(target), names)
                    self.assign(target, None, names)
            case ast.Return(value=expression):
                returned.append(None if expression is None else self.value(expression, names))
            case _:
                for node in ast.iter_child_nodes(statement):
                    if isinstance(node, ast.expr):
                        self.value(node, names)


def _source(function: Function) -> Body | None:
    found = getattr(function.function, "__func__", function.function)
    return found if isinstance(found, Body) else source_of(found) if callable(found) else None


def _label(function: Function) -> str:
    """Return the qualified name of a function, with its class or module."""
    found = getattr(function.function, "__func__", function.function)
    if isinstance(found, Body):
        return f"{function.owner.__name__}.{name_of(found)}:{found.lineno}"
    inside = function.owner.__name__ if function.bound or not hasattr(found, "__module__") else found.__module__
    return f"{inside}.{getattr(found, '__name__', found)}"


def _leaves(statement: ast.stmt) -> bool:
    """Return whether a statement is an ``if`` with a body that always leaves the block."""
    return isinstance(statement, ast.If) and not statement.orelse and isinstance(statement.body[-1], _LEAVING)


@lru_cache(maxsize=8192)
def _may_leave(statement: ast.stmt) -> bool:
    """Return whether a method may return inside a statement, so that the next one may not run."""
    return not isinstance(statement, _LEAVING) and any(isinstance(node, _LEAVING) for node in ast.walk(statement))


def _catches(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches ``AttributeError`` without re-raising it."""
    names = {child.id for child in ast.walk(handler.type) if isinstance(child, ast.Name)} if handler.type else {"BaseException"}
    return bool(names & _CATCHING) and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _as_read(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body
