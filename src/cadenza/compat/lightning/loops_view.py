"""The parts of ``trainer.fit_loop`` and the other loops that callbacks read."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

from cadenza.compat.lightning.part_view import PartView
from cadenza.compat.lightning.setup_view import SetupView
from cadenza.engine.objective import on_host
from cadenza.engine.session import session_of
from cadenza.hooks.moments import Callback

_ENDS = (
    *(Callback.on_before_optimizer_step, Callback.on_after_optimizer_step, Callback.on_before_zero_grad),
    *(Callback.on_after_zero_grad, Callback.on_batch_end, Callback.on_step_end),
)
"""The hooks in which the current batch is counted but not yet completed in Lightning."""


def counts(total: int, current: int, inside: tuple[int, int] = (0, 0), **others: Any) -> SimpleNamespace:
    """Return a ``_Progress`` of Lightning. Between two batches, all its counters have the same value.

    Args:
        total: The number of batches that have begun in the run.
        current: The same in the epoch.
        inside: Whether the last batch is not yet processed and not yet completed: 0 or 1.
        others: Other attributes.
    """

    def counters(begun: int) -> SimpleNamespace:
        return SimpleNamespace(ready=begun, started=begun, processed=begun - inside[0], completed=begun - inside[1])

    return SimpleNamespace(total=counters(total), current=counters(current), **others)


class EvaluationLoopView(PartView):
    """The loop of the current evaluation."""

    title: ClassVar[str] = "trainer.validate_loop"

    @property
    def batch_progress(self) -> SimpleNamespace:
        """The batches of the evaluation."""
        evaluation = self._trainer._evaluation
        done = 0 if evaluation is None else evaluation.batch
        return counts(done, done, is_last_batch=evaluation is not None and done == evaluation.batches)

    @property
    def max_batches(self) -> list[int | float]:
        """The number of batches of each loader."""
        return self._trainer._batches(self._trainer._evaluation)

    @property
    def num_dataloaders(self) -> int:
        """The number of loaders."""
        return len(self.max_batches)

    @property
    def _has_run(self) -> bool:
        return any(evaluation.complete for evaluation in self._run.evaluations.values())


class PredictLoopView(EvaluationLoopView):
    """The loop of ``Trainer.predict``."""

    title: ClassVar[str] = "trainer.predict_loop"

    def __init__(self, trainer: SetupView) -> None:
        super().__init__(trainer)
        self._predictions: list[list[Any]] = []
        self._indices: list[list[Any]] = []

    @property
    def current_batch_indices(self) -> list[Any]:
        """The indices of the samples in the current batch, after its prediction; empty if they are not known."""
        evaluation = self._trainer._evaluation
        if evaluation is None:
            return []
        known = evaluation.indices(self._run, evaluation.batch - 1, session_of(self._run).data_seed)
        return [] if known is None else [int(length) for length in known]

    @property
    def epoch_batch_indices(self) -> list[list[Any]]:
        """By loader, the indices of each batch."""
        return self._indices

    @property
    def predictions(self) -> list[Any]:
        """The prediction for each batch, on the host; with several loaders, a list for each."""
        return self._predictions[0] if len(self._predictions) == 1 else self._predictions

    def _record(self, loader: int, predictions: Any) -> None:
        """Keep the predictions for the current batch, for callbacks that read them at the end."""
        for kept in (self._predictions, self._indices):
            while len(kept) <= loader:
                kept.append([])
        self._predictions[loader].append(on_host(predictions))
        self._indices[loader].append(self.current_batch_indices)


class EpochLoopView(PartView):
    """The loop over the batches of an epoch."""

    title: ClassVar[str] = "trainer.fit_loop.epoch_loop"

    @property
    def global_step(self) -> int:
        """Completed steps."""
        return self._trainer.global_step

    @property
    def batch_idx(self) -> int:
        """The index of the current batch in its epoch."""
        return self._trainer._batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The index of the current batch, over all epochs."""
        return self._trainer._total_batch_idx

    @property
    def _batches_that_stepped(self) -> int:
        return self._trainer.global_step

    @property
    def batch_progress(self) -> SimpleNamespace:
        """The batches of the run and of the epoch."""
        trainer, step = self._trainer, session_of(self._run).step
        ends = trainer._evaluation is None and trainer._moment in _ENDS
        inside = int(not step.counted), int(not step.counted or ends)
        return counts(self.total_batch_idx + 1, self.batch_idx + 1, inside, is_last_batch=trainer._is_last_batch)

    @property
    def val_loop(self) -> EvaluationLoopView:
        """The loop of the current evaluation."""
        return EvaluationLoopView(self._trainer)

    @property
    def min_steps(self) -> None:
        """None: a native run has no minimum."""

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 without one."""
        return self._trainer.max_steps

    def _should_check_val_epoch(self) -> bool:
        every = self._trainer.check_val_every_n_epoch
        return bool(self._run.evaluations) and (every is None or (self._trainer.current_epoch + 1) % every == 0)

    def _should_accumulate(self) -> bool:
        return self._trainer._accumulates


class FitLoopView(PartView):
    """The loop over epochs."""

    title: ClassVar[str] = "trainer.fit_loop"

    def __init__(self, trainer: SetupView) -> None:
        super().__init__(trainer)
        self._more_batches = 0
        self._skips = False

    @property
    def epoch_loop(self) -> EpochLoopView:
        """The loop over the batches of an epoch."""
        return EpochLoopView(self._trainer)

    @property
    def epoch_progress(self) -> SimpleNamespace:
        """The epochs of the run."""
        return counts(self._trainer.current_epoch, self._trainer.current_epoch)

    @property
    def batch_idx(self) -> int:
        """The index of the current batch in its epoch."""
        return self._trainer._batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The index of the current batch, over all epochs."""
        return self.epoch_loop.total_batch_idx

    @property
    def max_epochs(self) -> int:
        """The limit of epochs; -1 without one."""
        return self._trainer.max_epochs

    @max_epochs.setter
    def max_epochs(self, epochs: int) -> None:
        self._run.progress.limit_epochs(None if epochs == -1 else epochs)

    @property
    def min_epochs(self) -> int:
        """0: a native run has no minimum."""
        return 0

    @property
    def max_steps(self) -> int:
        """The limit of steps; -1 without one."""
        return self._trainer.max_steps

    @property
    def min_steps(self) -> None:
        """None: a native run has no minimum."""

    @property
    def max_batches(self) -> int | float:
        """The batches of an epoch; infinite if not known. A value set here is only returned on reads."""
        return self._trainer.num_training_batches + self._more_batches

    @max_batches.setter
    def max_batches(self, batches: int) -> None:
        self._more_batches = int(batches - self._trainer.num_training_batches)

    @property
    def _skip_backward(self) -> bool:
        return self._skips

    @_skip_backward.setter
    def _skip_backward(self, skip: bool) -> None:
        self._skips = skip

    @property
    def _data_source(self) -> SimpleNamespace:
        is_defined: Callable[[], bool] = lambda: True  # noqa: E731
        return SimpleNamespace(instance=session_of(self._run).loader, is_defined=is_defined)

    def _should_accumulate(self) -> bool:
        return self._trainer._accumulates
