"""Native callbacks before and after those of fastNLP's trainer: the start of a run, its evaluations and its batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.compat.adapter.view import Weak
from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.controllers.stepping import SteppingTrainer
from cadenza.compat.fastnlp.core.controllers.utils.feeding import Feed
from cadenza.engine import weight_update
from cadenza.engine.evaluation import record_evaluated, undisturbed
from cadenza.engine.step_state import AccumulationWindow
from cadenza.hooks.dispatch import hooks_of, unwinding
from cadenza.hooks.moments import Callback, Moment
from cadenza.loading.evaluation import Evaluation
from cadenza.loading.loaders import length_of
from cadenza.loading.rng import RNGState
from cadenza.optim.parameters import parameters_of
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
    from cadenza.run import Run

logger: logging.Logger = logging.getLogger("cadenza")

NAME = "eval"


@dataclass
class Plan:
    """The lengths of a ``Trainer.run``."""

    per_epoch: int
    """The number of batches in an epoch."""
    epochs: int
    batches: int
    """The total number of batches."""
    per_loader: int
    """The number of batches of each loader in an evaluation; -1: all."""
    sanity: int
    """The number of batches of each loader in the sanity check; 0: none."""

    def batches_from(self, epoch: int) -> int:
        """Return the number of batches from the begin of an epoch on."""
        return self.batches - epoch * self.per_epoch


class TrainerEvaluation(Evaluation):
    """An evaluation by the trainer's evaluator, with native result names such as ``eval/acc#acc``."""

    def __init__(self, evaluator: Evaluator, limit: int) -> None:
        super().__init__(_Chain(evaluator.dataloaders, None if limit == -1 else limit), name=NAME)
        self._evaluator, self._limit_per_loader = evaluator, limit
        self.plain_results: dict[str, Any] = {}
        """The results with fastNLP's names."""

    def run(self, run: Run | None) -> None:
        """Evaluate the model. With a run, fire its moments of each batch."""
        self.results: dict[str, float] = {}
        self.plain_results = {}
        self.complete: bool = False
        self.batch: int = 0

        def watch(when: str, batch: Any, outputs: Mapping[str, Any] | None) -> None:
            self.batch += when == "end" and outputs is not None
            if run is not None and when == "start":
                hooks_of(run).on_eval_batch_start(run, self, batch)
            elif run is not None:
                hooks_of(run).on_eval_batch_end(run, self, batch, outputs or {})

        self.plain_results = self._evaluator.run(self._limit_per_loader, watch=watch)
        numbers = {name: value for name, value in self.plain_results.items() if isinstance(value, int | float)}
        self.results = {f"{NAME}/{name}": float(value) for name, value in numbers.items()}
        self.complete = True


class FirstCallback(Callback):
    """Runs first at each moment: starts the run at the counters of the trainer, and evaluates at the end of an epoch."""

    name: str = "fastNLP"
    _trainer: Weak[SteppingTrainer] = Weak()  # it refers to the run, which has this callback
    logs_training = True

    def __init__(self, trainer: SteppingTrainer, plan: Plan) -> None:
        self._trainer, self._plan = trainer, plan
        self._losses: list[Tensor] = []  # the losses of a window that a checkpoint has interrupted

    def on_setup(self, run: Run) -> None:
        trainer, plan = self._trainer, self._plan
        adapted = AdaptedRun(run, trainer, own=True)
        adapted.session.advises = False
        if trainer.evaluator is not None:
            adapted.evaluation = run.evaluations[NAME] = TrainerEvaluation(trainer.evaluator, plan.per_loader)
        carried = trainer.carried
        # Without a seed of the run the order of the data depends on torch.manual_seed.
        seed = torch.initial_seed() % 2**56 if carried.data_seed is None else carried.data_seed
        adapted.session.data_seed = run.driver.broadcast(seed)
        adapted.own_loop = trainer.runs_own_epochs
        trainer.live, trainer.driver.precision = run, adapted.session.precision

    def on_fit_start(self, run: Run) -> None:
        trainer, plan, carried = self._trainer, self._plan, self._trainer.carried
        state = trainer.trainer_state
        state.num_batches_per_epoch, state.n_batches, state.n_epochs = plan.per_epoch, plan.batches, plan.epochs
        epoch, inside, adapted = state.cur_epoch_idx, state.batch_idx_in_epoch, AdaptedRun.of(run)
        session = adapted.session
        adapted.began = True
        if not plan.epochs:  # a native run has at least one epoch; this run is complete before it begins
            adapted.empty = True
            run.progress.begin(Counters(1, 0, 0, 0, 0), plan.per_epoch)
            return
        if adapted.own_loop:
            run.progress.begin(Counters(epoch, epoch, epoch, 0, epoch), 1)
            self._restore(adapted)
            return
        at = Counters(epoch, carried.steps, plan.per_epoch * epoch + inside, inside, carried.samples)
        run.progress.begin(at, plan.per_epoch)
        if carried.loader:
            session.cursor.source.load_state_dict(carried.loader)

        def note(indices: list[int] | None) -> None:
            adapted.indices = indices

        source = session.cursor.source
        session.cursor.source = Feed(source, trainer.train_dataloader, trainer.input_mapping, note, plan.batches_from)
        if carried.scaler:
            session.precision.load_state_dict(carried.scaler)
        self._restore(adapted)

    def _restore(self, adapted: AdaptedRun) -> None:
        """Restore the RNG state and the incomplete accumulation window of the checkpoint."""
        carried, session = self._trainer.carried, adapted.session
        adapted.epoch_evaluated = carried.evaluated
        parameters = list(parameters_of(adapted.run.optimizers))
        session.restored.rng_state = None if carried.streams is None else RNGState.from_plain(carried.streams)
        gradients = [(parameters[i], gradient.to(parameters[i].device)) for i, gradient in carried.gradients.items()]
        session.restored.gradients = gradients
        self._losses = list(carried.losses)
        if session.step_fn is not None and self._losses:
            self._trainer.resume_window(self._losses)
            self._losses = []

    def on_epoch_start(self, run: Run) -> None:
        left = self._plan.batches_from(run.progress.epoch)
        if 0 < left < self._plan.per_epoch and not AdaptedRun.of(run).own_loop:
            run.progress.take_over(left)  # n_batches shortens the last epoch

    def on_step_start(self, run: Run) -> None:
        adapted = AdaptedRun.of(run)
        if adapted.session.step_fn is None:
            adapted.window = adapted.session.step.window
            self._resume_window(adapted.window)

    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None:
        # If the update fails, the batch does not count for fastNLP.
        adapted = AdaptedRun.of(run)
        adapted.updating = adapted.window_is_full

    def on_step_end(self, run: Run) -> None:
        if unwinding(run) is None:  # otherwise a checkpoint in on_exception needs the window
            adapted = AdaptedRun.of(run)
            adapted.window, adapted.updating = None, False

    def on_epoch_end(self, run: Run) -> None:
        adapted = AdaptedRun.of(run)
        if unwinding(run) is not None:
            return
        adapted.agree()
        if adapted.over or run.progress.batch_in_epoch:
            return
        if adapted.own_loop:  # the loop runs the evaluation
            state = self._trainer.trainer_state
            state.cur_epoch_idx, state.batch_idx_in_epoch = state.cur_epoch_idx + 1, 0
            return
        with adapted.keep_counters():
            self._finish_window(adapted)
        if not adapted.epoch_evaluated:
            adapted.epoch_evaluated = True
            # The counters are those of the last batch: callbacks see the epoch before it is complete.
            adapted.call(Callback.on_epoch_end, type(self._trainer).epoch_evaluate, (), may_stop=True, may_fail=False)
        adapted.epoch_evaluated = False

    def _finish_window(self, adapted: AdaptedRun) -> None:
        """Perform the pending update after the last batch of an epoch."""
        if self._losses:  # saved after this batch, before the update
            session = adapted.session
            self._resume_window(session.step.window)
            weight_update.complete_window(session)
            weight_update.update(session, session.optimizers)
        if adapted.run.progress.finished:
            adapted.call(Callback.on_epoch_end, type(self._trainer).finish_window, (), may_stop=True, may_fail=False)

    def _resume_window(self, window: AccumulationWindow) -> None:
        """Continue an accumulation window from the checkpoint."""
        if self._losses:
            window.resume(self._losses)
            self._losses = []


class LastCallback(Callback):
    """Runs last at each moment: the sanity check, and evaluations after a batch."""

    name: str = "fastNLP, at the end"
    _trainer: Weak[SteppingTrainer] = Weak()

    def __init__(self, trainer: SteppingTrainer, plan: Plan) -> None:
        self._trainer, self._plan = trainer, plan

    def on_setup(self, run: Run) -> None:
        for name, state in self._trainer.carried.callbacks.items():
            if (callback := hooks_of(run).callbacks.get(name)) is not None:
                callback.load_state_dict(state)
        if self._trainer.evaluator is not None and self._plan.sanity:
            self._check_sanity(run, TrainerEvaluation(self._trainer.evaluator, self._plan.sanity))

    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None:
        self._finish_batch(run, Callback.on_batch_end)

    def on_step_end(self, run: Run) -> None:
        self._finish_batch(run, Callback.on_step_end)

    def _finish_batch(self, run: Run, moment: Moment) -> None:
        adapted = AdaptedRun.of(run)
        if not adapted.completes_batch(moment) or unwinding(run) is not None:
            return
        adapted.agree()
        if adapted.over or adapted.own_loop:
            return
        adapted.count()
        self._trainer.check_batch_step_fn()
        adapted.call(moment, type(self._trainer).step_evaluate, (), may_stop=True, may_fail=False)

    def _check_sanity(self, run: Run, trial: TrainerEvaluation) -> None:
        adapted = AdaptedRun.of(run)
        adapted.trial = trial
        with evaluating(adapted), undisturbed(adapted.session):
            try:
                adapted.session.hooks.on_sanity_start(run, trial)
                trial.run(None)
            finally:
                adapted.session.hooks.on_sanity_end(run, trial)


def evaluate(run: Run) -> dict[str, Any]:
    """Evaluate the model with the trainer's evaluator; return the results."""
    adapted = AdaptedRun.of(run)
    evaluation = adapted.evaluation
    if not isinstance(evaluation, TrainerEvaluation):
        raise RuntimeError("this training has no evaluation. Pass evaluate_dataloaders= and metrics= to the trainer.")
    with evaluating(adapted):
        with undisturbed(adapted.session):
            try:
                adapted.session.hooks.on_eval_start(run, evaluation)
                evaluation.run(run)
                record_evaluated(adapted.session, evaluation, who="the trainer")
            finally:
                adapted.session.hooks.on_eval_end(run, evaluation)
        run.log(dict(evaluation.results))
    return evaluation.plain_results


@contextmanager
def evaluating(adapted: AdaptedRun) -> Iterator[None]:
    """A context in which the trainer's counters do not change and checkpoints hold the RNG state of the training."""
    adapted.rng_state = RNGState.capture()
    try:
        with adapted.keep_counters():
            yield
    finally:
        adapted.rng_state = None


class _Chain:
    """The batches of several loaders in a row, at most `limit` of each."""

    def __init__(self, loaders: Mapping[str, Any], limit: int | None) -> None:
        self._loaders, self._limit = loaders, limit

    def __iter__(self) -> Iterator[Any]:
        for loader in self._loaders.values():
            yield from islice(loader, self._limit)

    def __len__(self) -> int:
        lengths = [length_of(loader) for loader in self._loaders.values()]
        if None in lengths:
            raise TypeError("a loader has no length")
        return sum(min(length or 0, length or 0 if self._limit is None else self._limit) for length in lengths)
