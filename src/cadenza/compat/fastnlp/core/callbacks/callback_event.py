"""``fastNLP.core.callbacks.callback_event``: the events, and filters of their calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

logger: logging.Logger = logging.getLogger("cadenza")

FilterFn = Callable[["Filter", Any], bool]

_MARK = "__fastNLP_filter__"


class _Factory:
    """Creates events with the name of the class attribute that holds it."""

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
    """One of the 24 events, with the arguments of a filter. Create it with, say, ``Event.on_train_begin(every=2)``.

    The numbers are checked when the event is bound to a trainer.
    """

    value: str
    every: int | None = None
    once: int | None = None
    filter_fn: FilterFn | None = None

    on_after_trainer_initialized: ClassVar[_Factory] = _Factory()
    on_sanity_check_begin: ClassVar[_Factory] = _Factory()
    on_sanity_check_end: ClassVar[_Factory] = _Factory()
    on_train_begin: ClassVar[_Factory] = _Factory()
    on_train_end: ClassVar[_Factory] = _Factory()
    on_train_epoch_begin: ClassVar[_Factory] = _Factory()
    on_train_epoch_end: ClassVar[_Factory] = _Factory()
    on_fetch_data_begin: ClassVar[_Factory] = _Factory()
    on_fetch_data_end: ClassVar[_Factory] = _Factory()
    on_train_batch_begin: ClassVar[_Factory] = _Factory()
    on_train_batch_end: ClassVar[_Factory] = _Factory()
    on_exception: ClassVar[_Factory] = _Factory()
    on_save_model: ClassVar[_Factory] = _Factory()
    on_load_model: ClassVar[_Factory] = _Factory()
    on_save_checkpoint: ClassVar[_Factory] = _Factory()
    on_load_checkpoint: ClassVar[_Factory] = _Factory()
    on_before_backward: ClassVar[_Factory] = _Factory()
    on_after_backward: ClassVar[_Factory] = _Factory()
    on_before_optimizers_step: ClassVar[_Factory] = _Factory()
    on_after_optimizers_step: ClassVar[_Factory] = _Factory()
    on_before_zero_grad: ClassVar[_Factory] = _Factory()
    on_after_zero_grad: ClassVar[_Factory] = _Factory()
    on_evaluate_begin: ClassVar[_Factory] = _Factory()
    on_evaluate_end: ClassVar[_Factory] = _Factory()

    def filter(self) -> Filter:
        """Return a new filter for a function at this event."""
        return Filter(self.every, self.once, self.filter_fn)

    def __str__(self) -> str:
        return self.value


class Filter:
    """Passes only some calls to a function. Use it as a decorator of functions and of methods of a `Callback`.

    Each instance with a decorated method has separate counters.

    Args:
        every: Pass every n-th call.
        once: Pass only the n-th call.
        filter_fn: ``filter_fn(filter, trainer)`` returns whether a call passes; the trainer is its first argument. If several
            of the three are given, the first one is used, with a warning. If none is given, all calls pass.

    Raises:
        ValueError: `every` or `once` is not a positive integer.
        TypeError: `filter_fn` is not callable.

    >>> @Filter(every=2)
    ... def show(trainer):
    ...     print("call", show.__fastNLP_filter__.num_called)
    >>> for _ in range(5):
    ...     show(None)
    call 2
    call 4
    """

    num_called: int = 0
    """The number of calls, the current one included."""
    num_executed: int = 0
    """The number of passed calls."""

    def __init__(self, every: int | None = None, once: int | None = None, filter_fn: FilterFn | None = None) -> None:
        named = {"every": every, "once": once, "filter_fn": filter_fn}
        if len(given := [name for name, value in named.items() if value is not None]) > 1:
            logger.warning("%s= is used, and %s= is ignored. Pass only one of them.", given[0], "=, ".join(given[1:]))
        numbers: dict[str, int | None] = {"every": every, "once": once}
        for name, count in numbers.items():
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1; got {count!r}")
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(f"filter_fn must be a function (filter, trainer) -> bool; got {filter_fn!r}")
        self._arguments = every, once, filter_fn

    def due(self, trainer: Any) -> bool:
        """Count a call; return whether it passes."""
        every, once, filter_fn = self._arguments
        self.num_called += 1
        if every is not None:
            passes = self.num_called % every == 0
        elif once is not None:
            passes = self.num_called == once
        else:
            passes = filter_fn is None or bool(filter_fn(self, trainer))
        self.num_executed += passes
        return passes

    def fresh(self) -> Filter:
        """Return a copy of this filter with counters at 0."""
        twin = Filter.__new__(Filter)
        twin._arguments = self._arguments
        return twin

    def __call__(self, fn: Callable[..., Any]) -> Filtered:
        return Filtered(fn, self)

    def reset(self) -> None:
        """Set the counters to 0."""
        self.num_called = self.num_executed = 0

    def state_dict(self) -> dict[str, int]:
        """Return both counters."""
        return {"num_called": self.num_called, "num_executed": self.num_executed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore both counters."""
        self.num_called, self.num_executed = state["num_called"], state["num_executed"]


class Filtered:
    """A function with a filter. As a method, it has a separate filter in each instance."""

    def __init__(self, fn: Callable[..., Any], filter: Filter) -> None:
        self._fn = fn
        functools.update_wrapper(self, fn)
        self.__fastNLP_filter__ = filter

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = f"{_MARK}{name}"

    def __get__(self, instance: object | None, owner: type | None = None) -> Filtered:
        if instance is None:
            return self
        own: dict[str, Any] = vars(instance)
        if self._attribute not in own:
            own[self._attribute] = Filtered(functools.partial(self._fn, instance), self.__fastNLP_filter__.fresh())
        bound: Filtered = own[self._attribute]
        return bound

    def __call__(self, trainer: Any, *rest: Any) -> Any:
        return self._fn(trainer, *rest) if self.__fastNLP_filter__.due(trainer) else None


def filter_of(function: object) -> Filter | None:
    """Return the filter of a function; None if it has none."""
    found = getattr(function, _MARK, None)
    return found if isinstance(found, Filter) else None
