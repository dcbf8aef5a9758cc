"""The logging, evaluation and save strategies of ``TrainingArguments`` as schedules."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from cadenza.errors import AdapterError
from cadenza.hooks.schedule import At, Every, First, Schedule


class Limits(NamedTuple):
    """The length of a run."""

    arguments: dict[str, int]
    """``max_epochs`` or ``max_steps``, for the trainer."""
    total: int | None
    """The number of steps; None if unknown."""
    per_epoch: int | None
    """The number of steps in an epoch; None if unknown."""

    @property
    def cut(self) -> bool:
        """Whether the run ends inside an epoch."""
        return self.total is not None and self.per_epoch is not None and self.total % self.per_epoch != 0


def limits_of(arguments: Any, batches: int | None) -> Limits:
    """Return the limits of a run with this many batches per epoch on each rank.

    Raises:
        AdapterError: The run has no end.
    """
    per_epoch = None if batches is None else max(1, -(-batches // arguments.gradient_accumulation_steps))
    if arguments.max_steps > 0:
        return Limits({"max_steps": arguments.max_steps}, arguments.max_steps, per_epoch)
    if per_epoch is None:
        raise AdapterError(
            "the training data has no length, so the end of the run is unknown: expected TrainingArguments(max_steps=...); got "
            f"max_steps={arguments.max_steps}. Give max_steps."
        )
    total = math.ceil(arguments.num_train_epochs * per_epoch)
    if arguments.num_train_epochs == int(arguments.num_train_epochs):
        return Limits({"max_epochs": int(arguments.num_train_epochs)}, total, per_epoch)
    return Limits({"max_steps": total}, total, per_epoch)


def logging_schedule(arguments: Any, limits: Limits) -> Schedule | None:
    """Return when to log; None for never."""
    found = _strategy(arguments.logging_strategy, arguments.logging_steps, limits)
    if found is not None and limits.cut and _name(arguments.logging_strategy) == "epoch":
        found = found | At(f"{limits.total} steps")  # the end of an epoch that is cut short, as in transformers
    first = At("1 step") if arguments.logging_first_step else None
    return found if first is None else first if found is None else found | first


def evaluation_schedule(arguments: Any, limits: Limits) -> Schedule | None:
    """Return when to evaluate; None for never. The end of a run is evaluated as well, as in transformers."""
    strategy, delay = _name(arguments.eval_strategy), arguments.eval_delay
    found = _strategy(strategy, arguments.eval_steps, limits)
    if found is None:
        return None
    unit = "step" if strategy == "steps" else "epoch"
    if (before := math.ceil(delay) - 1) > 0:
        found = found & ~First(f"{before} {unit}s")
    ends_late = strategy == "steps" or limits.cut
    if limits.total is None or not ends_late:
        return found
    end = limits.total if strategy == "steps" else limits.total / (limits.per_epoch or 1)
    return found | At(f"{limits.total} steps") if delay <= end else found


def saving_schedule(arguments: Any, limits: Limits) -> Schedule | None:
    """Return when to save; None for never. For ``best``, it is when to evaluate."""
    if _name(arguments.save_strategy) == "best":
        return evaluation_schedule(arguments, limits)
    return _strategy(arguments.save_strategy, arguments.save_steps, limits)


def _strategy(strategy: Any, steps: float | None, limits: Limits) -> Schedule | None:
    name = _name(strategy)
    if name == "epoch":
        return Every("1 epoch")
    if name != "steps" or not steps or steps < 0:
        return None
    if steps >= 1:
        return Every(f"{int(steps)} steps")
    return Every(f"{100 * steps:g}%" if limits.total is None else f"{math.ceil(limits.total * steps)} steps")


def _name(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy))
