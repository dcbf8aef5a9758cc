"""What the ranks of a run exchange with each step: flags, sample counts, sums of logged numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.engine.arguments import units_of_changes
from cadenza.engine.objective import count_in
from cadenza.engine.rank_sync import RankSync, SharedProgress
from cadenza.engine.step_state import AccumulationWindow, StepState, number_on_host
from cadenza.errors import LossError
from cadenza.hooks.counting import exchanged
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment
from cadenza.optim.parameters import parameters_of
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.scalars import as_number, weighted_sum, widened
from cadenza.status.decisions import Decision
from cadenza.status.progress import Counters

# -- quiet steps -----------------------------------------------------------------------------------

STEPS = (2, 8, 32, 128)
"""The numbers of steps for which ranks that expect different calls may agree to exchange nothing."""

LONGEST_S = 0.25
"""The longest time without an exchange, in seconds: a signal waits for so long."""

_MOST = 1 << 16  # of the steps that a rank says it expects without a call: the sum of their squares stays small


class Silence:
    """The quiet windows of a run: steps in which ranks exchange nothing, because no listener is due on any rank.

    All numbers are those that the ranks have exchanged, so that all ranks come to the same result.
    """

    def __init__(self) -> None:
        self._until = 0
        self._measured: tuple[int, float] | None = None
        self._pace_s = float("inf")

    def covers(self, step: int) -> bool:
        """Return whether nothing is exchanged after so many complete steps."""
        return step < self._until

    @staticmethod
    def votes(quiet: float) -> list[int]:
        """Return what a rank sends that expects `quiet` steps without a call: their number, its square, the `STEPS` within."""
        expected = int(max(0, min(quiet, _MOST)))
        return [expected, expected * expected, *(expected >= steps for steps in STEPS)]

    def measure(self, step: int, elapsed_s: float) -> None:
        """Note the seconds since the fit began, by the clock of all ranks, at a number of complete steps."""
        if self._measured is None or step > self._measured[0]:
            before, then_s = self._measured or (step - 1, 0.0)
            self._pace_s = (elapsed_s - then_s) / (step - before)  # since the last exchange: a pause is soon forgotten
            self._measured = step, elapsed_s

    def agree(self, votes: Sequence[float], ranks: int, first: int) -> None:
        """Start the longest quiet window that all ranks voted for and that is short enough at the pace of the last steps.

        Ranks that expect the same number of steps get a window of this length. Others get one of `STEPS`.

        Args:
            votes: The sums of the votes of all ranks.
            ranks: The number of ranks.
            first: The number of complete steps at which the window starts.
        """
        total, squares, *each = votes
        if total * total == squares * ranks:  # only if all numbers are equal
            agreed = total // ranks
        else:
            agreed = max((steps for steps, sure in zip(STEPS, each, strict=True) if sure == ranks), default=0)
        steps = int(min(agreed, LONGEST_S / self._pace_s if self._pace_s else agreed))
        self._until = first + steps if steps else 0


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
    on_host = [number for one in (*losses, *weights) if (number := number_on_host(one)) is not None]
    if not loss.is_cpu or len(on_host) < len(losses) + len(weights):
        return None
    factors = on_host[len(losses) :] if weights else [1.0] * len(losses)
    terms = [value * factor for value, factor in zip(on_host, factors, strict=False) if factor]
    arrives = driver.reduce_later(torch.tensor([sum(terms), sum(factors)], dtype=torch.float64) * driver.counts)

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


@dataclass(eq=False, repr=False)
class SharedSync(RankSync):
    """The exchange among several ranks. No rank waits for another in a step in which nothing was requested or logged.

    With a batch, while they compute, ranks exchange the numbers of samples and tokens, whether a stop was requested, the time,
    and whether a hook may still make a request or log in this step. Only if one may, a second exchange starts at the step
    boundary: the sums of what each rank requests and logs. A rank with nothing of its own goes on, and reads the sums with the
    next batch, when they have arrived. A rank with a request or a logged number reads them immediately:

    - If all ranks have something, all know it at this boundary. Requests take effect and the record is complete, as in one
      process.
    - Otherwise all ranks know it at the next boundary, where requests take effect and the record is completed.

    If no listener is due for some steps on any rank, nothing is exchanged in these steps; a signal and unexpected requests are
    exchanged at the end of this quiet window. At the end of an epoch and of the run, all ranks wait.

    Numbers that only the outputs of a batch say are sent with the next exchange. If the run depends on samples or tokens, there
    is no quiet window. If it depends on tokens that only the outputs say, a batch is exchanged when it is over: all ranks then
    know its tokens before ``on_batch_end``.
    """

    several: ClassVar[bool] = True

    _driver: Driver
    _model: nn.Module
    _hooks: Hooks
    _buffer: MetricBuffer
    _stepped: Sequence[Optimizer]  # the optimizers of a step_fn
    _uneven: bool  # code that may speak at any time calls the user's own module

    def __post_init__(self) -> None:
        self._uneven |= bool(self._stepped)
        hooks, progress = self._hooks, self._progress
        self._leave = self._ends = False  # all ranks know that the epoch, or the run, is to end
        self._synchronized = False  # no request can have come since the last exchange
        self._quiet = self._leave_sent = False
        self._given: int | None = 0
        self._tokens = 0  # those of this rank that are not sent yet
        schedules = (one.schedule for listeners in hooks.by_moment.values() for one in listeners if one.schedule is not None)
        units = {length.unit for schedule in schedules for length in schedule.lengths}
        self._by_tokens = progress.max_tokens is not None  # all ranks must know the tokens of each batch
        self._exact = self._by_tokens  # no quiet window: the counters must be those of this step
        self.depends_on(units | units_of_changes(self._step.most, progress))
        self._silence = Silence()
        self._announced: Callable[[], Tensor] | None = None  # what ranks exchange with a batch
        self._boundary: tuple[Counters, Callable[[], Tensor]] | None = None  # what they exchange at the end of a step
        self._late: tuple[Counters, list[float]] | None = None  # sums of which all ranks know that only some have something
        self._held_back: AbstractContextManager[None] | None = None
        self._drops = False  # a batch is announced when its loss is known, which may be a reason to drop it on this rank
        self._weighs = False  # a batch is announced with its weight
        self._weight: float | None = None
        self._shows_losses = False
        self._mean_loss: Callable[[], Tensor | None] | None = None  # that of the step, on its way

    def depends_on(self, units: Collection[str]) -> None:
        self._by_tokens |= "token" in units
        self._exact |= bool(exchanged(units))

    def over(self) -> bool:
        if self._progress.finished:
            return True
        self.leaves()
        return self._ends

    def leaving_epoch(self) -> bool:
        return self._cursor.exhausted or self._progress.finished or self.leaves()

    def leaves(self) -> bool:
        if not self._synchronized:
            self.synchronize()
        self._synchronized = self._leave  # no request comes before the epoch is left
        return self._leave

    # -- a batch -----------------------------------------------------------------------------------

    def begin_batch(self, batch: Any) -> None:
        step, window, driver = self._step, self._step.window, self._driver
        self._mean_loss = None
        self.agree_on_skip(Callback.on_batch_start)
        self._count(batch)
        if not self._announces_late and not self._announces_at_loss:
            self._announce()
        if self._uneven and not driver.shards:
            driver.share_buffers(self._model)  # as the wrapper of DDP does, which a step_fn does not call
        if not step.skipping and window.seen < window.size and not self._progress.at_last_batch and self._may_hold_back():
            self._held_back = driver.no_sync(self._model)  # gradients are reduced once a step, with its last batch
            self._held_back.__enter__()

    def end_batch(self) -> tuple[int, int]:
        step, window = self._step, self._step.window
        if self._held_back is not None:
            self.close()
            window.unreduced |= not step.skipping
        else:
            window.unreduced &= step.skipping
        if self._stepped:  # the gradients that no update has dropped, so that a checkpoint holds those of all ranks
            self._driver.average_gradients(dict.fromkeys(parameters_of(self._stepped)))
        return self._summed()

    @property
    def holds_back(self) -> bool:
        return self._held_back is not None

    def close(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            held_back.__exit__(None, None, None)

    def agree_on_skip(self, moment: Moment) -> None:
        if self._hooks.may_skip(moment) and self._driver.any_rank(self._step.skipping):
            self._step.skip()  # else the others would wait for its gradients

    def check_skip(self, listener: Listener | None) -> None:
        if listener is not None and not self._hooks.can_skip(listener):
            setting = "skips = False" if self._hooks.callbacks[listener.owner].asks else "asks = False"
            raise RuntimeError(
                f"{listener.owner} has {setting}, so the other ranks do not expect it to skip a batch. Remove {setting}."
            )

    def expect_drops(self) -> None:
        self._drops = True

    def expect_losses(self) -> None:
        self._shows_losses = not self._uneven

    def before_backward(self, weight: Any) -> float | None:
        own = None if self._uneven else number_on_host(weight)
        if own is not None:
            self._weigh(0.0 if self._step.dropped or not self._driver.counts else own)
        if self._announces_at_loss and not self._announces_late and self._announced is None:
            self._announce()
        if self._shows_losses:
            self._mean_loss = mean_on_its_way(self._step, weight, self._driver)
        return None if own is None else self._step.weight_unit or 1.0

    def _weigh(self, weight: float) -> None:
        """Send a weight with the batch. The first one has to be reduced apart: the batch is announced already."""
        if self._weighs:
            self._weight = weight
            return
        self._weighs = True
        total = float(self._driver.reduce(torch.tensor(weight, dtype=torch.float64), "total"))
        self._step.window.of_ranks = (self._step.window.of_ranks or 0.0) + total
        if self._step.weight_unit is None and 0 < total < math.inf:  # a power of 2, which does not change the rounding
            self._step.weight_unit = 2.0 ** round(math.log2(total / self._driver.data_world_size))

    def take_no_part(self, loss: Tensor) -> None:
        if self._held_back is None:
            self._driver.add_no_gradients(self._model, loss)

    def _may_hold_back(self) -> bool:
        """Return whether gradients may be left on each rank until the last batch of the window, by a rule that all ranks share.

        If they can only be reduced in a backward pass, the last batch must have one: the length of the epoch is known, and no
        hook can skip a batch.
        """
        if self._driver.reduces_later:
            return True
        listeners = self._hooks.by_moment
        may_skip = self._uneven or listeners.get(Callback.on_batch_start) or listeners.get(Callback.on_before_backward)
        return self._progress.batches_per_epoch is not None and not may_skip

    @property
    def _announces_at_loss(self) -> bool:
        """Whether a batch is announced when its loss is known."""
        return self._drops or self._weighs

    @property
    def _announces_late(self) -> bool:
        """Whether a batch is announced when it is over, because only its outputs say how many tokens it has."""
        return self._by_tokens and self.count_tokens is None

    def _count(self, batch: Any) -> None:
        """Count `batch` before the forward pass."""
        source = self._cursor.source
        replicated = source.replicated_at == self._progress.batch_in_epoch and self._driver.data_rank > 0
        alike = replicated or not self._driver.counts
        self._given = None if alike else source.size_of(batch)  # a batch that several ranks train on counts once
        self._samples += self._given or 0
        if self.count_tokens is not None and not alike:
            self._tokens += self._tokens_in_batch

    def _count_outputs(self) -> None:
        """Count what only the outputs of the batch say."""
        reported = count_in(self._step.outputs, "samples")
        tokens = self._tokens_of_batch()
        if self._given is not None:
            self._samples += 0 if reported is None else reported - self._given
            self._tokens += tokens if self.count_tokens is None else 0

    def _announce(self) -> None:
        """Start the exchange for a batch, unless this is a quiet step."""
        progress = self._progress
        if self._silence.covers(progress.step) and not self._weighs:
            return
        may_speak = self._may_speak()
        quiet = 0 if may_speak else self._hooks.next_call(progress, asking=False) - progress.step - 2
        passed_ns = int(progress.own_s * 1e9) if isinstance(progress, SharedProgress) else 0
        flags = [
            self._samples,
            self._tokens,
            self.requests.leave,
            may_speak,
            passed_ns,
            self._step.dropped and self._driver.counts,
        ]
        self._samples = self._tokens = 0
        own = [*flags, *Silence.votes(quiet), self._weight is not None, self._weight or 0]
        self._weight = None
        self._announced = self._driver.reduce_later(torch.tensor(own, dtype=torch.float64 if self._weighs else torch.int64))

    def _summed(self) -> tuple[int, int]:
        """Return the samples and the tokens in the announced batches of all ranks."""
        self._collect()
        self._count_outputs()
        if self._announces_late or (self._announces_at_loss and self._announced is None):
            self._announce()
        if self._announced is None:
            self._leave_sent, self._quiet = False, True
            return 0, 0
        samples, tokens, leave, may_speak, passed_ns, drops, *votes, weighed, weight = self._announced().tolist()
        self._announced = None
        self._step.drops = int(drops)
        self._step.window.left_out += int(drops)
        self._leave_sent, self._quiet = bool(leave), not may_speak
        ranks, progress = self._driver.world_size, self._progress
        if weighed:
            self._step.window.of_ranks = (self._step.window.of_ranks or 0.0) + weight
            if weighed < ranks:
                raise LossError(
                    "outputs['weight'] is there on some ranks only; either all batches of a step report it, or none"
                )
        if isinstance(progress, SharedProgress):
            progress.agree(passed_ns / ranks / 1e9)
        if leave or self._exact or self._weighs:
            votes = [0] * len(votes)
        self._silence.measure(progress.step, progress.elapsed_s)
        self._silence.agree(votes, ranks, progress.step + 1)
        return int(samples), int(tokens)

    def _may_speak(self) -> bool:
        """Return whether a hook may still make a request, or log, in this step."""
        if self._uneven or self._buffer.holds_numbers:
            return True
        return self._hooks.next_call(self._progress, asking=True) <= self._progress.step + 1

    # -- the step boundary -------------------------------------------------------------------------

    def end_step(self, *, acts: bool) -> None:
        if self.broken:
            return
        self._collect()
        progress, requests = self._progress, self.requests
        ends = self._cursor.exhausted or progress.finished or progress.batch_in_epoch == progress.batches_per_epoch
        if ends or self._leave_sent or self._late is not None:  # as all ranks know
            self.synchronize()
            return
        quiet, self._quiet = self._quiet, False
        self._leave, self._synchronized = False, True
        if quiet:
            return
        speaks = acts or requests.leave or self._buffer.holds_numbers or (self._exact and bool(self._samples or self._tokens))
        self._boundary = progress.now(), self._driver.reduce_later(self._own(speaks=speaks))
        if not speaks:
            return
        sums = self._boundary[1]().tolist()
        if sums[0] == self._driver.world_size:
            self._boundary = None
            self._complete(sums)
        else:
            self._buffer.set_aside(self._boundary[0])  # all ranks complete it at the next boundary

    def synchronize(self) -> None:
        if self.broken:
            return
        self._collect()
        self._complete_late()
        self._complete(self._driver.reduce(self._own(speaks=True), "total").tolist())

    def _own(self, *, speaks: bool) -> Tensor:
        """Return what the ranks exchange at a boundary: what `_complete` receives the sums of."""
        summary = self._buffer.summary(rank=self._driver.rank, counts=self._driver.counts)
        own = [speaks, self.requests.leave, self._samples, self._tokens, *summary]
        self._samples = self._tokens = 0
        return torch.tensor(own, dtype=torch.float64)

    def _complete(self, sums: Sequence[float]) -> None:
        """Complete the open record, and exchange requests if there are any."""
        _, leave, samples, tokens, *numbers = sums
        self._progress.add(int(samples), int(tokens))
        self._buffer.reduce(self._driver, numbers)
        if leave:
            self._exchange_requests()
        self._leave, self._ends, self._synchronized = bool(leave), bool(leave) and self.requests.ends_run, True
        self._leave_sent = self._quiet = False

    def _collect(self) -> None:
        """Read the sums of the last boundary, on all ranks: those of a rank that has read them already are the same."""
        if self._boundary is None:
            return
        (at, arrived), self._boundary = self._boundary, None
        speaks, _, samples, tokens, *numbers = arrived().tolist()
        self._progress.add(int(samples), int(tokens))
        if speaks:
            self._late = at, numbers

    def _complete_late(self) -> None:
        """Complete the record of the last boundary, where only some ranks had something."""
        if self._late is not None:
            (at, numbers), self._late = self._late, None
            self._buffer.reduce_aside(self._driver, numbers, at)

    def take_requests(self) -> None:
        self._collect()
        self._complete_late()
        self._exchange_requests()
        self._leave = self._synchronized = True
        self._ends = self.requests.ends_run

    def take_stop(self) -> Decision | None:
        return self.requests.stop or self.requests.signalled  # a signal is recorded when all ranks know of it

    def mean_loss(self) -> Tensor | None:
        if self._mean_loss is not None:
            return self._mean_loss()
        return mean_over_ranks(self._step.last_window, self._driver, uneven=self._uneven)

    def loss_to_log(self) -> Tensor | None:
        window = self._step.last_window
        return window.mean_loss() if is_number(window, uneven=self._uneven) else self.mean_loss()

    def _exchange_requests(self) -> None:
        requests = self.requests
        self._note_signal()
        everyone = self._driver.gather((requests.stop, requests.end_epoch, requests.signalled, requests.signal))
        stops, ends, signalled, signals = zip(*everyone, strict=True)
        requests.stop, requests.end_epoch = self._first(stops), self._first(ends)
        requests.signalled = self._first(signalled)
        requests.signal = next((signal for signal in signals if signal is not None), None)
        requests.leave = True

    def _first(self, decisions: Sequence[Decision | None]) -> Decision | None:
        """Return the first rank's decision. If another rank made it, record that it takes effect on this one."""
        for rank, decision in enumerate(decisions):
            if decision is not None:
                if rank != self._driver.rank and " on rank " not in decision.who:
                    who, own = f"{decision.who} on rank {rank}", decisions[self._driver.rank]
                    if own is not None and own.who == who:
                        return own
                    return self._decide(decision.what, decision.why, who=who, data=decision.data)
                return replace(decision)
        return None
