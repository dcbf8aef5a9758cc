"""The parts of a step, for a ``batch_step_fn``: the native ones, with fastNLP's division by ``accumulation_steps``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cadenza.compat.fastnlp.core.utils.utils import loss_in
from cadenza.compat.fastnlp.session import Session
from cadenza.engine import loop
from cadenza.engine.outputs import parts_of
from cadenza.loading.batches import distinct_gradients

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.trainer import Trainer


def forward(trainer: Trainer, function: Callable[[Any], Any], batch: Any) -> Any:
    """Return what the model's method makes of a batch.

    Of several processes inside of the driver's wrapper, which reduces the gradients of what was computed there, and no others.
    """
    wrapper, model = None if trainer.live is None else trainer.live.model, trainer.model
    if wrapper is None or wrapper is model:
        return function(batch)
    own = vars(model).get("forward")

    def once(batch: Any) -> Any:
        put_back()  # the method may call the model
        return function(batch)

    def put_back() -> None:
        vars(model).pop("forward", None)
        if own is not None:
            vars(model)["forward"] = own

    vars(model)["forward"] = once
    try:
        return wrapper(batch)
    finally:
        put_back()


def note_outputs(trainer: Trainer, outputs: Any) -> None:
    """Let callbacks see outputs that are no dict as they are."""
    Session.of(trainer.running()).outputs = None if isinstance(outputs, Mapping) else outputs


def whole_step(trainer: Trainer, batch: Any) -> dict[str, Any]:
    """Have the user's function do the step; return its outputs."""
    run = trainer.running()
    assert trainer.batch_step_fn is not None
    trainer.batch_step_fn(trainer, batch)
    loss = dict.get(run.outputs, "loss")
    return {**run.outputs, "loss": torch.tensor(torch.nan) if loss is None else loss.detach()}


def backward(trainer: Trainer, outputs: Any) -> None:
    """Add the gradients of a batch's share of the loss."""
    run = trainer.running()
    loss_in(outputs)  # says what is wrong
    note_outputs(trainer, outputs)
    run.outputs.update(parts_of(outputs))
    if trainer.batch_idx_in_epoch % trainer.accumulation_steps == 0:
        trainer.group.clear()
    trainer.group.seen += 1
    with run.precision.outside():
        loop.backward(run, run.outputs, trainer.group)


def step(trainer: Trainer) -> None:
    """Update the weights, if the group is complete."""
    run = trainer.running()
    if not _complete(trainer):
        return
    with run.precision.outside():
        if trainer.group.losses and not trainer.group.complete:
            torch._foreach_mul_(distinct_gradients(run.optimizers), trainer.group.correction())
        run.updating = run.optimizers
        if run.outside.parameters:
            run.outside.before_update(run, run.optimizers)
        run.precision.unscale(run.optimizers)
        run.hooks.on_before_optimizer_step(run)
        run.left_out = run.precision.step(run.optimizers)
        run.updated = len(run.left_out) < len(run.optimizers)
        run.hooks.on_after_optimizer_step(run)


def zero_grad(trainer: Trainer) -> None:
    """Drop the gradients, if the group is complete."""
    run = trainer.running()
    if _complete(trainer):
        run.hooks.on_before_zero_grad(run)
        loop.drop_gradients(run.optimizers)
        run.hooks.on_after_zero_grad(run)


def _complete(trainer: Trainer) -> bool:
    """Return whether the batch under way is the last of its group, or of the epoch."""
    done = trainer.batch_idx_in_epoch + 1
    last = done == trainer.num_batches_per_epoch or trainer.global_forward_batches + 1 == trainer.n_batches
    return bool(done % trainer.accumulation_steps == 0 or last)
