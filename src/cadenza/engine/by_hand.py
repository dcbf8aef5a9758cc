"""What `Run.backward` and `Run.update` do: in a ``step_fn``, and in a loop of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import proxy

from torch.optim import Optimizer

from cadenza.engine import updating
from cadenza.engine.own_calls import OwnCalls
from cadenza.engine.session import Session
from cadenza.engine.start_checks import check_computes_batch
from cadenza.errors import LossError
from cadenza.optim.parameters import distinct_gradients, parameters_of
from cadenza.status.counting import counted
from cadenza.status.outputs import Outputs
from cadenza.status.shown import brief


class ByHand:
    """Backward passes and updates of a ``step_fn``, which accumulates itself: each call takes effect at once."""

    own_step: Callable[[Session], Generator[Any, Any, bool]] | None = None
    """Does each step instead of ``train_step`` of the loop, with batches that do not come from the loader."""

    def __init__(self, session: Session) -> None:
        self.session: Session = proxy(session)  # which holds this

    def backward(self, loss: Any) -> None:
        """See `Run.backward`."""
        with self.session.precision.disabled():
            updating.backward(self.session, Outputs(loss=loss))

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        """See `Run.update`."""
        session = self.session
        for one in optimizers:
            if not any(one is known for known in session.optimizers):
                raise ValueError(
                    f"update(...) expected optimizers of the run; got {brief(one)}, which no checkpoint would hold. Give all "
                    "optimizers to Trainer(...) or attach(...); pass several as update(first, second)."
                )
        optimizers = optimizers or session.optimizers
        if session.driver.reduces:  # the user's own module is called: with DDP its backward pass reduces nothing
            held = {id(parameter) for parameter in parameters_of(optimizers)}
            session.driver.average_gradients([one for one in session.module.parameters() if id(one) in held])
        with session.precision.disabled():
            updating.update(session, optimizers)

    def check_window(self) -> None:
        """Report mistakes of a loop of the user's own after the batches of a step: no backward pass, or no gradients."""

    def begin(self, ending: ExitStack) -> None:
        """Begin to look at what a loop of the user's own calls, until `ending`."""


class InWindow(ByHand):
    """One backward pass for each batch of an accumulation window, and one update at its end."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.own_calls: OwnCalls = OwnCalls(session, "step")
        self._done = -1  # the batch that had its backward pass, counted in the run
        self._has_warned = False  # of a step without a backward pass
        self._has_warned_of_skipped = False

    def backward(self, loss: Any) -> None:
        session, step = self.session, self.session.step
        if step.counted:
            raise LossError(
                "step.backward(loss) must be called inside of `for batch in step:`, before the next batch is taken and before "
                "step.update()."
            )
        if self._done == session.progress.batch:
            raise LossError(
                "step.backward(...) was called twice for one batch. Add the losses and call it once. For a step with several "
                "losses or optimizers, use cadenza.attach(...) or step_fn=."
            )
        if self._done < 0:
            check_computes_batch(session, step.batch)
        if self.own_calls.looks and step.window.losses:
            self.own_calls.check_gradients("the next batch")
        self._done = session.progress.batch
        step.outputs.take(loss, "step.backward(...) expects")
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

    def _check_without_backward(self) -> None:
        if distinct_gradients(self.session.optimizers):
            raise LossError(
                "there are gradients, but no batch of this step had step.backward(loss), so they would never be used. Call "
                "step.backward(loss) instead of loss.backward()."
            )
        if self._done < 0 and not self._has_warned and not self.session.step.skipping:
            self._has_warned = True
            self.session.warn(
                f"step {self.session.progress.step + 1} had no step.backward(...), so the weights did not change. Call "
                "step.backward(loss) for each batch"
            )

    def begin(self, ending: ExitStack) -> None:
        self.own_calls.begin(ending)

    def check_window(self) -> None:
        if not self.session.step.window.losses:
            self._check_without_backward()
        elif self.own_calls.looks:
            self.own_calls.check_gradients("the update")
            self.own_calls.updated()

    def warn_of_skipped(self, batches: int) -> None:
        """Warn, once, that an update skipped batches."""
        if not self._has_warned_of_skipped:
            self._has_warned_of_skipped = True
            self.session.warn(
                f"step.update() skipped {counted(batches, 'batch')} of step {self.session.progress.step + 1}, which the loop "
                "had not taken. Call it after `for batch in step:`, or not at all: the update is done at the end of the step"
            )
