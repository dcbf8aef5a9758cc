"""Analyses expressions for uses of the objects that a callback receives."""

from __future__ import annotations

import ast
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from importlib.util import resolve_name
from types import FunctionType, ModuleType
from typing import Any

from cadenza.compat.adapter.description import Description
from cadenza.compat.adapter.surface.notes import Notes, concerns
from cadenza.compat.adapter.surface.values import Function, Items, Keywords, Kind, Self, Tracked, Value, Views

Names = dict[str, Value]

_NO_METHOD = object()
REST = "**"
"""The key of ``**kwargs`` in the arguments of a call, if they are an event's."""
_LEFT = {*sys.stdlib_module_names, "torch", "numpy"}
"""Packages with functions that are not analysed."""


class Expressions(Notes):
    """Follows objects through expressions.

    Args:
        kind: The callback class.
        base: The base class of the other system.
        description: The objects that callbacks of that system receive.
    """

    def __init__(self, kind: type[Any], base: type[Any], description: Description) -> None:
        super().__init__()
        self.base: type[Any] = base
        self.description: Description = description
        self.parts: Mapping[str, type[Any]] = description.parts
        self.classes: list[type[Any]] = [class_ for class_ in kind.__mro__ if class_ not in base.__mro__]
        """The class and its bases up to the foreign base class."""
        self.owner: type[Any] = kind
        """The class of the method that is being read."""
        self.scope: Mapping[str, Any] = {}
        """The globals and enclosing names of the function being analysed."""

    @abstractmethod
    def follow(self, function: Function, given: list[Value], named: Mapping[str, Value] = {}) -> Value:
        """Analyse a function with these arguments. Return its result if known."""

    @abstractmethod
    def can_follow(self, function: Function) -> bool:
        """Return whether a function has a source that can be read."""

    def owner_of(self, name: str, after: type[Any] | None = None) -> type[Any] | None:
        """Return the class that defines a method, before the base class; with `after`, as ``super()`` finds it there."""
        start = 0 if after is None else self.classes.index(after) + 1
        return next((class_ for class_ in self.classes[start:] if name in vars(class_)), None)

    def argument(self, name: str) -> Value:
        """Return an argument of events by name."""
        arguments = self.description.arguments
        return Tracked(name, arguments[name]) if name in arguments else None

    def value(self, node: ast.expr, names: Names) -> Value:
        """Record the uses in an expression. Return its value if it is an object that the callback received."""
        match node:
            case ast.Name(id=name):
                return names[name] if name in names else self._outside(node, names)
            case ast.Attribute(value=expression, attr=name):
                value = self.value(expression, names)
                return self._outside(node, names) if value is None else self._attribute(value, name, "reads", node)
            case ast.Subscript(value=expression, slice=index):
                thing = self.value(expression, names)
                self.value(index, names)
                return self._item(thing, index, node)
            case ast.Call():
                return self._call(node, names)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return Items(tuple(self._arguments(parts, names)))
            case ast.NamedExpr(target=target, value=expression):
                value = self.value(expression, names)
                self.assign(target, value, names)
                return value
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.value(test, names)
                with self.only_sometimes(tried=self.tried_in(test, names)):
                    result = self.value(body, names)
                with self.only_sometimes(tried=self.tried_in(test, names, holds=False)):
                    other = self.value(orelse, names)
                return result or other
            case ast.BoolOp(values=[first, *others], op=operator):
                value = self.value(first, names)
                with self.only_sometimes(tried=self.tried_in(first, names, holds=isinstance(operator, ast.And))):
                    rest = [self.value(other, names) for other in others]
                return next((known for known in (value, *rest) if known is not None), None)
            case ast.Lambda():
                with self.only_sometimes():
                    self._children(node, {**names, **dict.fromkeys(argument.arg for argument in node.args.args)})
                return Function(node, self.owner, names=names, scope=self.scope)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                with self.only_sometimes():
                    self._children(node, dict(names))
                return None
        self._children(node, names)
        return None

    def elements(self, node: ast.expr, names: Names) -> Value:
        """Record the uses in an iterable. Return its elements if they are objects that the callback received."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id not in names and node.args:
            if node.func.id == "enumerate":
                return Items((None, self.elements(node.args[0], names)))
            if node.func.id == "zip":
                parts = [part for part in node.args if not isinstance(part, ast.Starred)]
                return Items(tuple(self.elements(part, names) for part in parts))
            if node.func.id in ("list", "tuple", "reversed", "iter", "sorted"):
                return self.elements(node.args[0], names)
        value = self.value(node, names)
        if isinstance(value, Items):  # of several objects, the first that is checked
            return next((part for part in value.parts if concerns([part])), None)
        return value.element if isinstance(value, Views) else None

    def _children(self, node: ast.AST, names: Names) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                self.assign(child.target, self.elements(child.iter, names), names)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child, names)
            elif isinstance(child, ast.comprehension):
                for test in child.ifs:
                    self.value(test, names)
            elif isinstance(child, ast.keyword | ast.FormattedValue):
                self.value(child.value, names)

    def _attribute(self, value: Value, name: str, kind: Kind, node: ast.AST) -> Value:
        match value:
            case Self(after=None):
                return self._own(self._mangled(name))
            case Tracked():
                return self.use(value, name, kind, node)
        return None

    def _mangled(self, name: str) -> str:
        """Return the name of an attribute as Python stores it: ``__name`` has the name of the class before it."""
        return f"_{self.owner.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name

    def _own(self, name: str) -> Value:
        """Return an attribute of the callback: one of its base class, one that it has set, or the result of a property."""
        if name in self.description.attributes:
            return Tracked(f"self.{name}", self.description.attributes[name])
        if name in self.found.own:
            return self.found.own[name]
        if (owner := self.owner_of(name)) is None:
            return None
        found = vars(owner)[name]
        getter = getattr(found, "fget", None) or getattr(found, "func", None)  # of a property, or a cached one
        if getter is not None:
            return self.follow(Function(getter, owner, bound=True), [])
        return Function(found, owner, bound=True) if isinstance(found, FunctionType) else None

    def _outside(self, node: ast.expr, names: Names) -> Value:
        """Return the function of a module that an expression names."""
        return self._followed(self._object(node, names))

    def _followed(self, found: object) -> Value:
        is_followed = isinstance(found, FunctionType) and (found.__module__ or "").partition(".")[0] not in _LEFT
        return Function(found, self.owner) if is_followed else None

    def imported(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Record the functions and modules that a method imports, if already imported."""
        found = dict[str, Any]()
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                name = alias.name if alias.asname else alias.name.partition(".")[0]
                found[alias.asname or name] = sys.modules.get(name)
        else:
            package, path = self.scope.get("__package__") or "", "." * statement.level + (statement.module or "")
            module = sys.modules.get(resolve_name(path, package) if package or not statement.level else path)
            for alias in statement.names:
                found[alias.asname or alias.name] = None if module is None else vars(module).get(alias.name)
        self.scope = {**self.scope, **found}

    def _object(self, node: ast.expr, names: Names) -> Any:
        """Resolve a name, or an attribute of a module or class, defined outside the method; None if unknown."""
        match node:
            case ast.Name(id=name) if name not in names:
                return self.scope.get(name)
            case ast.Attribute(value=expression, attr=name):
                holder = self._object(expression, names)
                return vars(holder).get(name) if isinstance(holder, ModuleType | type) else None
        return None

    def _item(self, value: Value, index: ast.expr, node: ast.AST) -> Value:
        match value, index:
            case Keywords(), ast.Constant(value=str() as name):
                return self.argument(name)
            case Tracked(), ast.Constant(value=str() as name):
                return self.use(value, f"[{name!r}]", "reads", node)
            case Items(parts=parts), ast.Constant(value=int() as number) if number < len(parts):
                return parts[number]
            case Views(element=element), _:
                return value if isinstance(index, ast.Slice) else element
        return None

    def _arguments(self, nodes: Iterable[ast.expr], names: Names) -> list[Value]:
        found = list[Value]()
        for node in nodes:
            value = self.value(node.value if isinstance(node, ast.Starred) else node, names)
            found += value.parts if isinstance(node, ast.Starred) and isinstance(value, Items) else (value,)
        return found

    def _call(self, node: ast.Call, names: Names) -> Value:
        function = node.func
        if isinstance(function, ast.Name) and function.id in ("getattr", "hasattr", "setattr", "delattr"):
            return self._by_name(function.id, node, names)
        given = self._arguments(node.args, names)
        named = {keyword.arg or REST: self.value(keyword.value, names) for keyword in node.keywords}
        callee: Value = None
        if isinstance(function, ast.Attribute):
            holder, name = self._holder(function.value, names), self._mangled(function.attr)
            if isinstance(holder, Self) and (result := self._method(holder, name, given, named)) is not _NO_METHOD:
                return result  # type: ignore[return-value]
            of_mapping = isinstance(holder, Keywords) or (isinstance(holder, Tracked) and holder.view is None)
            if of_mapping and node.args and function.attr in ("get", "pop", "setdefault"):
                return self._item(holder, node.args[0], node)
            if isinstance(holder, Tracked):
                result = self.use(holder, function.attr, "calls", node)
                self.pass_on(ast.unparse(function), given, named, node)
                return result
            callee = self._own(name) if isinstance(holder, Self) else self._of_class(function, names)
        else:
            callee = self.value(function, names)
        if isinstance(callee, Function) and concerns((*given, *named.values())) and self.can_follow(callee):
            return self.follow(callee, given, named)
        self.pass_on(ast.unparse(function), given, named, node)
        return None

    def _of_class(self, node: ast.Attribute, names: Names) -> Value:
        """Return the function for ``module.function`` or ``Class.method``, for classes of the callback."""
        holder = self._object(node.value, names)
        if isinstance(holder, type):
            owner = next((base for base in holder.__mro__ if node.attr in vars(base)), None)
            own = owner in self.classes and isinstance(vars(owner)[node.attr], FunctionType)
            return Function(vars(owner)[node.attr], owner) if own and owner is not None else None
        return self._outside(node, names)

    def _holder(self, node: ast.expr, names: Names) -> Value:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super":
            return Self(self.owner if self.owner in self.classes else None)
        return self.value(node, names)

    def _method(self, holder: Self, name: str, given: list[Value], named: Mapping[str, Value]) -> object:
        """Analyse a call to a method of the callback; return `_NO_METHOD` if its class has no such method."""
        owner = self.owner_of(name, holder.after)
        if owner is None or not callable(getattr(found := vars(owner)[name], "__func__", found)):
            known = holder.after is not None or hasattr(self.base, name)  # methods of the base class are not analysed
            return None if known else _NO_METHOD
        return self.follow(Function(found, owner, bound=True), given, named)

    def _by_name(self, function: str, node: ast.Call, names: Names) -> Value:
        """Record a use through ``getattr``, ``hasattr`` or ``setattr``."""
        first, *rest = node.args or [ast.Constant(None)]
        value, others = self.value(first, names), [self.value(argument, names) for argument in rest[1:]]
        name = self._text(rest[0], names) if rest else None
        if isinstance(value, Self) and function == "setattr":
            self.found.hooks |= {name} if name else set()
            self.found.dynamic |= name is None
            if name and others and concerns(others):
                self.found.own.setdefault(name, others[0])
        if name is None:
            self.pass_on(function, [value], {}, node)
        if not (isinstance(value, Tracked) and name is not None):
            return self._own(name) if isinstance(value, Self) and name is not None else None
        with self.guarded(function == "hasattr" or (function == "getattr" and bool(others))):
            return self.use(value, name, "sets" if function == "setattr" else "reads", node)

    def _text(self, node: ast.expr, names: Names) -> str | None:
        """Return a string literal or a string constant of the module."""
        found = node.value if isinstance(node, ast.Constant) else self._object(node, names)
        return found if isinstance(found, str) else None

    def assign(self, target: ast.expr | None, value: Value, names: Names) -> None:
        match target:
            case ast.Name(id=name):
                names[name] = value
            case ast.Attribute(value=expression, attr=name):
                match self.value(expression, names):
                    case Self():
                        self.found.hooks.add(name)
                        if isinstance(value, Tracked) or concerns([value]):
                            self.found.own.setdefault(self._mangled(name), value)
                    case Tracked() as thing:
                        self.use(thing, name, "sets", target)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                given = value.parts if isinstance(value, Items) and len(value.parts) == len(parts) else [None] * len(parts)
                for part, argument in zip(parts, given, strict=True):
                    self.assign(part, argument, names)
            case ast.Starred(value=part):
                self.assign(part, None, names)
            case ast.Subscript(value=expression, slice=index):
                self.value(index, names)
                holder = self.value(expression, names)
                if isinstance(holder, Tracked) and isinstance(index, ast.Constant):
                    self.use(holder, f"[{index.value!r}]", "sets", target)

    def tried_in(self, test: ast.expr, names: Names, *, holds: bool = True) -> tuple[str, ...]:
        """Return the attributes implied by a condition being true or false, as text; for ``isinstance(x, ...)``, ``x.*``.

        A view is never an instance of the classes that a foreign callback tests for.
        """
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self.tried_in(operand, names, holds=not holds)
            case ast.BoolOp(op=operator, values=parts) if isinstance(operator, ast.And) is holds:
                return tuple(value for part in parts for value in self.tried_in(part, names, holds=holds))
            case ast.Call(func=ast.Name(id="hasattr" | "isinstance" as function), args=[thing, name]) if holds:
                value = self.value(thing, names)
                asked = "*" if function == "isinstance" else self._text(name, names)
                return (f"{value.text}.{asked}",) if isinstance(value, Tracked) else ()
        return ()
