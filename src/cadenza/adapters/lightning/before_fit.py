"""What a native trainer takes from callbacks of Lightning before a run: the accumulation, and frozen parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from cadenza.adapters.foreign import ForeignCallback
from cadenza.adapters.lightning.library import is_lightning
from cadenza.engine.arguments import Accumulate

_NAME = "GradientAccumulationScheduler"


def is_scheduler(callback: Any) -> bool:
    """Return whether a callback only changes the accumulation by a mapping of epochs, so that its hooks need no call."""
    if not is_lightning(callback, _NAME):
        return False
    base = next(one for one in type(callback).__mro__ if one.__name__ == _NAME)
    own = ("get_accumulate_grad_batches", "on_train_epoch_start", "on_train_start")
    return all(getattr(type(callback), name) is getattr(base, name) for name in own)


def scheduled(callbacks: Iterable[object], accumulate: Any) -> Accumulate:
    """Return the argument ``accumulate`` of a native trainer with this list of callbacks.

    Raises:
        ValueError: `accumulate` is given as well, or the list has two such callbacks.
    """
    found = [one for one in callbacks if isinstance(one, ForeignCallback) and is_scheduler(one.callback)]
    if not found:
        return accumulate  # type: ignore[no-any-return]  # checked by the trainer
    points = {int(epoch): int(batches) for epoch, batches in sorted(found[0].callback.scheduling.items())}
    mapping: dict[int | str, int] = {(f"{epoch} epochs" if epoch else 0): batches for epoch, batches in points.items()}
    if len(found) > 1 or accumulate != 1:
        other = f"Trainer(accumulate={accumulate})" if accumulate != 1 else f"another {_NAME}"
        raise ValueError(
            f"{_NAME} sets the batches in a step, and so does {other}: expected one of them. Keep "
            f"Trainer(accumulate={mapping}), which means the same as the callback."
        )
    return mapping


def freeze_early(callbacks: Iterable[object], model: object) -> None:
    """Freeze what subclasses of ``BaseFinetuning`` freeze, before the optimizers are made, as Lightning does.

    Their ``setup`` comes later here. Its call of ``freeze_before_training`` has no effect.
    """
    for one in callbacks:
        if isinstance(one, ForeignCallback) and is_lightning(one.callback, "BaseFinetuning"):
            vars(one.callback).pop(_FREEZE, None)
            one.callback.freeze_before_training(model)
            vars(one.callback)[_FREEZE] = partial(_frozen_already, one.callback)


_FREEZE = "freeze_before_training"


def _frozen_already(callback: Any, model: object) -> None:
    del vars(callback)[_FREEZE]
