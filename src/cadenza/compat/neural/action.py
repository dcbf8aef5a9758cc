"""Callbacks of NeMo 0.10: six events without arguments. The callback's own attributes show the training."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from cadenza.compat.neural.adapted import AdaptedRun
from cadenza.compat.neural.events import counters, listeners
from cadenza.compat.neural.logs import Logger, logging
from cadenza.hooks.moments import BaseCallback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from cadenza.hooks.listener import Listener
    from cadenza.run import Run

EVENT_OF = {
    "on_action_start": "on_action_start",
    "on_epoch_start": "on_epoch_start",
    "on_iteration_start": "on_step_start",
    "on_iteration_end": "on_step_end",
    "on_epoch_end": "on_epoch_end",
    "on_action_end": "on_action_end",
}
"""Maps each hook to the event of the table that calls it. An iteration is an update."""


class Action:
    """The current training, with the attributes of NeMo 0.10."""

    step: int
    epoch_num: int

    def __init__(self, adapted: AdaptedRun, event: str) -> None:
        self.adapted = adapted
        self.step, self.epoch_num = counters(adapted, event)

    @property
    def run(self) -> Run:
        """The native run."""
        return self.adapted.run

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the training."""
        return list(self.run.optimizers)


class ActionCallback(BaseCallback):
    """Base class with six events. Override those you need and call ``super().__init__()``."""

    _action: Action | None = None

    def __init__(self) -> None:
        self._action = None

    # -- events ---------------------------------------------------------------------------------------

    def on_action_start(self) -> None:
        """Called before the first epoch."""

    def on_epoch_start(self) -> None:
        """Called before the first iteration of an epoch."""

    def on_iteration_start(self) -> None:
        """Called before the first batch of an update."""

    def on_iteration_end(self) -> None:
        """Called after an update; `registered_tensors` are those of its last batch."""

    def on_epoch_end(self) -> None:
        """Called after the last iteration of an epoch."""

    def on_action_end(self) -> None:
        """Called at the end of the training, unless an error ended it."""

    # -- attributes ----------------------------------------------------------------------------------

    @property
    def action(self) -> Action:
        """The current training.

        Raises:
            RuntimeError: Outside the events.
        """
        if self._action is None:
            raise RuntimeError(f"{type(self).__name__} is in no training; its attributes can be read only in its events")
        return self._action

    @property
    def step(self) -> int:
        """The index of the current update, or of the one that has just ended. In `on_action_end` the number of updates."""
        return self.action.step

    @property
    def epoch_num(self) -> int:
        """The index of the current epoch, or of the one that has just ended. In `on_action_end` the number of epochs."""
        return self.action.epoch_num

    @property
    def local_rank(self) -> int | None:
        """The rank of this process on its machine; None in a run on one process."""
        return self.action.adapted.local_rank

    @property
    def global_rank(self) -> int | None:
        """The rank of this process; None in a run on one process."""
        return self.action.adapted.rank

    @property
    def registered_tensors(self) -> dict[str, Tensor]:
        """The tensors of the last batch, by unique name; empty before the first."""
        return self.action.adapted.tensors()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group, in a training with several optimizers that of the current one."""
        return self.action.adapted.learning_rate

    @property
    def logger(self) -> Logger:
        """NeMo's logger."""
        return logging

    # -- listeners -----------------------------------------------------------------------------------

    def listeners(self) -> list[Listener]:
        overridden = [
            hook for hook in EVENT_OF if getattr(getattr(self, hook), "__func__", None) is not getattr(ActionCallback, hook)
        ]
        return list(listeners({EVENT_OF[hook]: partial(self._call, hook) for hook in overridden}))

    def _call(self, hook: str, run: Run, adapted: AdaptedRun, event: str) -> None:
        self._action = Action(adapted, event)
        getattr(self, hook)()
