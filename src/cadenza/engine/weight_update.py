"""The backward pass of a batch and the update of the weights, with the moments around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.drivers.sharding import locals_of
from cadenza.engine.objective import checked_loss
from cadenza.engine.session import Loops, Session
from cadenza.engine.step_state import AccumulationWindow, number_on_host
from cadenza.hooks.moments import Callback
from cadenza.optim.parameters import distinct_gradients, parameters_of
from cadenza.records.scalars import as_number
from cadenza.status.outputs import Outputs

if TYPE_CHECKING:
    from cadenza.run import Run

StepOptimizers = Callable[[Sequence[Optimizer]], Sequence[Optimizer]]
"""Lets optimizers step, and returns those that skipped the update, as `Precision.step`."""


def updated_parameters(run: Run) -> Iterator[Tensor]:
    """Yield what ``run.window.parameters`` lists, in less time."""
    return parameters_of(run._session.step.updating)


def backward(session: Session, outputs: Outputs, window: AccumulationWindow | None = None) -> None:
    """Add the gradients of ``outputs["loss"]``, times its loss scale if the batch belongs to an accumulation window."""
    run, hooks, step = session.run, session.hooks, session.step
    step.may_skip = True  # again: a step_fn may come here more than once
    hooks.on_before_backward(run, outputs)
    step.may_skip = False
    session.sync.agree_on_skip(Callback.on_before_backward)
    if step.skipping:
        return
    weight = dict.get(outputs, "weight")
    unit = session.sync.before_backward(weight)
    if step.dropped and session.loop is not Loops.FIT:
        return
    loss = checked_loss(outputs["loss"], session.model)
    if step.dropped and window is not None:
        window.leave_out(loss, weight, unit)
        session.sync.take_no_part(loss)
        hooks.on_after_backward(run, outputs)  # as on the other ranks, which may communicate there
        return
    scale = 1.0 if window is None else window.add(loss, weight, unit)
    # 0 times a gradient that is NaN is NaN, so a batch of weight 0 has no backward pass, if the other ranks can do without it.
    if type(scale) is not float or scale or (unit is not None and not session.driver.adds_nothing):
        session.precision.backward(loss, scale)
    elif unit is not None:
        session.sync.take_no_part(loss)
    hooks.on_after_backward(run, outputs)


def finish_window(session: Session) -> None:
    """Complete the gradients of an accumulation window, and update the weights, once. Every rank must call this."""
    window = session.step.window
    if window.applied:
        return
    window.applied = True
    if session.verbs is not None:
        session.verbs.check_window()
    if session.loop is not Loops.FIT and session.sync.several:
        counted = complete_uneven(session)
    else:
        counted = window.counts(session.driver.data_world_size)
        if counted:
            complete_window(session)
        elif window.left_out and not counted:
            drop_gradients(session.optimizers)  # the zeros that ranks have added for batches that none of them counts
    if counted:
        update(session, session.optimizers)


def complete_uneven(session: Session) -> bool:
    """Make the gradients of all ranks a mean over their batches; return whether there is one. Every rank must call this.

    A loop of the user's own calls the user's own module, so no gradient is reduced yet, and a rank may leave out batches.
    """
    window, driver = session.step.window, session.driver
    on_host = number_on_host(window.total) if window.weights else 0.0
    own = [len(window.losses), len(window.weights), on_host or 0.0, on_host is None]
    batches, weighted, total, on_device = driver.average_gradients(session.module.parameters(), own)
    if not batches:
        return False
    factor: float | Tensor = window.size * driver.data_world_size / batches
    if on_device:
        mean = driver.reduce(as_number(window.total, driver.device, torch.float32))
        window.mean_weight = mean
        factor = window.size / (mean + (mean == 0))
    elif weighted:
        window.mean_weight = total / driver.data_world_size
        factor = window.size * driver.data_world_size / (total or driver.data_world_size)
    if (weighted or factor != 1.0) and (gradients := distinct_gradients(session.optimizers)):
        _multiply(session, gradients, factor)
    return True


def complete_window(session: Session) -> None:
    """Reduce gradients that were held back, and make the scaled sum a mean.

    A short window is divided by its own length, a weighted one by its weights.
    """
    window = session.step.window
    if window.complete and not window.unreduced:
        return
    if window.unreduced:
        session.driver.reduce_gradients(session.model.parameters())
    gradients = distinct_gradients(session.optimizers)
    if gradients and not window.complete:
        _multiply(session, gradients, window.correction(session.driver.data_world_size))


def _multiply(session: Session, gradients: list[Tensor], factor: float | Tensor) -> None:
    # torch multiplies no shards together that lie on different groups of ranks.
    torch._foreach_mul_(locals_of(gradients) if session.driver.shards else gradients, factor)


def update(session: Session, optimizers: Sequence[Optimizer], take: StepOptimizers | None = None) -> None:
    """Update the weights, and drop the gradients."""
    run, hooks = session.run, session.hooks
    update_weights(session, optimizers, take)
    hooks.on_before_zero_grad(run)
    drop_gradients(optimizers)
    hooks.on_after_zero_grad(run)


def update_weights(session: Session, optimizers: Sequence[Optimizer], take: StepOptimizers | None = None) -> None:
    """Let `optimizers` step, with the moments around it. Gradients stay.

    Args:
        session: The session of the run.
        optimizers: The optimizers.
        take: What lets them step. None: the precision of the run.
    """
    run, hooks, step = session.run, session.hooks, session.step
    step.updating = optimizers
    if session.extra_parameters.parameters:
        session.extra_parameters.before_update(run, optimizers)
    session.precision.unscale(optimizers)
    hooks.on_before_optimizer_step(run)
    step.in_update = True
    step.left_out = left_out = (take or session.precision.step)(optimizers)
    step.in_update = False
    step.updates += 1
    step.updated = not left_out or len(left_out) < len(optimizers)
    if type(session.driver).after_update is not Driver.after_update:  # a call less in each step
        session.driver.after_update(session.model, session.progress.step + 1)
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
