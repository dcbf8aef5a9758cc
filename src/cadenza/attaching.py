"""A loop that brings its own data and optimizers: `attach`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from os import PathLike
from types import TracebackType
from typing import Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers import Driver
from cadenza.engine.loop import Open, Training
from cadenza.engine.module_state import Compile
from cadenza.engine.session import Loops, session_of
from cadenza.engine.verbs import LoopVerbs
from cadenza.errors import DataError
from cadenza.files.new_directory import NewDirectory
from cadenza.loading.rng import RNGState
from cadenza.loops.foreign_callbacks import AnyCallback
from cadenza.loops.run_segment import RunSegment
from cadenza.loops.steps import Kept
from cadenza.optim.optimizers import Optimizers
from cadenza.run import Run
from cadenza.status.reprs import brief
from cadenza.text.hints import advised, answered
from cadenza.trainer import Trainer


@answered("attach")
def attach(
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module],
    optimizers: Optimizers,
    *,
    max_steps: int | None = None,
    max_tokens: int | None = None,
    tokens: Callable[[Any], int] | None = None,
    precision: str = "fp32",
    seed: int | None = None,
    directory: str | PathLike[str] | NewDirectory | None = None,
    callbacks: Iterable[AnyCallback] = (),
    device: str | torch.device | None = None,
    driver: str | Driver = "auto",
    progress: bool = True,
    compile: Compile = False,
    debug_ranks: bool | float = False,
    resume: bool | str | PathLike[str] = False,
    strict: bool = False,
    override: Sequence[str] | Mapping[str, Any] = (),
) -> Loop:
    """Return a run around a loop of your own, which brings its own data; see `Loop`. Every rank must call this.

    Args:
        model: An ``nn.Module``; or several as a sequence or a mapping, of which a ``ModuleList`` or ``ModuleDict`` is made.
        optimizers: An optimizer, a list of them, or a function that builds them from the list of the model's parameters.
        max_steps: End after this many updates. Without a limit, the run ends when the loop is left.
        max_tokens: End after the update with which this many tokens, over all ranks, are reached.
        tokens: As in `Trainer`, for the batches that `Loop.batch` is given.
        precision: As in `Trainer`, like all of the following up to `debug_ranks`.
        seed: Seeds every generator when the run starts.
        directory: The local directory of the run.
        callbacks: Called in this order.
        device: The device; None takes the best one that exists.
        driver: How tensors and processes are run.
        progress: Show a progress bar.
        compile: Compile the model, in place.
        debug_ranks: Compare each collective over the ranks before it runs.
        resume: As in `Trainer.fit`.
        strict: As in `Trainer.fit`.
        override: As in `Trainer.fit`.

    Raises:
        TypeError, ValueError: An argument is wrong.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=3, progress=False) as loop:
    ...     while not loop.over():
    ...         with loop.step():
    ...             loop.backward(model(torch.ones(1, 2)).square().mean())
    ...             loop.update()
    >>> loop.run.progress.step
    3
    """
    kept = Kept("loop")
    trainer = Trainer(
        _one_module(model),
        optimizers,
        OwnData(),
        max_steps=max_steps,
        max_tokens=max_tokens,
        tokens=tokens,
        precision=precision,
        seed=seed,
        directory=directory,
        callbacks=[*callbacks, kept] if isinstance(callbacks, Iterable) else callbacks,  # the trainer says what is wrong
        device=device,
        driver=driver,
        progress=progress,
        step_fn=_no_step_fn,
        compile=compile,
        debug_ranks=debug_ranks,
    )
    return Loop(trainer, kept, {"resume": resume, "strict": strict, "override": override})


def _one_module(model: Any) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping) and all(isinstance(value, nn.Module) for value in model.values()):
        return nn.ModuleDict(model)
    if isinstance(model, Sequence) and all(isinstance(part, nn.Module) for part in model):
        return nn.ModuleList(model)
    raise TypeError(f"attach(...): model must be an nn.Module, or a sequence or mapping of them; got {brief(model)}")


@advised("loop")
class Loop:
    """A run around a loop of your own, for ``with``. Its moments come in the order of `Callback`.

    A step has batches only if the loop says so with `batch`. The run has no epochs: ``on_epoch_start`` and ``on_epoch_end`` are
    called once, around all steps. It ends at a limit, after a request to stop, or when the loop leaves the ``with`` block: then
    its outcome is ``stopped``. Between two steps, in `over`, the record of the step is delivered and checkpoints are saved. So
    a run that continues begins with `over`: what the loop needs then must be saved, by `keep` or in ``run.state``.

    Steps without `over` between them belong together, such as several updates on one rollout: saves and requests to stop wait
    for the next `over`. A loop that never calls it saves before each step.
    """

    def __init__(self, trainer: Trainer, kept: Kept, arguments: Mapping[str, Any]) -> None:
        self.trainer: Trainer = trainer
        """The arguments of the run, and its plan: ``loop.trainer.plan()``."""
        self._kept, self._arguments = kept, arguments
        self._part: RunSegment | None = None
        self._training: Training | None = None
        self._rng: RNGState | None = None
        self._asks = False  # whether the loop calls over()
        self._together = ExitStack()  # blocks saves between steps that belong together

    def __repr__(self) -> str:
        return f"<Loop: {'not begun' if self._training is None else repr(self.run)}>"

    def __enter__(self) -> Self:
        """Begin the run, or restore it. Every rank must call this."""
        self._check_not_begun()
        part = self.trainer._part(**self._arguments, loop=Loops.ATTACHED)
        self._training, self._part = part.__enter__(), part
        with self._ending_with_error():
            self._training.next_epoch()
            self._go_on(self._training)
        if self.run.progress.step:
            self._rng = RNGState.capture()  # the loop may draw random numbers until its first step
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, GeneratorExit):  # that of a generator around the loop is a break
            self._end(error)
        elif self._part is not None:
            with self._ending_with_error():
                if not self.run.progress.finished:
                    self.run.stop("the loop was left")
                self._take_up()
            self._end(None)

    def resuming(self, resume: bool | str | PathLike[str]) -> Self:
        """Set `resume`, before the run begins; return the loop."""
        self._check_not_begun()
        self._arguments = {**self._arguments, "resume": resume}
        return self

    @property
    def run(self) -> Run:
        """The run that hooks receive."""
        return self.trainer.run

    def keep(self, name: str, held: Any) -> None:
        """Save the state of an object of your own in every checkpoint; in a run that continues, restore it now.

        Args:
            name: Its name in the checkpoint.
            held: An object with ``state_dict`` and ``load_state_dict``; a generator of torch, numpy or ``random``; or a pair of
                functions ``(save, restore)``. States are plain values and tensors, nested in lists, tuples and mappings.

        Raises:
            TypeError: `held` has no state, or `name` is not a string.
            StateError: A checkpoint of this run cannot hold the state.
            ValueError: The name is in use.
        """
        self._kept.keep(name, held, check=self._part is not None and bool(session_of(self.run).savers))

    def over(self) -> bool:
        """Return whether the run is over: at a limit, or because a stop was requested. Every rank must call this.

        If the last step is complete, its record is delivered and checkpoints are saved. If the run is over, it ends here.
        """
        self._reach_boundary("over")
        return self._part is None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Return the context of a step, from ``on_step_start`` to ``on_step_end``. Every rank must enter it.

        Raises:
            RuntimeError: The run is over.
        """
        training = self._reach_boundary("step")
        if self._part is None:
            outcome = self.run.outcome
            raise RuntimeError(
                f"the run is over ({outcome and f'{outcome.kind}: {outcome.reason}'}), so no step follows. Ask "
                "`while not loop.over():` before each step. For several updates on one rollout, let the limit be a multiple of "
                "their number."
            )
        with self._ending_with_error():
            training.session.hooks.enter()
            step = training.session.step
            step.begin_batch(None)
            step.may_skip = False
            training.begin_step()
            try:
                yield
            except GeneratorExit:
                self._end_step(training)
                raise
            self._end_step(training)

    def _end_step(self, training: Training) -> None:
        progress = training.session.progress
        if progress.max_tokens is not None and not (training.session.step.window.seen or progress.tokens):
            raise DataError(
                f"max_tokens={progress.max_tokens} counts the tokens of batches, and this step has none. Surround each batch "
                "with `with loop.batch(batch):`, or give max_steps=."
            )
        training.end_step()

    @contextmanager
    def batch(self, batch: Any = None) -> Iterator[Any]:
        """Return the context of a batch, from ``on_batch_start`` to ``on_batch_end``; it gives the batch on the device.

        The batches of a step need it only for callbacks at these moments, and for the counters of batches, samples and tokens.
        The number of batches in a step must be the same on all ranks.
        """
        if self._training is None or self._training.open != Open.STEP:
            raise RuntimeError("loop.batch(...) must be used inside of `with loop.step():`, and not inside of another batch.")
        training, session = self._training, self._training.session
        session.sync.read_tokens(batch)
        moved = session.driver.to_device(batch)
        with self._ending_with_error():
            training.begin_batch(moved)
            try:
                yield moved
            except GeneratorExit:
                training.end_batch()
                raise
            training.end_batch()

    def backward(self, loss: Tensor | Mapping[str, Any], *, into: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Add the gradients of `loss`, shape (), with the moments around it; see `Run.backward`. Every rank must call this.

        ``run.loss`` of the step is the mean of the losses given here. Inside of a batch that a callback skips, nothing is done.
        """
        self._check_inside("backward")
        self.run.backward(loss, into=into)  # type: ignore[arg-type]  # a mapping has the loss, too

    def update(self, *optimizers: Optimizer | Callable[[], Any]) -> Any:
        """Update the weights with `optimizers` (none: all), and drop the gradients; see `Run.update`."""
        self._check_inside("update")
        return self.run.update(*optimizers)

    def precision(self) -> AbstractContextManager[Any]:
        """Return the context of the forward pass, in the precision of the run; in fp32 it does nothing."""
        return session_of(self.run).precision.autocast()

    @contextmanager
    def _ending_with_error(self) -> Iterator[None]:
        """End the run with an error that is raised inside."""
        try:
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            self._end(error)
            raise

    def _end(self, error: BaseException | None) -> None:
        """End the run, if it is not over."""
        self._together.__exit__(error and type(error), error, error and error.__traceback__)  # type: ignore[arg-type]
        part, self._part = self._part, None
        if part is not None:
            part.end(error)

    def _reach_boundary(self, verb: str) -> Training:
        """Do what waits for the boundary of the last step; end the run if no step follows."""
        training = self._training
        if training is None:
            raise RuntimeError(f"loop.{verb}() needs a run that has begun. Write `with cadenza.attach(...) as loop:`.")
        if training.open >= Open.STEP:
            raise RuntimeError(f"loop.{verb}() must be called between two steps, and not inside of `with loop.step():`.")
        verbs = cast("LoopVerbs", training.verbs)
        if self._part is not None:
            with self._ending_with_error():
                if not training.session.cursor.at_boundary:
                    self._go_on(training, inside=verb == "step" and self._asks and not self.run.progress.finished)
                elif verb == "over":
                    verbs.check_between()
        verbs.own_calls.outside = False
        self._asks |= verb == "over"
        self._take_up()
        return training

    def _go_on(self, training: Training, *, inside: bool = False) -> None:
        """Pass the boundary; end the run if no step follows. Between steps that belong together, saves and stops wait."""
        self._together.close()
        if inside:
            self._together.enter_context(self.run.block_saves("steps without loop.over() between them"))
        if not training.advance() and not inside:
            self._end(None)

    def _take_up(self) -> None:
        """Before the first step of a run that continues, restore the random numbers, and compare the kept states."""
        if self._rng is not None:
            self._rng.restore()
            self._rng = None
            self._kept.compare(self.run, strict=self._arguments["strict"])

    def _check_not_begun(self) -> None:
        if self._training is not None:
            raise RuntimeError(
                "a loop of attach(...) runs once, and this one has begun. Call attach(...) again for another run."
            )

    def _check_inside(self, verb: str) -> None:
        if self._training is None or self._training.open < Open.STEP:
            raise RuntimeError(f"loop.{verb}(...) must be called inside of `with loop.step():`.")


class OwnData:
    """Stands for the data that an attached loop brings itself: a loader that is never read, and with no position to save."""

    has_epochs = False

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError(_ITS_OWN_STEPS)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the loop keeps what it needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""

    def __repr__(self) -> str:
        return "the data of the loop"


def _no_step_fn(run: Run, batch: Any) -> NoReturn:
    raise RuntimeError(_ITS_OWN_STEPS)


_ITS_OWN_STEPS = "the trainer of cadenza.attach(...) has no data: the loop does its steps. Write `with attach(...) as loop:`."
