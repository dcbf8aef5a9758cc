"""The table that maps the events of Lightning to moments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.adapter.event import Event
from cadenza.compat.lightning.moments import LightningMoments
from cadenza.hooks.moments import Callback
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

Hook = Callable[..., Any]

POSITION = Progress.position_reader()
"""Returns a position with a single call."""


def bare(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module)`` without further arguments."""

    def call(run: Run, *_: object) -> None:
        hook(adapter.trainer, adapter.module)

    return call


def ending(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module)`` unless an earlier callback failed: native hooks at the end reach all callbacks."""

    def call(run: Run, *_: object) -> None:
        trainer = adapter.trainer
        if not trainer._broken:
            hook(trainer, adapter.module)

    return call


def with_stage(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, stage)``."""

    def call(run: Run, stage: str) -> None:
        trainer = adapter.trainer
        hook(trainer, adapter.module, trainer.state.fn)

    return call


def epoch_start(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module)``, except when a run resumes inside an epoch."""

    def call(run: Run) -> None:
        if not run.progress.resumed_in_epoch:
            hook(adapter.trainer, adapter.module)

    return call


def batch_start(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, batch, batch_idx)``."""

    def call(run: Run, batch: Any) -> None:
        _, _, done, _ = POSITION(run.progress)
        hook(adapter.trainer, adapter.module, batch, done)

    return call


def batch_end(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, outputs, batch, batch_idx)``. Both ``on_batch_end`` and ``on_step_end`` call it.

    The last batch of a step waits for ``on_step_end``, which follows the update of the weights. The outputs match Lightning's:
    the loss is detached and divided by the number of batches per step.
    """

    def call(run: Run, *of_batch: Any) -> None:
        step, trainer = adapter.step, adapter.trainer
        owed, adapter.owed = adapter.owed, None
        if trainer._broken or adapter.scene.unwinding is not None:
            return
        _, steps, done, batches = POSITION(run.progress)
        window, size = step.window, step.window.size
        if of_batch:
            if window.seen >= size or done == batches:
                adapter.owed = steps, size
                return
        elif owed is None:
            return
        else:
            window, (_, size) = step.last_window, owed
        outputs = dict(step.outputs)
        if "loss" in outputs:  # the window has it without its graph
            loss = outputs["loss"].detach() if step.discarded else window.losses[-1]
            outputs["loss"] = loss / size if size > 1 else loss
        hook(trainer, adapter.module, outputs, step.batch, done - 1)

    return call


def before_backward(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, loss)``."""

    def call(run: Run, outputs: Mapping[str, Any]) -> None:
        size = adapter.step.window.size
        hook(adapter.trainer, adapter.module, outputs["loss"] if size == 1 else outputs["loss"] / size)

    return call


def each_optimizer(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, optimizer)`` for each optimizer of the step."""

    def call(run: Run) -> None:
        for optimizer in adapter.step.updating:
            hook(adapter.trainer, adapter.module, optimizer)

    return call


def with_error(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, exception)``."""

    def call(run: Run, error: BaseException) -> None:
        hook(adapter.trainer, adapter.module, error)

    return call


def eval_batch_start(stage: str) -> Callable[[Any, Hook], Callable[..., None]]:
    """Call ``hook(trainer, pl_module, batch, batch_idx, dataloader_idx)`` in evaluations of this stage."""

    def make(adapter: Any, hook: Hook) -> Callable[..., None]:
        def call(run: Run, evaluation: Evaluation, batch: Any) -> None:
            trainer = adapter.trainer
            if trainer._stage == stage:
                trainer._metrics.batch = batch
                hook(trainer, adapter.module, batch, *trainer._batch_of(evaluation, 0))

        return call

    return make


def eval_batch_end(stage: str) -> Callable[[Any, Hook], Callable[..., None]]:
    """Call ``hook(trainer, pl_module, outputs, batch, batch_idx, dataloader_idx)`` in evaluations of this stage."""

    def make(adapter: Any, hook: Hook) -> Callable[..., None]:
        def call(run: Run, evaluation: Evaluation, batch: Any, outputs: Any) -> None:
            trainer = adapter.trainer
            if trainer._stage == stage and not trainer._broken and adapter.scene.unwinding is None:
                own = trainer._outputs_of(outputs)
                trainer._metrics.batch = batch
                hook(trainer, adapter.module, own, batch, *trainer._batch_of(evaluation, 1))

        return call

    return make


def saving(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, checkpoint)``; the adapter keeps the entries that it adds."""

    def call(run: Run, checkpoint: object) -> None:
        adapter.collect(hook, checkpoint)

    return call


def loading(adapter: Any, hook: Hook) -> Callable[..., None]:
    """Call ``hook(trainer, pl_module, checkpoint)``, then ``load_state_dict``."""

    def call(run: Run, checkpoint: object) -> None:
        adapter.hand_back(hook, checkpoint)

    return call


_STAGES = "of Evaluate in a fit, and of Trainer.evaluate"
_GRADIENTS = "called after the update; Lightning calls it before the next backward pass"

EVENTS: Mapping[str, Event] = {
    "setup": Event(LightningMoments.on_stage_setup, with_stage),
    "on_load_checkpoint": Event(Callback.on_load, loading, "gets the entries of Lightning's own checkpoints that a run has"),
    "on_fit_start": Event(LightningMoments.on_fit_begin, bare),
    "on_sanity_check_start": Event(LightningMoments.on_sanity_check_start, bare, "no on_validation_* hook is called inside"),
    "on_sanity_check_end": Event(LightningMoments.on_sanity_check_end, ending),
    "on_train_start": Event(LightningMoments.on_train_start, bare),
    "on_train_epoch_start": Event(Callback.on_epoch_start, epoch_start),
    "on_train_batch_start": Event(Callback.on_batch_start, batch_start),
    "on_before_backward": Event(Callback.on_before_backward, before_backward),
    "on_after_backward": Event(Callback.on_after_backward, bare),
    "on_before_optimizer_step": Event(Callback.on_before_optimizer_step, each_optimizer),
    "on_before_zero_grad": Event(Callback.on_before_zero_grad, each_optimizer, _GRADIENTS),
    "on_train_batch_end": Event(Callback.on_batch_end, batch_end, "for the last batch of a step at on_step_end"),
    "on_validation_start": Event(LightningMoments.on_validation_start, bare, _STAGES),
    "on_validation_epoch_start": Event(LightningMoments.on_validation_epoch_start, bare),
    "on_validation_batch_start": Event(Callback.on_eval_batch_start, eval_batch_start("validate")),
    "on_validation_batch_end": Event(Callback.on_eval_batch_end, eval_batch_end("validate")),
    "on_validation_epoch_end": Event(LightningMoments.on_validation_epoch_end, ending),
    "on_validation_end": Event(LightningMoments.on_validation_end, ending),
    "on_train_epoch_end": Event(LightningMoments.on_train_epoch_end, ending),
    "on_save_checkpoint": Event(Callback.on_save, saving, "the entries that it adds are saved; others are not changed"),
    "on_train_end": Event(LightningMoments.on_train_end, ending),
    "on_fit_end": Event(LightningMoments.on_fit_finish, ending),
    "on_exception": Event(Callback.on_exception, with_error),
    "on_test_start": Event(LightningMoments.on_test_start, bare, 'of Trainer.evaluate(name="test")'),
    "on_test_epoch_start": Event(LightningMoments.on_test_epoch_start, bare),
    "on_test_batch_start": Event(Callback.on_eval_batch_start, eval_batch_start("test")),
    "on_test_batch_end": Event(Callback.on_eval_batch_end, eval_batch_end("test")),
    "on_test_epoch_end": Event(LightningMoments.on_test_epoch_end, ending),
    "on_test_end": Event(LightningMoments.on_test_end, ending),
    "on_predict_start": Event(LightningMoments.on_predict_start, bare, "of Trainer.predict"),
    "on_predict_epoch_start": Event(LightningMoments.on_predict_epoch_start, bare),
    "on_predict_batch_start": Event(Callback.on_eval_batch_start, eval_batch_start("predict")),
    "on_predict_batch_end": Event(Callback.on_eval_batch_end, eval_batch_end("predict")),
    "on_predict_epoch_end": Event(LightningMoments.on_predict_epoch_end, ending),
    "on_predict_end": Event(LightningMoments.on_predict_end, ending),
    "teardown": Event(LightningMoments.on_stage_teardown, with_stage),
}
"""The events by name, in the order of a run."""

REMOVED: Mapping[str, str] = {
    "on_init_start": "setup",
    "on_init_end": "setup",
    "on_before_accelerator_backend_setup": "setup",
    "on_configure_sharded_model": "setup",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_keyboard_interrupt": "on_exception",
}
"""Hooks removed in Lightning 2, with their replacements."""
