"""The callbacks of a trainer, and calls of custom events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from cadenza.compat.accelerated.events import AcceleratedCallback
from cadenza.errors import CallbackError
from cadenza.hooks.moments import BaseCallback
from cadenza.loops.foreign_callbacks import AnyCallback, adapt, base_of


class CallbackHandler:
    """The callbacks of a trainer, in the order in which they are called.

    Args:
        callbacks: Instances, or classes that need no arguments: of this adapter, native, or of other adapters.

    Raises:
        ValueError: Two callbacks of this adapter have exactly the same class.
        CallbackError: An element is not a callback.

    >>> from cadenza.compat.accelerated.callbacks import TrainerCallback
    >>> class Hello(TrainerCallback):
    ...     def on_hello(self, trainer, to):
    ...         print(f"{trainer} says hello to {to}")
    >>> handler = CallbackHandler([Hello])
    >>> handler.call_event("on_hello", "Ann", to="Bob")
    Ann says hello to Bob
    >>> handler.callback_list
    ['Hello']
    """

    def __init__(self, callbacks: Iterable[AnyCallback | type[Any]] = ()) -> None:
        self.callbacks: list[BaseCallback] = []
        """The callbacks. The list may be changed."""
        self._enabled = True
        """Whether events are called."""
        self.add_callbacks(callbacks)

    def add_callbacks(self, callbacks: Iterable[AnyCallback | type[Any]]) -> None:
        """Add several callbacks at the end.

        Raises:
            TypeError: They are not iterable.
        """
        if not isinstance(callbacks, Iterable):
            raise TypeError(f"callbacks must be a tuple or list of callbacks; got {callbacks!r}. Write callbacks=(...,)")
        for callback in callbacks:
            self.add_callback(callback)

    def add_callback(self, callback: AnyCallback | type[Any]) -> None:
        """Add a callback, or an instance of a callback class, at the end.

        A callback that is added during a run gets the events from then on, after all others.
        """
        added: object = callback() if isinstance(callback, type) else callback
        added = adapt(added) if base_of(added) is not None else added
        if not isinstance(added, BaseCallback):
            raise CallbackError(f"expected an instance or a subclass of TrainerCallback; got {callback!r}")
        if isinstance(added, AcceleratedCallback) and any(type(callback) is type(added) for callback in self.callbacks):
            raise ValueError(
                f"{type(added).__name__} is already in the list; got a second one beside {', '.join(self.callback_list)}. "
                "Pass one callback of each class, or an instance of a subclass."
            )
        self.callbacks.append(added)

    def clear_callbacks(self) -> None:
        """Remove all callbacks."""
        self.callbacks = []

    @property
    def callback_list(self) -> list[str]:
        """The names of the callbacks' classes."""
        return [type(getattr(callback, "callback", callback)).__name__ for callback in self.callbacks]

    def call_event(self, event: str, *args: Any, **kwargs: Any) -> None:
        """Call the method named `event` of every callback that has it, in order. It may be a custom event.

        Errors in such a method propagate, including AttributeError.
        """
        for callback in tuple(self.callbacks) if self._enabled else ():
            method = getattr(callback, event, None)
            if method is not None:
                method(*args, **kwargs)

    def __iter__(self) -> Iterator[BaseCallback]:
        return iter(tuple(self.callbacks))

    def __contains__(self, callback: object) -> bool:
        return any(known is callback for known in self.callbacks)

    def __len__(self) -> int:
        return len(self.callbacks)
