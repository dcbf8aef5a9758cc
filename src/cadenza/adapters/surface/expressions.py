"""Reads expressions: which objects that a callback received they use."""

from __future__ import annotations

import ast
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from cadenza.adapters.description import Description
from cadenza.adapters.surface.notes import Notes
from cadenza.adapters.surface.values import Keywords, Kind, Self, Thing, Value

Names = dict[str, Value]

_NO_METHOD = object()


class Expressions(Notes):
    """Follows objects through expressions.

    Args:
        kind: The callback class.
        base: The base class of the other system.
        description: What the callbacks of that system receive.
    """

    def __init__(self, kind: type[Any], base: type[Any], description: Description) -> None:
        super().__init__()
        self.base: type[Any] = base
        self.description: Description = description
        self.parts: Mapping[str, type[Any]] = description.parts
        self.classes: list[type[Any]] = [one for one in kind.__mro__ if one not in base.__mro__]
        """The class and its bases before the one of the other system."""
        self.owner: type[Any] = kind
        """The class of the method that is being read."""

    @abstractmethod
    def function(self, function: Any, owner: type[Any], given: list[Value], named: Mapping[str, Value] = {}) -> Value:
        """Read a method with these arguments; return the object that it returns, if that is known."""

    def owner_of(self, name: str, after: type[Any] | None = None) -> type[Any] | None:
        """Return the class that defines a method, before the base class; with `after`, as ``super()`` finds it there."""
        start = 0 if after is None else self.classes.index(after) + 1
        return next((one for one in self.classes[start:] if name in vars(one)), None)

    def argument(self, name: str) -> Value:
        """Return an argument of events by name."""
        arguments = self.description.arguments
        return Thing(name, arguments[name]) if name in arguments else None

    def value(self, node: ast.expr, names: Names) -> Value:
        """Note the uses in an expression, and return its value if that is an object the callback received."""
        match node:
            case ast.Name(id=name):
                return names.get(name)
            case ast.Attribute(value=expression, attr=name):
                return self._attribute(self.value(expression, names), name, "reads", node)
            case ast.Subscript(value=expression, slice=index):
                thing = self.value(expression, names)
                self.value(index, names)
                return self._item(thing, index, node)
            case ast.Call():
                return self._call(node, names)
            case ast.NamedExpr(target=target, value=expression):
                value = self.value(expression, names)
                self.assign(target, value, names)
                return value
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.value(test, names)
                with self.only_sometimes(tried=tried_in(test)):
                    one = self.value(body, names)
                with self.only_sometimes():
                    other = self.value(orelse, names)
                return one or other
            case ast.BoolOp(values=[first, *others]):
                value = self.value(first, names)
                with self.only_sometimes(tried=tried_in(first)):
                    rest = [self.value(one, names) for one in others]
                return next((one for one in (value, *rest) if one is not None), None)
            case ast.Lambda() | ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                with self.only_sometimes():
                    self._children(node, dict(names))
                return None
        self._children(node, names)
        return None

    def _children(self, node: ast.AST, names: Names) -> None:
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.comprehension):
                self.value(one.iter, names)
                for target in ast.walk(one.target):
                    if isinstance(target, ast.Name):
                        names[target.id] = None
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.expr):
                self.value(one, names)
            elif isinstance(one, ast.comprehension):
                for test in one.ifs:
                    self.value(test, names)
            elif isinstance(one, ast.keyword | ast.FormattedValue):
                self.value(one.value, names)

    def _attribute(self, value: Value, name: str, kind: Kind, node: ast.AST) -> Value:
        match value:
            case Self(after=None):
                return self._own(name)
            case Thing():
                return self.use(value, name, kind, node)
        return None

    def _own(self, name: str) -> Value:
        """Return an attribute of the callback: one of its base class, one that it has set, or the result of a property."""
        if name in self.description.attributes:
            return Thing(f"self.{name}", self.description.attributes[name])
        owner = self.owner_of(name)
        if owner is not None and isinstance(found := vars(owner)[name], property) and found.fget is not None:
            return self.function(found.fget, owner, [])
        return self.found.own.get(name)

    def _item(self, value: Value, index: ast.expr, node: ast.AST) -> Value:
        if isinstance(index, ast.Constant) and isinstance(index.value, str):
            if isinstance(value, Keywords):
                return self.argument(index.value)
            if isinstance(value, Thing):
                return self.use(value, f"[{index.value!r}]", "reads", node)
        return None

    def _call(self, node: ast.Call, names: Names) -> Value:
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr", "setattr", "delattr"):
            return self._by_name(function.id, node, names)
        given = [self.value(one, names) for one in node.args if not isinstance(one, ast.Starred)]
        named = {one.arg: self.value(one.value, names) for one in node.keywords if one.arg is not None}
        if isinstance(function, ast.Attribute):
            holder = self._holder(function.value, names)
            if isinstance(holder, Self) and (result := self._method(holder, function.attr, given, named)) is not _NO_METHOD:
                return result  # type: ignore[return-value]
            of_mapping = isinstance(holder, Keywords) or (isinstance(holder, Thing) and holder.view is None)
            if of_mapping and node.args and function.attr in ("get", "pop", "setdefault"):
                return self._item(holder, node.args[0], node)
            if isinstance(holder, Thing):
                result = self.use(holder, function.attr, "calls", node)
                self.pass_on(ast.unparse(function), given, named, node)
                return result
        else:
            self.value(function, names)
        self.pass_on(ast.unparse(function), given, named, node)
        return None

    def _holder(self, node: ast.expr, names: Names) -> Value:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            return Self(self.owner)
        return self.value(node, names)

    def _method(self, holder: Self, name: str, given: list[Value], named: Mapping[str, Value]) -> object:
        """Read a method of the callback that is called; the result is `_NO_METHOD` if its class has none of this name."""
        owner = self.owner_of(name, holder.after)
        if owner is None or not callable(getattr(found := vars(owner)[name], "__func__", found)):
            known = holder.after is not None or hasattr(self.base, name)  # a method of the base class: of no interest
            return None if known else _NO_METHOD
        return self.function(found, owner, given, named)

    def _by_name(self, function: str, node: ast.Call, names: Names) -> Value:
        """Note a use by ``getattr``, ``hasattr`` or ``setattr``."""
        first, *rest = node.args or [ast.Constant(None)]
        value, others = self.value(first, names), [self.value(one, names) for one in rest[1:]]
        name = rest[0].value if rest and isinstance(rest[0], ast.Constant) else None
        if isinstance(value, Self) and function == "setattr":
            self.found.hooks |= {str(name)} if name else set()
            self.found.dynamic |= name is None
        if not (isinstance(value, Thing) and isinstance(name, str)):
            return value and self._own(name) if isinstance(value, Self) and isinstance(name, str) else None
        with self.guarded(function == "hasattr" or (function == "getattr" and bool(others))):
            return self.use(value, name, "sets" if function == "setattr" else "reads", node)

    def assign(self, target: ast.expr | None, value: Value, names: Names) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Attribute(value=expression, attr=name):
                match self.value(expression, names):
                    case Self():
                        self.found.hooks.add(name)
                        if isinstance(value, Thing):
                            self.found.own.setdefault(name, value)
                    case Thing() as thing:
                        self.use(thing, name, "sets", target)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self.assign(part, None, names)
            case ast.Starred(value=part):
                self.assign(part, None, names)
            case ast.Subscript(value=expression, slice=index):
                self.value(index, names)
                holder = self.value(expression, names)
                if isinstance(holder, Thing) and isinstance(index, ast.Constant):
                    self.use(holder, f"[{index.value!r}]", "sets", target)


def tried_in(test: ast.expr) -> tuple[str, ...]:
    """Return the attributes that a condition asks for with ``hasattr``, as text; after ``isinstance(x, ...)``, ``x.*``.

    A view is of none of the classes that a callback of another system asks for.
    """
    if isinstance(test, ast.UnaryOp):
        return ()
    calls = [node for node in ast.walk(test) if isinstance(node, ast.Call) and len(node.args) == 2]
    found = [(ast.unparse(one.func), ast.unparse(one.args[0]), one.args[1]) for one in calls]
    of_classes = [f"{thing}.*" for function, thing, _ in found if function == "isinstance"]
    by_name = [
        f"{thing}.{name.value!s}" for function, thing, name in found if function == "hasattr" and isinstance(name, ast.Constant)
    ]
    return (*of_classes, *by_name)
