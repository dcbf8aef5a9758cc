"""The arguments of a native trainer for a LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.callbacks.limit import Limit
from cadenza.compat.adapter.foreign import listed, never_called
from cadenza.compat.lightning import events
from cadenza.compat.lightning.module import transfer
from cadenza.compat.lightning.module.advice import check_arguments
from cadenza.compat.lightning.module.attached import Attached
from cadenza.compat.lightning.module.before_run import TrainerBeforeRun
from cadenza.compat.lightning.module.data import ModuleData, ModuleLoaders, prepare
from cadenza.compat.lightning.module.evaluation import EvaluationHooks, evaluating
from cadenza.compat.lightning.module.hooks import ModuleHooks, ModuleStart
from cadenza.compat.lightning.module.logging import LogEpoch, LogStart, LogStep, ModuleLog
from cadenza.compat.lightning.module.manual import ManualStep
from cadenza.compat.lightning.module.optimizers import ConfiguredOptimizers
from cadenza.compat.lightning.module.schedules import ModuleSchedules, PlateauSchedules
from cadenza.compat.lightning.module.training import TrainingStep
from cadenza.drivers import driver_of
from cadenza.errors import AdapterError, CallbackError
from cadenza.optim.rates import SetsRates


class HasFacts(Protocol):
    """The part of a trainer that keeps data about its module."""

    _facts: dict[str, Any]


R = TypeVar("R", bound=HasFacts)


def assembled(make: Callable[..., R], module: Any, data: Any, given: Mapping[str, Any]) -> R:
    """Return a trainer of `module`, after calling the hooks that build the module and its data.

    These are ``prepare_data``, ``setup("fit")`` and ``configure_model``, in the order of Lightning. Every rank must call this.

    Args:
        make: The class of the trainer.
        module: A LightningModule.
        data: A LightningDataModule, a training loader, or None for the loaders of the module.
        given: The other arguments of the trainer.
    """
    given = dict(given)
    check_arguments(given)
    every, sanity_batches = given.pop("evaluate_every", "1 epoch"), given.pop("sanity_batches", 0)
    driver = driver_of(given.get("driver", "auto"), given.get("device"))
    attached = Attached(module, driver, given)
    _check(attached)
    attached.log = ModuleLog(attached)
    attached.loaders = ModuleLoaders(attached, data)
    attached.attach(TrainerBeforeRun(attached))
    callbacks = _clipping(attached, _with_own(given.get("callbacks", ()), attached.call("configure_callbacks")))
    limits = [callback.train for callback in callbacks if isinstance(callback, Limit) and callback.train]
    attached.limit = min(limits, default=None)
    attached.rate_setters = [callback for callback in callbacks if isinstance(callback, SetsRates)]
    prepare(attached)
    attached.configure_model()
    transfer.install(attached)
    attached.doubts = [*_removed_hooks(attached), *([] if every is None else _half_of_an_evaluation(attached))]
    trainer = make(**given | _arguments(attached, callbacks, evaluating(attached, every, sanity_batches)))
    trainer._facts |= _hyperparameters(attached)
    return trainer


def _arguments(attached: Attached, callbacks: Iterable[Any], evaluations: Iterable[Any]) -> dict[str, Any]:
    step, schedules = TrainingStep(attached), ModuleSchedules(attached)
    work: dict[str, Any] = {"compute_loss": step} if attached.automatic else {"step_fn": ManualStep(attached, step)}
    return {
        **work,
        "model": attached.module,
        "optimizer": ConfiguredOptimizers(attached),
        "loader": attached.loaders.train,
        "callbacks": [
            *(ModuleStart(attached), LogStart(attached), schedules, *evaluations, *callbacks),
            *(ModuleHooks(attached), EvaluationHooks(attached), ModuleData(attached), LogStep(attached), LogEpoch(attached)),
            PlateauSchedules(schedules),
        ],
        "driver": attached.driver,
        "device": None,
    }


def _with_own(callbacks: Iterable[Any], own: Any) -> list[Any]:
    """Return the callbacks of the trainer and of ``configure_callbacks``, which replace others of the same class."""
    given = listed(callbacks)
    if not own:
        return given
    added = [*own] if isinstance(own, Sequence) else [own]
    return [callback for callback in given if not any(issubclass(type(new), type(callback)) for new in added)] + added


def _clipping(attached: Attached, callbacks: list[Any]) -> list[Any]:
    """Return the callbacks without `ClipGradients` if the module overrides clipping.

    It then receives the bound, as in Lightning.

    Raises:
        CallbackError: `ClipGradients` has more arguments than a bound.
    """
    found = [callback for callback in callbacks if isinstance(callback, ClipGradients)]
    if not (found and attached.automatic and attached.overrides("configure_gradient_clipping")):
        return callbacks
    clip = found[0]
    if len(found) > 1 or clip.parameters is not None or clip.norm_type != 2.0 or clip.log is not None:
        raise CallbackError(
            f"{type(attached.module).__name__}.configure_gradient_clipping decides about clipping, so that ClipGradients in "
            "callbacks can only give it max_norm or max_value. Leave its other arguments out, or remove the method."
        )
    attached.clip = (clip.max_value, "value") if clip.max_norm is None else (clip.max_norm, "norm")
    return [other for other in callbacks if other is not clip]


REMOVED: Mapping[str, str] = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}
"""Methods of Lightning 1 that are never called, with their replacements."""


def _check(attached: Attached) -> None:
    """Raise an error for methods that are not called, and for manual optimization of a sharded model.

    The weights of a sharded model are complete only during a forward pass.
    """
    for name, instead in REMOVED.items():
        if callable(getattr(attached.module, name, None)):
            raise AdapterError(
                f"{type(attached.module).__name__} has {name}, which Lightning 2 removed, and nothing calls it. Write "
                f"{instead}(self), and collect outputs in an attribute of the module."
            )
    if not attached.automatic and attached.driver.shards:
        raise AdapterError(
            f"{type(attached.module).__name__} has manual optimization, which works with one process and with DDP; got "
            f"driver={attached.driver!r}. Use driver='ddp', or automatic optimization."
        )


def _removed_hooks(attached: Attached) -> list[str]:
    """Return a warning for each method that was a hook in Lightning 1."""
    kind = type(attached.module)
    named = [name for name in events.REMOVED if callable(getattr(kind, name, None))]
    return [never_called(kind.__name__, name, "lightning", (), events.REMOVED) for name in named]


def _half_of_an_evaluation(attached: Attached) -> list[str]:
    """Return a warning if a fit has no validation because its step or its loader is missing."""
    name, has_step = type(attached.module).__name__, attached.overrides("validation_step")
    if has_step and attached.loaders.val is None:
        return [f"{name} has a validation_step, but there is no validation loader: nothing is validated"]
    if attached.loaders.val is not None and not has_step:
        return [f"there is a validation loader, but {name} has no validation_step: nothing is validated"]
    return []


def _hyperparameters(attached: Attached) -> dict[str, Any]:
    """Return the values stored by ``save_hyperparameters`` as plain data."""
    kept: dict[str, Any] = {}
    for source in (attached.loaders.datamodule, attached.module):
        kept |= getattr(source, "hparams", {})
    return {"hparams": {name: _plain(value) for name, value in kept.items()}} if kept else {}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)
