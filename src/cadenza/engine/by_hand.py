"""What `Run.backward` and `Run.update` do: in a ``step_fn``, and in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from torch.optim import Optimizer

from cadenza.engine import updating
from cadenza.engine.session import Session
from cadenza.errors import LossError
from cadenza.optim.parameters import parameters_of
from cadenza.status.outputs import Outputs


class ByHand:
    """Backward passes and updates of a ``step_fn``, which accumulates itself: each call takes effect at once."""

    own_step: Callable[[Session], Generator[Any, Any, bool]] | None = None
    """Does each step instead of ``train_step`` of the loop, with batches that do not come from the loader."""

    def __init__(self, session: Session) -> None:
        self.session: Session = session

    def backward(self, loss: Any) -> None:
        """See `Run.backward`."""
        with self.session.precision.disabled():
            updating.backward(self.session, Outputs(loss=loss))

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Run.update`."""
        session = self.session
        optimizers = optimizers or session.optimizers
        if session.driver.reduces:  # the user's own module is called: with DDP its backward pass reduces nothing
            held = {id(parameter) for parameter in parameters_of(optimizers)}
            session.driver.average_gradients([one for one in session.module.parameters() if id(one) in held])
        with session.precision.disabled():
            updating.update(session, optimizers)


class InWindow(ByHand):
    """One backward pass for each batch of an accumulation window, and one update at its end."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._done = -1  # the batch that had its backward pass, counted in the run

    def backward(self, loss: Any) -> None:
        session, step = self.session, self.session.step
        if self._done == session.progress.batch:
            raise LossError(
                "step.backward(...) was called twice for one batch. Add the losses and call it once. For a step with several "
                "losses or optimizers, use cadenza.attach(...) or step_fn=."
            )
        self._done = session.progress.batch
        step.outputs.take(loss)
        if step.skipping:
            return
        with session.precision.disabled():
            updating.backward(session, step.outputs, step.window)

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        if optimizers and [*optimizers] != [*self.session.optimizers]:
            raise ValueError(
                "in a loop over trainer.steps(), an update is one of all optimizers. For updates of some of them, use "
                "cadenza.attach(...) or step_fn=."
            )
        with self.session.precision.disabled():
            updating.finish_window(self.session)
