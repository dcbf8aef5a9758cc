"""Native callbacks placed before and after those of a trainer, which call its hooks and evaluate after each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.compat.accelerated.adapted import AdaptedRun
from cadenza.compat.accelerated.events import EVENTS, AcceleratedCallback, EpochStart, EvalEpoch, EvaluationStopped
from cadenza.compat.accelerated.overridable import Overridable, overrides
from cadenza.compat.accelerated.train_epoch import is_live
from cadenza.compat.adapter.view import Weak
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import unwinding
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.optim.parameters import parameters_of
from cadenza.optim.precision import BackwardPass, Precision, Scaled
from cadenza.run import Run

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation


class FirstCallback(Callback):
    """Calls the hooks of the trainer, each before the event of the same name."""

    trainer: Weak[Overridable] = Weak()  # it refers to the run, which has this callback
    logs_training = True

    def __init__(self, trainer: Overridable) -> None:
        self.name: str = f"{type(trainer).__name__}'s hooks"
        self.trainer = trainer
        # Shuffling depends on the seed of the user; on several processes, on the seed of the main process.
        self.data_seed: int = trainer._accelerator.driver.broadcast(int(torch.randint(2**62, ())))
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._modes: tuple[int, list[tuple[nn.Module, bool]]] = (-1, [])
        """The step of the last evaluation, and the mode of each module at its end."""

    def on_setup(self, run: Run) -> None:
        trainer, adapted = self.trainer, self._begin(run)
        session = adapted.session
        run.model.train()  # `train_epoch_start` does it again, and is called later
        session.advises = False
        trainer.model, trainer._accelerator.precision = session.model, session.precision
        adapted.own_passes = overrides(trainer, Overridable._perform_forward_and_backward_passes)
        session.data_seed = self.data_seed
        session.precision = Hooked(adapted, session.precision)
        if trainer._eval_dataloader is not None:
            run.evaluations["eval"] = EvalEpoch(trainer._eval_dataloader, name="eval", compute=self.compute_eval)

    def on_fit_start(self, run: Run) -> None:
        run.at_end(partial(self._leave_modes, run))
        _outside(AdaptedRun.of(run), self.trainer.training_run_start)

    def on_batch_start(self, run: Run, batch: Any) -> None:
        adapted = AdaptedRun.of(run)
        if adapted.stopped and not adapted.session.step.skipping:
            run.skip_batch("the training was stopped")

    def compute_train(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the result of the trainer's hook for a batch. This is ``compute_loss`` of the native run."""
        trainer, adapted = self.trainer, AdaptedRun.of(self.run)
        if adapted.own_passes:
            with adapted.run.driver.no_sync(adapted.session.model):  # else others wait for the gradients of one that stops
                adapted.call_hook(trainer._perform_forward_and_backward_passes, batch, self.run.progress.batch_in_epoch)
            return {"loss": trainer._loss_tracker.latest.requires_grad_()}
        output = self._computed(trainer.calculate_train_batch_loss, batch)
        trainer._items_factor = 1 if output is None else trainer._loss_factor(output)
        return output or {"loss": torch.zeros((), requires_grad=True)}

    def compute_eval(self, model: nn.Module, batch: Any) -> Mapping[str, Any]:
        """Return the result of the trainer's hook for an evaluation batch; leave the evaluation if the training was stopped."""
        trainer = self.trainer
        prepared = trainer.model
        # Not the wrapper of the driver: it broadcasts buffers, and another process may have stopped.
        trainer.model = inner = trainer._accelerator.unwrap_model(prepared)
        try:
            output = self._computed(trainer.calculate_eval_batch_loss, batch)
        finally:
            if trainer.model is inner:
                trainer.model = prepared
        if output is None and trainer._accelerator.num_processes > 1:
            return {"loss": torch.zeros(())}  # the others have not stopped yet and wait at the end of the evaluation
        if output is None:
            raise EvaluationStopped
        AdaptedRun.of(self.run).output = output
        loss = torch.as_tensor(output["loss"])
        return {**output, "loss": loss.mean()} if loss.ndim else output

    def _computed(self, hook: Callable[[Any], Mapping[str, Any]], batch: Any) -> Mapping[str, Any] | None:
        adapted = AdaptedRun.of(self.run)
        output: Mapping[str, Any] | None = adapted.call_hook(hook, batch)
        if not isinstance(output, Mapping) and not (output is None and adapted.stopped):
            raise TypeError(
                f"{hook.__name__} must return a dict with 'loss' and 'batch_size'; got "
                f"{'None' if output is None else type(output).__name__}"
            )
        if output is not None:
            missing = [name for name in ("loss", "batch_size") if name not in output]
            if missing:
                raise KeyError(
                    f"{hook.__name__} must return a dict with 'loss' and 'batch_size'; {missing} is missing in {list(output)}"
                )
            self.trainer._update_loss_tracker(output["loss"], output["batch_size"])
        return output

    def listeners(self) -> list[Listener]:
        own = overrides(self.trainer, Overridable._perform_forward_and_backward_passes)
        reducing = [Listener(Callback.on_batch_end, _leave_unreduced)] if own else []
        return [*super().listeners(), *reducing]

    def on_before_optimizer_step(self, run: Run) -> None:
        config = self.trainer.run_config
        if config is not None and config.gradient_clip_value is not None:
            AdaptedRun.of(run).call_hook(self.trainer._clip_gradients)

    def on_after_optimizer_step(self, run: Run) -> None:
        adapted = AdaptedRun.of(run)
        if adapted.session.step.updated and self.trainer.scheduler is not None:
            adapted.call_hook(self.trainer.scheduler_step)

    def on_before_zero_grad(self, run: Run) -> None:
        adapted = AdaptedRun.of(run)
        adapted.call_hook(self.trainer.optimizer_zero_grad)
        # The hook may keep gradients, but the native loop drops all of them.
        parameters = parameters_of(adapted.session.step.updating)
        self._kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]

    def on_after_zero_grad(self, run: Run) -> None:
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._kept = []

    def on_eval_start(self, run: Run, evaluation: Evaluation) -> None:
        if not isinstance(evaluation, EvalEpoch):
            return
        AdaptedRun.of(run).call_hook(self.trainer.eval_epoch_start)
        self.trainer._loss_tracker.reset()

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        adapted = AdaptedRun.of(run)
        adapted.agree()
        if is_live(adapted):
            if isinstance(evaluation, EvalEpoch):
                adapted.call_hook(self.trainer.eval_epoch_end)
                self._modes = run.progress.step, [(module, module.training) for module in run.model.modules()]
            adapted.record(evaluation)

    def _leave_modes(self, run: Run) -> None:
        """Set the modes of an evaluation after the last step, as nothing in the original restores those before it."""
        step, modes = self._modes
        if step == run.progress.step:
            for module, training in modes:
                module.training = training

    def on_stop(self, run: Run, reason: str) -> None:
        AdaptedRun.of(run).close_for_a_stop()
        self.trainer.print(reason)

    def on_fit_end(self, run: Run) -> None:
        adapted = AdaptedRun.of(run)
        if not adapted.broken and unwinding(run) is None:
            _outside(adapted, self.trainer.training_run_end)

    def on_save(self, run: Run, checkpoint: Any) -> None:
        AdaptedRun.of(run).save(checkpoint)

    def on_load(self, run: Run, checkpoint: Any) -> None:
        AdaptedRun.of(run).load(checkpoint)

    def evaluate(self, run: Run) -> None:
        """Evaluate without training, with the events of `Trainer.evaluate`."""
        trainer, adapted = self.trainer, self._begin(run)
        assert trainer._eval_dataloader is not None, "created by Trainer.evaluate"
        _outside(adapted, trainer.evaluation_run_start)
        adapted.call_all("on_evaluation_run_start")
        adapted.call_hook(partial(trainer._run_eval_epoch, trainer._eval_dataloader, is_training=False))
        self._leave_modes(run)
        if adapted.stopped:
            trainer.print(adapted.reason)
            adapted.call_all("on_stop_training_error")
        _outside(adapted, trainer.evaluation_run_end)
        adapted.call_all("on_evaluation_run_end")

    @property
    def run(self) -> Run:
        """The native run."""
        assert self.trainer.native_run is not None, "set in on_setup"
        return self.trainer.native_run

    def _begin(self, run: Run) -> AdaptedRun:
        self.trainer.native_run, self.trainer._eval_compute = run, self.compute_eval
        return AdaptedRun(run, self.trainer, facade=True)


class LastCallback(Callback):
    """Evaluates at the end of each epoch, and calls the callbacks that were added to the handler during the run."""

    trainer: Weak[Overridable] = Weak()  # it refers to the run, which has this callback

    def __init__(self, trainer: Overridable) -> None:
        self.name: str = f"{type(trainer).__name__}'s evaluation"
        self.trainer = trainer
        self._late: tuple[list[object], list[AcceleratedCallback]] = ([], [])

    def listeners(self) -> list[Listener]:
        late = [
            (EpochStart if name == "on_train_epoch_start" else Listener)(event.moment, partial(self._call_late, name))
            for name, event in EVENTS.items()
            if event.moment and name != "on_init_end"
        ]
        return [*late, *super().listeners()]

    def on_epoch_end(self, run: Run) -> None:
        adapted, trainer = AdaptedRun.of(run), self.trainer
        adapted.agree()
        if not is_live(adapted):
            return
        if trainer._eval_dataloader is not None:
            adapted.call_hook(trainer._run_eval_epoch, trainer._eval_dataloader)
            adapted.agree()
        adapted.call_hook(trainer.training_run_epoch_end)
        history, epoch = trainer.run_history, trainer.run_history.current_epoch
        adapted.close_epoch()
        run.log({name: value for name in history.get_metric_names() if _is_number(value := history.get_latest_metric(name))})
        limit = run.progress.max_steps
        if limit is not None and run.progress.step >= limit and not adapted.stopped:
            trainer.print(f"The limit of {limit} training steps was reached in epoch {epoch}.")

    def _call_late(self, name: str, run: Run, *arguments: Any) -> None:
        adapted, handler = AdaptedRun.of(run), self.trainer.callback_handler
        if name == "on_train_epoch_start" and not adapted.starting:
            return
        if name == "on_train_step_end" and adapted.own_passes:
            return
        if adapted.by_handler:
            adapted.deliver_to_all(name, lambda: EVENTS[name].keywords(run, *arguments))
            return
        if self._late[0] != handler.callbacks:
            members = {id(callback) for callback in adapted.session.hooks.callbacks.values()}
            late = [late for late in handler if id(late) not in members and isinstance(late, AcceleratedCallback)]
            self._late = ([*handler.callbacks], late)
        for callback in self._late[1]:
            adapted.deliver(name, callback, lambda: EVENTS[name].keywords(run, *arguments))


class Hooked(Precision):
    """The precision of the run, with the trainer's hooks for the backward pass and the update."""

    def __init__(self, adapted: AdaptedRun, inner: Precision) -> None:
        self._adapted, self._inner = adapted, inner
        self.name: str = inner.name
        self.backward_pass: BackwardPass = inner.backward_pass

    def wrap(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        return self._inner.wrap(compute)

    def disabled(self) -> AbstractContextManager[None]:
        return self._inner.disabled()

    def backward(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        if self._adapted.own_passes:
            return  # the trainer's own method has called backward
        factor = scale * self._trainer._items_factor
        self._adapted.call_hook(self._trainer.backward_step, loss if type(factor) is float and factor == 1.0 else loss * factor)

    def unscale(self, optimizers: Sequence[Optimizer]) -> None:
        self._inner.unscale(optimizers)

    def step(self, optimizers: Sequence[Optimizer]) -> Sequence[Optimizer]:
        accelerator = self._trainer._accelerator
        accelerator.optimizer_step_was_skipped = False
        own = self.name == "fp16" and overrides(self._trainer, Overridable.optimizer_step)
        with self._scaled_step(self._trainer.optimizer) if own else nullcontext():
            self._adapted.call_hook(self._trainer.optimizer_step)
        return optimizers if accelerator.optimizer_step_was_skipped or self._adapted.stopped else ()

    @contextmanager
    def _scaled_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Let ``step`` of the optimizer be that of the gradient scaler, as in the original: it leaves out overflows."""
        given = vars(optimizer).get("step")  # a scheduler of torch sets one

        def put(function: Callable[..., Any] | None) -> None:
            if function is None:
                vars(optimizer).pop("step", None)
            else:
                vars(optimizer)["step"] = function

        def step() -> None:
            put(given)
            try:
                self._trainer._accelerator.optimizer_step_was_skipped = bool(self._inner.step([optimizer]))
            finally:
                put(step)

        put(step)
        try:
            yield
            if isinstance(self._inner, Scaled) and self._inner.is_unscaled(optimizer):  # the hook makes no update this time
                put(lambda: None)
                self._inner.step([optimizer])
        finally:
            put(given)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    @property
    def _trainer(self) -> Overridable:
        return self._adapted.trainer  # type: ignore[return-value]  # the adapter's trainer started this run


def _leave_unreduced(run: Run, *_: Any) -> None:
    """Let the native loop reduce the gradients before the update."""
    if run.driver.reduces:
        session_of(run).step.window.unreduced = True


def _outside(adapted: AdaptedRun, hook: Callable[[], object]) -> None:
    """Call a hook in which a `StopTrainingError` is an ordinary error."""
    try:
        hook()
    except BaseException:
        adapted.broken = True
        raise


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0)
