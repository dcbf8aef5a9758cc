"""The small objects in which the engine keeps where a run is. Each has one writer; others call its methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from cadenza.errors import LossError, notes_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.loading import ResumableLoader
from cadenza.loading.batch_log import BatchLog
from cadenza.loading.batches import moved
from cadenza.loading.rng import RNGState
from cadenza.loading.shards import PERMUTED
from cadenza.records.scalars import as_number, weighted_sum, widened
from cadenza.status.branches import Branch
from cadenza.status.decisions import Decision, Outcome
from cadenza.status.formats import counted
from cadenza.status.outputs import Outputs
from cadenza.status.progress import Counters, Progress

if TYPE_CHECKING:
    from cadenza.run import Run
    from cadenza.status.decisions import Requests

_ALL_OR_NONE = "either all batches of a step report outputs['weight'], or none does"


class AccumulationWindow:
    """The batches of one step, and the loss scale of each.

    The gradient of a step is that of the mean loss of its batches or, if batches report a ``weight``, of the weighted mean. The
    number and the weights of the batches are not known when the first gradient is added. So each loss scale assumes a full
    window in which all batches have the weight of the first, and `correction` corrects the gradients at the end.
    """

    def __init__(self, size: int, mean_over_ranks: Callable[[Tensor], Tensor] | None = None, *, uneven: bool = False) -> None:
        self.size: int = size
        self._uneven = uneven  # a custom loop may leave out batches on one rank: nothing is exchanged in `add`
        self._mean_over_ranks = mean_over_ranks
        self._scale = 1.0 / size
        self.clear()

    def resize(self, size: int) -> None:
        """Have the next steps hold `size` batches."""
        self.size, self._scale = size, 1.0 / size

    def clear(self) -> None:
        """Start the next step."""
        self.seen: int = 0
        self.unreduced: bool = False
        self.applied: bool = False
        """Whether the weights were updated already."""
        self.left_out: int = 0
        """Batches that do not count, over all ranks: each was left out by one rank alone."""
        self._taken = 0  # batches of this rank: those that count, and those that it left out
        self.losses: list[Tensor] = []
        self.weights: list[float | Tensor] = []
        self._first_weight: float | Tensor | None = None
        self.of_ranks: float | None = None
        """The sum of the weights of all ranks, if it is exchanged with the batches."""
        self.mean_weight: float | Tensor | None = None
        """The sum of the weights, as a mean over ranks, once the gradients are corrected by it."""

    def resume(self, losses: list[Tensor]) -> None:
        """Continue after the batches with these losses, which a checkpoint has counted."""
        self.clear()
        self.losses, self.seen, self._taken = losses, len(losses), len(losses)

    def add(self, loss: Tensor, weight: float | Tensor | None, unit: float | None = None) -> float | Tensor:
        """Add a batch and return its loss scale. The loss is stored without its graph, which would keep activations alive.

        Args:
            loss: The loss of the batch.
            weight: Its weight.
            unit: What loss scales assume as the weight of each batch, the same on all ranks. None: the mean of the first ones.

        Raises:
            LossError: Some batches of the step have a weight, and others have none.
        """
        if self.losses and (weight is None) != (self._first_weight is None):
            raise LossError(_ALL_OR_NONE)
        self.losses.append(loss.detach())
        self._taken += 1
        if weight is None:
            return self._scale
        if (on_host := number_on_host(weight)) is not None:
            weight = on_host
        if self._first_weight is None and unit is not None:
            self._first_weight = unit
        elif self._first_weight is None:
            first = weight + (weight == 0)  # a batch of weight 0, such as one of padding only, cannot be the reference
            # The gradients of all ranks are added before they are corrected.
            self._first_weight = 1.0 if self._uneven else self._mean(first, loss)
        self.weights.append(weight)
        return self.scale_of(-1)

    def note(self, loss: Tensor, weight: float | Tensor | None) -> None:
        """Keep a batch of which the user's own code adds the gradients. Its weight counts in the mean loss alone.

        Raises:
            LossError: Some batches of the step have a weight, and others have none.
        """
        if self.losses and (weight is None) != (not self.weights):
            raise LossError(_ALL_OR_NONE)
        self.losses.append(loss.detach())
        if weight is not None:
            on_host = number_on_host(weight)
            self.weights.append(weight if on_host is None else on_host)

    def scale_of(self, index: int) -> float | Tensor:
        """Return the loss scale of a batch that was added."""
        return self._scale if self._first_weight is None else self.weights[index] / (self._first_weight * self.size)

    @property
    def loss_scale(self) -> float | Tensor:
        """The loss scale of the last batch."""
        return self.scale_of(-1) if self.losses else self._scale

    def leave_out(self, loss: Tensor, weight: float | Tensor | None, unit: float | None = None) -> None:
        """Leave out a batch on this rank, which takes part in the exchanges of the others as if its weight were 0."""
        if weight is None:
            self._taken += 1
        else:
            self.add(loss, 0.0, unit)

    def counts(self, ranks: int = 1) -> bool:
        """Return whether a batch of any rank counts."""
        return self.left_out < self._taken * ranks if self.left_out else bool(self.losses)

    @property
    def complete(self) -> bool:
        """Whether the gradients need no correction."""
        return len(self.losses) == self.size and self._first_weight is None and not self.left_out

    @property
    def is_weightless(self) -> bool:
        """Whether no batch of any rank counts, because all weights are 0. Waits for a weight on a device."""
        of_ranks = self.weight_of_ranks
        return bool(self.weights) and float(self.total if of_ranks is None else of_ranks) == 0

    @property
    def weight_of_ranks(self) -> float | Tensor | None:
        """The sum or mean of the weights of all ranks; None if this rank does not know it."""
        return self.of_ranks if self.mean_weight is None else self.mean_weight

    @property
    def total(self) -> float | Tensor:
        """The weights of the batches of this rank, or their number if they have none."""
        return sum(self.weights) if self.weights else len(self.losses)

    def correction(self, ranks: int = 1) -> float | Tensor:
        """Return the factor by which the gradients of an incomplete or weighted window must be multiplied."""
        if self._first_weight is None and self.left_out:
            return self.size * ranks / (self._taken * ranks - self.left_out)
        if self._first_weight is None:
            return self.size / len(self.losses)
        total = self._mean(sum(self.weights), self.losses[0]) if self.of_ranks is None else self.of_ranks / ranks
        self.mean_weight = total
        return self._first_weight * self.size / (total + (total == 0))

    def _mean(self, weight: float | Tensor, like: Tensor) -> float | Tensor:
        """Return the mean of `weight` over all ranks."""
        if self._mean_over_ranks is None:
            return weight
        return self._mean_over_ranks(as_number(weight, like.device, widened(like).dtype))

    def mean_loss(self) -> Tensor | None:
        """Return the (weighted) mean loss of the batches so far, shape (), without graph; None before the first batch."""
        losses, weights = self.losses, self.weights  # read once: a progress bar calls this from another thread
        return mean_loss(losses, weights) if losses else None


def number_on_host(weight: Any) -> float | None:
    """Return a weight as a number; None if there is none, or if it is on a device, which would have to be waited for."""
    return None if weight is None or (isinstance(weight, Tensor) and not weight.is_cpu) else float(weight)


def mean_loss(losses: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    """Return the (weighted) mean loss of the batches of a step, at least one, shape (). Does not wait for the device.

    A batch of weight 0 is ignored, even if its loss is NaN. If all weights are 0, the mean is NaN.
    """
    if len(losses) == 1:
        loss = losses[0]
        return torch.where(as_number(weights[0], loss.device) == 0, math.nan, loss) if weights else loss
    stacked = torch.stack([widened(loss) for loss in losses])
    if not weights:
        return stacked.mean()
    factors = torch.stack([as_number(weight, stacked.device, stacked.dtype) for weight in weights])
    return weighted_sum(stacked, factors) / factors.sum()


class Decide(Protocol):
    """Records a decision: see `Session.decide`."""

    def __call__(self, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> Decision: ...


# -- blocked saves ---------------------------------------------------------------------------------


class Saver(Protocol):
    """Writes checkpoints of a run."""

    def request(self, reason: str) -> None:
        """Save the run, at a step boundary."""


class SaveBlock(NamedTuple):
    """A block that is open."""

    owner: str
    """The callback that opened it."""
    reason: str
    step: int
    """The number of complete steps when it was opened."""

    def __str__(self) -> str:
        return f"{self.owner}, since step {self.step}{f' ({self.reason})' if self.reason else ''}"


class SaveBlocks:
    """The blocks of a run on this rank. They may be nested, and may stay open from one moment to another."""

    def __init__(self) -> None:
        self.open: list[SaveBlock] = []
        """The blocks that are open, oldest first."""
        self._left: tuple[SaveBlock, BaseException] | None = None

    @contextmanager
    def block(self, owner: str, reason: str, step: int) -> Iterator[None]:
        """Block saves in a context."""
        block = SaveBlock(owner, reason, step)
        self.open.append(block)
        try:
            yield
        except BaseException as error:
            self._left = block, error
            raise
        finally:
            self.open.remove(block)

    def left_by(self, error: BaseException) -> SaveBlock | None:
        """Return the block that this error, or its cause, left in the middle; None if there is none."""
        if self._left is not None and self._left[1] in (error, error.__cause__):
            return self._left[0]
        return None


# -- the position of the run -----------------------------------------------------------------------


class SharedProgress(Progress):
    """Counters of one among multiple ranks. The elapsed time is the one that all ranks agreed on before the current step.

    So a schedule of every ten minutes is due on all ranks at the same step.
    """

    __slots__ = ("_agreed_s",)

    @property
    def elapsed_s(self) -> float:
        """Seconds since this fit began, the same on all ranks."""
        return self._agreed_s

    @property
    def own_s(self) -> float:
        """Seconds since this fit began on this rank."""
        return super().elapsed_s

    def agree(self, elapsed_s: float) -> None:
        """Set the time that all ranks agreed on."""
        self._agreed_s = elapsed_s

    def begin(self, origin: Counters, batches_per_epoch: int | None) -> None:
        super().begin(origin, batches_per_epoch)
        self._agreed_s = 0.0


class Cursor:
    """The position of a run in its training loader, and between or inside steps. Written by the loop."""

    source: ResumableLoader
    """The training loader, readable from any batch of an epoch on."""

    def __init__(self) -> None:
        self.batches: Iterator[Any] = iter(())
        """The iterator of the current epoch."""
        self.change: Callable[[Any], Any] | None = None
        """Changes each training batch; set in ``on_setup``."""
        self.course: BatchLog = BatchLog()
        """The batches that each step has read, as ``run.json`` and checkpoints hold them."""
        self.in_epoch: bool = False
        """Whether an epoch has begun and ``on_epoch_end`` is still to come."""
        self.exhausted: bool = False
        """Whether the loader has no more batches in this epoch."""
        self.at_boundary: bool = True
        """Whether the run is between two steps, after all hooks of the last one, and of the epoch if it is over."""
        self.replay: bool = False
        """Whether the batches before the position are read and dropped, if the loader cannot start there."""
        self.permuted: int = PERMUTED
        """The largest number of samples with the order of ``torch.randperm``; see `resumable`."""

    def leave_epoch(self) -> None:
        """End the current epoch."""
        self.batches, self.in_epoch, self.exhausted = iter(()), False, False

    def close(self) -> None:
        """End the workers of the training loader."""
        self.batches = iter(())
        self.source.close()


def derived_of(run: Run) -> dict[str, Callable[[Run], Any]]:
    """Return the functions of a run by the name of the output that they compute."""
    return run._session.step.derived


def is_discarded(run: Run) -> bool:
    """Return whether the current batch is dropped, on all ranks or on this one."""
    return run._session.step.discarded


class StepState:
    """The current batch and the batches of the current step. Written by the loop."""

    def __init__(self, window: Callable[[], AccumulationWindow], optimizers: Sequence[Optimizer]) -> None:
        self.window: AccumulationWindow = window()
        self.last_window: AccumulationWindow = window()
        """The accumulation windows of the current step and of the last one."""
        self.shown: AccumulationWindow = self.window
        """That of the current step or, between two steps, of the last one."""
        self.most: int = self.window.size
        """The most batches that a step of the run has."""
        self.weight_unit: float | None = None
        """What loss scales of multiple ranks assume as the weight of each batch, in the whole run."""
        self.next_change: float = math.inf
        """The number of complete steps at which the size of the windows may change."""
        self.batch: Any = None
        """The current batch, on the device."""
        self.counted: bool = True
        """Whether the progress of the run counts the current batch."""
        self.outputs: Outputs = Outputs()
        """The outputs of the current batch: the same object until the next batch starts."""
        self.run: Callable[[], Run | None] | None = None
        self.derived: dict[str, Callable[[Run], Any]] = {}
        """Functions of the run by the name of the output that they compute; see `Derive`."""
        self.skipping: bool = False
        """Whether the current batch is dropped, on all ranks."""
        self.dropped: bool = False
        """Whether this rank alone drops the current batch."""
        self.undone: bool = False
        """Whether the current batch is dropped as if it was never read: what its forward pass changed is restored."""
        self.guard: float = 0
        """The number of the last step in which a batch may be dropped in this way; 0: in none."""
        self.drops: int = 0
        """How many ranks have dropped their current batch alone; 0 until the batch is over."""
        self.may_skip: bool = False
        """Whether the current batch can still be dropped."""
        self.raised: BaseException | None = None
        """What a verb of the run raised in a custom loop, until its next batch."""
        self.owner: object = None
        """What stands for the current step in a loop of the user's own."""
        self.updating: Sequence[Optimizer] = optimizers
        """The optimizers that the current step updates."""
        self.in_update: bool = False
        """Whether the optimizers step now."""
        self.updates: int = 0
        """How often the optimizers have stepped in this session."""
        self.updated: bool = True
        """Whether the last update took place, of one optimizer at least; fp16 skips it when gradients overflow."""
        self.left_out: Sequence[Optimizer] = ()
        """The optimizers that skipped their last update for this reason."""

    @property
    def discarded(self) -> bool:
        """Whether the current batch is dropped, on all ranks or on this one."""
        return self.skipping or self.dropped

    def begin(self) -> None:
        """Begin a step."""
        self.window.clear()
        self.shown = self.window

    def begin_batch(self, batch: Any) -> None:
        """Replace the current batch."""
        self.batch, self.counted, self.raised = batch, False, None
        self.outputs = outputs = Outputs()
        if self.derived:
            outputs.run, outputs.derived = self.run, self.derived
        self.skipping, self.may_skip, self.dropped, self.drops = False, True, False, 0
        self.undone = False

    def skip(self, *, undone: bool = False) -> None:
        """Drop the current batch. `undone`: what its forward pass changed must be restored."""
        self.skipping = True
        self.undone = undone

    def drop(self, *, undone: bool = False) -> None:
        """Drop the current batch on this rank alone. `undone`: as for `skip`."""
        self.dropped = True
        self.undone = undone

    def finish(self) -> None:
        """End the step: its accumulation window becomes the last one."""
        self.window, self.last_window = self.last_window, self.window

    def resize(self, batches: int) -> None:
        """Have the next steps hold so many batches."""
        self.window.resize(batches)
        self.last_window.resize(batches)

    def undo_update(self) -> None:
        """Count the last update as skipped: a callback has restored the weights."""
        self.updated = False


class Restored:
    """What a run that continues takes from its checkpoint later. Written by restore."""

    def __init__(self) -> None:
        self.rng_state: RNGState | None = None
        """The RNG state to continue with."""
        self.gradients: Sequence[tuple[Tensor, Tensor]] = ()
        """Parameters, and the gradients that a ``step_fn`` or an attached loop had left in them."""
        self.branch: Branch = Branch()
        """The line of checkpoints to which the run belongs."""
        self.recovery: Mapping[str, Any] | None = None
        """The data of the rollback with which the present branch began; see `GoBack`."""
        self.config: dict[str, Any] = {}
        """The configuration of the run at its start, before training or a checkpoint changed it."""
        self.callback_states: Mapping[str, Mapping[str, Any]] = {}
        """The states by callback, for what must be known in ``on_setup``."""

    @property
    def pending(self) -> bool:
        """Whether the run has not restored all of its checkpoint yet, so its state is no state of its own."""
        return self.rng_state is not None

    def take_rng_state(self) -> None:
        """Set the RNG state of the checkpoint, once."""
        if self.rng_state is not None:
            self.rng_state.restore()
            self.rng_state = None

    def take_gradients(self) -> None:
        """Set the gradients of the checkpoint, once."""
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        self.gradients = ()


# -- evaluations that are due at a step boundary ---------------------------------------------------


Evaluating = Callable[["Run"], object]
Session = Any  # that of cadenza.engine.session, which holds a `DueEvaluations`


class EvaluationInterrupted(BaseException):  # not an error: it unwinds an evaluation
    """Raised before the next batch of an evaluation when a signal ends the run. `DueEvaluations.run` catches it."""

    def __init__(self, evaluation: str, batches: int) -> None:
        super().__init__(f"{evaluation!r} was left after {counted(batches, 'batch')}")
        self.data: dict[str, Any] = {"evaluation": evaluation, "batches": batches}


class Deferred:
    """The function of a listener that evaluates: it adds the evaluation to those that are due at the boundary.

    In a run with callbacks of other libraries it evaluates immediately: they read the results in the same moment.

    Args:
        evaluate: Evaluates the model, and logs the results.
    """

    def __init__(self, evaluate: Evaluating) -> None:
        self.evaluate: Evaluating = evaluate

    def __call__(self, run: Run) -> None:
        session: Session = run._session
        listener = session.hooks.here().listener
        if session.adapters or listener is None:
            self.evaluate(run)
        else:
            session.due.add(listener, self.evaluate)


class DueEvaluations:
    """The evaluations that are due at the present boundary, in the order of the list.

    They run right after the moment at which they became due: no moment is open then. A signal interrupts an evaluation before
    its next batch. The run is saved with the names of the evaluations that are still due, and these run first after the resume.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        """The evaluations still due after a signal, for the checkpoint or from it, with what their record holds so far."""
        self._waiting: list[Listener] = []
        self._interruptible = False

    def add(self, listener: Listener, evaluate: Evaluating) -> None:
        """Run an evaluation after the present moment, as the work of `listener`."""
        evaluating = Listener(listener.moment, evaluate)
        evaluating.begin(listener.owner)
        self._waiting.append(evaluating)

    def interrupts(self, requests: Requests) -> Requests | None:
        """Return the requests in which a signal interrupts the running evaluation; None if none does."""
        return requests if self._interruptible and requests.from_signals else None

    def run_first(self, session: Session) -> None:
        """Run the sanity checks of the start, unless the run is to end before. Every rank must call this."""
        if self._waiting and session.sync.over():
            self._waiting = []
        self.run(session)

    def run(self, session: Session) -> bool:
        """Run the due evaluations, in order; return False if a signal leaves some of them to the resume.

        Every rank must call this.
        """
        return not self._waiting or self._run_each(session)

    def _run_each(self, session: Session) -> bool:
        outcome = session.outcome
        while self._waiting:
            listener = self._waiting[0]
            if outcome is not None and outcome.kind in ("preempted", "interrupted"):  # and saved at an earlier boundary
                self._keep(session)
                return False
            self._interruptible = outcome is None  # else no resume would repeat it
            try:
                with session.hooks.timed("evaluate", listener.owner):
                    session.hooks.call([listener], session.run)
            except EvaluationInterrupted as interrupted:
                self._interrupt(session, listener, interrupted)
                return False
            finally:
                self._interruptible = False
            del self._waiting[0]
        return True

    def take_up(self, session: Session) -> bool:
        """After a resume, make the evaluations due again that were so. Return whether their boundary is to be reached."""
        saved, self.state = self.state, None
        if saved is None:
            return False
        held = moved({name: saved[name] for name in ("losses", "weights")}, session.driver.device)
        session.step.last_window.losses, session.step.last_window.weights = held["losses"], held["weights"]
        session.metrics.buffer.put_numbers(saved["numbers"])
        session.cursor.at_boundary = False
        listeners: list[Listener] = [*chain.from_iterable(session.hooks.by_moment.values())]
        deferred = [(listener, listener.function) for listener in reversed(listeners)]
        known = {own.owner: (own, function.evaluate) for own, function in deferred if isinstance(function, Deferred)}
        for name in saved["names"]:
            if name in known:
                self.add(*known[name])  # the first one of its callback
            else:
                session.warn(
                    f"{name} was evaluating when the run was interrupted, but is no longer in callbacks. Its evaluation is not "
                    "repeated"
                )
        return True

    def restore(self, saved: Mapping[str, Any] | None) -> None:
        """Take the state of a checkpoint, for `take_up`."""
        self.state = None if saved is None else dict(saved)

    def _interrupt(self, session: Session, listener: Listener, interrupted: EvaluationInterrupted) -> None:
        session.decide("evaluation left", f"{interrupted}; it is repeated when the run continues", data=interrupted.data)
        for note in notes_of(interrupted):
            if note.startswith("then "):
                session.warn(note)
        if listener.moment is not Callback.on_fit_start:
            self.state = None
            self._keep(session)
            return
        session.sync.take_requests()  # nothing is trained yet, so nothing is saved
        stop = session.sync.take_stop()
        session.end(Outcome(session.sync.requests.kind, "" if stop is None else stop.why))

    def _keep(self, session: Session) -> None:
        """Leave the evaluations to the resume, with the numbers of their record and the loss of their step."""
        names, window = [listener.owner for listener in self._waiting], session.step.last_window
        self._waiting = []
        if self.state is None:
            numbers = session.metrics.buffer.take_numbers()
            state = {"names": names, "numbers": numbers, "losses": list(window.losses), "weights": list(window.weights)}
            self.state = moved(pytree.tree_map_only(Tensor, Tensor.detach, state), torch.device("cpu"))
