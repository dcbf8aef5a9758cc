"""Checks of arguments before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import unwrap
from types import CodeType, FunctionType
from typing import SupportsFloat

from torch import nn
from torch.optim import Optimizer

from cadenza.compat.accelerated.accelerator import Accelerator
from cadenza.compat.accelerated.tracking import RunHistory


def check_parts(model: object, optimizer: object, *, training: bool) -> None:
    """Check the parts of a trainer at the start of a run, since they may be set until then.

    Raises:
        TypeError: An argument has a wrong type.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {model!r}")
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an optimizer that holds the model's parameters; got {optimizer!r}. Call it first")
    if training and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"train needs an optimizer; got {optimizer!r}. Pass optimizer= to the constructor. Without one, only evaluate "
            "works."
        )


def check_accelerator(accelerator: object, kind: type) -> None:
    """Check the result of ``_create_accelerator``.

    Raises:
        TypeError: It is not an `Accelerator` of this adapter.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"{kind.__name__}._create_accelerator must return a cadenza.compat.accelerated.accelerator.Accelerator; got "
            f"{accelerator!r}. Import Accelerator from there: it takes mixed_precision= and cpu=. Pass "
            "gradient_accumulation_steps to train, and use the sinks of Cadenza in place of log_with."
        )


LOOPS = {
    "_run_train_epoch": "the native loop does the steps of an epoch in it. Override train_epoch_start and train_epoch_end for "
    "code before and after the steps, and calculate_train_batch_loss, backward_step, optimizer_step and optimizer_zero_grad "
    "to change a step",
    "_run_training": "the native trainer runs in it. Override training_run_start, training_run_epoch_end and training_run_end "
    "for code between epochs",
    "_run_evaluation": "the native trainer runs in it. Override evaluation_run_start and evaluation_run_end",
}
"""Methods that an override must call with ``super()``, and the alternatives to overriding them."""


def check_overrides(kind: type, base: type) -> None:
    """Check that the classes from `kind` up to `base` that override one of `LOOPS` also call it.

    Raises:
        TypeError: The functions of a class that overrides one of them do not contain its name.
    """
    for owner in kind.__mro__[: kind.__mro__.index(base)]:
        functions = [unwrap(attribute) for attribute in vars(owner).values() if isinstance(attribute, FunctionType)]
        called = {name for function in functions for name in _names(function.__code__)}
        for name, advice in LOOPS.items():
            if isinstance(vars(owner).get(name), FunctionType) and name not in called:
                raise TypeError(f"{owner.__name__}.{name} must call super().{name}(...): {advice}.")


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names used by a function and its nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def check_clip_value(value: object) -> None:
    """Check ``gradient_clip_value``.

    Raises:
        ValueError: It is neither None nor a number greater than 0.
    """
    if value is not None and not (isinstance(value, SupportsFloat) and float(value) > 0):
        raise ValueError(f"gradient_clip_value must be a number greater than 0, or None; got {value!r}")


def check_scheduler_fn(create: object) -> None:
    """Check ``create_scheduler_fn``.

    Raises:
        TypeError: It is not callable.
    """
    if create is not None and not callable(create):
        raise TypeError(
            f"create_scheduler_fn must be a function that returns a scheduler for an optimizer; got {create!r}. Pass the class "
            "and its arguments instead: functools.partial(StepLR, step_size=10)"
        )


def check_scheduler(scheduler: object, method: str | None, trainer: str) -> None:
    """Check that a scheduler has the method that ``scheduler_step`` of a trainer calls; None: an override calls another.

    Raises:
        TypeError: It does not have this method.
    """
    if scheduler is not None and method is not None and not hasattr(scheduler, method):
        raise TypeError(
            f"{trainer} calls {method} of the scheduler after each update; got a {type(scheduler).__name__}, which has no "
            f"{method}. Trainer takes schedulers with step, TrainerWithTimmScheduler those with step_update. For another one, "
            "override scheduler_step."
        )


def check_history(history: object) -> None:
    """Check a ``run_history``.

    Raises:
        TypeError: It lacks a method of `RunHistory`.
    """
    missing = sorted(name for name in RunHistory.__abstractmethods__ if not hasattr(history, name))
    if missing or isinstance(history, type):
        raise TypeError(
            f"run_history must be an instance of a subclass of RunHistory; got {history!r}"
            + (f", which lacks {', '.join(missing)}" if missing else ". Call it first")
        )


def check_padding(pad: bool, processes: int) -> None:
    """Check ``_pad_uneven_eval_batches``.

    Raises:
        ValueError: It is true, and there are several processes.
    """
    if pad and processes > 1:
        raise ValueError(
            "_pad_uneven_eval_batches=True evaluates some samples twice, which Cadenza does not do; expected False on several "
            "processes. Remove it: losses and gathered values are those of one process."
        )


def check_enough(samples: int | None, total_batch_size: int | None) -> None:
    """Check that each process gets a sample in an evaluation.

    Raises:
        ValueError: One batch on each process needs more samples than the data set has.
    """
    if samples is not None and total_batch_size and total_batch_size > samples:
        raise ValueError(
            f"an evaluation takes {total_batch_size} samples at a time over all processes, but the data set has {samples}. "
            "Lower the batch size of the evaluation."
        )


def report_uneven(samples: int | None, total_batch_size: int | None, processes: int, report: Callable[[str], object]) -> None:
    """Warn if the last batches of an evaluation differ between processes."""
    if samples is None or not total_batch_size:
        return
    rest = samples % total_batch_size
    per_process = total_batch_size // processes
    if rest and rest <= per_process * (processes - 1):
        report(
            f"The last batch of an evaluation has {rest} samples for {processes} processes, so some processes get none. "
            "Do not call gather in on_eval_step_end: the other processes would wait forever."
        )
    elif rest:
        report("The last batches of an evaluation differ in size between processes.")
