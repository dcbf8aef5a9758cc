"""Calls of the hand-written loop that its run makes too: left in the loop, they update twice or drop gradients."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import chain
from typing import Any
from weakref import proxy

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from cadenza.engine.session import Session
from cadenza.errors import LossError
from cadenza.optim.parameters import parameters_of

_UPDATES = 16  # a step may have several, with optimizers of its own


class OwnCalls:
    """Raises an error if the loop updates the weights beside the run, or drops gradients that the run is still to use.

    Args:
        session: The session of the run.
        name: ``step`` or ``loop``, the variable with the verbs of the run.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session: Session = proxy(session)
        self._update = "loop.update()" if name == "loop" else "step.update(), or the end of the step,"
        self.looks: bool = True
        """Whether it still looks: not after some updates, as a line that was left in the loop is called in each step."""
        self.outside: bool = False
        """Whether an optimizer has stepped between two steps of the run, since this was set to False."""
        self._updates = 0
        self._handles: list[RemovableHandle] = []

    def begin(self, ending: ExitStack) -> None:
        """Look at each ``optimizer.step()`` of the loop, at most until `ending`."""
        self._handles = [one.register_step_pre_hook(self._check_step) for one in self._session.optimizers]
        ending.callback(self._end)

    def check_gradients(self, before: str) -> None:
        """Raise an error if there are no gradients any more. To be called after a backward pass.

        Args:
            before: The call of the run that needs them.
        """
        if not self._updates and not self._session.step.window.weights and not self._has_gradients():
            raise LossError(
                f"the gradients of step {self._session.progress.step + 1} were dropped before {before}, so they would never be "
                f"used. Remove optimizer.zero_grad() from the loop: {self._update} drops the gradients."
            )

    def _has_gradients(self) -> bool:
        parameters = chain(parameters_of(self._session.optimizers), self._session.module.parameters())
        return any(one.grad is not None for one in parameters)

    def updated(self) -> None:
        """Count an update."""
        self._updates += 1
        if self._updates == _UPDATES:
            self._end()

    def _end(self) -> None:
        self.looks = False
        for one in self._handles:
            one.remove()

    def _check_step(self, optimizer: Optimizer, *_: Any) -> None:
        session = self._session
        self.outside |= session.cursor.at_boundary
        if session.step.in_update or session.cursor.at_boundary:  # at a boundary a driver may step, to make the state
            return
        raise LossError(
            f"optimizer.step() was called in step {session.progress.step + 1}, beside the update of the run. Remove it from "
            f"the loop: {self._update} updates the weights."
        )
