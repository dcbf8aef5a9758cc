"""The training loop: the steps of a run in their order. The moments are those of `Callback`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from cadenza.engine import accumulating, loader_length, suspension
from cadenza.engine.error_context import explain
from cadenza.engine.evaluation_batches import FITS
from cadenza.engine.outputs import checked_loss
from cadenza.engine.session import Session
from cadenza.engine.window import AccumulationWindow
from cadenza.errors import DataError
from cadenza.hooks.fan_out import Left
from cadenza.hooks.moments import Callback
from cadenza.optim.parameters import distinct_gradients
from cadenza.status.decisions import Outcome
from cadenza.status.outputs import Outputs

END: Any = object()  # what `fetch` returns when the loader has no more batches


def fit(session: Session) -> None:
    """Train until a limit is reached or a stop is requested. An error is passed to the callbacks, then raised."""
    run, hooks = session.run, session.hooks
    error: BaseException | None = None
    FITS.under_way.append(session)
    try:
        begin(session)
        if session.cursor.in_epoch:  # restored: on_epoch_end is still to come, even if the epoch has no more steps
            train_epoch(session)
        while not session.sync.over():
            train_epoch(session)
        take_stop(session)
        session.end(session.metrics.losses.ended(session.outcome or Outcome("finished", "the limit is reached")))
    except Left as left:
        leave(session, left)
    except BaseException as raised:
        error = fail(session, raised)
        if error is raised:
            raise
        raise error from raised
    finally:
        with hooks.unwinding_of(error):
            try:
                hooks.on_fit_end(run)
            finally:
                session.close()
                FITS.under_way.pop()


def begin(session: Session) -> None:
    """Fire ``on_fit_start``, and restore what the hooks must not change before the first step."""
    session.own_step = backward, update
    accumulating.begin(session)
    session.model.train()
    session.module_flags.begin(session.driver, session.model, session.decide)
    session.hooks.on_fit_start(session.run)
    session.extra_parameters.check_devices(session.run)
    drop_gradients(session.optimizers)
    session.restored.take_gradients()
    if not session.progress.batch_in_epoch:  # inside an epoch the RNG state is restored when its loader is open
        session.restored.take_rng_state()
    if suspension.take_up(session, Callback.on_epoch_end):
        session.sync.requests.drop_epoch()
        session.settle()


def fail(session: Session, raised: BaseException) -> BaseException:
    """Pass an error to the callbacks; return it, or the error of another rank that caused it."""
    explain(session, raised)
    error = session.driver.first_error(raised)
    session.end(Outcome("failed", repr(error)))
    session.hooks.end(error, Callback.on_exception, session.run, error)
    return error


def train_epoch(session: Session) -> None:
    """Train for one pass over the loader."""
    run, hooks, cursor = session.run, session.hooks, session.cursor
    cursor.in_epoch = True
    with hooks.ending(Callback.on_epoch_end, run):
        try:
            hooks.on_epoch_start(run)
            (session.own_epoch or train_steps)(session)
        except Left as left:
            leave(session, left)
        finally:
            cursor.leave_epoch()
    session.leave_epoch()


def train_steps(session: Session) -> None:
    """Do the steps of an epoch, and count the epoch if it is whole."""
    progress, cursor = session.progress, session.cursor
    if not progress.finished and not cursor.exhausted:
        cursor.batches = cursor.source.batches(progress.epoch, progress.batch_in_epoch)
    session.restored.take_rng_state()  # the next draw is that of the step after the checkpoint
    if suspension.take_up(session, Callback.on_step_end):
        session.settle()
    while not session.sync.leaving_epoch() and train_step(session):
        session.settle()
    take_stop(session)
    loader_length.check(session)
    session.finish_epoch()


def train_step(session: Session) -> bool:
    """Do one update, from the batches of one accumulation window. Return False if the loader has no more batches."""
    run, hooks, step, window = session.run, session.hooks, session.step, session.step.window
    batch = fetch(session)  # the only other name of a batch: one more would keep the first of a window in memory
    if batch is END:
        return False
    window.clear()
    session.cursor.at_boundary = False
    try:
        hooks.on_step_start(run)
        train_batch(session, batch)
        while window.seen < window.size and (batch := fetch(session)) is not END:
            train_batch(session, batch)
        if window.losses and session.step_fn is None:
            if window.unreduced or not window.complete:
                complete_gradients(session)
            update(session, session.optimizers)
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


def train_batch(session: Session, batch: Any) -> None:
    """Add the gradients of one batch, unless a callback skips it; a ``step_fn`` does this, and the update, itself."""
    run, hooks, step, sync = session.run, session.hooks, session.step, session.sync
    step.begin_batch(batch)
    outputs = step.outputs
    try:
        hooks.on_batch_start(run, batch)
        step.window.seen += 1
        sync.begin_batch(batch)
        if step.skipping:
            pass
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


def backward(session: Session, outputs: Outputs, window: AccumulationWindow | None = None) -> None:
    """Add the gradients of ``outputs["loss"]``, times its loss scale if the batch belongs to an accumulation window."""
    run, hooks, step = session.run, session.hooks, session.step
    step.may_skip = True  # again: a step_fn may come here more than once
    hooks.on_before_backward(run, outputs)
    step.may_skip = False
    session.sync.agree_on_skip(Callback.on_before_backward)
    if step.skipping:
        return
    loss = checked_loss(outputs["loss"], session.model)
    scale = 1.0 if window is None else window.add(loss, dict.get(outputs, "weight"))
    if type(scale) is not float or scale:  # 0 times a gradient that is NaN is NaN, so a weight of 0 needs no backward pass
        session.precision.backward(loss, scale)
    hooks.on_after_backward(run, outputs)


def complete_gradients(session: Session) -> None:
    """Reduce gradients that were held back, and make the scaled sum a mean.

    A short window is divided by its own length, a weighted one by its weights.
    """
    window = session.step.window
    if window.unreduced:
        session.driver.reduce_gradients(session.model.parameters())
    gradients = distinct_gradients(session.optimizers)
    if gradients and not window.complete:
        torch._foreach_mul_(gradients, window.correction())


def update(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Update the weights, and drop the gradients."""
    run, hooks = session.run, session.hooks
    update_weights(session, optimizers)
    hooks.on_before_zero_grad(run)
    drop_gradients(optimizers)
    hooks.on_after_zero_grad(run)


def update_weights(session: Session, optimizers: Sequence[Optimizer]) -> None:
    """Let `optimizers` step, with the moments around it. Gradients stay."""
    run, hooks, step = session.run, session.hooks, session.step
    step.updating = optimizers
    if session.extra_parameters.parameters:
        session.extra_parameters.before_update(run, optimizers)
    session.precision.unscale(optimizers)
    hooks.on_before_optimizer_step(run)
    step.left_out = left_out = session.precision.step(optimizers)
    step.updated = not left_out or len(left_out) < len(optimizers)
    hooks.on_after_optimizer_step(run)


def drop_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Set every gradient to None, as ``zero_grad`` does, at a tenth of its cost."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()


def take_stop(session: Session) -> None:
    """Call ``on_stop``, once, if a stop was requested."""
    session.sync.leaves()  # a request of the last step of an epoch may not be known to all ranks yet
    stop = session.sync.take_stop()
    if stop is not None and session.outcome is None:
        session.end(Outcome(session.sync.requests.kind, stop.why))
        session.hooks.on_stop(session.run, stop.why)


def leave(session: Session, left: Left) -> None:
    """Handle the signal that interrupted an evaluation: save the run in the middle of the moment."""
    with session.hooks.unwinding_of(left):
        if suspension.suspend(session, left):
            take_stop(session)
            suspension.finish(session, left)


def _no_batches(session: Session) -> str:
    again = "" if session.progress.epoch == 0 else " again: an iterator is used up after one pass, a loader is not"
    return (
        f"the training loader gave no batch in epoch {session.progress.epoch + 1}. Give one that has at least one batch"
        f"{again}; with drop_last=True a data set smaller than a batch has none."
    )
