"""``fastNLP.core.controllers.utils.state``: the trainer's counters and user values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class MissingItemError(AttributeError, ValueError):
    """``trainer.state`` has no such entry. fastNLP raises a ``ValueError``; ``hasattr`` needs an ``AttributeError``."""


class State(dict[str, Any]):
    """A dict with entries that can also be read as attributes; saved by ``save_checkpoint`` and restored.

    >>> state = State(loss=0.5)
    >>> state.loss
    0.5
    >>> state.loss = 1
    Traceback (most recent call last):
        ...
    AttributeError: write state['loss'] = ...: attributes of the state are read-only
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise MissingItemError(f"the state has no {name!r}; it has {list(self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"write state[{name!r}] = ...: attributes of the state are read-only")


@dataclass
class TrainerState:
    """The counters of a training. They count completed work."""

    n_epochs: int | None = None
    """The total number of epochs; None until it is known."""
    cur_epoch_idx: int = 0
    """The number of completed epochs."""
    global_forward_batches: int = 0
    """The total number of completed batches."""
    batch_idx_in_epoch: int = 0
    """The number of completed batches in the current epoch."""
    num_batches_per_epoch: int | None = None
    """The number of batches in an epoch; None before the training."""
    n_batches: int | None = None
    """The total number of batches; before the training, the argument of the trainer."""

    def state_dict(self) -> dict[str, int]:
        """Return the counters for a checkpoint."""
        return {name: getattr(self, name) for name in _KEPT}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore the counters that `state_dict` returned.

        Raises:
            AssertionError: There are other keys.
        """
        if unknown := state_dict.keys() - set(_KEPT):
            raise AssertionError(f"expected {_KEPT}; got {sorted(unknown)} besides")
        for name, value in state_dict.items():
            setattr(self, name, value)


_KEPT = ("cur_epoch_idx", "global_forward_batches", "batch_idx_in_epoch")
