"""The training loop: the steps of a run in their order. The moments are those of `Callback`."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import torch

from cadenza.engine import accumulating, data_points, loader_length
from cadenza.engine.by_hand import ByHand
from cadenza.engine.error_context import explain
from cadenza.engine.evaluation_batches import FITS
from cadenza.engine.session import Session
from cadenza.engine.updating import backward, drop_gradients, finish_window
from cadenza.errors import DataError, out_of_generator
from cadenza.hooks.moments import Callback
from cadenza.status.decisions import Outcome

END: Any = object()  # what `fetch` returns when the loader has no more batches
STEP: Any = object()  # what `course` yields at the beginning of a step
BATCHES_DONE: Any = object()  # and after its last batch


def fit(session: Session) -> None:
    """Train until a limit is reached or a stop is requested. An error is passed to the callbacks, then raised."""
    run_through(course(session))


def run_through(course: Iterator[Any]) -> None:
    """Run a course of which nothing is yielded."""
    try:
        for _ in course:
            pass
    except RuntimeError as error:
        if out_of_generator(error) is error:
            raise
        raise out_of_generator(error) from None


def course(session: Session) -> Iterator[Any]:
    """Train as `fit`. If a loop of the user's own computes the losses, yield where its code runs.

    That is at the beginning of each step (`STEP`), with each batch, and after the last batch of the step (`BATCHES_DONE`).
    """
    run, hooks = session.run, session.hooks
    error: BaseException | None = None
    FITS.under_way.append(session)
    try:
        begin(session)
        if session.cursor.in_epoch:  # restored: on_epoch_end is still to come, even if the epoch has no more steps
            yield from train_epoch(session)
        while not session.sync.over():
            yield from train_epoch(session)
        take_stop(session)
        session.end(session.metrics.losses.ended(session.outcome or Outcome("finished", "the limit is reached")))
    except BaseException as raised:
        error = fail(session, out_of_generator(raised))
        if error is raised or isinstance(error, StopIteration):
            raise
        raise error from raised
    finally:
        with hooks.unwinding_of(error):
            try:
                with closing(session):
                    hooks.on_fit_end(run)
            finally:
                FITS.leave(session)
                session.cursor.close()
                del error  # its traceback holds this frame, and the frame the run


def begin(session: Session) -> None:
    """Fire ``on_fit_start``, and restore what the hooks must not change before the first step."""
    session.by_hand = session.by_hand or ByHand(session)
    accumulating.begin(session)
    data_points.begin(session)
    session.hooks.measure(session.progress)
    session.module_flags.begin(session.driver, session.model, session.decide)
    session.hooks.on_fit_start(session.run)
    session.extra_parameters.check_devices(session.run)
    drop_gradients(session.optimizers)
    session.restored.take_gradients()
    if not session.progress.batch_in_epoch:  # inside an epoch the RNG state is restored when its loader is open
        session.restored.take_rng_state()
    session.due.run(session)  # sanity checks
    if not session.cursor.in_epoch:
        session.due.take_up(session, session.leave_epoch)


def fail(session: Session, raised: BaseException) -> BaseException:
    """Pass an error to the callbacks; return it, or the error of another rank that caused it."""
    explain(session, raised)
    error = session.driver.first_error(raised)
    session.end(Outcome("failed", repr(error)))
    session.hooks.end(error, Callback.on_exception, session.run, error)
    return error


def train_epoch(session: Session) -> Iterator[Any]:
    """Train for one pass over the loader."""
    run, hooks, cursor = session.run, session.hooks, session.cursor
    cursor.in_epoch = True
    with hooks.ending(Callback.on_epoch_end, run):
        try:
            hooks.on_epoch_start(run)
            if session.own_epoch is not None:
                session.own_epoch(session)
            else:
                yield from train_steps(session)
        finally:
            cursor.leave_epoch()
    session.leave_epoch()


def train_steps(session: Session) -> Iterator[Any]:
    """Do the steps of an epoch, and count the epoch if it is whole."""
    progress, cursor = session.progress, session.cursor
    if not progress.finished and not cursor.exhausted:
        cursor.batches = cursor.source.batches(progress.epoch, progress.batch_in_epoch)
    session.restored.take_rng_state()  # the next draw is that of the step after the checkpoint
    session.due.take_up(session, session.settle)
    step = session.own_step or train_step
    while not session.sync.leaving_epoch() and (yield from step(session)):
        session.settle(after_step=True)
    take_stop(session)
    loader_length.check(session)
    session.finish_epoch()
    data_points.look(session)


def train_step(session: Session) -> Generator[Any, None, bool]:
    """Do one update, from the batches of one accumulation window. Return False if the loader has no more batches."""
    run, hooks, step, window = session.run, session.hooks, session.step, session.step.window
    batch = fetch(session)  # the only other name of a batch: one more would keep the first of a window in memory
    if batch is END:
        return False
    window.clear()
    step.left = False
    session.cursor.at_boundary = False
    try:
        hooks.on_step_start(run)
        if session.own_loop:
            yield STEP
        yield from train_batch(session, batch)
        while window.seen < window.size and (batch := fetch(session)) is not END:
            yield from train_batch(session, batch)
        if session.own_loop:
            yield BATCHES_DONE
        if session.step_fn is None:
            finish_window(session)
        step.finish()
        session.finish_step()
    except BaseException as error:
        hooks.end(error, Callback.on_step_end, run)
        raise
    hooks.on_step_end(run)
    return True


def fetch(session: Session) -> Any:
    """Return the next batch, on the device, or `END`."""
    run, hooks, cursor = session.run, session.hooks, session.cursor
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
            raise DataError(_no_batches(session))
        return END
    if session.tokens is not None:
        session.sync.tokens.read(batch)
    return session.driver.to_device(batch)


def train_batch(session: Session, batch: Any) -> Iterator[Any]:
    """Add the gradients of one batch, unless a callback skips it; a ``step_fn`` does this, and the update, itself."""
    run, hooks, step, sync = session.run, session.hooks, session.step, session.sync
    step.begin_batch(batch)
    outputs = step.outputs
    try:
        hooks.on_batch_start(run, batch)
        step.window.seen += 1
        sync.begin_batch(batch)
        if step.skipping and session.own_step is None:
            pass
        elif session.own_loop:
            if not step.left:
                yield batch
        elif session.step_fn is not None:
            outputs.take(session.step_fn(run, batch))
            step.window.losses.append(torch.as_tensor(outputs["loss"]).detach())
        else:
            outputs.take(session.compute(session.model, batch))
            backward(session, outputs, step.window)
        step.may_skip = False  # also if there was no backward pass
        session.progress.finish_batch(*sync.end_batch())
        step.counted = True
    except BaseException as error:
        hooks.end(error, Callback.on_batch_end, run, batch, outputs)
        raise
    hooks.on_batch_end(run, batch, outputs)


def take_stop(session: Session) -> None:
    """Call ``on_stop``, once, if a stop was requested."""
    session.sync.leaves()  # a request of the last step of an epoch may not be known to all ranks yet
    session.metrics.deliver(session.run, wait=False)  # nor its record have been complete
    stop = session.sync.take_stop()
    if stop is not None and session.outcome is None:
        session.end(Outcome(session.sync.requests.kind, stop.why))
        if session.sync.requests.back is None:
            session.hooks.on_stop(session.run, stop.why)


def _no_batches(session: Session) -> str:
    again = "" if session.progress.epoch == 0 else " again: an iterator is used up after one pass, a loader is not"
    return (
        f"the training loader gave no batch in epoch {session.progress.epoch + 1}. Give one that has at least one batch"
        f"{again}; with drop_last=True a data set smaller than a batch has none."
    )
