"""The steps of a run, for a loop of the user's own: `Trainer.steps`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

from torch import nn

from cadenza.engine.loop import BATCHES_DONE
from cadenza.engine.session import Session, session_of
from cadenza.hooks.moments import BaseCallback
from cadenza.loops.keeping import Kept
from cadenza.loops.leaving import close_at_exit, end_with, error_leaving
from cadenza.loops.unkept import Unkept, loop_frame
from cadenza.run import Run
from cadenza.text.hints import advised

T = TypeVar("T")

_OVER = "this step is over. Use the step that trainer.steps() returned last."


@advised("step")
class Step:
    """One update of the weights: an iterator over its batches, on the device.

    Each batch has one `backward`; a batch without one counts for nothing, as a skipped batch. A batch that the loop does not
    take, because it leaves the step early, is skipped too.
    """

    __slots__ = ("_course", "_open", "_session")

    def __init__(self, session: Session, course: Iterator[Any]) -> None:
        self._session, self._course = session, course
        self._open = True

    def __repr__(self) -> str:
        return f"<Step: {'over' if self._session.step.owner is not self else self._session.progress.now()}>"

    def __iter__(self) -> Iterator[Any]:
        """Return the next batches of the step; each is complete when the next one is taken."""
        course = self._course  # a generator: it ends for less than a StopIteration costs
        while self._open:
            batch = next(course)
            if batch is BATCHES_DONE:
                self._open = False
                return
            yield batch

    def __next__(self) -> Any:
        """Return the next batch of the step; the one before is complete then."""
        if not self._open:
            raise StopIteration
        batch = next(self._course)
        if batch is BATCHES_DONE:
            self._open = False
            raise StopIteration
        return batch

    @property
    def run(self) -> Run:
        """The run that hooks receive."""
        return self._session.run

    def backward(self, loss: Any) -> None:
        """Add the gradients of a batch, with the moments around it. No other rank has to call this.

        The gradient of a step is that of the mean loss of its batches, over all ranks. An fp16 loss is scaled.

        Args:
            loss: Shape (), undivided; or a mapping as ``compute_loss`` returns it, with ``loss`` and, for a weighted mean,
                ``weight``.

        Raises:
            LossError: It is not a tensor of shape () that has a gradient; or the batch has had its backward pass, or is over.
            RuntimeError: The step is over.
        """
        session = self._session
        if session.step.owner is not self:
            raise RuntimeError(_OVER)
        session.by_hand.backward(loss)  # type: ignore[union-attr]  # a run that has begun has it

    def update(self) -> None:
        """Update the weights now; else this is done at the end of the step. Every rank must call this.

        Batches of the step that were not taken are skipped, with a warning the first time.

        Raises:
            RuntimeError: The step is over.
        """
        session = self._session
        if session.step.owner is not self:
            raise RuntimeError(_OVER)
        seen = session.step.window.seen
        self.leave()
        hand: Any = session.by_hand
        if (skipped := session.step.window.seen - seen) > 0:
            hand.warn_of_skipped(skipped)
        hand.update(())

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass, in the precision of the run; in fp32 it does nothing."""
        return self._session.precision.autocast()

    def forward(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T:
        """Return ``function(model, batch)``, computed in the precision of the run."""
        with self.precision():
            return function(self._session.module, batch)

    def leave(self) -> None:
        """Skip the batches that the loop has not taken."""
        if self._open:
            self._open, self._session.step.left = False, True
            while next(self._course) is not BATCHES_DONE:
                pass


@advised("steps")
class Steps:
    """The steps of a run, to iterate over in a loop of your own.

    The run begins with the first step and ends when the loop does: at a limit, or because it is left. ``break`` and ``return``
    complete the current step and stop the run, as `Run.stop` does; an error ends it as an error in `Trainer.fit` does. This is
    the same if a variable holds the steps: no second loop continues the run.

    After ``break``, Python ends the run when it deletes the iterator of the loop: at once in CPython. An error of a hook at
    this end, as in ``on_fit_end``, is printed as "Exception ignored" and not raised. ``with trainer.steps() as steps:`` ends
    the run at the end of the block, and raises the error.

    A ``for`` loop does not tell its iterator why it is left. The error is looked up in the frame of the loop; where Python does
    not hold it as an object yet (Python 3.11, for an error that C code raised in the loop itself), callbacks receive a
    `LoopError` that names the line. Inside ``with trainer.steps() as steps:`` they always receive the error itself.
    """

    def __init__(
        self, course: Generator[Any, None, None], began: Callable[[], Run], callbacks: list[BaseCallback], *, strict: bool
    ) -> None:
        self._course, self._began, self._callbacks, self._strict = course, began, callbacks, strict
        self._kept: Kept | None = None
        self._unkept: Unkept | None = None
        self._step: Step | None = None
        self._frames: tuple[int, ...] = ()
        """The ids of the frame that asks for steps and of its caller: the loop, if a generator such as tqdm is between."""
        self._over = self._inside_with = False
        self._close_no_more: Callable[[], object] | None = None

    def __repr__(self) -> str:
        return f"<Steps: {'over' if self._over else self._step or 'not begun'}>"

    def __iter__(self) -> Iterator[Step]:
        return self if self._inside_with else _Loop(self)

    def __next__(self) -> Step:
        """Complete the step, and return the next one. Every rank must call this."""
        return self._next(sys._getframe(1))

    def _next(self, frame: FrameType) -> Step:
        if self._over:
            raise StopIteration
        self._frames = id(frame), id(frame.f_back)  # ids: with the frames themselves, the loop would hold what it iterates over
        if self._step is not None:
            self._step._session.hooks.enter()
            if self._step._open:
                self._step.leave()
        try:
            next(self._course)
        except BaseException:
            self._end()
            raise
        session = self._begin(frame) if self._step is None else self._step._session
        if self._unkept is not None:
            self._unkept = self._unkept.after_step()
        self._step = session.step.owner = step = Step(session, self._course)
        return step

    def _begin(self, frame: FrameType) -> Session:
        session = session_of(self._began())
        if session.driver.world_size == 1:  # other ranks may be gone by then
            self._close_no_more = close_at_exit(self)
        if self._kept is not None and session.progress.step:
            self._kept.compare(session.run, strict=self._strict)
        if session.savers:
            held = self._kept.held if self._kept is not None else []
            self._unkept = Unkept(loop_frame(frame), session, held, loop=self)
        return session

    def keep(self, name: str, held: Any) -> None:
        """Save the state of an object of your own in every checkpoint; in a run that continues, it is restored at the start.

        Call this before the loop, on every rank. If the run writes checkpoints, a warning in the first steps names what moved
        in the loop and was not kept: generators, iterators, and models, optimizers and schedulers beside those of the trainer.

        Args:
            name: Its name in the checkpoint.
            held: As in `Loop.keep`: an object with ``state_dict`` and ``load_state_dict``, a random generator, or a pair of
                functions ``(save, restore)``.

        Raises:
            TypeError: `held` has no state.
            ValueError: The name is in use.
            RuntimeError: The run has begun.

        >>> import random
        >>> from cadenza.testing import tiny_trainer
        >>> dice = random.Random(6)
        >>> with tiny_trainer(steps=2).steps() as steps:
        ...     steps.keep("dice", dice)
        ...     for step in steps:
        ...         for inputs, _ in step:
        ...             step.backward(step.run.model(inputs).square().mean() * dice.random())
        """
        if self._step is not None or self._over:
            raise RuntimeError("steps.keep(...) must be called before the loop: the checkpoint is restored at its first step.")
        if self._kept is None:  # that of an earlier loop holds other objects
            self._kept = Kept("steps")
            self._callbacks[:] = [*(one for one in self._callbacks if not isinstance(one, Kept)), self._kept]
        self._kept.keep(name, held)

    def __enter__(self) -> Self:
        self._inside_with = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(None if isinstance(error, GeneratorExit) else error)  # that of a closed generator is a break

    def close(self) -> None:
        """End the run as ``break`` does."""
        self._leave(None)

    def __del__(self) -> None:
        self._look_and_leave()

    def _look_and_leave(self) -> None:
        """Leave the loop, with the error that is leaving it now if there is one."""
        if not self._over and self._step is not None:
            self._leave(error_leaving(self._frames))

    def _leave(self, error: BaseException | None) -> None:
        """Complete the step and stop the run; or end it with the error that leaves the loop."""
        over, self._over, self._frames, self._unkept = self._over, True, (), None
        if over or self._step is None:
            return
        try:
            if error is None:
                self._stop(self._step)
            else:
                end_with(self._course, error)
        finally:
            self._end()

    def _stop(self, step: Step) -> None:
        step.leave()
        step.run.stop("the loop was left")
        for _ in self._course:  # ranks that have not left complete their step
            session_of(step.run).step.left = True

    def _end(self) -> None:
        """Note that the run is over, and so its last step."""
        if self._close_no_more is not None:
            self._close_no_more()
        self._over, self._frames, self._unkept = True, (), None
        if self._step is not None:
            self._step._session.step.owner = None


class _Loop:
    """What a ``for`` loop over `Steps` holds, and nothing else: it is deallocated when the loop is left."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Step:
        return self._steps._next(sys._getframe(1))

    def __del__(self) -> None:
        self._steps._look_and_leave()
