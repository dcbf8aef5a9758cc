"""The steps and the verbs of a loop of `cadenza.attach`, which brings its own data and optimizers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

from torch.optim import Optimizer

from cadenza.engine import updating
from cadenza.engine.by_hand import ByHand
from cadenza.engine.loop import BATCHES_DONE, STEP, train_batch
from cadenza.engine.own_calls import OwnCalls
from cadenza.engine.session import Session
from cadenza.errors import DataError, LossError
from cadenza.hooks.moments import Callback
from cadenza.optim.parameters import distinct_gradients
from cadenza.status.outputs import scalar

BETWEEN: Any = object()  # what the course of an attached loop yields when the next step may begin
AFTER: Any = object()  # and when all hooks of a step have been called
OVER: Any = object()  # where it is when it has ended; sent to it, it begins no step


class Attached(ByHand):
    """The verbs of an attached loop: each call takes effect at once."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.own_calls: OwnCalls = OwnCalls(session, "loop")
        self.updates: int = 0
        """How often the loop has updated weights."""
        self._backwards = False  # whether it has called backward

    def begin(self, ending: ExitStack) -> None:
        self.own_calls.begin(ending)

    def backward(self, loss: Any) -> None:
        step = self.session.step
        if step.skipping:
            return
        self._backwards = True
        step.outputs.take(loss, "loop.backward(...) expects")
        with self.session.precision.disabled():
            updating.backward(self.session, step.outputs)
        step.window.losses.append(scalar(step.outputs["loss"].detach()))

    def update(self, optimizers: Sequence[Optimizer]) -> None:
        session = self.session
        if session.step.skipping:
            return
        if not self.updates and session.step.window.losses:
            self.own_calls.check_gradients("loop.update(...)")
        self.updates += 1
        if self.updates == 1 and not session.step.window.losses:
            self._check_without_backward()
        super().update(optimizers)
        if self.own_calls.looks:
            self.own_calls.updated()

    def check_between(self) -> None:
        """Raise an error if the loop has updated weights since the last ``over()``, and has done no step."""
        if self.own_calls.outside:
            raise LossError(
                "optimizer.step() was called between two calls of loop.over(), outside of a step, so the run would never end. "
                "Surround each update with `with loop.step():`, and call loop.backward(loss) and loop.update() in it."
            )

    def _check_without_backward(self) -> None:
        """Report a first update without gradients, or with gradients of a backward pass by hand."""
        session, progress = self.session, self.session.progress
        found = f"loop.update(...) in step {progress.step + 1} found"
        if not distinct_gradients(session.optimizers):
            if not session.driver.reduces:
                session.warn(f"{found} no gradients, so the weights do not change. Call loop.backward(loss) before")
        elif not self._backwards and progress.step == 0:  # later, they may be those of a checkpoint
            instead = "Call loop.backward(loss) instead of loss.backward()"
            if session.precision.name == "fp16":
                raise LossError(f"{found} gradients that are not scaled for fp16. {instead}.")
            session.warn(
                f"{found} gradients, but loop.backward(...) was not called, so callbacks do not see the loss. {instead}"
            )


def own_step(session: Session) -> Generator[Any, Any, bool]:
    """Do a step of an attached loop, as ``train_step`` of the engine's loop does one."""
    run, hooks, step = session.run, session.hooks, session.step
    if (yield BETWEEN) is OVER:
        return True
    step.window.clear()
    step.begin_batch(None)
    step.may_skip = False
    session.cursor.at_boundary = False
    try:
        hooks.on_step_start(run)
        while (batch := (yield STEP)) is not BATCHES_DONE:
            yield from train_batch(session, batch)
        if session.progress.max_tokens is not None and not (step.window.seen or session.progress.tokens):
            raise DataError(
                f"max_tokens={session.progress.max_tokens} counts the tokens of batches, and this step has none. Surround each "
                "batch with `with loop.batch(batch):`, or give max_steps=."
            )
        step.finish()
        session.finish_step()
    except BaseException as error:
        hooks.end(error, Callback.on_step_end, run)
        raise
    hooks.on_step_end(run)
    yield AFTER
    return True


Attached.own_step = staticmethod(own_step)
