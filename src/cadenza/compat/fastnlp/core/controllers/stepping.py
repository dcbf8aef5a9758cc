"""The parts of a step, for a ``batch_step_fn``: the native ones, with fastNLP's division by ``accumulation_steps``."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.controllers.loops import Loop, TrainBatchLoop
from cadenza.compat.fastnlp.core.controllers.registry import AddedFunctions
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.compat.fastnlp.core.controllers.view import TrainerView
from cadenza.compat.fastnlp.core.utils.utils import Mapped, ModelFunction, apply_mapping, loss_in
from cadenza.engine import weight_update
from cadenza.engine.session import session_of
from cadenza.engine.step_state import AccumulationWindow
from cadenza.hooks.dispatch import hooks_of
from cadenza.optim.parameters import distinct_gradients
from cadenza.status.outputs import parts_of

if TYPE_CHECKING:
    from cadenza.run import Run

logger: logging.Logger = logging.getLogger("cadenza")


class SteppingTrainer(TrainerView):
    """The part of the trainer that a ``batch_step_fn`` or a user-defined loop calls during a training."""

    group: AccumulationWindow
    """The accumulation window of a ``batch_step_fn``."""
    carried: Carried
    """The values from which the next training continues."""
    batch_step_fn: Callable[[Any, Any], object] | None
    evaluate_every: int | Callable[[Any], bool]
    input_mapping: Mapped | None
    output_mapping: Mapped | None
    _function: ModelFunction
    _loop: Loop
    _training = False
    _step_waits = False
    """Whether `step` was called for an accumulation window that is not complete."""
    _checked_step = False
    _last_loss: torch.Tensor | None = None
    """The loss of the last `train_step`, for a step that does not call `backward`."""

    def running(self) -> Run:
        """Return the native run in progress.

        Raises:
            RuntimeError: No training is in progress.
        """
        if self.live is None or not self._training:
            raise RuntimeError("no training is in progress; expected a call between on_train_begin and on_train_end")
        return self.live

    @property
    def train_batch_loop(self) -> Loop:
        """The loop over the batches of an epoch. Replace it with an object that has a method ``run(trainer, dataloader)``.

        Such a loop calls the events, such as ``trainer.on_train_batch_begin(batch, indices)``, does the steps with
        ``trainer.train_step``, ``backward``, ``step`` and ``zero_grad``, raises ``trainer.batch_idx_in_epoch`` and
        ``trainer.global_forward_batches``, and calls ``trainer.step_evaluate()`` after a batch. If it does not call
        ``trainer.epoch_evaluate()``, the trainer does so after it.
        """
        return self._loop

    @train_batch_loop.setter
    def train_batch_loop(self, loop: Loop) -> None:
        if not callable(getattr(loop, "run", None)):
            raise TypeError(f"train_batch_loop must have a method run(trainer, dataloader); got {loop!r}")
        if self.batch_step_fn is not None:
            logger.warning("the trainer has a batch_step_fn: train_batch_loop must call it")
        self._loop = loop

    @property
    def runs_own_epochs(self) -> bool:
        """Whether a user-defined loop replaces the trainer's."""
        return type(self._loop).run is not TrainBatchLoop.run

    @property
    def runs_own_steps(self) -> bool:
        """Whether the step is user-defined."""
        plain = TrainBatchLoop.batch_step_fn
        return getattr(self._loop, "batch_step_fn", plain) is not plain

    @property
    def accumulation_steps(self) -> int:
        """The number of batches in an update. It can be set between trainings, and during a training with a user-defined step.

        Raises:
            RuntimeError: A training with the trainer's step is in progress.
        """
        return self._accumulation_steps

    @accumulation_steps.setter
    def accumulation_steps(self, steps: int) -> None:
        changes = steps != getattr(self, "_accumulation_steps", None)
        if changes and self._training and self.live is not None and session_of(self.live).step_fn is None:
            raise RuntimeError(
                "accumulation_steps cannot change during a training with the trainer's own step. Pass batch_step_fn= with "
                "trainer.train_step, backward, step and zero_grad: then it can."
            )
        if changes:
            self._accumulation_steps, self.group = steps, AccumulationWindow(steps)

    @property
    def overrides_steps(self) -> bool:
        """Whether a subclass overrides a part of the step, so that the native loop must call it."""
        return any(
            getattr(type(self), name) is not getattr(SteppingTrainer, name) for name in ("backward", "step", "zero_grad")
        )

    @property
    def evaluate_batch_step_fn(self) -> Callable[[Any, Any], object] | None:
        """The argument of the trainer."""
        step: Callable[[Any, Any], object] | None = self.evaluator_arguments["evaluate_batch_step_fn"]
        return step

    def check_batch_step_fn(self) -> None:
        """Warn once about overridden events that the user-defined step did not trigger."""
        if self._checked_step or not self.runs_own_steps:
            return
        self._checked_step = True
        manager = self.callback_manager
        waiting = [callback for callback in manager.class_callbacks if not isinstance(callback, AddedFunctions)]
        silent = [
            event
            for event in ("on_before_backward", "on_after_backward", *_UPDATE)
            if not manager.callback_counter[event] and (event not in _UPDATE or self.accumulation_steps == 1)
            if any(callback.hook_at(event) is not None for callback in waiting)
        ]
        if silent:
            logger.warning(
                "callbacks have hooks at %s, but batch_step_fn did not cause these events. Call trainer.backward(outputs), "
                "trainer.step() and trainer.zero_grad() in it.",
                ", ".join(silent),
            )

    def carrying(self) -> Carried:
        adapted = None if self.live is None else AdaptedRun.of(self.live)
        if adapted is None or not adapted.began:
            return self.carried
        window = adapted.window if adapted.session.step_fn is None else self.group
        return Carried.of(adapted.run, window, evaluated=adapted.epoch_evaluated, streams=adapted.rng_state)

    # -- evaluation ------------------------------------------------------------------------------------

    def step_evaluate(self) -> None:
        """Evaluate, if it is due after this many batches."""
        every = self.evaluate_every
        if self.evaluator is None:
            return
        if every(self) if callable(every) else every > 0 and self.global_forward_batches % every == 0:
            self.run_evaluate()

    def epoch_evaluate(self) -> None:
        """Evaluate, if it is due at the end of the current epoch."""
        every = self.evaluate_every
        adapted = AdaptedRun.of(self.running())
        adapted.epoch_evaluated = adapted.epoch_evaluated or adapted.own_loop
        if self.evaluator is not None and not callable(every) and every < 0 and (self.cur_epoch_idx + 1) % -every == 0:
            self.run_evaluate()

    @abstractmethod
    def run_evaluate(self) -> dict[str, Any]:
        """Evaluate now; return the results."""

    # -- the parts of a step ---------------------------------------------------------------------------

    def train_step(self, batch: Any) -> Any:
        """Return the outputs of the model for a batch, after ``output_mapping``."""
        outputs = apply_mapping(self.output_mapping, self._forward(batch))
        if self._training and isinstance(outputs, Mapping) and isinstance(loss := outputs.get("loss"), torch.Tensor):
            self._last_loss = loss.detach()
        return outputs

    def backward(self, outputs: Any) -> None:
        """Add the gradients of the loss in `outputs`, with the events around it."""
        run = self.running()
        loss_in(outputs)  # raises if there is none
        self._note_outputs(outputs)
        run.outputs.update(parts_of(outputs))
        if self.global_forward_batches % self.accumulation_steps == 0:
            self.group.clear()
        self.group.seen += 1
        session = session_of(run)
        with session.precision.disabled():
            weight_update.backward(session, run.outputs, self.group)

    def step(self) -> None:
        """Update the weights, with the events around it, if ``accumulation_steps`` batches were added."""
        run = self.running()
        self._step_waits = not self._window_is_complete()
        if self._step_waits:
            return
        session = session_of(run)
        with session.precision.disabled():
            weight_update.update_weights(session, run.optimizers)

    def resume_window(self, losses: list[torch.Tensor]) -> None:
        """Continue an accumulation window of a checkpoint, after the batches with these losses."""
        self.group.resume(losses)
        self._step_waits = True

    def finish_window(self) -> None:
        """At the end of the training, update the weights from an accumulation window that is not complete.

        It is normalised by its length. fastNLP drops its gradients.
        """
        run = self.running()
        if not self._step_waits or not self.group.losses:
            return
        self._step_waits = False
        gradients = distinct_gradients(run.optimizers)
        if gradients and not self.group.complete:
            torch._foreach_mul_(gradients, self.group.correction())
        self.group.clear()
        weight_update.update(session_of(run), run.optimizers)

    def zero_grad(self) -> None:
        """Drop the gradients, with the events around it, if ``accumulation_steps`` batches were added."""
        run = self.running()
        if self._window_is_complete():
            hooks_of(run).on_before_zero_grad(run)
            weight_update.drop_gradients(run.optimizers)
            hooks_of(run).on_after_zero_grad(run)

    def get_no_sync_context(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are added in this process only."""
        return self.driver.native.no_sync(self.running().model)

    def _step(self, run: Run, batch: Any) -> Any:
        """Run the loop's ``batch_step_fn``; return the outputs that it set."""
        self._last_loss = None
        self._loop.batch_step_fn(self, batch)
        loss = dict.get(run.outputs, "loss", self._last_loss)
        return {**run.outputs, "loss": torch.tensor(torch.nan) if loss is None else loss.detach()}

    def _note_outputs(self, outputs: Any) -> None:
        """Pass outputs that are not a dict to callbacks unchanged."""
        AdaptedRun.of(self.running()).outputs = None if isinstance(outputs, Mapping) else outputs

    def _forward(self, batch: Any) -> Any:
        """Return the result of the model's method for a batch.

        On several processes it runs inside the driver's wrapper, which reduces only gradients that are computed in it.
        """
        model, function = self.model, self._function
        wrapper = None if self.live is None else session_of(self.live).model
        if wrapper is None or wrapper is model:
            return function(batch)
        own = vars(model).get("forward")

        def once(batch: Any) -> Any:
            restore()  # the method may call the model
            return function(batch)

        def restore() -> None:
            vars(model).pop("forward", None)
            if own is not None:
                vars(model)["forward"] = own

        vars(model)["forward"] = once
        try:
            return wrapper(batch)
        finally:
            restore()

    def _window_is_complete(self) -> bool:
        """Return whether the current batch is the last of its accumulation window, which may begin in an earlier epoch."""
        return bool((self.global_forward_batches + 1) % self.accumulation_steps == 0)


_UPDATE = ("on_before_optimizers_step", "on_after_optimizers_step", "on_before_zero_grad", "on_after_zero_grad")
