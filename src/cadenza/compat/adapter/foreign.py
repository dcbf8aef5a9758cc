"""The base class of adapters: a callback of another system as a native one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cadenza.compat.adapter.attributes import changed_since, left_out, plain_attributes, put_back
from cadenza.compat.adapter.event import Event
from cadenza.errors import nearest
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.loops.foreign import AdaptedCallback, base_of, not_a_list

if TYPE_CHECKING:
    from cadenza.compat.adapter.surface.surface import Surface
    from cadenza.hooks.dispatch import Hooks
    from cadenza.run import Run


class ForeignCallback(AdaptedCallback):
    """An adapter with a table of the events of its system, and with the state of the callback in checkpoints.

    Args:
        callback: The callback.
        base: The base class of the other system.
    """

    events: ClassVar[Mapping[str, Event]]
    """The events of the other system by name, in the order of a run."""

    removed: ClassVar[Mapping[str, str]] = {}
    """Events that the other system does not have any more, by the event that replaces them."""

    def __init__(self, callback: Any, base: type[Any]) -> None:
        super().__init__(callback, base)
        self._at_start = {}
        self._told: set[str] = set()

    @property
    def _at_start(self) -> dict[str, Any]:
        """The plain attributes of the callback when the run started."""
        return self._plain_at_start

    @_at_start.setter
    def _at_start(self, attributes: dict[str, Any]) -> None:
        self._plain_at_start = attributes
        self._others_known: dict[str, Any] | None = None

    def beforehand(self, name: str, hooks: Hooks) -> tuple[list[str], list[str]]:
        """Return lines for the plan, and warnings for the start of a run: only of that which fails at each call of an event.

        The source of the class is read; nothing of it is called.
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
        """Return what the callback uses of a run, from its source; None if that is not described for its system."""
        from cadenza.compat.adapter.surface.surface import surface_of  # imported here: few runs need it

        return surface_of(self.callback)

    def _never_called(self, name: str) -> list[str]:
        """Return a warning for each method that is named almost like an event, or was one, and is none."""
        kind = type(self.callback)
        own = kind.__mro__[: kind.__mro__.index(self.base)]
        methods = {method for one in own for method, value in vars(one).items() if method.startswith("on_") and callable(value)}
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
        """Warn once of each container that changed since the first checkpoint, and that a checkpoint cannot hold.

        What hooks at the start of a run put into a container, they put there again after a resume.
        """
        found = left_out(self.callback, self.plain())
        if self._others_known is None:
            self._others_known = found
        for name, known in found.items():
            if self._others_known.get(name) != known and name not in self._told:
                self._told.add(name)
                warnings.warn(
                    f"checkpoints leave out {type(self.callback).__name__}.{name}, which changed in the run: it holds objects "
                    "that cannot be saved. After a resume the attribute is that of a new instance.",
                    stacklevel=2,
                )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        put_back(state, self.callback)


def foreign_callbacks(run: Run, system: str) -> list[ForeignCallback]:
    """Return the callbacks of one system in a run, in order."""
    return [one for one in hooks_of(run).callbacks.values() if isinstance(one, ForeignCallback) and one.system == system]


def listed(callbacks: object) -> list[Any]:
    """Return the callbacks that a trainer was given as a list.

    Raises:
        CallbackError: They are no iterable, such as a single callback.
    """
    if base_of(callbacks) is not None or isinstance(callbacks, BaseCallback) or not isinstance(callbacks, Iterable):
        raise not_a_list(callbacks)
    return [*callbacks]


def _function(callback: object, name: str) -> object:
    method = getattr(callback, name, None)
    return getattr(method, "__func__", method)


def never_called(name: str, method: str, system: str, events: Iterable[str], removed: Mapping[str, str]) -> str:
    """Return a warning for a method that is named almost like an event, or was one; empty for another method."""
    text = f" Did you mean {removed[method]!r}?" if method in removed else nearest(method, events, cutoff=0.75)
    return text and f"{name}.{method} is never called: it is no event of {system}.{text}"
