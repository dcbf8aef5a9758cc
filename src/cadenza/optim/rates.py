"""The learning rates in effect: those of the schedules of the optimizers, times the factors of warm-ups."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, MultiplicativeLR, ReduceLROnPlateau, SequentialLR

from cadenza.errors import CallbackError
from cadenza.loading import num_batches
from cadenza.optim.settings import limits_of, set_option
from cadenza.status.progress import Progress
from cadenza.status.reprs import signature_of

if TYPE_CHECKING:
    from cadenza.run import Run

Factor = Callable[[int], float]


def rates_of(run: Run) -> Rates:
    """Return the factors on the learning rates of a run."""
    return run._session.rates


class Rates:
    """Factors on the learning rates.

    A scheduler must not read a scaled rate, or it would continue from that rate. Between updates the optimizers therefore
    hold the rates of their schedules. A factor depends on the step alone and is applied around the update.
    """

    def __init__(self) -> None:
        self.factors: dict[int, list[Factor]] = {}
        """By the index of the optimizer in the run: functions of the step, counted from 1. Their product is applied."""
        self._kept: dict[int, list[tuple[dict[str, Any], Any]]] = {}

    def factor(self, optimizer: int, step: int) -> float:
        """Return the factor on the rates of an optimizer in a step."""
        return prod((factor(step) for factor in self.factors.get(optimizer, ())), start=1.0)

    def apply(self, index: int, optimizer: Optimizer, step: int) -> None:
        """Multiply the rates of an optimizer by their factor, once, until `put_back`."""
        if index in self._kept:
            return
        factor = self.factor(index, step)
        # All are copied before one is scaled, because two groups may share a tensor.
        self._kept[index] = [(group, _copy_of(group["lr"])) for group in optimizer.param_groups]
        for group, rate in self._kept[index]:
            set_option(group, "lr", rate * factor)

    def put_back(self, index: int) -> None:
        """Restore the rates before `apply`."""
        for group, rate in self._kept.pop(index, ()):  # a hook may have added groups
            set_option(group, "lr", rate)

    def of(self, run: Run) -> list[float]:
        """Return the rate of each parameter group, over all optimizers, in the next update."""
        step = run.progress.step + 1
        return [
            float(group["lr"]) * self.factor(index, step)
            for index, optimizer in enumerate(run.optimizers)
            for group in optimizer.param_groups
        ]


def _copy_of(rate: Any) -> Any:
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


def optimizer_of(run: Run, index: int, *, needed_by: str) -> Optimizer:
    """Return an optimizer of the run by its index.

    Raises:
        ValueError: The run has no such optimizer.
    """
    if not 0 <= index < len(run.optimizers):
        raise ValueError(f"{needed_by}: optimizer must be an index from 0 to {len(run.optimizers) - 1}; got {index}")
    return run.optimizers[index]


# -- schedules --------------------------------------------------------------------------------------


class SetsRates(ABC):
    """A callback that steps the schedule of one optimizer."""

    given: Any
    """The scheduler, or the function that makes it."""

    @abstractmethod
    def aim(self, optimizers: Sequence[Optimizer] | None) -> object:
        """Return the optimizer that it changes, or the index of the optimizer if the optimizers are not made yet."""

    @abstractmethod
    def drives(self, optimizer: Optimizer) -> bool:
        """Return whether it changes the rates of `optimizer` in the current run."""

    @abstractmethod
    def renew(self, run: Run) -> None:
        """Make the scheduler again, from the rates that the optimizer has now."""


def check_one_each(callbacks: Mapping[str, object], optimizers: Sequence[Optimizer] | None) -> None:
    """Raise `CallbackError` if two callbacks set the learning rate of one optimizer, because their schedules would multiply.

    Args:
        callbacks: The callbacks of the run, by name.
        optimizers: The optimizers of the run; None if they are not made yet.
    """
    names: dict[object, str] = {}
    for name, callback in callbacks.items():
        other = names.setdefault(callback.aim(optimizers), name) if isinstance(callback, SetsRates) else name
        if other != name:
            raise CallbackError(
                f"{other} and {name} set the learning rate of the same optimizer, and their schedules would multiply. Keep "
                "one: torch's SequentialLR runs schedules one after the other, ChainedScheduler multiplies them, and Warmup "
                "combines with any schedule. For several optimizers, choose one: LearningRate(..., optimizer=1)."
            )


def takes_total(function: Callable[..., object]) -> bool:
    """Return whether a function takes the total too, as a second argument without default.

    A class, or a partial of one, does not: its second argument has another meaning.

    >>> takes_total(lambda step: 0), takes_total(lambda step, total: 0), takes_total(lambda step, power=2: 0)
    (False, True, False)
    """
    if isinstance(function.func if isinstance(function, partial) else function, type):
        return False
    try:
        parameters = signature_of(function).parameters.values()
    except ValueError:  # a function in C without a signature
        return False
    positional = [
        parameter for parameter in parameters if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(positional) > 1 and positional[1].default is inspect.Parameter.empty


RunUnit = Literal["step", "epoch", "token"]
"""The units of a schedule over a run."""


def length_of(run: Run, unit: RunUnit = "step", *, needed_by: str) -> tuple[int, RunUnit]:
    """Return how much the run completes if nothing stops it, in `unit`; in tokens instead of steps if they are its only limit.

    Works in ``on_setup`` too.

    Raises:
        ValueError: The number is not known. `needed_by` is the subject of the message.
    """
    if unit == "step" and (tokens := run.progress.total("token")) is not None:
        return tokens, "token"
    # In on_setup the counters are not yet those of a loader that was replaced.
    batches = num_batches(run.loader, run.driver.data_shard())
    limits = Progress(**limits_of(run.progress), batches_per_epoch=batches)
    total = limits.total(unit, run.info.accumulate)
    if total is None:
        raise ValueError(f"{needed_by} needs a run of known length: {why_unknown(run.progress, unit)}")
    return total, unit


def count_of(run: Run, unit: RunUnit) -> int:
    """Return how much of `unit` the run has completed."""
    return run.progress.tokens if unit == "token" else int(getattr(run.progress, unit))


def why_unknown(limits: Progress, unit: RunUnit) -> str:
    """Return why a run has no known total of `unit`, and what to give."""
    limit = "max_epochs" if unit == "epoch" else "max_steps"
    if limits.max_tokens is not None:
        alone = "" if unit == "epoch" else " max_tokens= alone, or"
        return (
            f"with max_tokens={limits.max_tokens} it ends when they are reached, and how many a step has is not known. Give "
            f"Trainer{alone} {limit}= instead."
        )
    if not limits.has_epochs:
        return "a loop of cadenza.attach ends where it is left. Give attach(max_steps=...)."
    silent = "its loader does not say how many batches it has (no __len__), and"
    if limits.max_epochs is None or limits.max_steps is None:
        return f"{silent} {limit}= is not given. Give Trainer one of the two."
    return (
        f"{silent} with max_epochs={limits.max_epochs} and max_steps={limits.max_steps} either limit may come first. Give "
        f"Trainer {limit}= alone, or a loader with __len__."
    )


_ONLY_STEPPED = (ChainedScheduler, MultiplicativeLR, ReduceLROnPlateau)


def check_can_go_to(scheduler: LRScheduler) -> None:
    """Raise `ValueError` for a scheduler that computes each rate from the rate before: `go_to` cannot set it."""
    for part in getattr(scheduler, "_schedulers", ()):
        check_can_go_to(part)
    if isinstance(scheduler, _ONLY_STEPPED) or (isinstance(scheduler, SequentialLR) and not hasattr(scheduler, "_milestones")):
        raise ValueError(
            f"a {type(scheduler).__name__} can only be stepped, once for each update: it cannot count the tokens of a run "
            "that max_tokens= ends. Give LearningRate a LambdaLR, a SequentialLR or another scheduler of torch, or Trainer "
            "max_steps=."
        )


def go_to(scheduler: LRScheduler, position: int) -> None:
    """Set the rates of a position, such as the number of tokens so far. A step may pass over many positions.

    A scheduler that `check_can_go_to` accepts; one of timm must count updates.
    """
    if isinstance(scheduler, CountedSchedule):
        scheduler.last_epoch = position
        scheduler.schedule.step_update(position)
    elif isinstance(scheduler, SequentialLR):
        starts = [0, *scheduler._milestones]
        index = bisect_right(starts, position) - 1
        go_to(scheduler._schedulers[index], position - starts[index])
        scheduler.last_epoch, scheduler._last_lr = position, scheduler._schedulers[index].get_last_lr()
    else:
        with warnings.catch_warnings():  # torch warns of positions, because some of its schedulers take none
            warnings.simplefilter("ignore")
            scheduler.step(position)


# -- schedules of timm ------------------------------------------------------------------------------


@runtime_checkable
class Counted(Protocol):
    """A schedule of timm: its caller counts, and passes the count."""

    optimizer: Optimizer
    t_in_epochs: bool
    """Whether it counts epochs. Otherwise it counts updates."""

    def step(self, epoch: int, metric: float | None = None) -> None: ...
    def step_update(self, num_updates: int, metric: float | None = None) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def is_counted(schedule: object) -> TypeGuard[Counted]:
    """Return whether `schedule` has the interface of timm."""
    return not isinstance(schedule, type) and isinstance(schedule, Counted)


Scheduler = LRScheduler | Counted


class CountedSchedule(LRScheduler):
    """Counts for a schedule that must be given the count. The count is part of its state.

    Args:
        schedule: The schedule. ``step(1)`` or ``step_update(1)`` sets the rate after the first epoch or update.

    Raises:
        ValueError: It is a plateau schedule, which needs results and does not save its state.
    """

    def __init__(self, schedule: Counted) -> None:  # a scheduler of torch would set the rates here
        name = type(schedule).__name__
        if name == "PlateauLRScheduler":
            raise ValueError(
                "LearningRate cannot resume timm's PlateauLRScheduler, because it does not save its counters. Use "
                'LearningRate(lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor="eval/loss").'
            )
        self.schedule = schedule
        self.optimizer: Optimizer = schedule.optimizer
        self.last_epoch: int = 0

    @staticmethod
    def around(schedule: Any) -> Any:
        """Return a schedule of timm in this form; any other object unchanged."""
        return CountedSchedule(schedule) if is_counted(schedule) else schedule

    @property
    def unit(self) -> Literal["step", "epoch"]:
        """The unit that it counts."""
        return "epoch" if self.schedule.t_in_epochs else "step"

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        step = self.schedule.step if self.schedule.t_in_epochs else self.schedule.step_update
        step(self.last_epoch)

    def get_last_lr(self) -> list[float | Tensor]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {**self.schedule.state_dict(), "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self.last_epoch = state.pop("last_epoch")
        self.schedule.load_state_dict(state)
