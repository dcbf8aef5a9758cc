"""The objects that callbacks of a system receive: classes of views by argument name."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, get_args, get_origin, get_type_hints

from cadenza.compat.adapter.event import Event
from cadenza.compat.adapter.view import View
from cadenza.errors import nearest


@dataclass(frozen=True, slots=True)
class Description:
    """The objects that callbacks of a system receive. ``cadenza.compat.SYSTEM.surface`` holds it as ``DESCRIPTION``."""

    events: Mapping[str, Event]
    """The events of the system."""

    arguments: Mapping[str, type[Any] | None]
    """The arguments of the events by the names that the base class gives them: the class of the view, or None for a user object
    such as the model, on which any attribute may be read.
    """

    attributes: Mapping[str, type[Any] | None] = field(default_factory=dict)
    """The same for attributes that the base class sets on the callback, such as ``self.model`` of Keras."""

    parts: Mapping[str, type[Any]] = field(default_factory=dict)
    """Classes of views by the attribute that returns them, such as ``ModelView.optimizer``, if not given by its annotation."""

    never: frozenset[str] = frozenset()
    """Source of conditions that are false in a native run."""

    state: tuple[str, ...] = ("state_dict", "load_state_dict")
    """The methods that save and restore a callback."""

    refused: Callable[[type[Any]], str] = lambda kind: ""
    """Returns why a class cannot run in a native list; an empty string if it can."""

    def is_never(self, test: ast.expr) -> bool:
        """Return whether a condition, or a required part of it, is false in a native run."""
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        return any(ast.unparse(part) in self.never for part in parts)


@cache
def description_of(system: str) -> Description:
    """Return the description of a system."""
    found = import_module(f"cadenza.compat.{system}.surface").DESCRIPTION
    assert isinstance(found, Description)
    return found


def provides(view: type[Any], name: str) -> bool | None:
    """Return whether a view has an attribute; None if that depends on a user object such as the model.

    A view with computed names has a class method ``_provides(name)``.
    """
    if (computed := getattr(view, "_provides", None)) is not None:
        return bool(computed(name))
    if hasattr(view, name):
        return True
    own = not issubclass(view, View) or view.__getattr__ is not View.__getattr__
    return None if own and name not in getattr(view, "absent", {}) else False


def sets(view: type[Any], name: str) -> bool | None:
    """Return whether callbacks may set an attribute of a view, which has a setter or is a plain value."""
    found = getattr(view, name, None)
    return False if isinstance(found, property) and found.fset is None else provides(view, name)


def advice_for(view: type[Any], name: str, does: str = "reads") -> str:
    """Return a sentence that names the replacement of an attribute; an empty string if there is none.

    A view with user-provided attributes has a class method ``_advice(name)``.
    """
    known = [name for name in dir(view) if not name.startswith("_")] if issubclass(view, View) else []
    said = getattr(view, "absent", {}).get(name) or nearest(name, known).strip()
    may_give = getattr(view, "_advice", None) if does != "sets" else None
    return str(said or (may_give(name) if may_give else ""))


@cache
def part_of(view: type[Any], name: str) -> type[Any] | None:
    """Return the class of the view that an attribute or a method returns, from its annotation; None if it is not a view."""
    return _view(_returned(view, name))


@cache
def element_of(view: type[Any], name: str) -> type[Any] | None:
    """Return the class of the views in the list that an attribute returns, from its annotation; None if there is none."""
    kind = _returned(view, name)
    return _view(get_args(kind)[0]) if get_origin(kind) in (list, Sequence) else None


def _returned(view: type[Any], name: str) -> Any:
    found = getattr(view, name, None)
    function = found.fget if isinstance(found, property) else found
    try:
        return get_type_hints(function).get("return") if callable(function) else None
    except (NameError, TypeError):  # an annotation that only type checkers can read
        return None


def _view(kind: Any) -> type[Any] | None:
    return kind if isinstance(kind, type) and (issubclass(kind, View) or hasattr(kind, "absent")) else None
