"""Set any value by a schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cadenza.errors import nearest
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.hooks.schedule import Interval
from cadenza.hooks.schedule import Schedule as Due
from cadenza.hooks.subscription import periodic
from cadenza.optim.rates import RunUnit, count_of, length_of, takes_total
from cadenza.optim.settings import Compared

if TYPE_CHECKING:
    from cadenza.run import Run

Schedule = Callable[[int], Any] | Callable[[int, int], Any] | Mapping[int, Any]


class ScheduleValue(Callback, Compared):
    """Set an attribute of an object, or a key of a mapping, by a schedule over the steps.

    The value is set before the first step and then at the interval. It keeps its last value when the run ends.

    With multiple ranks: each rank does the same; it does not communicate.

    Args:
        target: The object, or a function of the run that returns it, such as ``lambda run: run.optimizers[0].param_groups[0]``.
        key: The name of the attribute, or the key. A tensor is filled in place.
        schedule: A function of the completed steps, or of the completed steps and the total; or values by step, such as
            ``{0: 0.5, 1000: 0.1}``. The first value also holds before its step, and the last value after its step. If
            ``max_tokens`` is the only limit, a function of two numbers gets the tokens so far and this limit.
        every: The interval: ``10`` (steps), ``"1 epoch"``.
        between: For values by step: ``"linear"`` interpolates between them, ``"hold"`` keeps each value up to the next.

    Raises:
        TypeError, ValueError: An argument is wrong, or the schedule needs the total and it is not known.
        AttributeError: At the start of a run: the target has no such attribute or key.

    >>> from torch import nn
    >>> from cadenza.testing import tiny_run
    >>> model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1))
    >>> run = tiny_run(model=model, callbacks=[ScheduleValue(model[0], "p", {0: 0.5, 4: 0.1})], steps=2)
    >>> model[0].p
    0.3
    """

    def __init__(
        self,
        target: object,
        key: str,
        schedule: Schedule,
        every: Interval = "1 step",
        *,
        between: Literal["linear", "hold"] = "linear",
    ) -> None:
        if between not in ("linear", "hold"):
            raise ValueError(f"between must be 'linear' or 'hold'; got {between!r}")
        if not callable(schedule):
            _check_values(schedule, between)
        self.target: object = target
        self.key: str = key
        self.schedule: Schedule = schedule
        self.every: Due = Due.parse(every)
        self.between = between
        self._set_at: tuple[int, RunUnit] | None = None
        self._total: int | None = None
        self._unit: RunUnit = "step"

    def listeners(self) -> list[Listener]:
        return silent([*super().listeners(), periodic(self.every, self._set_now, str(self.key))])

    def on_setup(self, run: Run) -> None:
        self._set_at = None

    def on_fit_start(self, run: Run) -> None:
        self._total, self._unit = None, "step"
        if not isinstance(self.schedule, Mapping) and takes_total(self.schedule):
            self._total, self._unit = length_of(run, needed_by="ScheduleValue with a function of the step and the total")
        target = self._target_in(run)
        has = self.key in target if isinstance(target, Mapping) else hasattr(target, self.key)
        if not has:
            known = [str(key) for key in target] if isinstance(target, Mapping) else dir(target)
            raise AttributeError(
                f"ScheduleValue cannot set {self.key!r}: a {type(target).__name__} has no such option."
                f"{nearest(str(self.key), known)}"
            )
        position, unit = self._set_at or (0, "")
        self._set(run, position if unit == self._unit else count_of(run, self._unit))

    def _set_now(self, run: Run) -> None:
        self._set(run, count_of(run, self._unit))

    def _set(self, run: Run, position: int) -> None:
        self._set_at = position, self._unit
        # The target is found each time, because restoring a checkpoint gives an optimizer new groups.
        target, value = self._target_in(run), self._value_at(position)
        current = target[self.key] if isinstance(target, MutableMapping) else getattr(target, self.key)
        if isinstance(current, Tensor):
            with torch.no_grad():
                current.fill_(value)
        elif isinstance(target, MutableMapping):
            target[self.key] = value
        else:
            setattr(target, self.key, value)

    def _target_in(self, run: Run) -> Any:
        # A module is callable too, but is not a function of the run.
        function = isinstance(self.target, FunctionType | MethodType | BuiltinFunctionType | partial)
        target: Any = self.target
        return target(run) if function else target

    def _value_at(self, position: int) -> Any:
        values: Any = self.schedule
        if not isinstance(values, Mapping):
            return values(position) if self._total is None else values(position, self._total)
        steps = sorted(values)
        index = bisect_right(steps, position)
        if index in (0, len(steps)) or self.between == "hold":
            return values[steps[max(0, index - 1)]]
        left, right = steps[index - 1], steps[index]
        return values[left] + (values[right] - values[left]) * ((position - left) / (right - left))

    def state_dict(self) -> dict[str, Any]:
        if self._set_at is None:
            return {}
        position, unit = self._set_at  # not always the last step
        return {"set_at": position, "unit": unit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._set_at = (state["set_at"], state.get("unit", "step")) if "set_at" in state else None


def _check_values(schedule: object, between: str) -> None:
    if not isinstance(schedule, Mapping):
        raise TypeError(
            f"schedule must be a function of the step, or a mapping such as {{0: 0.5, 1000: 0.1}}; got {schedule!r}"
        )
    if not schedule:
        raise ValueError("schedule must hold at least one value, such as {0: 0.5, 1000: 0.1}; got an empty mapping")
    for step, value in schedule.items():
        at_least(0, "each key of schedule, a step,", step)
        if between == "linear" and not isinstance(value, int | float):
            raise TypeError(f"between='linear' needs numbers; got {value!r} at step {step}. Use between='hold' for it.")
