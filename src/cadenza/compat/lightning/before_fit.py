"""Effects of Lightning callbacks before a native run: accumulation and frozen parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

from cadenza.compat.lightning.library import is_lightning
from cadenza.engine.arguments import Accumulate

_NAME = "GradientAccumulationScheduler"


def is_scheduler(callback: Any) -> bool:
    """Return whether a callback only sets the accumulation per epoch, so that its hooks need not be called."""
    if not is_lightning(callback, _NAME):
        return False
    base = next(base for base in type(callback).__mro__ if base.__name__ == _NAME)
    own = ("get_accumulate_grad_batches", "on_train_epoch_start", "on_train_start")
    return all(getattr(type(callback), name) is getattr(base, name) for name in own)


class _OfScheduler(dict[int | str, int]):
    """The accumulation set by a callback."""


def scheduled(callback: Any, accumulate: Any) -> Accumulate:
    """Return the argument ``accumulate`` of a native trainer with this callback.

    Raises:
        ValueError: `accumulate` is given as well, or another callback has set it.
    """
    points = {int(epoch): int(batches) for epoch, batches in sorted(callback.scheduling.items())}
    mapping = _OfScheduler({(f"{epoch} epochs" if epoch else 0): batches for epoch, batches in points.items()})
    if accumulate != 1:
        other = f"another {_NAME}" if isinstance(accumulate, _OfScheduler) else f"Trainer(accumulate={accumulate})"
        raise ValueError(
            f"{_NAME} sets the batches in a step, and so does {other}: expected one of them. Keep "
            f"Trainer(accumulate={mapping}), which means the same as the callback."
        )
    return mapping


def freeze_early(callback: Any, model: object) -> None:
    """Call ``freeze_before_training`` of ``BaseFinetuning`` subclasses before the optimizers are created, as Lightning does.

    ``setup`` runs later here, and its call of ``freeze_before_training`` has no effect.
    """
    if is_lightning(callback, "BaseFinetuning"):
        vars(callback).pop(_FREEZE, None)
        callback.freeze_before_training(model)
        vars(callback)[_FREEZE] = partial(_frozen_already, callback)


_FREEZE = "freeze_before_training"


def _frozen_already(callback: Any, model: object) -> None:
    del vars(callback)[_FREEZE]
