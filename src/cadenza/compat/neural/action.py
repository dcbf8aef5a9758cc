"""Callbacks of NeMo 0.10: six events without arguments; what they want to know stands in their own attributes."""

from __future__ import annotations

import logging as _logging
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from cadenza.compat.neural.adapted import AdaptedRun
from cadenza.compat.neural.events import counters, listeners
from cadenza.compat.neural.logs import logging
from cadenza.hooks.moments import BaseCallback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from cadenza.hooks.listener import Listener
    from cadenza.run import Run

PLACES = {
    "on_action_start": "on_action_start",
    "on_epoch_start": "on_epoch_start",
    "on_iteration_start": "on_step_start",
    "on_iteration_end": "on_step_end",
    "on_epoch_end": "on_epoch_end",
    "on_action_end": "on_action_end",
}
"""Each hook, and the event of the table at which it is called. An iteration is an update."""


class Action:
    """The training under way, as 0.10 shows it to callbacks."""

    def __init__(self, adapted: AdaptedRun, event: str) -> None:
        self.adapted = adapted
        self.step, self.epoch_num = counters(adapted, event)

    @property
    def run(self) -> Run:
        """The run itself."""
        return self.adapted.run

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the training."""
        return list(self.run.optimizers)


class ActionCallback(BaseCallback):
    """Your own code at six events; override those you need, and call ``super().__init__()``."""

    _action: Action | None = None

    def __init__(self) -> None:
        self._action = None

    # -- events ---------------------------------------------------------------------------------------

    def on_action_start(self) -> None:
        """Called before the first epoch."""

    def on_epoch_start(self) -> None:
        """Called before the first iteration of an epoch."""

    def on_iteration_start(self) -> None:
        """Called before an update's first batch."""

    def on_iteration_end(self) -> None:
        """Called after an update; `registered_tensors` are those of its last batch."""

    def on_epoch_end(self) -> None:
        """Called after the last iteration of an epoch."""

    def on_action_end(self) -> None:
        """Called when the training is over, unless an error ended it."""

    # -- what they see --------------------------------------------------------------------------------

    @property
    def action(self) -> Action:
        """The training under way.

        Raises:
            RuntimeError: Outside of the events.
        """
        if self._action is None:
            raise RuntimeError(f"{type(self).__name__} has no training yet: its attributes can be read in its events")
        return self._action

    @property
    def step(self) -> int:
        """The number, from 0, of the update under way, or of that which has just ended; at the end how many there were."""
        return self.action.step

    @property
    def epoch_num(self) -> int:
        """The number, from 0, of the epoch under way, or of that which has just ended; at the end how many there were."""
        return self.action.epoch_num

    @property
    def local_rank(self) -> int | None:
        """This process among those of this machine; None alone."""
        return self.action.adapted.local_rank

    @property
    def global_rank(self) -> int | None:
        """This process among all; None alone."""
        return self.action.adapted.rank

    @property
    def registered_tensors(self) -> dict[str, Tensor]:
        """The tensors of the last batch, by unique name; empty before the first."""
        return self.action.adapted.tensors()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.action.optimizers[0].param_groups[0]["lr"])

    @property
    def logger(self) -> _logging.Logger:
        """Where to say something."""
        return logging

    # -- how it is called -----------------------------------------------------------------------------

    def listeners(self) -> list[Listener]:
        heard = [hook for hook in PLACES if getattr(getattr(self, hook), "__func__", None) is not getattr(ActionCallback, hook)]
        return list(listeners({PLACES[hook]: partial(self._hear, hook) for hook in heard}))

    def _hear(self, hook: str, run: Run, adapted: AdaptedRun, event: str) -> None:
        self._action = Action(adapted, event)
        getattr(self, hook)()
