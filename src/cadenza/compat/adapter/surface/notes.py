"""Records of the uses found by the analyser, with their conditions."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cadenza.compat.adapter.description import advice_for, element_of, part_of, provides, sets
from cadenza.compat.adapter.surface.values import Access, Function, Items, Keywords, Kind, PassedOn, Self, Tracked, Value, Views

_HARMLESS = {"isinstance", "len", "print", "str", "repr", "type", "id", "bool", "int", "float", "callable", "issubclass"}


@dataclass
class Accesses:
    """Uses recorded for the methods of a class."""

    uses: list[Access] = field(default_factory=list)
    passed_on: list[PassedOn] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    own: dict[str, Value] = field(default_factory=dict)
    """Attributes of the callback that hold an object it received: ``self.trainer = trainer``."""

    hooks: set[str] = field(default_factory=set)
    """Names that the callback sets on itself: ``self.on_epoch_end = ...``."""

    dynamic: bool = False
    """Whether it sets attributes on itself with names computed at run time."""


class Notes:
    """Records uses."""

    def __init__(self) -> None:
        self.found: Accesses = Accesses()
        self.event: str = ""
        """The event being analysed."""
        self.conditions: int = 0
        """The number of conditions around the current statement."""
        self.parts: Mapping[str, type[Any]] = {}
        """Classes of views by the attribute that returns them, if not given by its annotation."""
        self._guards = 0
        self._tried: list[str] = []

    def use(self, thing: Tracked, name: str, kind: Kind, node: ast.AST) -> Value:
        """Record a use. Return the attribute's value if it should be tracked."""
        if not thing.followed or name.startswith("__"):
            return None
        view, key = thing.view, name.startswith("[")
        provided: bool | None = None
        advice = ""
        if view is not None and not key:
            provided = sets(view, name) if kind == "sets" else provides(view, name)
            if provided is False:
                only_read = kind == "sets" and provides(view, name)
                advice = "A native run only lets it be read." if only_read else advice_for(view, name, kind)
        guarded = self._guards > 0 or not {f"{thing.text}.{name}", f"{thing.text}.*"}.isdisjoint(self._tried)
        line = getattr(node, "lineno", 0)
        certain = not self.conditions and not guarded
        if view is None or not key:
            self.found.uses.append(Access(self.event, thing.text, name, kind, line, provided, advice, guarded, certain))
        if view is None or key or not provided:
            return Tracked(f"{thing.text}.{name}", followed=False)
        if (element := element_of(view, name)) is not None:  # type: ignore[arg-type]  # mypy does not know that a class is hashable
            return Views(Tracked(str(getattr(element, "title", f"{thing.text}.{name}[]")), element))
        part = self.parts.get(f"{view.__name__}.{name}") or part_of(view, name)  # type: ignore[arg-type]
        return Tracked(f"{thing.text}.{name}" + "()" * (kind == "calls"), part, followed=part is not None)

    def pass_on(self, function: str, given: list[Value], named: Mapping[str, Value], node: ast.Call) -> None:
        for value in things_in((*given, *named.values())):
            if function not in _HARMLESS:
                line = getattr(node, "lineno", 0)
                self.found.passed_on.append(PassedOn(self.event, value.text, function, line))

    @contextmanager
    def only_sometimes(self, tried: tuple[str, ...] = ()) -> Iterator[None]:
        """Analyse code that some calls skip. `tried` are attributes that it reads only if they exist."""
        before, self.conditions = self.conditions, self.conditions + 1
        self._tried.extend(tried)
        try:
            yield
        finally:
            self.conditions = before
            del self._tried[len(self._tried) - len(tried) :]

    @contextmanager
    def guarded(self, guarded: bool) -> Iterator[None]:
        """Analyse code that handles a missing attribute."""
        self._guards += guarded
        try:
            yield
        finally:
            self._guards -= guarded


def things_in(values: Iterable[Value]) -> list[Tracked]:
    """Return the arguments that are checked objects."""
    flat = [part for value in values for part in (value.parts if isinstance(value, Items) else (value,))]
    things = [value.element if isinstance(value, Views) else value for value in flat]
    return [value for value in things if isinstance(value, Tracked) and value.view is not None]


def concerns(values: Iterable[Value]) -> bool:
    """Return whether a function called with these arguments may use a checked object."""
    values = list(values)
    return bool(things_in(values)) or any(isinstance(value, Self | Keywords | Function) for value in values)
