"""Lightning checkpoint files of a native run, written by ``trainer.save_checkpoint``."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.compat.adapter.foreign import foreign_callbacks
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.drivers.sharding import is_sharded, whole
from cadenza.engine.session import session_of
from cadenza.files.disk import replacing
from cadenza.hooks.dispatch import hooks_of, unwinding
from cadenza.hooks.moments import Callback
from cadenza.status.decisions import decide

if TYPE_CHECKING:
    from cadenza.run import Run

_INSIDE_BATCH = (Callback.on_batch_end, Callback.on_step_end)
"""The native hooks of ``on_train_batch_end``, in which Lightning has not counted the batch as completed."""

_END_OF_EPOCH = (LightningMoments.on_train_epoch_end, LightningMoments.on_train_epoch_end_monitoring)
"""The native hooks of ``on_train_epoch_end``."""


def save_checkpoint(run: Run, trainer: Any, path: str | PathLike[str], *, weights_only: bool = False) -> None:
    """Write a checkpoint file that Lightning reads. Every rank must call this; the main process writes.

    The write is atomic. A run resumes exactly from the checkpoints of `cadenza.callbacks.Checkpoint` only.

    Args:
        run: The run.
        trainer: The view that callbacks receive.
        path: A local path, or a URL for fsspec.
        weights_only: Leave out callbacks, optimizers and schedulers.
    """
    if run.driver.shards and unwinding(run) is not None:
        run.warn(f"{fspath(path)} is not written: after an error, ranks exchange nothing, and each has a shard of the weights")
        return
    checkpoint, target = lightning_checkpoint(run, trainer, weights_only=weights_only), fspath(path)
    if run.is_main:
        _write(checkpoint, target)
    decide(run, "file written", f"{target}, in the format of Lightning", data={"path": target, "step": run.progress.step})
    if unwinding(run) is None:
        run.driver.barrier()  # so that each rank finds the file


def lightning_checkpoint(run: Run, trainer: Any, *, weights_only: bool = False) -> dict[str, Any]:
    """Return the content that Lightning saves at this point of a run. Every rank must call this."""
    module, checkpoint = trainer.lightning_module, content_of(run, trainer, weights_only=weights_only, gather=_on_one_rank)
    if not weights_only:
        for callback in foreign_callbacks(run, "lightning"):
            callback.callback.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    return checkpoint


def content_of(
    run: Run, trainer: Any, *, weights_only: bool = False, gather: Callable[[Any], Any] = lambda state: state
) -> dict[str, Any]:
    """Return the entries that a checkpoint of Lightning has when ``on_save_checkpoint`` is called.

    Args:
        run: The run.
        trainer: The view that callbacks receive.
        weights_only: Leave out callbacks, optimizers and schedulers.
        gather: Applied to the weights and to the state of each optimizer.
    """
    checkpoint = {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "pytorch-lightning_version": lightning_version(),
        "state_dict": gather(run.model.state_dict()),
        "loops": loops_of(run, trainer),
    }
    if not weights_only:
        callbacks = [callback.callback for callback in foreign_callbacks(run, "lightning")]
        states = {callback.state_key: callback.state_dict() for callback in callbacks}
        checkpoint["callbacks"] = {key: state for key, state in states.items() if state}
        checkpoint["optimizer_states"] = [gather(optimizer.state_dict()) for optimizer in run.optimizers]
        checkpoint["lr_schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        if scaler := session_of(run).precision.state_dict():
            checkpoint["MixedPrecision"] = scaler
    _add_hyper_parameters(checkpoint, trainer.lightning_module)
    return checkpoint


def loops_of(run: Run, trainer: Any) -> dict[str, Any]:
    """Return the counters of Lightning's loops at this point of the training."""
    progress, epoch, step = run.progress, trainer.current_epoch, trainer.global_step
    moment = None if (listener := hooks_of(run).here().listener) is None else listener.moment
    ended = progress.epoch > epoch  # the epoch of a native run is counted before its last hooks
    processed = moment in _END_OF_EPOCH or (ended and trainer.training)
    in_epoch = (progress.batches_per_whole_epoch or 0) if ended else progress.batch_in_epoch
    inside = int(moment in _INSIDE_BATCH and not session_of(run).cursor.at_boundary)
    accumulate = session_of(run).step.window.size
    steps = -(-in_epoch // accumulate) if ended else in_epoch // accumulate
    last = ended or in_epoch == progress.batches_per_whole_epoch
    automatic = bool(getattr(trainer.lightning_module, "automatic_optimization", True))
    scheduled = sum(max(0, getattr(config.scheduler, "_step_count", 1) - 1) for config in trainer.lr_scheduler_configs)
    own, other = {"total": _counts(step), "current": _counts(steps)}, {"total": _counts(0), "current": _counts(0)}
    zeroed = {"total": _counts(step, 3), "current": _counts(steps, 3)}
    none = {"total": _counts(0, 4), "current": _counts(0, 4)}
    fit = {
        "state_dict": {},
        "epoch_loop.state_dict": {"_batches_that_stepped": max(0, step - inside)},
        "epoch_loop.batch_progress": {
            "total": _batches(progress.batch, inside),
            "current": _batches(in_epoch, inside),
            "is_last_batch": last,
        },
        "epoch_loop.scheduler_progress": {"total": _counts(scheduled), "current": _counts(scheduled)},
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {"step": own if automatic else other, "zero_grad": zeroed}
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": other if automatic else own,
        "epoch_loop.val_loop.state_dict": {},
        "epoch_loop.val_loop.batch_progress": {**none, "is_last_batch": False},
        "epoch_progress": {name: _epochs(epoch, processed=epoch + processed) for name in ("total", "current")},
    }
    alone = {"state_dict": {}, "batch_progress": {**none, "is_last_batch": False}}
    predicts = {"state_dict": {}, "batch_progress": none}
    return {"fit_loop": fit, "validate_loop": alone, "test_loop": alone, "predict_loop": predicts}


_NAMES = ("ready", "completed", "started", "processed")


def _counts(number: int, names: int = 2) -> dict[str, int]:
    return dict.fromkeys(_NAMES[:names], number)


def _batches(done: int, inside: int) -> dict[str, int]:
    return {**_counts(done, 4), "completed": done - inside}


def _epochs(epoch: int, *, processed: int) -> dict[str, int]:
    return {"ready": epoch + 1, "completed": epoch, "started": epoch + 1, "processed": processed}


def _add_hyper_parameters(checkpoint: dict[str, Any], module: Any) -> None:
    hparams = getattr(module, "hparams", None)
    if hparams:
        if hasattr(module, "_hparams_name"):
            checkpoint[module.CHECKPOINT_HYPER_PARAMS_NAME] = module._hparams_name
        checkpoint[module.CHECKPOINT_HYPER_PARAMS_KEY] = dict(hparams)


def _on_one_rank(state: Any) -> Any:
    """Return a state with each sharded tensor whole. Every rank must call this if there are any."""
    if not any(map(is_sharded, pytree.tree_leaves(state))):
        return state
    return pytree.tree_map_only(Tensor, lambda tensor: whole(tensor) if is_sharded(tensor) else tensor, dict(state))


def lightning_version() -> str:
    """Return the version of the installed package of Lightning."""
    packages = (sys.modules.get("lightning.pytorch"), sys.modules.get("pytorch_lightning"))
    return str(next((package.__version__ for package in packages if package is not None), "2.0.0"))


def _write(checkpoint: Mapping[str, Any], target: str) -> None:
    if "://" in target:
        import fsspec  # Lightning requires it

        held = io.BytesIO()
        torch.save(checkpoint, held)
        with fsspec.open(target, "wb") as file:
            file.write(held.getvalue())
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)
