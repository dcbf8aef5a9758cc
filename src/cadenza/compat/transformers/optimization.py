"""Optimizer and learning rate of ``TrainingArguments``, created by methods of transformers' trainer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from cadenza.callbacks import LearningRate
from cadenza.compat.transformers.originals import original
from cadenza.errors import AdapterError
from cadenza.optim.optimizers import Optimizers

_OWN_STEP = ("lomo", "layerwise", "schedule_free")


def optimizer_for(arguments: Any, model: nn.Module, given: Optimizer | None, class_and_options: Any = None) -> Optimizers:
    """Return the given optimizer, or a function that creates the arguments' optimizer for `model`.

    Raises:
        AdapterError: The optimizer needs the training step of transformers' trainer.
    """
    if given is not None:
        return given
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if class_and_options is None and any(optimizer_name in name for optimizer_name in _OWN_STEP):
        raise AdapterError(
            f"TrainingArguments(optim={name!r}) cannot be used: this optimizer needs the training step of their trainer. Use "
            "another one, such as 'adamw_torch_fused' or 'adafactor', or pass optimizers=(optimizer, scheduler)."
        )

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        bare = _bare_trainer(arguments, model)
        bare.optimizer_cls_and_kwargs = class_and_options
        optimizer: Optimizer = bare.create_optimizer()
        for group in optimizer.param_groups:  # keep optimizers unfused that transformers does not fuse
            if "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = any(parameter.is_cuda for parameter in group["params"])
        return optimizer

    return make


def schedule_for(arguments: Any, scheduler: LRScheduler | None, monitor: str | None) -> LearningRate:
    """Return the callback that steps the given scheduler or the arguments' scheduler.

    Args:
        arguments: The ``TrainingArguments``.
        scheduler: The given scheduler; None creates one.
        monitor: The name of the result for ``reduce_lr_on_plateau``.

    Raises:
        AdapterError: The schedule needs a custom step.
    """
    if scheduler is not None:
        return LearningRate(scheduler)
    name = str(getattr(arguments.lr_scheduler_type, "value", arguments.lr_scheduler_type))
    if name == "greedy":
        raise AdapterError("TrainingArguments(lr_scheduler_type='greedy') cannot be used. Use 'reduce_lr_on_plateau'.")
    if name == "reduce_lr_on_plateau":
        return LearningRate(lambda optimizer: _made(arguments, optimizer, 1), monitor=monitor)
    if name == "constant":
        return LearningRate(lambda optimizer: _made(arguments, optimizer, 1))

    def make(optimizer: Optimizer, total: int) -> LRScheduler:
        return _made(arguments, optimizer, total)

    return LearningRate(make)


def _made(arguments: Any, optimizer: Optimizer, total: int) -> LRScheduler:
    scheduler: LRScheduler = _bare_trainer(arguments, None).create_scheduler(total, optimizer)
    return scheduler


def _bare_trainer(arguments: Any, model: nn.Module | None) -> Any:
    """Return a transformers trainer without setup, which can only create an optimizer or a scheduler."""
    bare: Any = object.__new__(original("Trainer"))
    bare.args, bare.model = arguments, model
    bare.optimizer = bare.lr_scheduler = bare.optimizer_cls_and_kwargs = None
    return bare
