"""The training epoch of the adapter's trainer: its hooks and events around the steps of the native loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cadenza.compat.accelerated.adapted import AdaptedRun
from cadenza.compat.accelerated.events import StopTrainingError
from cadenza.compat.accelerated.trainer_api import TrainerApi
from cadenza.engine import boundary
from cadenza.engine.loop import Training, train_epoch
from cadenza.engine.session import Session
from cadenza.hooks.dispatch import unwinding
from cadenza.loading import num_batches

INSTEAD = (
    "The native loop does the steps, so that a run can be resumed. Call super()._run_train_epoch(train_dl) once. To change a "
    "step, override calculate_train_batch_loss, backward_step, optimizer_step or optimizer_zero_grad; for a loop of your own, "
    "pass a step_fn to cadenza.Trainer."
)


def fit(trainer: TrainerApi, run_epoch: Callable[[Any], object], training: Training) -> None:
    """Train, with ``_run_train_epoch`` of a trainer, which is `run_epoch`, around the steps of each epoch.

    Raises:
        RuntimeError: An override of the method has not called the method of the base class.
    """
    adapted = AdaptedRun.of(training.session.run)
    try:
        while training.next_epoch():
            adapted.steps, adapted.stepped = training, False
            _use_loader(trainer, training.session)
            adapted.call_hook(run_epoch, trainer._train_dataloader)
            if not (adapted.stepped or adapted.stopped):
                raise RuntimeError(f"{type(trainer).__name__}._run_train_epoch did not do the steps of the epoch. {INSTEAD}")
    finally:
        adapted.steps = None


def run_train_epoch(
    trainer: TrainerApi, train_dl: Iterable[Any], start: Callable[[], object], end: Callable[[], object]
) -> bool:
    """Run an epoch with the trainer's hooks `start` and `end`; see `Overridable._run_train_epoch`."""
    run = trainer.native_run
    if run is None or run.outcome is not None or not run.optimizers:
        raise RuntimeError("_run_train_epoch needs a training in progress; got a trainer without one. Call train")
    if train_dl is not trainer._train_dataloader:
        raise ValueError(
            f"_run_train_epoch needs the trainer's _train_dataloader; got {train_dl!r}. Set _train_dataloader before the "
            "epoch, or return the loader from create_train_dataloader."
        )
    adapted = AdaptedRun.of(run)
    if adapted.stepped:
        raise RuntimeError(f"_run_train_epoch was called twice in an epoch. {INSTEAD}")
    session = adapted.session
    adapted.call_hook(start)
    adapted.start_epoch()
    if not adapted.stopped and adapted.steps is not None:
        adapted.stepped = True
        _use_loader(trainer, session)  # a hook may have replaced it
        train_epoch(adapted.steps)
        session.cursor.at_boundary = False  # states saved after this include the evaluation of the epoch
    if is_live(adapted):
        adapted.call_hook(end)
    adapted.agree()
    if is_live(adapted):
        adapted.close_steps()
    if adapted.stopped:
        raise StopTrainingError(adapted.reason)  # the rest of an override does not run
    limit = run.progress.max_steps
    return limit is not None and run.progress.step >= limit


def is_live(adapted: AdaptedRun) -> bool:
    """Return whether the training was not stopped and no error is propagating."""
    return not adapted.stopped and not adapted.broken and unwinding(adapted.run) is None


def _use_loader(trainer: TrainerApi, session: Session) -> None:
    """Read the trainer's ``_train_dataloader``, if a hook or a callback has replaced it since the last epoch."""
    loader = trainer._train_dataloader
    adapted = AdaptedRun.of(session.run)
    if loader is None or loader is adapted.loader or session.progress.batch_in_epoch:
        return
    adapted.loader = session.loader = loader
    boundary.open_loader(session)
    batches = num_batches(loader, session.driver.data_shard())
    if batches is not None:
        session.progress.correct(batches)
