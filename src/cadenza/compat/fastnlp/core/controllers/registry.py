"""The functions that ``Trainer.on`` was given, until a trainer takes them."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from cadenza.compat.fastnlp.core.callbacks.callback import Callback, _CallbackWrapper
from cadenza.compat.fastnlp.core.callbacks.callback_event import Event

logger = logging.getLogger("cadenza")

Function = Callable[..., Any]
Waiting = defaultdict[str | None, list[tuple[Event, Function]]]

ALL = "all"


def check_event(event: object) -> None:
    """Raise `AttributeError` unless this is an event of the table."""
    if not isinstance(event, Event) or not hasattr(Callback, event.value):
        raise AttributeError(f"expected an event, such as Event.on_train_begin(); got {event!r}")


def check_arguments(event: Event, function: Function) -> None:
    """Raise `TypeError` unless a function can be called with the event's arguments, by position."""
    wanted = list(inspect.signature(getattr(Callback, event.value)).parameters)[1:]
    if not callable(function):
        raise TypeError(f"expected a function for {event}; got {function!r}")
    try:
        inspect.signature(function).bind(*wanted)
    except TypeError:
        raise TypeError(
            f"{event} calls a function with ({', '.join(wanted)}); got {getattr(function, '__qualname__', function)!s}"
            f"{inspect.signature(function)}"
        ) from None
    except ValueError:  # some builtins have no signature
        return


def taken(waiting: Waiting, marker: str | None) -> list[Callback]:
    """Return the callbacks of the trainer that is being made: those for all, those for the next, those for its marker.

    Those for the next trainer do not wait any longer.
    """
    found = [*waiting.get(ALL, ()), *waiting.pop(None, ())]
    if marker is not None and marker != ALL:
        if marker not in waiting:
            logger.info("no function waits for a trainer with marker %r", marker)
        found += waiting.get(marker, ())
    return [_CallbackWrapper(event, function) for event, function in found]


class Late(Callback):
    """The functions of ``add_callback_fn``, which may come at any time; and a count of how often each event took place."""

    name = "add_callback_fn"

    def __init__(self) -> None:
        self.functions: defaultdict[str, list[_CallbackWrapper]] = defaultdict(list)

    def add(self, event: Event, function: Function) -> None:
        """Call a function at an event from now on."""
        self.functions[event.value].append(_CallbackWrapper(event, function))

    def hook_at(self, event: str) -> Function | None:
        functions = self.functions[event]

        def call(trainer: Any, *arguments: Any) -> None:
            trainer.callback_manager.callback_counter[event] += 1
            for added in functions:  # also one that is added by one of them
                getattr(added, event)(trainer, *arguments)

        return call

    def saved_state(self, trainer: Any) -> dict[str, Any]:
        filters = {
            f"{event}:{place}": state
            for event, functions in self.functions.items()
            for place, added in enumerate(functions)
            if (state := added.saved_state(trainer).get("filter_states", {}).get(event))
        }
        return {"filter_states": filters} if filters else {}

    def restore_state(self, trainer: Any, kept: Any) -> None:
        for place, counted in kept.get("filter_states", {}).items():
            event, _, number = place.partition(":")
            functions = self.functions[event]
            if int(number) < len(functions):
                functions[int(number)].restore_state(trainer, {"filter_states": {event: counted}})
