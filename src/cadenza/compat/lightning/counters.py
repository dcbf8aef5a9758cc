"""The part of ``trainer`` with counters and stop requests."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cadenza.compat.adapter.view import View
from cadenza.engine.session import session_of
from cadenza.errors import DataError
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


_EVALUATION = (Callback.on_eval_batch_start, Callback.on_eval_batch_end)
_BATCH = (
    *_EVALUATION,
    Callback.on_batch_start,
    Callback.on_before_backward,
    Callback.on_after_backward,
    Callback.on_batch_end,
    Callback.on_step_end,
    Callback.on_before_optimizer_step,
)


class RanksView(View):
    """A view with the identity of this process."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._run.is_main

    @property
    def global_rank(self) -> int:
        """The index of this process among all."""
        return self._run.driver.rank

    @property
    def local_rank(self) -> int:
        """The index of this process on its machine."""
        return self._run.driver.local_rank

    @property
    def node_rank(self) -> int:
        """The index of this machine."""
        return self.global_rank // self._ranks_here

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._run.driver.world_size

    @property
    def _ranks_here(self) -> int:
        """The number of processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))


class CountersView(RanksView):
    """The counters of a run, with the names of Lightning's ``Trainer``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._progress, self._cursor = run.progress, session_of(run).cursor  # also read after the run
        self._own: dict[str, Any] = {}
        self._fits = bool(run.optimizers)
        self._stage = "train" if self._fits else "validate"
        self._evaluation: Evaluation | None = None
        self._interrupted = False
        self._epoch: int | None = None
        """The epoch that started last."""
        self._asked: bool = False
        """Whether a callback of Lightning on this rank requested the stop."""
        self._evaluated: int = -1
        """The completed steps at the last evaluation."""
        self._over: bool = False
        """Whether the hooks at the end of the fit are running."""

    # -- counters -----------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The number of the current epoch, from 0. After the last epoch: the number of epochs."""
        cursor, progress = self._cursor, self._progress
        if cursor.in_epoch:
            return progress.epoch
        if not progress.batch_in_epoch:  # between epochs; it is counted before on_epoch_end
            counted = not cursor.at_boundary or self._moment is Callback.on_epoch_end
            return progress.epoch - (counted and progress.epoch != self._epoch)
        return progress.epoch + (self._over)

    @property
    def global_step(self) -> int:
        """The number of updates of the weights."""
        step = self._own.get("global_step")
        return self._progress.step if step is None else step()

    @property
    def is_last_batch(self) -> bool:
        """Whether the current batch is the last one of its epoch. A `DataError` if the loader has no length."""
        if self._run.progress.batches_per_epoch is None:
            raise DataError(
                "trainer.is_last_batch is not known, because the training loader has no length. Give its data set a __len__, "
                "or use on_train_epoch_end."
            )
        return self._is_last_batch

    @property
    def _is_last_batch(self) -> bool:
        return self._batch_idx + 1 == self._run.progress.batches_per_epoch

    @property
    def _moment(self) -> Any:
        session = self._of_run.held()
        listener = None if session is None else session.hooks.here().listener
        return None if listener is None else listener.moment

    @property
    def _in_batch(self) -> bool:
        """Whether a hook of a batch or a step is running."""
        return self._moment in _BATCH

    @property
    def _in_evaluation_batch(self) -> bool:
        """Whether a hook of an evaluation batch is running."""
        return self._moment in _EVALUATION

    @property
    def _batch_idx(self) -> int:
        progress = self._run.progress
        done = progress.batch_in_epoch
        if not done and progress.batch and not session_of(self._run).cursor.in_epoch:
            done = progress.batches_per_epoch or 0  # after an epoch, which is already counted
        return done - session_of(self._run).step.counted

    @property
    def _total_batch_idx(self) -> int:
        return self._run.progress.batch - session_of(self._run).step.counted

    @property
    def _accumulates(self) -> bool:
        window, moment = session_of(self._run).step.window, self._moment
        if moment is Callback.on_step_end:  # the window is that of the next step
            return False
        return window.seen + (moment is Callback.on_batch_start) < window.size and not self._is_last_batch

    # -- stop ---------------------------------------------------------------------------------------

    @property
    def should_stop(self) -> bool:
        """Whether a stop is requested. Set it to request one: ``run.stop`` with the callback as author."""
        return session_of(self._run).sync.requests.stop is not None

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        if value and not self.should_stop:
            self._asked = True
            self._run.stop(f"{hooks_of(self._run).current_owner() or 'the script'} set trainer.should_stop")

    @property
    def received_sigterm(self) -> bool:
        """Whether a signal has requested the end of the run."""
        return session_of(self._run).sync.requests.signal is not None

    @property
    def interrupted(self) -> bool:
        """Whether an error has ended the run."""
        return self._interrupted
