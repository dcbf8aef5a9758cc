"""The state of one run that fastNLP's callbacks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cadenza.compat.adapter.view import OfRun, Weak
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.engine.session import session_of
from cadenza.hooks.moments import Callback, Moment

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.engine.step_state import AccumulationWindow
    from cadenza.loading.evaluation import Evaluation
    from cadenza.loading.rng import RNGState
    from cadenza.run import Run

KEY = "fastnlp"


class AdaptedRun(OfRun):
    """A native run with fastNLP's trainer and counters."""

    early_stop: EarlyStopException | None = None
    """The exception of a hook that ends the training. After it, only ``on_exception`` and ``on_train_end`` are called."""
    requested: EarlyStopException | None = None
    """The exception of a hook on this rank."""
    agreed = False
    """Whether all ranks have exchanged their requests for the stop."""
    broken: Moment | None = None
    """The moment at which a hook failed. Its remaining hooks are skipped, and the counters do not change."""
    updating = False
    """Whether the last counted batch still awaits its update. fastNLP does not count it yet."""
    indices: list[int] | None = None
    """The indices of the current batch in the data set."""
    counts: bool = True
    """Whether the trainer's counters follow the run; see `keep_counters`."""
    empty = False
    """Whether the training has no epochs. The counters do not change."""
    began = False
    """Whether the training of fastNLP's trainer has started, after the sanity check."""
    own_loop = False
    """Whether a ``train_batch_loop`` runs the epochs and calls the events in them."""
    epoch_evaluated = False
    """Whether the evaluation at the end of the current epoch has run."""
    evaluation: Evaluation | None = None
    """The evaluation of fastNLP's trainer."""
    trial: Evaluation | None = None
    """The sanity check of fastNLP's trainer."""
    rng_state: RNGState | None = None
    """The RNG state of the training during an evaluation."""
    window: AccumulationWindow | None = None
    """The accumulation window that awaits its update."""
    outputs: Any = None
    """The outputs of the current batch if they are not a mapping."""

    trainer: Weak[TrainerView] = Weak()

    def __init__(self, run: Run, trainer: TrainerView, *, own: bool = False) -> None:
        super().__init__(run)
        self.trainer = trainer
        self._view = None if own else trainer  # nothing else refers to it
        self.own = own
        """Whether fastNLP's trainer started the run."""
        self.session.adapters[KEY] = self

    @staticmethod
    def of(run: Run) -> AdaptedRun:
        """Return the adapted run of a native run. If a native trainer started it, its trainer is a view on the run."""
        adapted: AdaptedRun | None = session_of(run).adapters.get(KEY)
        if adapted is None:
            from cadenza.compat.fastnlp.core.controllers.native import NativeRunView  # its package imports the trainer

            adapted = AdaptedRun(run, NativeRunView(run))
        return adapted

    @property
    def window_is_full(self) -> bool:
        """Whether the current accumulation window has all its batches; false with a ``step_fn``."""
        window = self.session.step.window
        return self.session.step_fn is None and window.seen >= window.size

    def completes_batch(self, moment: Moment) -> bool:
        """Return whether a batch ends at a moment: the last one of a window at ``on_step_end``, others at ``on_batch_end``."""
        window, last = self.session.step.window, self.session.step.last_window
        if moment is Callback.on_batch_end:
            return self.session.step_fn is None and window.seen < window.size
        return self.session.step_fn is not None or last.seen >= last.size

    @property
    def over(self) -> bool:
        """Whether only the final events are still called."""
        return self.early_stop is not None or self.broken is not None

    def count(self) -> None:
        """Update the trainer's counters from the run. They count completed work: a batch counts after its update."""
        if self.over or not self.counts or self.own_loop or self.empty:
            return  # the counters are final, or the user's loop counts
        progress, state = self.run.progress, self.trainer.trainer_state
        state.cur_epoch_idx = progress.epoch
        state.global_forward_batches = progress.batch - self.updating
        state.batch_idx_in_epoch = progress.batch_in_epoch - self.updating

    @contextmanager
    def keep_counters(self) -> Iterator[None]:
        """A context in which the trainer's counters do not change: an evaluation, or the update from an incomplete window."""
        before, self.counts = self.counts, False
        try:
            yield
        finally:
            self.counts = before

    def close_epoch(self) -> None:
        """Count an epoch that was shortened by a limit of the run."""
        state = self.trainer.trainer_state
        if not self.over and state.batch_idx_in_epoch and self.run.progress.finished:
            state.cur_epoch_idx += 1
            state.batch_idx_in_epoch = 0

    def take_stop(self, stop: EarlyStopException) -> None:
        """End the training at the request of a hook. On multiple ranks, hooks are still called until `agree`."""
        self.requested = self.requested or stop
        if self.run.driver.world_size == 1:
            self.early_stop = stop
        self.run.stop(stop.msg or "a callback raised EarlyStopException")

    def agree(self) -> None:
        """End the training if a hook requested it on any rank. Every rank must call this, unless an error is propagating."""
        driver = self.run.driver
        if driver.world_size == 1 or self.early_stop is not None or not driver.any_rank(self.requested is not None):
            return
        reasons = [
            reason
            for reason in driver.gather(None if self.requested is None else self.requested.msg or "")
            if reason is not None
        ]
        self.early_stop = self.requested or EarlyStopException(reasons[0])

    def call(
        self, moment: Moment, hook: Callable[..., Any], arguments: tuple[Any, ...], *, may_stop: bool, may_fail: bool
    ) -> None:
        """Call a hook.

        Args:
            moment: The moment of the call.
            hook: A hook of a callback.
            arguments: The arguments after the trainer.
            may_stop: Whether an `EarlyStopException` ends the training; otherwise it is an error.
            may_fail: Whether an error only disables the callback.
        """
        try:
            hook(self.trainer, *arguments)
        except EarlyStopException as stop:
            if not may_stop:
                raise
            self.take_stop(stop)
        except BaseException as error:
            if not (may_fail and isinstance(error, Exception)):
                self.broken = moment
            raise
