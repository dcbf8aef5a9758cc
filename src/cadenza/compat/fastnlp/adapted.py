"""What callbacks of this dialect share of a run: the trainer that they see, and how far they were told the run has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.engine.session import session_of
from cadenza.hooks.moments import Callback, Moment

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.engine.window import AccumulationWindow
    from cadenza.loading.evaluation import Evaluation
    from cadenza.loading.rng import RNGState
    from cadenza.run import Run

KEY = "fastnlp"


class AdaptedRun:
    """One training as fastNLP sees it."""

    early_stop: EarlyStopException | None = None
    """What a hook raised to end the training; from then on nothing is called but ``on_exception`` and ``on_train_end``."""
    asked: EarlyStopException | None = None
    """What a hook raised on this rank."""
    agreed = False
    """Whether all ranks know who asked for the stop that was taken."""
    broken: Moment | None = None
    """Where a hook failed: there, nobody else is called, and the counters stand still."""
    updating = False
    """Whether the batch that the run counted last still has its update before it, and so does not count here."""
    indices: list[int] | None = None
    """The places of the batch under way in the data set."""
    evaluating = False
    """Whether the trainer's own evaluation is under way, during which the counters stand still."""
    began = False
    """Whether fastNLP's trainer has begun to train, and not only to try the evaluation."""
    own_loop = False
    """Whether a loop of the user's own goes through an epoch, and calls the events in it."""
    epoch_evaluated = False
    """Whether the epoch under way was evaluated at its end."""
    evaluation: Evaluation | None = None
    """That of fastNLP's trainer."""
    trial: Evaluation | None = None
    """That of fastNLP's trainer before the training."""
    streams: RNGState | None = None
    """Random streams of the training, while an evaluation uses others."""
    group: AccumulationWindow | None = None
    """The batches whose update is still to come."""
    outputs: Any = None
    """What the model returned for the batch under way, if that is no mapping."""

    def __init__(self, run: Run, trainer: TrainerView, *, own: bool = False) -> None:
        self.run, self.session, self.trainer = run, session_of(run), trainer
        self.own = own
        """Whether fastNLP's trainer started the run, and not a native one."""
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
        """Whether nothing is called any more but what tells of the end."""
        return self.early_stop is not None or self.broken is not None

    def count(self) -> None:
        """Bring the trainer's counters up to the run's: of complete work, a batch after its update."""
        if self.over or self.evaluating or self.own_loop:
            return  # they stay as they were then, or the user's loop counts
        progress, state = self.run.progress, self.trainer.trainer_state
        state.cur_epoch_idx = progress.epoch
        state.global_forward_batches = progress.batch - self.updating
        state.batch_idx_in_epoch = progress.batch_in_epoch - self.updating

    def close_epoch(self) -> None:
        """Count an epoch that a limit of the run cut short."""
        state = self.trainer.trainer_state
        if not self.over and state.batch_idx_in_epoch and self.run.progress.finished:
            state.cur_epoch_idx += 1
            state.batch_idx_in_epoch = 0

    def take_stop(self, stop: EarlyStopException) -> None:
        """End the training: a hook asked for it. On several ranks hooks are called until all know of it, see `agree`."""
        self.asked = self.asked or stop
        if self.run.driver.world_size == 1:
            self.early_stop = stop
        self.run.stop(stop.msg or "a callback raised EarlyStopException")

    def agree(self) -> None:
        """End the training if a hook asked for it on any rank. Every rank must call this, unless an error is on its way out."""
        driver = self.run.driver
        if driver.world_size == 1 or self.early_stop is not None or not driver.any_rank(self.asked is not None):
            return
        told = [words for words in driver.gather(None if self.asked is None else self.asked.msg or "") if words is not None]
        self.early_stop = self.asked or EarlyStopException(told[0])

    def call(
        self, moment: Moment, hook: Callable[..., Any], arguments: tuple[Any, ...], *, may_stop: bool, may_fail: bool
    ) -> None:
        """Call a hook.

        Args:
            moment: Where it is called.
            hook: Of a callback.
            arguments: What it gets after the trainer.
            may_stop: Whether an `EarlyStopException` ends the training here; else it is an error.
            may_fail: Whether an error disables the callback, and is none for the others.
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
