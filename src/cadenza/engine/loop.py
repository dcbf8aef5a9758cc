"""The training loop: `fit`. It asks a `Training` for its epochs, steps and batches, and so do custom loops.

The moments are those of `Callback`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Self

import torch

from cadenza.engine import boundary
from cadenza.engine.error_context import explain
from cadenza.engine.session import UNDER_WAY, Session
from cadenza.engine.verbs import OF_LOOP, Verbs
from cadenza.engine.weight_update import backward, drop_gradients, finish_window
from cadenza.errors import DataError
from cadenza.hooks.moments import Callback
from cadenza.status.decisions import RESUMABLE, Outcome

if TYPE_CHECKING:
    from cadenza.run import Run

END: Any = object()  # what `fetch` returns when the loader has no more batches


class Open(IntEnum):
    """The innermost section that is open in a training. ``EPOCH``: before the first step of one, or after the last."""

    NOTHING, RUN, EPOCH, BETWEEN_STEPS, STEP, BATCH = range(6)


def fit(training: Training) -> None:
    """Train until a limit is reached or a stop is requested."""
    while training.next_epoch():
        train_epoch(training)


def train_epoch(training: Training) -> None:
    """Do the steps of an epoch."""
    while training.next_step():
        while training.next_batch():
            training.compute()


class Training:
    """The part of a run that trains, for ``with``.

    An epoch, a step or a batch that has begun is open until it ends, with its moment. What begins one ends the one before. An
    error that leaves the block ends all open sections; then ``on_exception`` is called, and ``on_fit_end`` in any case. Every
    rank must call each method.
    """

    def __init__(self, session: Session) -> None:
        self.session: Session = session
        self.run: Run = session.run
        self.verbs: Verbs = OF_LOOP[session.loop](session)
        session.verbs = self.verbs
        self.open: Open = Open.NOTHING
        self._first: Any = END  # the batch that was fetched to begin a step

    def __enter__(self) -> Self:
        UNDER_WAY.append(self.session)
        self.open = Open.RUN
        return self

    def begin(self) -> None:
        """Fire ``on_fit_start``, and restore what the hooks must not change before the first step."""
        session = self.session
        boundary.begin(session)
        session.hooks.refresh_schedules(session.progress)
        session.module_flags.begin(session.driver, session.model, session.decide)
        session.hooks.on_fit_start(self.run)
        session.extra_parameters.check_devices(self.run)
        drop_gradients(session.optimizers)
        session.restored.take_gradients()
        if not session.progress.batch_in_epoch:  # inside an epoch the RNG state is restored when its loader is open
            session.restored.take_rng_state()
        session.due.run_first(session)
        if not session.cursor.in_epoch and session.due.take_up(session):
            boundary.leave_epoch(session)

    # -- what comes next ---------------------------------------------------------------------------

    def next_epoch(self) -> bool:
        """End the open epoch, and begin the next one. Return False if the run is over."""
        self.end_epoch()
        session = self.session
        # A restored epoch is open even if it has no more steps: its on_epoch_end has not fired.
        if self.open == Open.NOTHING or (not session.cursor.in_epoch and session.sync.over()):
            return False
        self.open, session.cursor.in_epoch = Open.EPOCH, True
        session.hooks.on_epoch_start(self.run)
        return True

    def next_step(self) -> bool:
        """End the open step, and begin the next one of the epoch. Return False if none follows."""
        if self.advance():
            self._first = self.fetch()
            if self._first is not END:
                self.begin_step()
                return True
        self._end_steps()
        return False

    def next_batch(self) -> bool:
        """End the open batch, and begin the next one of the step. Return False if none follows."""
        if self.open == Open.BATCH:
            self.end_batch()
        session = self.session
        step = session.step
        if self._first is END:
            if step.window.seen >= step.window.size or session.cursor.exhausted:
                return False
            self._first = self.fetch()
            if self._first is END:
                return False
        batch, self._first = self._first, END
        step.begin_batch(batch)
        self.open = Open.BATCH
        session.hooks.on_batch_start(self.run, batch)
        step.window.seen += 1
        session.sync.begin_batch(batch)
        return True

    def compute(self) -> None:
        """Add the gradients of the open batch, unless it is skipped; a ``step_fn`` does this, and the update, itself."""
        session = self.session
        step = session.step
        if step.skipping:
            return
        if session.step_fn is not None:
            step.outputs.take(session.step_fn(self.run, step.batch))
            step.window.note(torch.as_tensor(step.outputs["loss"]), dict.get(step.outputs, "weight"))
        else:
            step.outputs.take(session.compute(session.model, step.batch))
            backward(session, step.outputs, step.window)

    # -- its parts ---------------------------------------------------------------------------------

    def advance(self) -> bool:
        """End the open step, and do what waits for its boundary. Return whether a step of the epoch may follow."""
        session = self.session
        session.hooks.enter()
        if self.open >= Open.STEP:
            self.end_step()
        if self.open == Open.EPOCH:
            self._open_loader()
        elif not session.cursor.at_boundary:
            boundary.run_boundary(session, after_step=True)
        return self.open == Open.BETWEEN_STEPS and not session.sync.leaving_epoch()

    def _open_loader(self) -> None:
        progress, cursor = self.session.progress, self.session.cursor
        if not progress.finished and not cursor.exhausted:
            cursor.batches = cursor.source.batches(progress.epoch, progress.batch_in_epoch)
        self.session.restored.take_rng_state()  # the next draw is that of the step after the checkpoint
        self.open = Open.BETWEEN_STEPS
        if self.session.due.take_up(self.session):
            boundary.run_boundary(self.session)

    def begin_step(self) -> None:
        """Fire ``on_step_start``."""
        session = self.session
        session.step.begin()
        session.cursor.at_boundary = False
        self.open = Open.STEP
        session.hooks.on_step_start(self.run)

    def fetch(self) -> Any:
        """Return the next batch, on the device, or `END`."""
        run, session = self.run, self.session
        hooks, cursor = session.hooks, session.cursor
        try:
            hooks.on_fetch_start(run)
            batch = next(cursor.batches, END)
        except BaseException as error:
            hooks.end(error, Callback.on_fetch_end, run)
            raise
        hooks.on_fetch_end(run)
        if batch is END:
            cursor.exhausted = True
            if not session.progress.batch_in_epoch:
                del batch  # the note on the error describes a batch
                raise DataError(boundary.no_batches(session.progress))
            return END
        if session.sync.count_tokens is not None:
            session.sync.read_tokens(batch)
        return session.driver.to_device(batch)

    def begin_batch(self, batch: Any) -> None:
        """Begin a batch of a loop that brings its own data. It is on the device."""
        self._first = batch
        self.next_batch()

    def end_batch(self) -> None:
        """Count the batch, and fire ``on_batch_end``."""
        session = self.session
        step = session.step
        step.may_skip = False  # also if there was no backward pass
        session.progress.finish_batch(*session.sync.end_batch())
        step.counted = True
        self.open = Open.STEP
        session.hooks.on_batch_end(self.run, step.batch, step.outputs)

    def skip_rest(self) -> None:
        """Skip the batches that the step has not taken."""
        while self.next_batch():
            pass

    def end_step(self) -> None:
        """Update the weights, count the step, and fire ``on_step_end``."""
        session = self.session
        if session.step_fn is None:
            finish_window(session)
        session.step.finish()
        boundary.count_step(session)
        self.open = Open.BETWEEN_STEPS
        session.hooks.on_step_end(self.run)

    def _end_steps(self) -> None:
        """Count the epoch if it is whole."""
        session = self.session
        boundary.take_stop(session)
        boundary.check_length(session)
        boundary.count_epoch(session)
        boundary.note_point(session)
        self.open = Open.EPOCH

    def end_epoch(self) -> None:
        """End the open epoch, and all in it."""
        session = self.session
        if self.open > Open.EPOCH:
            self.advance()
            self._end_steps()
        if self.open == Open.EPOCH:
            session.cursor.leave_epoch()
            self.open = Open.RUN
            session.hooks.on_epoch_end(self.run)
            boundary.leave_epoch(session)

    # -- its end -----------------------------------------------------------------------------------

    def leave(self, what: Literal["left", "stopped"], why: str) -> None:
        """End the run of a loop that was left. Ranks that have not left their loop complete its last step.

        A run that was ``left`` for an unknown reason can be continued, as one that a signal ended.
        """
        session = self.session
        if self.open >= Open.STEP:
            self.skip_rest()
        session.sync.requests.ask_stop(session.decide(what, why, data={RESUMABLE: True} if what == "left" else None))
        while self.next_step():
            self.skip_rest()

    def finish(self) -> None:
        """End the open epoch, and set how the run ended."""
        session = self.session
        self.end_epoch()
        boundary.take_stop(session)
        session.end(session.metrics.losses.ended(session.outcome or Outcome("finished", "the limit is reached")))

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        session = self.session
        first = error and self._fail(error)
        self.open = Open.NOTHING
        try:
            with session.hooks.unwinding_of(first):
                try:
                    try:
                        session.hooks.on_fit_end(self.run)
                    finally:
                        boundary.close(session)
                finally:
                    UNDER_WAY.remove(session)
                    session.cursor.close()
            if first is not error and first is not None:
                raise first from error
        finally:
            del first, error  # a traceback holds this frame, and the frame the run

    def _fail(self, raised: BaseException) -> BaseException:
        """End all open sections with an error, and pass it to the callbacks. Return it, or the error of another rank."""
        session, step = self.session, self.session.step
        run, hooks = session.run, session.hooks
        if self.open == Open.BATCH:
            hooks.end(raised, Callback.on_batch_end, run, step.batch, step.outputs)
        if self.open >= Open.STEP:
            hooks.end(raised, Callback.on_step_end, run)
        if self.open >= Open.EPOCH:
            session.cursor.leave_epoch()
            hooks.end(raised, Callback.on_epoch_end, run)
        explain(session, raised)
        error = boundary.fail(session, raised)
        hooks.end(error, Callback.on_exception, run, error)
        return error
