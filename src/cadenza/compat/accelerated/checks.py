"""Checks of arguments before a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer


def check_parts(kind: type, model: object, optimizer: object, callbacks: object) -> None:
    """Check the arguments of a trainer.

    Raises:
        TypeError: An argument has a wrong type, or `kind` overrides a method that is never called.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {model!r}")
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an optimizer that holds the model's parameters; got {optimizer!r}. Call it first")
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a tuple or list of callbacks; got {callbacks!r}. Write callbacks=(...,)")
    if hasattr(kind, "_run_train_epoch"):
        raise TypeError(
            f"{kind.__name__} overrides _run_train_epoch, which is never called: the native loop runs the steps. Override "
            "train_epoch_start and train_epoch_end for code before and after the steps, and calculate_train_batch_loss, "
            "backward_step, optimizer_step and optimizer_zero_grad to change a step."
        )


def check_lengths(epochs: object, max_steps: object, accumulate: object, clip_value: float | None) -> None:
    """Check the lengths of a training.

    Raises:
        TypeError: A value is not an integer.
        ValueError: A value is too small.
    """
    counts = {"num_epochs": epochs, "max_num_train_steps": max_steps, "gradient_accumulation_steps": accumulate}
    for name, count in counts.items():
        if count is None and name == "max_num_train_steps":
            continue
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{name} must be a whole number; got {count!r}")
        if count < 1:
            raise ValueError(f"{name} must be at least 1; got {count!r}")
    if clip_value is not None and not clip_value > 0:
        raise ValueError(f"gradient_clip_value must be greater than 0, or None; got {clip_value!r}")


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


def check_uneven(samples: int | None, total_batch_size: int | None, processes: int, report: Callable[[str], object]) -> None:
    """Print a message if the last batches of an evaluation differ between processes.

    Raises:
        ValueError: One batch on each process needs more samples than the data set has.
    """
    if samples is None or not total_batch_size:
        return
    if total_batch_size > samples:
        raise ValueError(
            f"an evaluation on {processes} processes takes {total_batch_size} samples at a time, but the data set has "
            f"{samples}. Lower the batch size of the evaluation."
        )
    rest = samples % total_batch_size
    per_process = total_batch_size // processes
    if rest and rest <= per_process * (processes - 1):
        report(
            f"The last batch of an evaluation has {rest} samples for {processes} processes, so some processes get none. "
            "Do not call gather in on_eval_step_end: the other processes would wait forever."
        )
    elif rest:
        report("The last batches of an evaluation differ in size between processes.")
