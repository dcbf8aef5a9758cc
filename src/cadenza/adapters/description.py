"""What the callbacks of one system receive: the classes of the views, by the names of the arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, get_type_hints

from cadenza.adapters.foreign import Event
from cadenza.adapters.view import View
from cadenza.errors import nearest


@dataclass(frozen=True, slots=True)
class Description:
    """What the callbacks of one system receive. ``cadenza.adapters.SYSTEM.surface`` holds it as ``DESCRIPTION``."""

    events: Mapping[str, Event]
    """The events of the system."""

    arguments: Mapping[str, type[Any] | None]
    """The arguments of the events by the names that the base class gives them: the class of the view, or None for an object
    of the user's own, such as the model, of which any attribute may be read."""

    attributes: Mapping[str, type[Any] | None] = field(default_factory=dict)
    """The same for attributes that the base class sets on the callback, such as ``self.model`` of Keras."""

    parts: Mapping[str, type[Any]] = field(default_factory=dict)
    """Classes of views by the attribute that returns them, such as ``ModelView.optimizer``, where its annotation does not
    say."""

    state: tuple[str, ...] = ("state_dict", "load_state_dict")
    """The methods that save and restore a callback."""

    refused: Callable[[type[Any]], str] = lambda kind: ""
    """Returns the reason why a class cannot run in a native list; an empty string for all others."""


@cache
def description_of(system: str) -> Description:
    """Return the description of a system."""
    found = import_module(f"cadenza.adapters.{system}.surface").DESCRIPTION
    assert isinstance(found, Description)
    return found


def provides(view: type[Any], name: str) -> bool | None:
    """Return whether a view has an attribute; None if that depends on an object of the user's own, such as the model.

    A view that computes its names has a class method ``_provides(name)``.
    """
    if (computed := getattr(view, "_provides", None)) is not None:
        return bool(computed(name))
    if hasattr(view, name):
        return True
    own = not issubclass(view, View) or view.__getattr__ is not View.__getattr__
    return None if own and name not in getattr(view, "absent", {}) else False


def sets(view: type[Any], name: str) -> bool | None:
    """Return whether callbacks may set an attribute of a view: one with a setter, or with a plain value."""
    found = getattr(view, name, None)
    return False if isinstance(found, property) and found.fset is None else provides(view, name)


def advice_for(view: type[Any], name: str) -> str:
    """Return a sentence on what to use instead of an attribute; an empty string if there is none."""
    known = [one for one in dir(view) if not one.startswith("_")] if issubclass(view, View) else []
    return str(getattr(view, "absent", {}).get(name) or nearest(name, known).strip())


@cache
def part_of(view: type[Any], name: str) -> type[Any] | None:
    """Return the class of the view that an attribute or a method returns, from its annotation; None if that is no view."""
    found = getattr(view, name, None)
    function = found.fget if isinstance(found, property) else found
    try:
        kind = get_type_hints(function).get("return") if callable(function) else None
    except (NameError, TypeError):  # an annotation that only type checkers can read
        return None
    return kind if isinstance(kind, type) and (issubclass(kind, View) or hasattr(kind, "absent")) else None
