"""Reads the methods of a callback class, and notes what each event uses of its arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cadenza.adapters.description import Description
from cadenza.adapters.surface.expressions import Expressions, Names, tried_in
from cadenza.adapters.surface.source import Body, parameters_of, source_of
from cadenza.adapters.surface.values import Keywords, Self, Value

_CATCHING = {"AttributeError", "Exception", "BaseException"}
_LEAVING = ast.Return | ast.Raise | ast.Continue | ast.Break
_DEPTH = 12  # of helper methods that call each other


class Reader(Expressions):
    """Follows the arguments of the events through the methods of a class."""

    event: str
    conditions: int
    owner: type[Any]

    def __init__(self, kind: type[Any], base: type[Any], description: Description) -> None:
        super().__init__(kind, base, description)
        self._calls: list[tuple[str, str]] = []  # the methods that are being read, with their arguments
        self._read: dict[tuple[str, str], tuple[int, Value]] = {}  # those of the event that were, with conditions and results

    def read(self, event: str, function: Callable[..., Any] | None = None) -> None:
        """Note what an event uses.

        Args:
            event: The name of the event, or of another method.
            function: The function of an instance that has its own; None for the method of the class.
        """
        self.event, self.conditions, self._calls, self._read = event, 0, [], {}
        if function is not None:
            self.function(function, self.owner, self._roles(event), bound=False)
        elif (owner := self.owner_of(event)) is not None:
            self.function(vars(owner)[event], owner, self._roles(event))

    def _roles(self, event: str) -> list[Value]:
        """Return the arguments of an event by position, as the base class names them."""
        try:
            parameters = [*inspect.signature(getattr(self.base, event)).parameters.values()][1:]
        except (AttributeError, ValueError, TypeError):
            return []
        by_position = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        return [self.argument(one.name) for one in by_position]

    def function(
        self, function: Any, owner: type[Any], given: list[Value], named: Mapping[str, Value] = {}, *, bound: bool = True
    ) -> Value:
        """Read a function with these arguments; return the object that it returns, if that is known."""
        static = isinstance(function, staticmethod)
        function = getattr(function, "__func__", function)
        source = source_of(function) if callable(function) else None
        label = f"{owner.__name__}.{getattr(function, '__name__', function)}"
        if source is None:
            if label not in self.found.unreadable:
                self.found.unreadable.append(label)
            return None
        call = (label, repr((given, sorted(named.items()))))
        if call in self._calls or len(self._calls) > _DEPTH:
            return None
        if call in self._read and self._read[call][0] <= self.conditions:
            return self._read[call][1]
        values = [Self(), *given] if bound and not static else given
        names = self._names(source, values, named)
        before, self.owner = self.owner, owner
        conditions, self._calls = self.conditions, [*self._calls, call]
        result = self._body(source, names)
        self.owner, self.conditions, self._calls = before, conditions, self._calls[:-1]
        self._read[call] = conditions, result
        return result

    def _names(self, source: Body, values: list[Value], named: Mapping[str, Value]) -> Names:
        parameters, rest = parameters_of(source), source.args
        names: Names = dict(zip(parameters, values, strict=False))
        others = [*parameters[len(values) :], *(one.arg for one in rest.kwonlyargs)]
        event = len(self._calls) == 0  # the arguments of an event may come by name; those of a helper are the ones given
        names |= {name: named.get(name, self.argument(name) if event else None) for name in others}
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
        for statement in body:
            self._statement(statement, names, returned)
            if _may_leave(statement):
                self.conditions += 1  # the method may have ended here

    def _statement(self, statement: ast.stmt, names: Names, returned: list[Value]) -> None:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inner: Names = {**names, **dict.fromkeys(parameters_of(statement))}
                with self.only_sometimes():
                    self._statements(statement.body, inner, [])
            case ast.ClassDef() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal() | ast.Pass():
                pass
            case ast.If(test=test, body=body, orelse=orelse):
                self.value(test, names)
                with self.only_sometimes(tried=tried_in(test)):
                    self._statements(body, names, returned)
                with self.only_sometimes():
                    self._statements(orelse, names, returned)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                with self.guarded(any(map(_catches, handlers))):
                    self._statements(body, names, returned)
                with self.only_sometimes():
                    for part in (*(one.body for one in handlers), orelse):
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
        """Read a statement that may run one part of several, or one part several times."""
        match statement:
            case ast.For(target=target, iter=expression, body=body, orelse=orelse):
                self.value(expression, names)
                self.assign(target, None, names)
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


@lru_cache(maxsize=8192)
def _may_leave(statement: ast.stmt) -> bool:
    """Return whether a method may end inside a statement, so that the next one is not always reached."""
    return not isinstance(statement, _LEAVING) and any(isinstance(node, _LEAVING) for node in ast.walk(statement))


def _catches(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler catches the error for an attribute that is absent, and does not raise again."""
    names = {one.id for one in ast.walk(handler.type) if isinstance(one, ast.Name)} if handler.type else {"BaseException"}
    return bool(names & _CATCHING) and not any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _as_read(target: ast.expr) -> ast.expr:
    """Return the target of an assignment as an expression that reads it."""
    return ast.parse(ast.unparse(target), mode="eval").body
