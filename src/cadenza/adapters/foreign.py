"""The base class of adapters: a callback of another system as a native one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from cadenza.adapters.attributes import changed_since, left_out, plain_attributes, put_back
from cadenza.errors import nearest
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import BaseCallback, Callback, Moment

if TYPE_CHECKING:
    from cadenza.run import Run


@dataclass(frozen=True, slots=True)
class Event:
    """One event of another system.

    Args:
        moment: The native moment that calls it; None if a native run never calls it.
        make: ``make(adapter, hook)`` returns the function that the moment calls. It takes the arguments of the moment, and
            calls `hook` with those of the other system. Its cost is part of each step: at most three interpreter calls.
        note: For the plan and the guide: what differs from the other system, or why the event is never called.
    """

    moment: Moment | None
    make: Callable[[Any, Callable[..., Any]], Callable[..., None]] | None = None
    note: str = ""


class ForeignCallback(BaseCallback):
    """A callback of another system in a native run. Subclasses are the adapters of one system each.

    Args:
        callback: The callback.
        base: The base class of the other system.
    """

    logs_training = True  # it sees the logs that its own trainer would give
    system: ClassVar[str]
    """The name of the other system: that of its adapter in `cadenza.adapters`, and the key in ``Session.adapters``."""

    events: ClassVar[Mapping[str, Event]]
    """The events of the other system by name, in the order of a run."""

    removed: ClassVar[Mapping[str, str]] = {}
    """Events that the other system does not have any more, by the event that replaces them."""

    def __init__(self, callback: Any, base: type[Any]) -> None:
        self.callback: Any = callback
        self.base: type[Any] = base
        self.name: str | None = type(callback).__name__
        self.on_fault: Literal["raise", "disable", "retry"] = getattr(callback, "on_fault", type(self).on_fault)
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

    def __repr__(self) -> str:
        return f"{type(self.callback).__name__} ({self.system})"

    def __eq__(self, other: object) -> bool:
        """An adapter equals its callback, so that ``in``, ``index`` and ``remove`` of a list take the callback."""
        return other is self or other is self.callback

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are new adapters of a copy of the callback, without the run that the adapter was in."""
        return type(self), (self.bare(), self.base)

    def bare(self) -> Any:
        """Return the callback to copy and to pickle. Override this if the adapter gives it parts of a run."""
        return self.callback

    @classmethod
    def companions(cls, callbacks: list[Any]) -> list[Any]:
        """Return the list of a trainer with the native callbacks that the adapters in it share. Override this."""
        return callbacks

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


def _function(callback: object, name: str) -> object:
    method = getattr(callback, name, None)
    return getattr(method, "__func__", method)


def never_called(name: str, method: str, system: str, events: Iterable[str], removed: Mapping[str, str]) -> str:
    """Return a warning for a method that is named almost like an event, or was one; empty for another method."""
    text = f" Did you mean {removed[method]!r}?" if method in removed else nearest(method, events, cutoff=0.75)
    return text and f"{name}.{method} is never called: it is no event of {system}.{text}"
