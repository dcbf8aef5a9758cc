"""Handling of Lightning hooks that change the run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from cadenza.compat.adapter.foreign import foreign_callbacks
from cadenza.compat.lightning.library import is_lightning
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of, unwinding
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import Callback

if TYPE_CHECKING:
    from cadenza.compat.lightning.trainer_view import TrainerView
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

CHANGING = ("setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_validation_epoch_end")
"""Hooks in which callbacks freeze parameters, add parameter groups or prune."""


class Adapter(Protocol):
    """The part of a Lightning adapter that this module reads."""

    callback: Any
    trainer: TrainerView
    module: Any

    def overridden(self) -> list[str]: ...


def around_hooks(adapter: Adapter) -> list[Listener]:
    """Return the listeners around the hooks of a callback that may change the run. They run after its hooks."""
    callback, overridden = adapter.callback, adapter.overridden()
    listeners = list[Listener]()
    if any(name in overridden for name in CHANGING):
        listeners += [
            Listener(LightningMoments.on_stage_setup, partial(_after_setup, adapter)),
            Listener(LightningMoments.on_fit_begin, partial(_after_start, adapter)),
            Listener(Callback.on_epoch_start, partial(_after_start, adapter)),
        ]
    if is_lightning(callback, "StochasticWeightAveraging"):
        listeners.append(Listener(Callback.on_before_backward, partial(_skip_backward, adapter)))
    if is_lightning(callback, "WeightAveraging"):
        listeners.append(Listener(Callback.on_eval_end, partial(_swap_back, adapter)))
    if is_lightning(callback, "BasePredictionWriter") and callback.interval.on_epoch:
        listeners.append(Listener(Callback.on_eval_batch_end, partial(_record_prediction, adapter)))
    return inner(listeners)


def _record_prediction(adapter: Adapter, run: Run, evaluation: Evaluation, batch: object, outputs: Mapping[str, Any]) -> None:
    trainer = adapter.trainer
    if trainer._stage == "predict" and unwinding(run) is None:
        done = sum(map(len, trainer.predict_loop._predictions))
        if done < evaluation.batch:  # another callback may have recorded it
            trainer.predict_loop._record([*trainer._batch_of(evaluation, 1), 0][1], trainer._outputs_of(outputs))


def _after_setup(adapter: Adapter, run: Run, stage: str) -> None:
    changes = adapter.trainer._changes
    if stage == "fit":
        state = session_of(run).restored.callback_states.get(hooks_of(run).name_of(adapter), {})
        changes.expect(state.get("run", {}))
        changes.renew()


def _after_start(adapter: Adapter, run: Run) -> None:
    trainer = adapter.trainer
    if run.progress.resumed_in_epoch and is_lightning(adapter.callback, "StochasticWeightAveraging") and trainer._trained:
        _make_schedule_again(adapter)
    if trainer._schedulers is not None:
        trainer._schedulers.drop_replaced()
    trainer._changes.renew()


def _make_schedule_again(adapter: Adapter) -> None:
    """Let an average that resumes inside an epoch recreate its schedule. Its rates are already restored."""
    groups = [group for optimizer in adapter.trainer.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    adapter.callback.on_train_epoch_start(adapter.trainer, adapter.module)
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate


def _skip_backward(adapter: Adapter, run: Run, outputs: object) -> None:
    if adapter.trainer.fit_loop._skip_backward:
        session_of(run).step.skip()


def _swap_back(adapter: Adapter, run: Run, evaluation: object) -> None:
    """Restore the model's weights after an evaluation was ended by an error or a signal."""
    if adapter.trainer._stage == "validate" and unwinding(run) is not None:
        adapter.callback.on_validation_epoch_end(adapter.trainer, adapter.module)


def saved_changes(adapter: Adapter) -> dict[str, Any]:
    """Return the state of `Changes` if this adapter saves it, which is the first one that may change the run."""
    trainer = getattr(adapter, "trainer", None)
    if trainer is None or not trainer._fits:
        return {}
    able = (callback for callback in foreign_callbacks(trainer._run, "lightning") if {*callback.overridden()} & {*CHANGING})
    first: object = next(able, None)
    return trainer._changes.state() if first is adapter else {}
