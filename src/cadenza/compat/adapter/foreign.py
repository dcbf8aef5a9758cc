"""The base class of adapters: a callback of another system as a native one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from cadenza.compat.adapter.attributes import changed_since, left_out, plain_attributes, put_back
from cadenza.compat.adapter.event import Event
from cadenza.errors import nearest
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.loops.foreign_callbacks import AdaptedCallback, base_of, not_a_list

if TYPE_CHECKING:
    from cadenza.compat.adapter.surface.surface import Surface
    from cadenza.hooks.dispatch import Hooks
    from cadenza.run import Run

Kind = TypeVar("Kind")


class ForeignCallback(AdaptedCallback):
    """An adapter with a table of the events of its system, and with the state of the callback in checkpoints.

    Args:
        callback: The callback.
        base: The base class of the other system.
    """

    events: ClassVar[Mapping[str, Event]]
    """The events of the other system by name, in the order of a run."""

    removed: ClassVar[Mapping[str, str]] = {}
    """Events that the other system has removed, and their replacements."""

    def __init__(self, callback: Any, base: type[Any]) -> None:
        super().__init__(callback, base)
        self._at_start = {}
        self._warned_of: set[str] = set()

    @property
    def _at_start(self) -> dict[str, Any]:
        """The plain attributes of the callback when the run started."""
        return self._plain_at_start

    @_at_start.setter
    def _at_start(self, attributes: dict[str, Any]) -> None:
        self._plain_at_start = attributes
        self._others_known: dict[str, Any] | None = None

    def beforehand(self, name: str, hooks: Hooks) -> tuple[list[str], list[str]]:
        """Return lines for the plan and warnings for the start of a run. Warnings cover only uses that fail on every call.

        Only the source of the class is read; no method is called.
        """
        warnings = self._never_called(name)
        notes = [f"! {text}" for text in warnings]
        if (surface := self.surface(hooks)) is not None:
            notes += surface.notes(name)
            if surface.refused:
                warnings.append(f"{name} does not work in a native run: {surface.refused}")
            warnings += (f"{name} will fail: it {error}" for error in surface.certain_errors())
        return notes, warnings

    def surface(self, hooks: Hooks) -> Surface | None:
        """Return the parts of a run that the callback's source uses; None if its system has no description."""
        from cadenza.compat.adapter.surface.surface import surface_of  # imported here because few runs need it

        return surface_of(self.callback)

    def _never_called(self, name: str) -> list[str]:
        """Return a warning for each method with a name close to an event's, or that was an event in an earlier version."""
        kind = type(self.callback)
        own = kind.__mro__[: kind.__mro__.index(self.base)]
        members = {name: value for class_ in own for name, value in vars(class_).items()}
        methods = {name for name, value in members.items() if name.startswith("on_") and callable(value)}
        unknown = sorted(methods - {*self.events, *dir(self.base)})
        found = (never_called(name, method, self.system, self.events, self.removed) for method in unknown)
        return [text for text in found if text]

    def overridden(self) -> list[str]:
        """Return the names of the events that the callback overrides, in its class or in the instance."""
        return [name for name in self.events if _function(self.callback, name) is not getattr(self.base, name, None)]

    def listeners(self) -> list[Listener]:
        found = [(name, self.events[name], getattr(self.callback, name)) for name in self.overridden()]
        called = [
            Listener(event.moment, event.make(self, hook), event=name)
            for name, event, hook in found
            if event.moment and event.make
        ]
        own = self.own_listeners()
        return [*inner([Listener(Callback.on_setup, self._begin)]), *called, *inner(own)] if called or own else []

    def own_listeners(self) -> list[Listener]:
        """Return listeners of the adapter itself, called after the events. Override this."""
        return []

    def _begin(self, run: Run) -> None:
        self._at_start = plain_attributes(self.callback)
        self.begin(run)

    def begin(self, run: Run) -> None:
        """Prepare a run, before any event. Override this."""

    # -- state: what the other system saves, or else the attributes that changed during the run ------------------

    def state_dict(self) -> dict[str, Any]:
        self.warn_of_left_out()
        return changed_since(self._at_start, self.callback)

    def plain(self) -> dict[str, Any]:
        """Return copies of the attributes that a checkpoint can hold. Override this if it can hold more."""
        return plain_attributes(self.callback)

    def warn_of_left_out(self) -> None:
        """Warn once about each changed container that a checkpoint cannot hold.

        Changes made by hooks at the start of a run are ignored, because these hooks run again after a resume.
        """
        found = left_out(self.callback, self.plain())
        if self._others_known is None:
            self._others_known = found
        for name, known in found.items():
            if self._others_known.get(name) != known and name not in self._warned_of:
                self._warned_of.add(name)
                warnings.warn(
                    f"checkpoints leave out {type(self.callback).__name__}.{name}, which changed in the run: it holds objects "
                    "that cannot be saved. After a resume the attribute is that of a new instance.",
                    stacklevel=2,
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        put_back(state, self.callback)


def foreign_callbacks(run: Run, system: str) -> list[ForeignCallback]:
    """Return the callbacks of one system in a run, in order."""
    return [callback for callback in callbacks_of(run, ForeignCallback) if callback.system == system]


def callbacks_of(run: Run, kind: type[Kind]) -> list[Kind]:
    """Return the callbacks of one class in a run, in order."""
    return [callback for callback in hooks_of(run).callbacks.values() if isinstance(callback, kind)]


def listed(callbacks: object) -> list[Any]:
    """Return the callbacks of a trainer as a list.

    Raises:
        CallbackError: They are not iterable, such as a single callback.
    """
    if base_of(callbacks) is not None or isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        raise not_a_list(callbacks)
    return [*callbacks]


def _function(callback: object, name: str) -> object:
    method = getattr(callback, name, None)
    return getattr(method, "__func__", method)


def never_called(name: str, method: str, system: str, events: Iterable[str], removed: Mapping[str, str]) -> str:
    """Return a warning for a method with a name close to an event's, or of a removed event; empty for other methods."""
    text = f" Did you mean {removed[method]!r}?" if method in removed else nearest(method, events, cutoff=0.75)
    return text and f"{name}.{method} is never called: it is no event of {system}.{text}"
