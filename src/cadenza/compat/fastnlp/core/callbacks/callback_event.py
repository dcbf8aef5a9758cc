"""``fastNLP.core.callbacks.callback_event``: when a function shall be called, and how often."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("cadenza")

FilterFn = Callable[["Filter", Any], bool]

_MARK = "__fastNLP_filter__"


class _Factory:
    """Makes events of the name that it is bound to in the class."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __call__(self, every: int | None = None, once: int | None = None, filter_fn: FilterFn | None = None) -> Event:
        """Return the event.

        Args:
            every: Call at every n-th firing.
            once: Call at the n-th firing, and never again.
            filter_fn: Call when ``filter_fn(filter, trainer)`` is true.
        """
        return Event(self._name, every, once, filter_fn)


@dataclass(frozen=True)
class Event:
    """One of the 24 events, and how often to call at it. Made by ``Event.on_train_begin(every=2)`` and its like.

    The numbers are checked when the event is bound to a trainer.
    """

    value: str
    every: int | None = None
    once: int | None = None
    filter_fn: FilterFn | None = None

    on_after_trainer_initialized = _Factory()
    on_sanity_check_begin = _Factory()
    on_sanity_check_end = _Factory()
    on_train_begin = _Factory()
    on_train_end = _Factory()
    on_train_epoch_begin = _Factory()
    on_train_epoch_end = _Factory()
    on_fetch_data_begin = _Factory()
    on_fetch_data_end = _Factory()
    on_train_batch_begin = _Factory()
    on_train_batch_end = _Factory()
    on_exception = _Factory()
    on_save_model = _Factory()
    on_load_model = _Factory()
    on_save_checkpoint = _Factory()
    on_load_checkpoint = _Factory()
    on_before_backward = _Factory()
    on_after_backward = _Factory()
    on_before_optimizers_step = _Factory()
    on_after_optimizers_step = _Factory()
    on_before_zero_grad = _Factory()
    on_after_zero_grad = _Factory()
    on_evaluate_begin = _Factory()
    on_evaluate_end = _Factory()

    def filter(self) -> Filter:
        """Return a fresh filter for a function at this event."""
        return Filter(self.every, self.once, self.filter_fn)

    def __str__(self) -> str:
        return self.value


class Filter:
    """Lets some calls of a function through; a decorator for functions and for methods of a `Callback`.

    Each instance that has a decorated method counts for itself.

    Args:
        every: Let every n-th call through.
        once: Let the n-th call through, and no other.
        filter_fn: Asked with the filter and the trainer, the first argument of the call. If several of the three are given, the
            first of them counts, which a warning says; if none is, all calls go through.

    Raises:
        ValueError: `every` or `once` is no whole number of at least 1.
        TypeError: `filter_fn` cannot be called.

    >>> @Filter(every=2)
    ... def show(trainer):
    ...     print("call", show.__fastNLP_filter__.num_called)
    >>> for _ in range(5):
    ...     show(None)
    call 2
    call 4
    """

    num_called = 0
    """How often the function was to be called, this time included."""
    num_executed = 0
    """How often it was called."""

    def __init__(self, every: int | None = None, once: int | None = None, filter_fn: FilterFn | None = None) -> None:
        named = {"every": every, "once": once, "filter_fn": filter_fn}
        if len(given := [name for name, value in named.items() if value is not None]) > 1:
            logger.warning("%s= counts, and %s= does not: give one of them", given[0], "=, ".join(given[1:]))
        numbers: dict[str, int | None] = {"every": every, "once": once}
        for name, count in numbers.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1; got {count!r}")
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(f"filter_fn must be a function (filter, trainer) -> bool; got {filter_fn!r}")
        self._arguments = every, once, filter_fn

    def due(self, trainer: Any) -> bool:
        """Count a call; return whether it goes through."""
        every, once, filter_fn = self._arguments
        self.num_called += 1
        if every is not None:
            goes = self.num_called % every == 0
        elif once is not None:
            goes = self.num_called == once
        else:
            goes = filter_fn is None or bool(filter_fn(self, trainer))
        self.num_executed += goes
        return goes

    def fresh(self) -> Filter:
        """Return a filter like this that has counted nothing yet."""
        twin = Filter.__new__(Filter)
        twin._arguments = self._arguments
        return twin

    def __call__(self, fn: Callable[..., Any]) -> Filtered:
        return Filtered(fn, self)

    def reset(self) -> None:
        """Count from 0."""
        self.num_called = self.num_executed = 0

    def state_dict(self) -> dict[str, int]:
        """Return both counters."""
        return {"num_called": self.num_called, "num_executed": self.num_executed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take both counters back."""
        self.num_called, self.num_executed = state["num_called"], state["num_executed"]


class Filtered:
    """A function behind a filter. As a method it has, in each instance, a filter of its own."""

    def __init__(self, fn: Callable[..., Any], filter: Filter) -> None:
        self._fn = fn
        functools.update_wrapper(self, fn)
        self.__fastNLP_filter__ = filter

    def __set_name__(self, owner: type, name: str) -> None:
        self._place = f"{_MARK}{name}"

    def __get__(self, instance: object | None, owner: type | None = None) -> Filtered:
        if instance is None:
            return self
        own: dict[str, Any] = vars(instance)
        if self._place not in own:
            own[self._place] = Filtered(functools.partial(self._fn, instance), self.__fastNLP_filter__.fresh())
        bound: Filtered = own[self._place]
        return bound

    def __call__(self, trainer: Any, *rest: Any) -> Any:
        return self._fn(trainer, *rest) if self.__fastNLP_filter__.due(trainer) else None


def filter_of(function: object) -> Filter | None:
    """Return the filter of a function; None if it has none."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, Filter) else None
