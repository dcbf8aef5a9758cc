"""What is checked before a run, so that a small mistake is named where it was made."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn
from torch.optim import Optimizer


def check_parts(kind: type, model: object, optimizer: object, callbacks: object) -> None:
    """Check what a trainer is made of.

    Raises:
        TypeError: Something is of another kind, or `kind` overrides what nothing would call.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {model!r}")
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an optimizer that holds the model's parameters; got {optimizer!r}: call it first")
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a tuple or list of callbacks; got {callbacks!r}. Write callbacks=(...,)")
    if hasattr(kind, "_run_train_epoch"):
        raise TypeError(
            f"{kind.__name__} overrides _run_train_epoch, and the native loop does its steps: nothing would call it. Do what "
            "comes before them in train_epoch_start, what comes after them in train_epoch_end, and change a step in "
            "calculate_train_batch_loss, backward_step, optimizer_step and optimizer_zero_grad."
        )


def check_lengths(epochs: object, max_steps: object, accumulate: object, clip_value: float | None) -> None:
    """Check the numbers that a training is made of.

    Raises:
        TypeError: One is no whole number.
        ValueError: One is too small.
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
    """Check what is to make a scheduler.

    Raises:
        TypeError: It cannot be called.
    """
    if create is not None and not callable(create):
        raise TypeError(
            f"create_scheduler_fn must be a function that makes a scheduler of the optimizer; got {create!r}. Give the class "
            "with its settings instead: functools.partial(StepLR, step_size=10)"
        )


def check_uneven(samples: int | None, total_batch_size: int | None, processes: int, say: Callable[[str], object]) -> None:
    """Say where the last batches of an evaluation differ between processes.

    Raises:
        ValueError: A batch of each process needs more samples than there are.
    """
    if samples is None or not total_batch_size:
        return
    if total_batch_size > samples:
        raise ValueError(
            f"an evaluation on {processes} processes takes {total_batch_size} samples at a time, and the data set has "
            f"{samples}. Lower the batch size of evaluations."
        )
    rest = samples % total_batch_size
    per_process = total_batch_size // processes
    if rest and rest <= per_process * (processes - 1):
        say(
            f"The last batch of an evaluation has {rest} samples for {processes} processes: some of them get none. "
            "Do not gather in on_eval_step_end then: those wait for ever."
        )
    elif rest:
        say("The last batches of an evaluation differ in size between processes.")
