"""Restore a trainer from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cadenza.compat.fastnlp.core.controllers.stepping import SteppingTrainer
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.errors import CheckpointMismatchError
from cadenza.loading.loaders import length_of
from cadenza.optim.optimizers import load_state


def restore(trainer: SteppingTrainer, kept: Mapping[str, Any]) -> None:
    """Restore everything but the model and the states of callbacks.

    Raises:
        CheckpointMismatchError: The checkpoint has other optimizers, or batches of another size that do not fit.
    """
    optimizers, states = trainer.driver.optimizers, kept["optimizers_state_dict"]
    if len(states) != len(optimizers):
        raise CheckpointMismatchError(f"the checkpoint holds {len(states)} optimizers, but the trainer has {len(optimizers)}")
    batches = _batches_done(trainer, kept)
    for optimizer, state in zip(optimizers, states.values(), strict=True):
        load_state(optimizer, state)
    trainer.trainer_state.load_state_dict({**kept["trainer_state"], "batch_idx_in_epoch": batches})
    own = dict(kept.get("cadenza", {}))  # missing in a checkpoint of fastNLP itself
    trainer.state.clear()
    trainer.state.update(own.pop("state", {}))
    trainer.carried = Carried(**own)


def _batches_done(trainer: SteppingTrainer, kept: Mapping[str, Any]) -> int:
    """Return the number of completed batches of the epoch, in batches of the trainer's loader."""
    done: int = kept["trainer_state"]["batch_idx_in_epoch"]
    saved_size: int | None = kept["sampler_states"].get("batch_size")
    now: int | None = getattr(trainer.train_dataloader, "batch_size", None)
    if not done or saved_size is None or now is None or saved_size == now:
        return done
    samples = length_of(getattr(trainer.train_dataloader, "dataset", None))
    consumed = done * saved_size if samples is None else min(done * saved_size, samples)
    if consumed % now and consumed != samples:
        raise CheckpointMismatchError(
            f"the epoch continues after {consumed} samples in batches of {saved_size}; batches of {now} do not end there. "
            f"Use batches of {saved_size}, or of a size that divides {consumed}."
        )
    return math.ceil(consumed / now)
