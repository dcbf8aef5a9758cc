"""The training loop: what a run does, in the order in which it happens. The moments are those of `Callback`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from cadenza.engine import agreement, lengths, suspension
from cadenza.engine.error_context import explain
from cadenza.engine.outputs import checked_loss, samples_in
from cadenza.errors import DataError
from cadenza.hooks.fan_out import Left
from cadenza.hooks.moments import Callback
from cadenza.loading.batches import Group, distinct_gradients
from cadenza.status.decisions import Outcome
from cadenza.status.outputs import Outputs

if TYPE_CHECKING:
    from cadenza.run import Run

END: Any = object()  # what `fetch` returns when the loader has no more


def fit(run: Run) -> None:
    """Train until a limit is reached or a stop is taken. An error is shown to the callbacks, then raised."""
    hooks, progress = run.hooks, run.progress
    run.model.train()
    try:
        run.switches.begin(run)
        hooks.on_fit_start(run)
        run.outside.check_devices(run)
        drop_gradients(run.optimizers)
        for parameter, gradient in run.gradients:
            parameter.grad = gradient
        run.gradients = []
        if not progress.batch_in_epoch:  # inside an epoch the streams are restored when its loader is open
            run.restore_streams()
        if suspension.take_up(run, Callback.on_epoch_end):
            run.requests.drop_epoch()
            run.settle()
        if run.in_epoch:  # restored: its end is still to be heard, even if it has no more steps
            train_epoch(run)
        while not run.over:
            train_epoch(run)
        take_stop(run)
        run.outcome = run.losses.ended(run, run.outcome or Outcome("finished", "the limit is reached"))
    except Left as left:
        leave(run, left)
    except BaseException as raised:
        explain(run, raised)
        error = run.driver.first_error(raised)
        run.outcome = Outcome("failed", repr(error))
        hooks.on_exception(run, error)
        if error is raised:
            raise
        raise error from raised
    finally:
        try:
            hooks.on_fit_end(run)
        finally:
            run.close()


def train_epoch(run: Run) -> None:
    """Do the steps of one pass over the loader."""
    hooks, progress = run.hooks, run.progress
    run.in_epoch = True
    try:
        hooks.on_epoch_start(run)
        if not progress.finished and not run.exhausted:
            run.batches = run.source.batches(progress.epoch, progress.batch_in_epoch)
        run.restore_streams()  # the next draw is that of the step after the checkpoint
        if suspension.take_up(run, Callback.on_step_end):
            run.settle()
        while not run.leaving_epoch and train_step(run):
            run.settle()
        take_stop(run)
        lengths.check(run)
        run.finish_epoch()
    except Left as left:
        leave(run, left)
    finally:
        run.batches, run.in_epoch, run.exhausted = iter(()), False, False
        hooks.on_epoch_end(run)
    run.requests.drop_epoch()  # one that came this late has nothing left to end
    run.losses.look_at_epoch(run)
    run.settle()


def fetch(run: Run) -> Any:
    """Return the next batch, on the device, or `END`."""
    hooks = run.hooks
    try:
        hooks.on_fetch_start(run)
        batch = next(run.batches, END)
    finally:
        hooks.on_fetch_end(run)
    if batch is END:
        run.exhausted = True
        if not run.progress.batch_in_epoch:
            raise DataError(_no_batches(run))
        return END
    return run.driver.to_device(batch)


def train_step(run: Run) -> bool:
    """Do one update, from as many batches as make a group; fewer if the loader has no more. Return False if it has none."""
    hooks, group = run.hooks, run.group
    batch = fetch(run)  # the only name of a batch outside of `run`: a second one would keep the first of a group in memory
    if batch is END:
        return False
    group.clear()
    run.at_border = False
    try:
        hooks.on_step_start(run)
        train_batch(run, batch)
        while group.seen < group.size and (batch := fetch(run)) is not END:
            train_batch(run, batch)
        if group.losses and run.step_fn is None:
            if group.unreduced:
                run.driver.reduce_gradients(run.model.parameters())
            if not group.complete:
                complete_gradients(run)
            update(run, run.optimizers)
        run.finish_step()
    finally:
        hooks.on_step_end(run)
    return True


def train_batch(run: Run, batch: Any) -> None:
    """Add the gradients of one batch, unless a callback skips it."""
    hooks, group = run.hooks, run.group
    run.begin_batch(batch)
    try:
        hooks.on_batch_start(run, batch)
        group.seen += 1
        if run.driver.reduces:
            samples = learn_on_all_ranks(run, batch)
        else:
            samples = run.source.size_of(batch)
            if not run.skipping:
                learn(run, batch)
            if (told := samples_in(run.outputs)) is not None:
                samples = told
        run.may_skip = False  # also where there was no backward
        run.progress.finish_batch(samples)
    finally:
        hooks.on_batch_end(run, batch, run.outputs)


def learn(run: Run, batch: Any) -> None:
    """Run the batch forward and backward; or leave both, and the update, to the user's ``step_fn``."""
    if run.step_fn is not None:
        run.outputs.take(run.step_fn(run, batch))
        run.group.losses.append(torch.as_tensor(run.outputs["loss"]).detach())
    else:
        run.outputs.take(run.compute(run.model, batch))
        backward(run, run.outputs, run.group)


def learn_on_all_ranks(run: Run, batch: Any) -> int:
    """Do the same where there are others: gradients are reduced once a step, with its last batch. Return all ranks' samples."""
    group = run.group
    agreement.skip(run, Callback.on_batch_start)
    run.word.give(run, batch)
    if run.skipping:
        pass
    elif group.seen < group.size and not run.progress.at_last_batch and agreement.may_hold_back(run):
        with run.driver.no_sync(run.model):
            learn(run, batch)
        group.unreduced |= not run.skipping
    else:
        learn(run, batch)
        group.unreduced &= run.skipping
    return run.word.take(run)


def backward(run: Run, outputs: Outputs, group: Group | None = None) -> None:
    """Add the gradients of ``outputs["loss"]``: of its share, if the batch belongs to a group."""
    hooks = run.hooks
    run.may_skip = True  # again: a step_fn may come here more than once
    hooks.on_before_backward(run, outputs)
    run.may_skip = False
    if run.driver.reduces:
        agreement.skip(run, Callback.on_before_backward)
    if run.skipping:
        return
    loss = checked_loss(outputs["loss"], run.model)
    share = 1.0 if group is None else group.share_of(loss, dict.get(outputs, "weight"))
    if type(share) is not float or share:  # 0 times a gradient that is NaN is NaN, so a weight of 0 needs no backward pass
        run.precision.backward(loss, share)
    hooks.on_after_backward(run, outputs)


def complete_gradients(run: Run) -> None:
    """Make the sum of the shares a mean: a short group is normalised by its own length, a weighted one by its weights."""
    gradients = distinct_gradients(run.optimizers)
    if gradients:
        torch._foreach_mul_(gradients, run.group.correction())


def update(run: Run, optimizers: Sequence[Optimizer]) -> None:
    """Update the weights, and drop the gradients."""
    hooks = run.hooks
    run.updating = optimizers
    if run.outside.parameters:
        run.outside.before_update(run, optimizers)
    run.precision.unscale(optimizers)
    hooks.on_before_optimizer_step(run)
    run.left_out = left_out = run.precision.step(optimizers)
    run.updated = not left_out or len(left_out) < len(optimizers)
    hooks.on_after_optimizer_step(run)
    hooks.on_before_zero_grad(run)
    drop_gradients(optimizers)
    hooks.on_after_zero_grad(run)


def drop_gradients(optimizers: Sequence[Optimizer]) -> None:
    """Set every gradient to None: what ``zero_grad`` does, at a tenth of its cost."""
    for optimizer in optimizers:
        if type(optimizer).zero_grad is Optimizer.zero_grad:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            optimizer.zero_grad()


def take_stop(run: Run) -> None:
    """Tell the callbacks, once, that a stop is taken."""
    agreement.leaving(run)  # one that was asked for in the last step of an epoch may not be known to all yet
    if run.stopping is not None and run.outcome is None:
        run.outcome = Outcome(run.requests.kind, run.stopping.why)
        run.hooks.on_stop(run, run.stopping.why)


def leave(run: Run, left: Left) -> None:
    """Handle the signal that interrupted an evaluation: save the run in the middle of the moment."""
    if suspension.suspend(run, left):
        take_stop(run)
        suspension.finish(run, left)


def _no_batches(run: Run) -> str:
    again = "" if run.progress.epoch == 0 else " again: an iterator is used up after one pass, a loader is not"
    return (
        f"the training loader gave no batch in epoch {run.progress.epoch + 1}. Give one that has at least one batch{again}; "
        "with drop_last=True a data set smaller than a batch has none."
    )
