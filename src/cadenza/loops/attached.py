"""The steps and the verbs of a loop of `cadenza.attach`, which brings its own data and optimizers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from cadenza.engine.by_hand import ByHand, Into
from cadenza.engine.loop import BATCHES_DONE, STEP, train_batch
from cadenza.engine.session import Session
from cadenza.errors import DataError, LossError
from cadenza.hooks.moments import Callback
from cadenza.status.outputs import scalar

BETWEEN: Any = object()  # what the course of an attached loop yields when the next step may begin
AFTER: Any = object()  # and when all hooks of a step have been called
OVER: Any = object()  # where it is when it has ended; sent to it, it begins no step


class Attached(ByHand):
    """The verbs of an attached loop: each call takes effect at once."""

    name = "loop"

    def backward(self, loss: Any, into: Into = None) -> None:
        step = self.session.step
        if step.skipping:
            return
        step.outputs.take(loss, "loop.backward(...) expects")
        self._add_gradients(step.outputs, into)
        step.window.losses.append(scalar(step.outputs["loss"].detach()))

    def update(self, arguments: Sequence[Any]) -> Any:
        step = self.session.step
        if step.skipping:
            return None
        if step.window.losses:
            self.own_calls.check_gradients("loop.update(...)")
        return super().update(arguments)

    def check_between(self) -> None:
        """Raise an error if the loop has updated weights since the last ``over()``, and has done no step."""
        if self.own_calls.outside:
            raise LossError(
                "optimizer.step() was called between two calls of loop.over(), outside of a step, so the run would never end. "
                "Surround each update with `with loop.step():`, and call loop.backward(loss) and loop.update() in it."
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
