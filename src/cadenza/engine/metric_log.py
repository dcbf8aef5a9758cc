"""Logged values, from ``run.log`` to the history, the run directory and the sinks; and the check that losses are finite."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cadenza.drivers.base import Driver
from cadenza.engine.step_state import AccumulationWindow, Decide, StepState, number_on_host
from cadenza.errors import add_note, notes_of
from cadenza.hooks.dispatch import Hooks
from cadenza.records.directory import RunDirectory
from cadenza.records.history import History
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.record import Record
from cadenza.records.scalars import ArrivingNumbers, as_number, weighted_sum, widened
from cadenza.records.writer import Writer
from cadenza.status.decisions import Outcome
from cadenza.status.progress import Counters, Progress

if TYPE_CHECKING:
    from cadenza.run import Run
    from cadenza.sinks.media import MediaFiles


_MANY = 200  # numbers in a record


class MetricLog:
    """The metric buffer, the records with numbers that are still on the device, and their readers.

    Args:
        hooks: Fires ``on_log``, on the main process.
        losses: Checks the losses in each record.
        files: The run directory of the main process; None if nothing is written.
        decide: Records a decision.
    """

    def __init__(self, hooks: Hooks, losses: LossCheck, files: RunDirectory | None, decide: Decide) -> None:
        self._hooks, self._files, self._decide = hooks, files, decide
        self._media: MediaFiles | None = None
        self._media_failed = self._said_many = False
        self.losses: LossCheck = losses
        self.buffer: MetricBuffer = MetricBuffer()
        """The logged values that are not in a record yet."""
        self.history: History = History()
        """The numbers of every record."""
        self.writer: Writer = Writer()
        """The thread in which sinks write."""
        self.readers: list[Callable[[Run, Record], None]] = []
        """Functions of adapters. Every rank calls them with each record; ``on_log`` fires on the main process only."""

    def deliver(self, run: Run, at: Counters | None = None, *, wait: bool) -> None:
        """Pass records to their readers: those that `MetricBuffer.take` returns for `at` and `wait`."""
        for record in map(self.losses.look_at, self.buffer.take(at, wait=wait)):
            if not (record.values or record.media):
                continue
            if len(record.values) > _MANY and not self._said_many:
                self._warn_of_many(run, record)
            if thinned := self.history.add(record):
                self._decide("history thinned", thinned, who="the run")
            if run.is_main:
                if self._files:
                    self._files.add_record(record)
                    self._keep_media(self._files, record)
                self._hooks.on_log(run, record)
            for reader in self.readers:
                reader(run, record)

    def _warn_of_many(self, run: Run, record: Record) -> None:
        self._said_many = True
        run.warn(
            f"a record has {len(record.values)} numbers, such as {[*record.values][-1]!r}, and each is a curve in all sinks. "
            "Log a matrix as Image or Figure, or with ConfusionMatrix, and many numbers as Histogram."
        )

    def close(self) -> None:
        """Write the media that wait, and end the thread in which sinks write."""
        media, self._media = self._media, None
        if media is not None:
            try:
                media.finish()
            except Exception as error:  # a medium is no reason to fail a run that is over
                self._decide("not kept", f"media cannot be written: {error!r}", who="the run")
            for remark in media.remarks:
                self._decide("not kept", remark, who="the run")
        self.writer.stop()

    def _keep_media(self, files: RunDirectory, record: Record) -> None:
        if not record.media or self._media_failed:
            return
        try:
            if self._media is None:
                from cadenza.sinks.media import MediaFiles  # most runs log no media

                self._media = MediaFiles(files.path, self.writer)
            self._media.put(record)
        except Exception as error:  # as for a sink: the training goes on
            self._media_failed = True
            self._decide("not kept", f"media cannot be written, and no more are: {error!r}", who="the run")


# -- the losses of all steps, and the check that they are finite -----------------------------------


EVERY = 100  # steps, after which their losses are copied to the host
_TRAINING = "the loss"  # the name of the training loss


@dataclass(eq=False, repr=False)
class LossCheck:
    """Checks the training loss of every step, and the losses in records.

    The losses of the steps are copied to the host together: every 100 steps, at the end of each epoch and of the run, before a
    save, and when a loss in a record is not finite. Only the last three wait for them. `StopOnNonFinite` checks each batch,
    and waits.
    """

    _step: StepState
    _progress: Progress
    _driver: Driver
    _decide: Decide
    _warn: Callable[[str], None]
    _may_overflow: bool
    quiet: bool = field(default=False, init=False)
    """Whether nothing is reported, as in a trial of learning rates."""
    buffer: LossBuffer = field(default_factory=lambda: LossBuffer(), init=False)
    _lasting: dict[str, list[Any]] = field(default_factory=dict, init=False)  # since which step, its value there, how often
    _found: list[tuple[int, str, float]] = field(default_factory=list, init=False)  # that are not reported yet
    _first: tuple[int, str] | None = field(default=None, init=False)  # of the run
    _weightless: deque[int] = field(default_factory=lambda: deque(maxlen=EVERY), init=False)
    _has_warned: bool = field(default=False, init=False)
    _knows_weights: bool = field(default=True, init=False)  # those of all ranks

    def __post_init__(self) -> None:
        self.buffer.readers.append(self._look_at_step)
        several = self._driver.world_size > 1
        self._where = {_TRAINING: f" on rank {self._driver.rank}" if several else ""}

    def end_step(self) -> None:
        """Keep the losses of the step that is complete."""
        step = self._progress.step
        window = self._step.last_window
        self._knows_weights = self._driver.world_size == 1 or window.weight_of_ranks is not None
        self.buffer.keep(step, window.losses, window.weights, window.weight_of_ranks)
        if step % EVERY == 0:
            self.buffer.send()
        if self.buffer.is_sent:
            self.look()

    def end_epoch(self) -> None:
        """Start to check the steps of the epoch."""
        self.buffer.send()
        self.look()

    def look(self, *, wait: bool = False) -> None:
        """Check the losses that have arrived. With `wait`, check those of all steps."""
        self.buffer.deliver(wait=wait)
        if self._found:
            self._report()

    def look_at(self, record: Record) -> Record:
        """Check the losses in a record. Return it without those of a step in which no batch counts."""
        losses = {name: value for name, value in record.values.items() if name.endswith("loss")}
        if not all(map(math.isfinite, losses.values())):
            self.buffer.deliver(wait=True)  # the loss of an earlier step may be the first
            if record.step in self._weightless:
                empty = {name for name, value in losses.items() if math.isnan(value)}
                record = replace(record, values={name: value for name, value in record.values.items() if name not in empty})
        for name, value in losses.items():
            if name in record.values:
                self._look(name, value, record.step)
        if self._found:
            self._report()
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint. Waits for the losses of all steps so far."""
        self.look(wait=True)
        return {"lasting": {name: [*value] for name, value in self._lasting.items()}, "first": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the steps of a checkpoint."""
        self._lasting = {name: [*value] for name, value in state["lasting"].items()}
        self._first = None if state["first"] is None else (state["first"][0], state["first"][1])

    def ended(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a run, extended if a loss was not finite. Every rank must call this."""
        self.look(wait=True)
        everyone = self._driver.gather_unequal(self._since())  # the loss of any rank may be the first that is not finite
        first = min((found for found in everyone if found is not None), default=None, key=itemgetter(0))
        return outcome if first is None else replace(outcome, reason=f"{outcome.reason}; {first[1]}")

    def failed(self, error: BaseException) -> Outcome:
        """Return the outcome of a run that an error ends. It and the error say if a loss of this rank was not finite."""
        self._has_warned = True  # the error says it
        with suppress(Exception):  # the device may have failed
            self.look(wait=True)
        first = self._since()
        if first is None:
            return Outcome("failed", repr(error))
        if first[1] not in notes_of(error):
            add_note(error, first[1])
        return Outcome("failed", f"{error!r}; {first[1]}")

    def _since(self) -> tuple[int, str] | None:
        """Return the first step of this rank with a loss that is not finite, and a text with it."""
        if self._first is None or self.quiet:
            return None
        step, name = self._first
        lasts = name in self._lasting and self._lasting[name][0] == step
        when = f"from step {step} on" if lasts else f"at step {step}"
        return step, f"{name}{self._where.get(name, '')} was not finite {when}"

    def _look_at_step(self, entry: StepLoss) -> None:
        if (loss := entry.loss) is not None:
            self._look(_TRAINING, loss, entry.step)
        if not entry.of_ranks:
            self._note_weightless(entry.step)

    def _note_weightless(self, step: int) -> None:
        if self._knows_weights and not self._weightless and not self.quiet and self._driver.is_main:
            self._warn(
                f"the weights of all batches of step {step} are 0, so nothing was trained in it, and its loss is NaN. "
                "Check that outputs['weight'] counts the labels that are not masked"
            )
        self._weightless.append(step)

    def _look(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._lasting.pop(name, None)
            return
        since = self._lasting.setdefault(name, [step, value, 0])
        since[2] += 1
        if since[2] >= 1 + self._may_overflow:  # in fp16 the scaler skips an update that overflows: the next loss is finite
            self._found.append((since[0], name, since[1]))

    def _report(self) -> None:
        """Report the first of the losses that were found, once."""
        found, self._found = self._found, []
        if self.quiet:
            return
        step, name, value = min(found, key=lambda loss: (loss[0], loss[1] == _TRAINING))
        self._first = self._first or (step, name)
        if self._has_warned:
            return
        self._has_warned = True
        why, data = f"{name}{self._where.get(name, '')} is {value} at step {step}", {"name": name, "value": value, "step": step}
        self._decide("loss not finite", why, who="the run", data=data)
        if self._driver.is_main:
            self._warn(
                f"{why}, and training goes on. Weights that have become NaN stay NaN: add "
                "StopOnNonFinite() to stop at the first such batch, lower the learning rate, or clip gradients."
            )


class StepLoss(NamedTuple):
    """The loss of a step, on the host."""

    step: int
    total: float
    """The (weighted) sum over the batches of this rank."""
    weight: float
    """The weight of all of them: their number, if they have no weights."""
    of_ranks: float
    """The sum or mean of the weights of all ranks, if this rank knows it; else its own weight."""

    @property
    def loss(self) -> float | None:
        """The (weighted) mean over the batches of this rank; None if none of them counts."""
        return self.total / self.weight if self.weight else None


KeptLosses = tuple[int, list[Tensor], list[float | Tensor], float | Tensor | None]
"""A step, its losses and weights that are not on the host yet, and the weight of all ranks, if it is known."""


class LossBuffer:
    """The losses of the steps since the last copy. To keep those of a step launches no kernel, and does not wait.

    >>> import torch
    >>> losses = LossBuffer()
    >>> losses.readers.append(print)
    >>> losses.keep(1, [torch.tensor(1.0), torch.tensor(float("nan"))], [3, 0])
    >>> losses.deliver(wait=True)
    StepLoss(step=1, total=3.0, weight=3, of_ranks=3)
    """

    def __init__(self) -> None:
        self.readers: list[Callable[[StepLoss], object]] = []
        """Functions that get the loss of each step, in order."""
        self._kept: list[KeptLosses] = []
        self._sent: deque[tuple[list[KeptLosses], ArrivingNumbers]] = deque()
        self._last: Tensor | None = None
        self._overwritten = False

    def keep(
        self, step: int, losses: list[Tensor], weights: list[float | Tensor], of_ranks: float | Tensor | None = None
    ) -> None:
        """Keep references to the losses of a step.

        Of losses in memory that the next step overwrites, as of a CUDA graph, copies are kept. The second step shows whether
        they are such, so the first is always copied.
        """
        before = self._last
        if not losses or losses[-1].is_meta:
            return
        self._last = losses[-1]
        if before is not None and not self._overwritten and _is_overwritten(before, losses[-1]):
            self._overwritten = True
            if self._kept and self._kept[-1][1][-1] is before:
                self._kept.pop()
        if before is None or self._overwritten:
            losses = [loss.clone() for loss in losses]
        self._kept.append((step, losses, weights, of_ranks))

    @property
    def is_sent(self) -> bool:
        """Whether losses are on their way to the host."""
        return bool(self._sent)

    def kept_since(self, step: int) -> list[KeptLosses]:
        """Return the losses of the steps after `step` that no reader has received yet."""
        later: list[KeptLosses] = []
        for kept in (self._kept, *(sent for sent, _ in reversed(self._sent))):
            for loss in reversed(kept):
                if loss[0] <= step:
                    return later[::-1]
                later.append(loss)
        return later[::-1]

    def send(self) -> None:
        """Start the copy of the losses that are kept."""
        kept, self._kept = self._kept, []
        tensors: list[Tensor] = []
        for _, losses, given, of_ranks in kept:
            tensors += losses
            tensors += [number for number in (*given, of_ranks) if isinstance(number, Tensor)] if given else ()
        if kept:
            self._sent.append((kept, ArrivingNumbers(tensors)))

    def deliver(self, *, wait: bool) -> None:
        """Pass the losses that have arrived to the readers. With `wait`, send all, and wait for them."""
        if wait:
            self.send()
        while self._sent and (wait or self._sent[0][1].arrived):
            for loss in _losses_of(*self._sent.popleft()):
                for read in self.readers:
                    read(loss)


def _losses_of(kept: Iterable[KeptLosses], arrived: Iterable[float]) -> Iterator[StepLoss]:
    """Yield the losses of steps; `arrived` are the numbers of their tensors, in order."""
    numbers = iter(arrived)
    for step, tensors, given, of_ranks in kept:
        losses = list(islice(numbers, len(tensors)))
        if not given:  # without further calls, in each step
            count = len(losses)
            yield StepLoss(step, sum(losses), count, count)
            continue
        weights = [next(numbers) if isinstance(item, Tensor) else item for item in given]
        total, weight = weighted_total(losses, weights)
        counted = next(numbers) if isinstance(of_ranks, Tensor) else of_ranks
        yield StepLoss(step, total, weight, weight if counted is None else counted)


def weighted_total(losses: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """Return the weighted sum of losses, and the sum of their weights; without weights, their sum and number.

    >>> weighted_total([1.0, float("nan")], [3, 0]), weighted_total([1.0, 2.0], [])
    ((3.0, 3), (3.0, 2))
    """
    if not weights:
        return sum(losses), len(losses)
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight), sum(weights)


def _is_overwritten(before: Tensor, after: Tensor) -> bool:
    try:
        return before.data_ptr() == after.data_ptr()
    except RuntimeError:  # the memory of a CUDA graph of torch.compile, which its next call took back
        return True


# -- the loss over the ranks -----------------------------------------------------------------------


def mean_over_ranks(window: AccumulationWindow, driver: Driver, *, uneven: bool) -> Tensor | None:
    """Return the (weighted) mean loss of a step over all ranks; None if there is none, NaN if all weights are 0.

    Every rank must call this.

    Args:
        window: The batches of this rank.
        driver: Reduces over the ranks.
        uneven: Whether ranks may have different numbers of batches.
    """
    own = window.mean_loss()
    differ = uneven or window.left_out > 0
    if driver.world_size == 1 or (own is None and not differ):
        return own
    if not uneven and not window.counts(driver.data_world_size):
        return None
    if own is not None and is_number(window, uneven=uneven):
        return driver.reduce(own.double(), "sum") / driver.data_world_size
    own = torch.zeros((), device=driver.device) if own is None else widened(own)
    weight = as_number(window.total if window.weights or differ else 1.0, own.device, own.dtype)
    total = driver.reduce(torch.stack([weighted_sum(own, weight), weight]), "sum")
    return total[0] / total[1]


def mean_on_its_way(step: StepState, weight: Any, driver: Driver) -> Callable[[], Tensor | None] | None:
    """Start the exchange of `mean_over_ranks` before the backward pass of the last batch of a step. Every rank must call this.

    Args:
        step: The step, with the batches before this one in its window.
        weight: The weight of the batch.
        driver: Reduces over the ranks.

    Returns:
        A function that waits for the mean; None if the window is not full or its numbers are on a device, on all ranks.
    """
    window, loss = step.window, dict.get(step.outputs, "loss")
    if window.seen < window.size or not isinstance(loss, Tensor) or loss.numel() != 1:  # no number: an error of this rank
        return None
    loss = loss.detach()
    weights = [*window.weights, *([] if weight is None else [0.0 if step.dropped else weight])]
    losses = [*window.losses, *([] if step.dropped and weight is None else [loss])]
    on_host = [number for loss in (*losses, *weights) if (number := number_on_host(loss)) is not None]
    if not loss.is_cpu or len(on_host) < len(losses) + len(weights):
        return None
    own = weighted_total(on_host[: len(losses)], on_host[len(losses) :])
    arrives = driver.reduce_later(torch.tensor(own, dtype=torch.float64) * driver.counts)

    def mean() -> Tensor | None:
        total, count = arrives()
        return total / count if weights or count else None

    return mean


def is_number(window: AccumulationWindow, *, uneven: bool) -> bool:
    """Return whether `mean_over_ranks` is the mean of the losses of all ranks as a record reduces it. All ranks agree.

    A record that holds the loss of this rank then saves an exchange. A sum of float32 in float64 is exact, in any order, unless
    they differ by a factor of 2^29 / ranks or more: so the bits are the same in a record and in a replay.
    """
    own = window.mean_loss()
    is_mean = not uneven and not window.left_out and not window.weights
    return is_mean and own is not None and own.is_cpu and own.dtype is not torch.float64
