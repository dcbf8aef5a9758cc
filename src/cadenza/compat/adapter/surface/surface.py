"""The surface of a foreign callback class: the events that it overrides and its uses of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cadenza.compat.adapter.description import description_of
from cadenza.compat.adapter.event import Event
from cadenza.compat.adapter.surface.reader import Reader
from cadenza.compat.adapter.surface.values import Access, PassedOn
from cadenza.loops.foreign_callbacks import ADAPTERS, base_of, title_of

SYSTEMS: Mapping[str, str] = {title: target.split(".")[2] for title, target in ADAPTERS.items()}
"""The system of each base class, which is a folder of `cadenza.compat`."""


@dataclass(frozen=True, slots=True)
class OverriddenEvent:
    """An event that a class overrides."""

    name: str
    event: Event

    @property
    def called(self) -> bool:
        """Whether a native run calls it."""
        return self.event.moment is not None

    @property
    def moment(self) -> str | None:
        """The name of the moment that calls it."""
        return None if self.event.moment is None else self.event.moment.__name__


@dataclass(frozen=True, slots=True)
class Surface:
    """The uses found in the source of a foreign callback."""

    name: str
    module: str
    system: str
    refused: str
    """Why a native run rejects it; empty if accepted."""
    events: tuple[OverriddenEvent, ...]
    state: tuple[str, ...]
    """The methods for checkpoints that it overrides."""
    uses: tuple[Access, ...]
    passed_on: tuple[PassedOn, ...]
    unreadable: tuple[str, ...]
    """Methods without readable source."""
    dynamic: bool
    """Whether its events depend on constructor arguments."""

    @property
    def missing(self) -> list[Access]:
        """Uses in called events that a native run does not provide."""
        skipped = {event.name for event in self.events if not event.called}
        return [use for use in self.uses if use.provided is False and not use.guarded and use.event not in skipped]

    @property
    def never_called(self) -> list[OverriddenEvent]:
        """Overridden events that a native run never calls."""
        return [event for event in self.events if not event.called]

    @property
    def mapped(self) -> bool:
        """Whether a native run calls all its events and provides everything they use."""
        return not (self.refused or self.missing or self.never_called or self.unreadable)

    def providing(self, thing: str, provides: Callable[[str], bool]) -> Surface:
        """Return the surface for a run that provides additional attributes of an object."""
        uses = (replace(use, provided=True) if use.thing == thing and provides(use.name) else use for use in self.uses)
        return replace(self, uses=tuple(uses))

    def certain_errors(self) -> list[str]:
        """Return a sentence for each use that fails on every call."""
        return [sentence(use) for use in distinct(self.missing) if use.certain]

    def notes(self, name: str = "") -> Iterator[str]:
        """Yield a line for the plan for each unmapped item. `name` is the callback's name in the run."""
        name = name or self.name
        for use in distinct(self.missing):
            yield f"! {name} {sentence(use)}"
        reasons = dict.fromkeys(handler.event.note for handler in self.never_called)
        for reason in reasons:
            names = [handler.name for handler in self.never_called if handler.event.note == reason]
            verb = "is" if len(names) == 1 else "are"
            yield f"! {name} overrides {', '.join(names)}, which {verb} never called{f': {reason}' if reason else ''}"
        if self.unreadable:
            yield f"! {name} has methods without source, and what they use is not checked: {', '.join(self.unreadable)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the surface as plain data, for JSON."""
        return {
            "callback": self.name,
            "module": self.module,
            "system": self.system,
            "mapped": self.mapped,
            "refused": self.refused or None,
            "events": [{"event": each.name, "moment": each.moment, "note": each.event.note or None} for each in self.events],
            "state": list(self.state),
            "uses": [
                {
                    "event": use.event, "what": use.text, "does": use.kind, "line": use.line, "provided": use.provided,
                    "guarded": use.guarded, "advice": use.advice or None,
                }
                for use in self.uses
            ],
            "passed_on": [{"event": call.event, "call": call.text, "line": call.line} for call in self.passed_on],
            "unreadable": list(self.unreadable),
            "depends_on_arguments": self.dynamic,
        }  # fmt: skip


def surface_of(callback: Any) -> Surface | None:
    """Analyse a foreign callback class or instance; None if it has no foreign base class.

    Only the source of the class is read; no method is called.
    """
    kind = callback if isinstance(callback, type) else type(callback)
    if (base := base_of(kind)) is None or title_of(base) not in SYSTEMS:
        return None
    surface = _surface(kind, base)  # type: ignore[arg-type]  # mypy does not know that a class is hashable
    if kind is callback:
        return surface
    own = {name: value for name, value in getattr(callback, "__dict__", {}).items() if callable(value)}
    if own.keys() & description_of(surface.system).events.keys() or surface.dynamic:
        return _read(kind, base, own)
    return surface


def sentence(use: Access) -> str:
    """Return a sentence about a use that a native run does not provide, with its replacement."""
    return f"{use.kind} {use.text} in {use.event}. {use.advice or 'A native run does not provide it.'}"


def distinct(uses: list[Access]) -> list[Access]:
    """Return each attribute once, with the first event that uses it. Uses that always fail come first."""
    first: dict[str, Access] = {}
    for use in sorted(uses, key=lambda use: not use.certain):
        first.setdefault(use.text, use)
    return [use for use in uses if first.get(use.text) is use]


@lru_cache(maxsize=1024)
def _surface(kind: type[Any], base: type[Any]) -> Surface:
    return _read(kind, base, None)


def _read(kind: type[Any], base: type[Any], own: dict[str, Any] | None) -> Surface:
    """Read the source of a class.

    Args:
        kind: The class.
        base: The base class of the other system.
        own: The functions of an instance; None if only the class is known.
    """
    system = SYSTEMS[title_of(base)]
    description = description_of(system)
    reader = Reader(kind, base, description)
    if "__init__" in vars(kind) or reader.owner_of("__init__"):
        reader.read("__init__")
    overridden = _overridden(kind, base, [*description.events, *description.state])
    for name in overridden:
        reader.read(name)
    if reader.found.own:  # objects stored by one method are now known in all methods
        reader.found = replace(reader.found, uses=[], passed_on=[])
        for name in overridden:
            reader.read(name)
    given = reader.found.hooks if own is None else own.keys()
    events = [name for name in description.events if name in overridden or name in given]
    for name in events:
        if own and name in own:
            reader.read(name, own[name])
    found = reader.found
    return Surface(
        name=kind.__name__,
        module=kind.__module__,
        system=system,
        refused=description.refused(kind),
        events=tuple(OverriddenEvent(name, description.events[name]) for name in events),
        state=tuple(name for name in description.state if name in overridden),
        uses=tuple(dict.fromkeys(found.uses)),
        passed_on=tuple(dict.fromkeys(found.passed_on)),
        unreadable=tuple(found.unreadable),
        dynamic=found.dynamic and own is None,
    )


def _overridden(kind: type[Any], base: type[Any], names: list[str]) -> list[str]:
    return [name for name in names if getattr(kind, name, None) is not getattr(base, name, None)]
