"""The steps of a run, for a custom loop: `Trainer.steps`. And its state, which `Loop.keep` and `Steps.keep` take."""

from __future__ import annotations

import atexit
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import Any, Literal, Self, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from cadenza.engine.loop import Open, Training
from cadenza.engine.session import Session
from cadenza.engine.verbs import StepVerbs
from cadenza.errors import CheckpointMismatchError, add_note
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.loading.rng import without_arrays
from cadenza.optim.optimizers import load_state
from cadenza.optim.rates import SetsRates
from cadenza.run import Run
from cadenza.status.encoding import encode
from cadenza.status.reprs import brief
from cadenza.text.hints import advised

T = TypeVar("T")

_OVER = "this step is over. Use the step that trainer.steps() returned last."
_WITH = "`with trainer.steps() as steps:`"


@advised("step")
class Step:
    """One update of the weights: an iterator over its batches, on the device.

    Each batch has one `backward`; a batch without one counts for nothing, as a skipped batch. A batch that the loop does not
    take, because it leaves the step early, is skipped too.
    """

    __slots__ = ("_steps", "_training")

    def __init__(self, steps: Steps, training: Training) -> None:
        self._steps, self._training = steps, training

    def __repr__(self) -> str:
        return f"<Step: {'over' if self._is_over else self._training.session.progress.now()}>"

    def __iter__(self) -> Iterator[Any]:
        """Return the next batches of the step; each is complete when the next one is taken."""
        training, state = self._training, self._training.session.step
        try:
            while state.owner is self and training.next_batch():
                if not state.skipping:
                    yield state.batch
        except GeneratorExit:
            raise
        except BaseException as error:
            self._steps._end(error)
            raise

    def __next__(self) -> Any:
        """Return the next batch of the step; the one before is complete then."""
        return next(iter(self))

    @property
    def run(self) -> Run:
        """The run that hooks receive."""
        return self._training.session.run

    @property
    def _is_over(self) -> bool:
        return self._training.session.step.owner is not self

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
        if self._training.session.step.owner is not self:
            raise RuntimeError(_OVER)
        try:
            self._training.verbs.backward(loss)
        except BaseException as error:
            self._training.session.step.raised = error
            raise

    def update(self) -> None:
        """Update the weights now; else this is done at the end of the step. Every rank must call this.

        Batches of the step that were not taken are skipped, with a warning the first time.

        Raises:
            RuntimeError: The step is over.
        """
        if self._is_over:
            raise RuntimeError(_OVER)
        verbs, window = self._training.verbs, self._training.session.step.window
        seen = window.seen
        try:
            self._training.skip_rest()
            if isinstance(verbs, StepVerbs) and window.seen > seen:
                verbs.warn_of_skipped(window.seen - seen)
            verbs.update(())
        except BaseException as error:
            self._training.session.step.raised = error
            raise

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass, in the precision of the run; in fp32 it does nothing."""
        return self._training.session.precision.autocast()

    def forward(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T:
        """Return ``function(model, batch)``, computed in the precision of the run."""
        with self.precision():
            return function(self._training.session.module, batch)


@advised("steps")
class Steps:
    """The steps of a run, to iterate over in a loop of your own.

    The run begins with the first step and ends when the loop does: at a limit, or because it is left. In ``with
    trainer.steps() as steps:`` the end of the block ends it: ``break`` and ``return`` complete the current step and stop the
    run, as `Run.stop` does; an error ends it as an error in `Trainer.fit` does.

    A ``for`` loop without ``with`` does not say why it is left: its run ends with the outcome ``left``, with everything saved
    as after ``break``. It ends when Python deletes the iterator of the loop, at once in CPython; when another run of this
    thread begins; or at the end of the process. An error of a hook at this end, as in ``on_fit_end``, is printed as "Exception
    ignored" and not raised. Two loops that take turns need ``with``.
    """

    def __init__(self, run: AbstractContextManager[Training], callbacks: list[BaseCallback], *, strict: bool) -> None:
        self._callbacks, self._strict = callbacks, strict
        self._part: AbstractContextManager[Training] | None = run
        """The run, until it is over."""
        self._training: Training | None = None
        self._kept: Kept | None = None
        self._inside_with = False
        self._ended_by = ""  # what has ended a loop that was going on
        self._thread = 0

    def __repr__(self) -> str:
        at = "not begun" if self._training is None else self._training.session.progress.now()
        return f"<Steps: {'over' if self._part is None else at}>"

    def __iter__(self) -> Iterator[Step]:
        try:
            while (step := self._following()) is not None:
                yield step
        finally:
            if not self._inside_with:
                self._abandon("the loop was left")

    def __next__(self) -> Step:
        """Complete the step, and return the next one. Every rank must call this."""
        if (step := self._following()) is None:
            raise StopIteration
        return step

    def _following(self) -> Step | None:
        """Complete the step, and return the next one; None if the run is over."""
        if self._ended_by:
            raise RuntimeError(f"this loop over trainer.steps() was ended: {self._ended_by}. Write {_WITH} around it.")
        if self._part is None:
            return None
        try:
            training = self._training or self._begin(self._part)
            if training.open >= Open.STEP:
                training.skip_rest()
            while not (training.open >= Open.EPOCH and training.next_step()):
                if not training.next_epoch():
                    self._end(None)
                    return None
        except BaseException as error:
            self._end(error)
            if isinstance(error, StopIteration):  # of a hook: it is not the end of the steps
                raise RuntimeError("a hook raised StopIteration") from error
            raise
        training.session.step.owner = step = Step(self, training)  # `step` refers to these steps, and they not to it
        return step

    def _begin(self, part: AbstractContextManager[Training]) -> Training:
        self._training = training = part.__enter__()
        self._thread = get_ident()
        if training.session.driver.world_size == 1:  # other ranks may be gone, or not know of the end
            atexit.register(_end_at_exit)
            _open.add(self)
        if self._kept is not None and training.session.progress.step:
            self._kept.compare(training.session.run, strict=self._strict)
        _warn_of_schedulers(training.session, [] if self._kept is None else self._kept.held)
        return training

    def keep(self, name: str, held: Any) -> None:
        """Save the state of an object of your own in every checkpoint; in a run that continues, it is restored at the start.

        Call this before the loop, on every rank. Keep what moves in the loop and is not of the trainer: generators, iterators
        with a position, and models, optimizers and schedulers beside its own.

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
        if self._training is not None or self._part is None:
            raise RuntimeError("steps.keep(...) must be called before the loop: the checkpoint is restored at its first step.")
        if self._kept is None:  # that of an earlier loop holds other objects
            self._kept = Kept("steps")
            self._callbacks[:] = [*(callback for callback in self._callbacks if not isinstance(callback, Kept)), self._kept]
        self._kept.keep(name, held)

    def __enter__(self) -> Self:
        self._inside_with = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, GeneratorExit):  # that of a closed generator is a break
            self.close()
        else:
            self._end(error)

    def close(self) -> None:
        """End the run as ``break`` does inside of ``with``."""
        self._leave("stopped", "the loop was left")

    def __del__(self) -> None:
        self._abandon("the loop was left")

    def _abandon(self, why: str) -> None:
        """End the run of a loop that does not say why it is left."""
        if self._training is not None and (error := self._training.session.step.raised) is not None:
            self._end(error)
        else:
            self._leave("left", f"{why}; write {_WITH} to record the reason")

    def _leave(self, what: Literal["left", "stopped"], why: str) -> None:
        """Complete the step, and stop the run."""
        part, self._part = self._part, None
        if part is None or self._training is None:
            return
        error: BaseException | None = None
        try:
            self._training.leave(what, why)
        except BaseException as raised:
            error = raised
        self._part = part
        self._end(error)
        if error is not None:
            raise error

    def _end(self, error: BaseException | None) -> None:
        """End the run, if it has begun and is not over."""
        part, self._part = self._part, None
        if part is None or self._training is None:
            return
        _open.discard(self)
        if not _open:
            atexit.unregister(_end_at_exit)
        self._training.session.step.owner = self._training.session.step.raised = None
        part.__exit__(None if error is None else type(error), error, None)


def _warn_of_schedulers(session: Session, held: Sequence[Any]) -> None:
    """Warn of a scheduler that no callback steps: the loop would step it before the update, and no checkpoint would have it."""
    callbacks = [callback for callback in session.hooks.callbacks.values() if isinstance(callback, SetsRates)]
    for optimizer in session.optimizers:
        steps = any(getattr(kept, "optimizer", None) is optimizer for kept in held)
        if "step" in vars(optimizer) and not steps and not any(callback.drives(optimizer) for callback in callbacks):
            session.warn(
                f"a scheduler was made for {type(optimizer).__name__}, and no callback steps it: remove scheduler.step() from "
                "the loop, and add LearningRate(scheduler) to callbacks, which steps it after each update and saves it. To "
                "step it yourself, call step.update() before it, and steps.keep('scheduler', scheduler)"
            )


_open: WeakSet[Steps] = WeakSet()
"""The loops of this process that are not over."""


def end_abandoned(why: str) -> None:
    """End the loops of this thread that are outside of ``with``, unless a hook of their run is running."""
    for steps in [*_open]:
        if steps._training is None or steps._inside_with or steps._thread != get_ident():
            continue
        if steps._training.session.hooks.here().listener is None:
            steps._ended_by = why
            steps._abandon(why)


def _end_at_exit() -> None:
    for steps in [*_open]:
        steps._abandon("the process ended")


# -- state of custom loops in the checkpoints of a run ----------------------------------------------


Pair = tuple[Callable[[], Any], Callable[[Any], object]]
"""A function that returns a state, and one that restores it."""


class Kept(Callback):
    """Holds the state of objects by name. A state that is restored waits for the object of its name.

    Args:
        owner: What the user calls ``keep`` of: ``"loop"`` or ``"steps"``.
    """

    each_rank: bool = True  # an environment has its own state on each rank

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.held: list[Any] = []
        """The objects that were given."""
        self._pairs: dict[str, Pair] = {}
        self._waiting: dict[str, Any] = {}
        self._restored: set[str] = set()

    def keep(self, name: str, held: Any, *, check: bool = False) -> None:
        """Save the state of an object from now on, and restore it now if a checkpoint has it. See `Loop.keep`.

        Args:
            name: Its name.
            held: The object, or a pair of functions.
            check: Raise `StateError` now if the state cannot be saved, and not at the first checkpoint.
        """
        pair = _pair_of(self._call(name), name, held)
        if name in self._pairs:
            raise ValueError(
                f"{self._call(name)} was called twice. Call it before the loop and not in it, once for each object; each needs "
                "its own name."
            )
        self._pairs[name] = pair
        self.held.append(held)
        if name in self._waiting:
            self._restore(name)
        if check:
            encode({self._call(name): self._saved(name)}, copy=type)  # nothing is copied

    def compare(self, run: Run, *, strict: bool) -> None:
        """Raise an error, with `strict`, if a run that continues keeps other objects than its checkpoint.

        Else warn after the first step, as the loop may keep an object until then.
        """
        if not strict:
            run.after_step(lambda: self._warn(run))
        elif differences := self._differences():
            raise CheckpointMismatchError(f"{'; '.join(differences)}, or continue with strict=False.")

    def _warn(self, run: Run) -> None:
        for text in self._differences():
            run.warn(text)

    def _differences(self) -> list[str]:
        """Return how a run that continues differs from its checkpoint: a sentence each, without its period."""
        texts = []
        if self._waiting:
            texts.append(
                f"the checkpoint holds {[*self._waiting]}, which this loop does not keep. Call {self._owner}.keep(...) "
                "before the loop"
            )
        if missing := [name for name in self._pairs if name not in self._restored]:
            texts.append(
                f"this loop keeps {missing}, which the checkpoint does not hold, so nothing was restored. Use the name "
                "that was saved"
            )
        return texts

    def state_dict(self) -> dict[str, Any]:
        return {name: self._saved(name) for name in self._pairs} | self._waiting

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._waiting = dict(state)
        for name in self._pairs.keys() & state.keys():
            self._restore(name)

    def _saved(self, name: str) -> Any:
        with self._named(name):
            return self._pairs[name][0]()

    def _restore(self, name: str) -> None:
        self._restored.add(name)
        with self._named(name):
            self._pairs[name][1](self._waiting.pop(name))

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            add_note(error, f"raised by what {self._call(name)} was given")
            raise

    def _call(self, name: str) -> str:
        return f"{self._owner}.keep({name!r}, ...)"


def _pair_of(call: str, name: str, held: Any) -> Pair:
    """Return the functions that save and restore an object.

    Raises:
        TypeError: It has none, or `name` is not a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"{call} expected a name; got {brief(name)}. Write keep('env', env).")
    if isinstance(held, torch.Generator):
        return held.get_state, held.set_state
    if isinstance(held, random.Random) and not isinstance(held, random.SystemRandom):
        return held.getstate, lambda state: held.setstate((state[0], tuple(state[1]), state[2]))
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(held, numpy.random.Generator):
        return lambda: without_arrays(held.bit_generator.state), lambda state: setattr(held.bit_generator, "state", state)
    if numpy is not None and isinstance(held, numpy.random.RandomState):
        return lambda: without_arrays(held.get_state(legacy=False)), held.set_state
    if isinstance(held, tuple) and len(held) == 2 and all(map(callable, held)):
        return held
    if isinstance(held, Optimizer):
        return held.state_dict, partial(load_state, held)
    has_state = callable(getattr(held, "state_dict", None)) and callable(getattr(held, "load_state_dict", None))
    if has_state and not isinstance(held, type):
        return held.state_dict, held.load_state_dict
    raise TypeError(
        f"{call} expected an object with state_dict and load_state_dict, a random generator, or a pair of "
        f"functions (save, restore); got {brief(held)}. A pair for a list is (lambda: [*rows], rows.extend)."
    )
