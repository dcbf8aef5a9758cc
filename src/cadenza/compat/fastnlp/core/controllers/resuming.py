"""Give a trainer back what a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cadenza.compat.fastnlp.core.controllers.stepping import SteppingTrainer
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.errors import CheckpointMismatchError
from cadenza.loading.loaders import length_of


def restore(trainer: SteppingTrainer, kept: Mapping[str, Any]) -> None:
    """Take back all but the model and the callbacks' states.

    Raises:
        CheckpointMismatchError: The optimizers, or the batches, are others.
    """
    optimizers, states = trainer.driver.optimizers, kept["optimizers_state_dict"]
    if len(states) != len(optimizers):
        raise CheckpointMismatchError(f"the checkpoint holds {len(states)} optimizers, and the trainer has {len(optimizers)}")
    batches = _batches_done(trainer, kept)
    for optimizer, state in zip(optimizers, states.values(), strict=True):
        optimizer.load_state_dict(state)
    trainer.trainer_state.load_state_dict({**kept["trainer_state"], "batch_idx_in_epoch": batches})
    own = dict(kept.get("cadenza", {}))  # one that fastNLP wrote has none
    trainer.state.clear()
    trainer.state.update(own.pop("state", {}))
    trainer.carried = Carried(**own)


def _batches_done(trainer: SteppingTrainer, kept: Mapping[str, Any]) -> int:
    """Return how many batches of the trainer's loader hold what was done of the epoch, which may have had another size."""
    done: int = kept["trainer_state"]["batch_idx_in_epoch"]
    former: int | None = kept["sampler_states"].get("batch_size")
    now: int | None = getattr(trainer.train_dataloader, "batch_size", None)
    if not done or former is None or now is None or former == now:
        return done
    samples = length_of(getattr(trainer.train_dataloader, "dataset", None))
    consumed = done * former if samples is None else min(done * former, samples)
    if consumed % now and consumed != samples:
        raise CheckpointMismatchError(
            f"{consumed} samples of the epoch were read in batches of {former}, and the trainer reads batches of {now}, which "
            f"do not end there. Give batches of {former}, or of a size that divides {consumed}."
        )
    return math.ceil(consumed / now)
