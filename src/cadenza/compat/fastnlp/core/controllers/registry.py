"""Functions registered with ``Trainer.on`` until a trainer is created."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from cadenza.compat.fastnlp.core.callbacks.callback import Callback, _CallbackWrapper
from cadenza.compat.fastnlp.core.callbacks.callback_event import Event
from cadenza.status.reprs import signature_of

logger: logging.Logger = logging.getLogger("cadenza")

Function = Callable[..., Any]
Waiting = defaultdict[str | None, list[tuple[Event, Function]]]

ALL = "all"


def check_event(event: object) -> None:
    """Raise `AttributeError` unless `event` is an event of the table."""
    if not isinstance(event, Event) or not hasattr(Callback, event.value):
        raise AttributeError(f"expected an event, such as Event.on_train_begin(); got {event!r}")


def check_arguments(event: Event, function: Function) -> None:
    """Raise `TypeError` unless a function can be called with the event's arguments, by position."""
    wanted = list(signature_of(getattr(Callback, event.value)).parameters)[1:]
    if not callable(function):
        raise TypeError(f"expected a function for {event}; got {function!r}")
    try:
        signature_of(function).bind(*wanted)
    except TypeError:
        raise TypeError(
            f"{event} calls a function with ({', '.join(wanted)}); got {getattr(function, '__qualname__', function)!s}"
            f"{signature_of(function)}"
        ) from None
    except ValueError:  # some builtins have no signature
        return


def taken(waiting: Waiting, marker: str | None) -> list[Callback]:
    """Return the callbacks of a new trainer: those for all trainers, for the next one, and for its marker.

    The functions for the next trainer are removed.
    """
    found = [*waiting.get(ALL, ()), *waiting.pop(None, ())]
    if marker is not None and marker != ALL:
        if marker not in waiting:
            logger.info("no function is registered for marker %r", marker)
        found += waiting.get(marker, ())
    return [_CallbackWrapper(event, function) for event, function in found]


class AddedFunctions(Callback):
    """The functions of ``add_callback_fn``, which may be added at any time; also counts the calls of each event."""

    name: str = "add_callback_fn"

    def __init__(self) -> None:
        self.functions: defaultdict[str, list[_CallbackWrapper]] = defaultdict(list)

    def add(self, event: Event, function: Function) -> None:
        """Call a function at an event from now on."""
        self.functions[event.value].append(_CallbackWrapper(event, function))

    def hook_at(self, event: str) -> Function | None:
        functions = self.functions[event]

        def call(trainer: Any, *arguments: Any) -> None:
            trainer.callback_manager.callback_counter[event] += 1
            for added in functions:  # includes functions added during the loop
                getattr(added, event)(trainer, *arguments)

        return call

    def saved_state(self, trainer: Any) -> dict[str, Any]:
        filters = {
            f"{event}:{index}": state
            for event, functions in self.functions.items()
            for index, added in enumerate(functions)
            if (state := added.saved_state(trainer).get("filter_states", {}).get(event))
        }
        return {"filter_states": filters} if filters else {}

    def restore_state(self, trainer: Any, saved: Any) -> None:
        for key, counted in saved.get("filter_states", {}).items():
            event, _, number = key.partition(":")
            functions = self.functions[event]
            if int(number) < len(functions):
                functions[int(number)].restore_state(trainer, {"filter_states": {event: counted}})
