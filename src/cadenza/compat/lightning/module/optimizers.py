"""``configure_optimizers`` in all its forms: the optimizers and the schedules of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cadenza.compat.lightning.module.before_run import TrainerBeforeRun
from cadenza.compat.lightning.module.parts import ScheduleConfig
from cadenza.errors import AdapterError, CallbackError

if TYPE_CHECKING:
    from cadenza.compat.lightning.module.attached import Attached

_FORMS = """\
{name}.configure_optimizers must return one of:
 * an optimizer, or a list or tuple of optimizers
 * a list of optimizers, and a list of schedulers
 * {{"optimizer": optimizer, "lr_scheduler": scheduler or {{"scheduler": scheduler, ...}}, "monitor": name}}
 * a list or tuple of such dicts
 * None
Got {came!r}."""


class ConfiguredOptimizers:
    """The optimizer function of a trainer for a LightningModule. Each run calls ``configure_optimizers``."""

    as_given: bool = True
    """The optimizers are not fused, may need closures, and produce the same rounding as in Lightning."""

    def __init__(self, attached: Attached) -> None:
        self._attached = attached

    def __call__(self, parameters: Sequence[Tensor]) -> list[Optimizer]:
        """Return the optimizers of ``configure_optimizers``, and keep its schedules."""
        attached = self._attached
        _check_overrides(attached)
        previous = attached.module._trainer
        attached.attach(TrainerBeforeRun(attached))
        try:
            attached.set_up("fit")
            configured = attached.call("configure_optimizers")
        finally:
            attached.attach(previous)
        found = NoUpdate(parameters) if configured is None else configured
        optimizers, schedulers, monitor = parsed(found, type(attached.module).__name__)
        if attached.automatic and len(optimizers) > 1:
            raise RuntimeError(
                "Training with multiple optimizers is only supported with manual optimization. Set "
                "`self.automatic_optimization = False`, then access your optimizers in `training_step` with "
                "`opt1, opt2, ... = self.optimizers()`."
            )
        optimizers = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]  # a LightningOptimizer
        schedules = [config_of(scheduler, monitor, automatic=attached.automatic) for scheduler in schedulers]
        _check(schedules, optimizers, own_step=not attached.automatic or attached.overrides("lr_scheduler_step"))
        _check_one_each(schedules, optimizers, attached)
        attached.configure(optimizers, schedules)
        return optimizers

    def __repr__(self) -> str:
        return f"{type(self._attached.module).__name__}.configure_optimizers"


def _check_overrides(attached: Attached) -> None:
    """Raise `AdapterError` if a module lacks a method that a fit needs."""
    for name, advice in (
        ("training_step", "Write training_step(self, batch, batch_idx), which returns the loss."),
        ("configure_optimizers", "Return the optimizer from it, or None for a run without updates."),
    ):
        if not attached.overrides(name):
            raise AdapterError(f"{type(attached.module).__name__} has no {name}, which a fit needs. {advice}")


class NoUpdate(Optimizer):
    """Update nothing: ``configure_optimizers`` returned None."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(list(parameters), {})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call the closure, if there is one."""
        return None if closure is None else closure()


def parsed(found: Any, name: str) -> tuple[list[Any], list[Any], str | None]:
    """Return the optimizers, the schedulers and the monitor that ``configure_optimizers`` returned.

    Raises:
        TypeError: Its form is not supported by Lightning.
    """
    if isinstance(found, Optimizer):
        return [found], [], None
    if isinstance(found, Mapping) and "optimizer" in found:
        schedulers = [found["lr_scheduler"]] if "lr_scheduler" in found else []
        return [found["optimizer"]], schedulers, found.get("monitor")
    if isinstance(found, list | tuple):
        if len(found) == 2 and isinstance(found[0], list) and all(isinstance(optimizer, Optimizer) for optimizer in found[0]):
            return found[0], found[1] if isinstance(found[1], list) else [found[1]], None
        if found and all(isinstance(entry, Mapping) and "optimizer" in entry for entry in found):
            given = [entry["lr_scheduler"] for entry in found if "lr_scheduler" in entry]
            schedulers = [dict(each) if isinstance(each, Mapping) else {"scheduler": each} for each in given]
            return [entry["optimizer"] for entry in found], schedulers, None
        if found and all(isinstance(optimizer, Optimizer) for optimizer in found):
            return list(found), [], None
    raise TypeError(_FORMS.format(name=name, came=found))


def config_of(given: Any, monitor: str | None, *, automatic: bool) -> ScheduleConfig:
    """Return when a scheduler of ``configure_optimizers`` is stepped."""
    plateau = ReduceLROnPlateau
    if not isinstance(given, Mapping):
        given = {"scheduler": given} | ({"monitor": monitor} if isinstance(given, plateau) else {})
    if "scheduler" not in given:
        raise ValueError(f'The lr scheduler dict must have the key "scheduler"; got {sorted(given)}.')
    known = {field.name for field in fields(ScheduleConfig)}
    config = ScheduleConfig(**{name: value for name, value in given.items() if name in known})
    if config.interval not in ("step", "epoch"):
        raise ValueError(f'The "interval" key in lr scheduler dict must be "step" or "epoch"; got {config.interval!r}.')
    if automatic:
        config.reduce_on_plateau = bool(given.get("reduce_on_plateau", isinstance(config.scheduler, plateau)))
        if config.reduce_on_plateau and config.monitor is None:
            raise ValueError(
                "The lr scheduler dict must include a monitor when a `ReduceLROnPlateau` scheduler is used; got none. For "
                'example: {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}'
            )
    return config


def _check_one_each(schedules: Iterable[ScheduleConfig], optimizers: Sequence[Optimizer], attached: Attached) -> None:
    """Raise `CallbackError` if a callback sets the learning rate of an optimizer that has a schedule of the module."""
    for setter in attached.rate_setters:
        aim = setter.aim(optimizers)
        for config in schedules:
            if aim in (held := getattr(config.scheduler, "optimizer", None), getattr(held, "optimizer", None)):
                raise CallbackError(
                    f"{setter!r} in callbacks and the {type(config.scheduler).__name__} of {type(attached.module).__name__}."
                    "configure_optimizers set the learning rate of the same optimizer. Keep one: remove LearningRate from "
                    "callbacks, or return the optimizer alone."
                )


def _check(schedules: Iterable[ScheduleConfig], optimizers: Sequence[Any], *, own_step: bool) -> None:
    for config in schedules:
        kind = type(config.scheduler).__name__
        if not all(callable(getattr(config.scheduler, name, None)) for name in ("state_dict", "load_state_dict")):
            raise TypeError(f"expected a scheduler with state_dict and load_state_dict; got a {kind}")
        if not isinstance(config.scheduler, LRScheduler) and not own_step:
            raise ValueError(
                f"{kind} does not follow the API of torch's LRScheduler. Override LightningModule.lr_scheduler_step, which "
                "then steps it."
            )
        held = getattr(config.scheduler, "optimizer", None)
        if not any(held is optimizer or getattr(held, "optimizer", None) is optimizer for optimizer in optimizers):
            raise ValueError(
                f"{kind} belongs to an optimizer that configure_optimizers does not return. Return the optimizer, too."
            )
