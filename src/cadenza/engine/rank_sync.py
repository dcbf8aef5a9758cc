"""What ranks exchange in each step: requests, counts of samples and tokens, the time, and sums of logged numbers.

`RankSync` is that of one process, and exchanges nothing. `SharedSync` is that of multiple ranks: every rank must call its
methods in the same order. Methods that communicate say so. A step of multiple ranks::

    begin_batch  --- announce: samples, tokens, the time, whether a request is pending, and whether a hook may still make
        |            one or log in this step. Sent while ranks compute; later if it takes the loss or the outputs to know.
    end_batch    --- read what all ranks have announced
        |
        |--- nothing was announced, or no hook of any rank may speak --> quiet: the step ends without an exchange
        |--- a request is pending, the last sums were late, or the epoch ends --> synchronize: all ranks wait for the sums
        v
    end_step     --- send the sums of requests and logged numbers
        |--- this rank has nothing --> it goes on, and reads the sums with its next batch
        |--- this rank has something, and so have all --> complete the record; requests take effect at this boundary
        '--- this rank has something, and others have not --> late: all ranks complete the record with the next batch, and
                                                              requests take effect at the next boundary

If no listener is due for some steps on any rank, nothing is announced in these steps, which are a quiet window. A signal and
unexpected requests are exchanged at its end. At the end of an epoch and of the run, all ranks wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from signal import Signals
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.engine.arguments import units_of_changes
from cadenza.engine.metric_log import is_number, mean_on_its_way, mean_over_ranks
from cadenza.engine.objective import count_in, counted_tokens, reported_tokens
from cadenza.engine.step_state import Cursor, Decide, Saver, SharedProgress, StepState, number_on_host
from cadenza.errors import LossError
from cadenza.hooks.counters import exchanged
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import Callback, Moment
from cadenza.optim.parameters import parameters_of
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.status.decisions import Decision, Requests
from cadenza.status.progress import Counters, Progress


@dataclass(eq=False, repr=False)
class RankSync:
    """The pending requests of a run in one process. Nothing is exchanged."""

    several: ClassVar[bool] = False
    """Whether there are other ranks."""

    _progress: Progress
    _cursor: Cursor
    _step: StepState
    _decide: Decide
    count_tokens: Callable[[Any], int] | None
    """Returns the tokens of a batch of the loader; None: the outputs of a batch may say them."""
    requests: Requests = field(default_factory=Requests, init=False)
    """The requests that are not carried out yet."""
    broken: bool = field(default=False, init=False)
    """Whether the run has failed: other ranks may not know it yet, so nothing is exchanged any more."""
    holds_back: bool = field(default=False, init=False)
    """Whether the gradients of the current batch stay on this rank until a later batch."""
    _samples: int = field(default=0, init=False)
    _counted: int = field(default=0, init=False)  # the tokens of the batch by `count_tokens`

    def __post_init__(self) -> None:
        self._needs_tokens = self._progress.max_tokens is not None

    @property
    def together(self) -> bool:
        """Whether there are other ranks that take part: not after an error, which they may not know of yet."""
        return self.several and not self.broken

    def over(self) -> bool:
        """Return whether no further step follows in the run. Communicates: every rank must call this."""
        return self._progress.finished or self.requests.ends_run

    def leaving_epoch(self) -> bool:
        """Return whether no further step follows in the epoch. Communicates: every rank must call this."""
        return self._cursor.exhausted or self._progress.finished or self.requests.leave

    def leaves(self) -> bool:
        """Return whether a request ends the epoch. Communicates: every rank must call this."""
        return self.requests.leave

    def read_tokens(self, batch: Any) -> None:
        """Count the tokens of a batch that is not on the device yet, if a function counts them."""
        if self.count_tokens is not None:
            self._counted = counted_tokens(self.count_tokens, batch)

    def begin_batch(self, batch: Any) -> None:
        """Begin a batch, after ``on_batch_start``. Communicates: every rank must call this."""
        self._samples = self._cursor.source.size_of(batch)

    def end_batch(self) -> tuple[int, int]:
        """Return the samples and the tokens in the batch, over all ranks. Communicates: every rank must call this."""
        outputs, samples, tokens = self._step.outputs, self._samples, self._counted
        if dict.get(outputs, "samples") is not None:
            samples = count_in(outputs, "samples") or 0
        if self._needs_tokens or dict.get(outputs, "tokens") is not None:
            tokens += self._reported_tokens()
        return samples, tokens

    def _reported_tokens(self) -> int:
        step, limit = self._step, self._progress.max_tokens
        return reported_tokens(step.outputs, count=self.count_tokens, limit=None if step.skipping else limit)

    def expect_drops(self) -> None:
        """Exchange with each batch how many ranks drop theirs alone. Every rank must call this, before the first step."""

    def expect_losses(self) -> None:
        """Exchange the loss of each step while ranks compute. Every rank must call this, before the first step."""

    def before_backward(self, weight: Any) -> float | None:
        """Exchange whether this rank drops the batch alone, and its weight. Communicates: every rank must call this.

        Only for the first batch with a weight ranks wait.

        Returns:
            The `unit` for `AccumulationWindow.add`.
        """
        return None

    def take_no_part(self, loss: Tensor) -> None:
        """Reduce the gradients of a batch that this rank drops alone: it adds nothing."""

    def agree_on_skip(self, moment: Moment) -> None:
        """Skip the batch on all ranks if a hook of `moment` skips it on one. Communicates: every rank must call this."""

    def end_step(self, *, acts: bool) -> None:
        """End a step: start the exchange of requests and logged numbers. Communicates: every rank must call this.

        Args:
            acts: Whether something is to be done at this step boundary, such as a save.
        """

    def synchronize(self) -> None:
        """Exchange requests and logged numbers, and wait for all ranks. Communicates: every rank must call this."""

    def take_requests(self) -> None:
        """Exchange requests now. Communicates: call it only if all ranks know that one has a request."""
        self._note_signal()

    saves: str = field(init=False, default="")
    """Why a save is due at this step boundary, as all ranks know; empty if none is."""

    def save(self, savers: Iterable[Saver]) -> None:
        """Carry out the requested save, if it is due and not done yet. Every rank must call this."""
        reason, self.requests.save = self.requests.save, ""
        for saver in savers if reason else ():
            saver.request(reason)

    def take_stop(self) -> Decision | None:
        """Return the stop that was requested, if there is one. A signal is recorded as a decision now."""
        self._note_signal()
        return self.requests.stop or self.requests.signalled

    def mean_loss(self) -> Tensor | None:
        """Return the (weighted) mean loss of the last step; None before the first. Communicates: every rank must call this."""
        return self._step.last_window.mean_loss()

    def loss_to_log(self) -> Tensor | None:
        """Return a loss of which the record holds the value of `mean_loss`. Communicates: every rank must call this."""
        return self.mean_loss()

    def depends_on(self, units: Collection[str]) -> None:
        """Keep the counters of these units exact in each step, as the run depends on them. Every rank must call this."""

    def close(self) -> None:
        """Leave what an error has left open."""

    def _note_signal(self) -> None:
        """Record that a signal ends the run, if one does. Not a collective: each rank records its own signal."""
        requests = self.requests
        if requests.signal is not None and requests.stop is None and requests.signalled is None:
            name = Signals(requests.signal).name
            data = {"signal": name, "kind": requests.kind}
            requests.signalled = self._decide("stopped", f"signal {name}", who="the system", data=data)


# -- multiple ranks ---------------------------------------------------------------------------------


LONGEST_S = 0.25
"""The longest time without an exchange, in seconds: a signal waits for so long."""

_MOST = 1 << 16  # of the steps that a rank says it expects without a call: the sum of their squares stays small

AT_START, AT_LOSS, AT_END = range(3)
"""When a batch is announced: before its forward pass, when its loss is known, or when it is over."""


class Silence:
    """The quiet windows of a run: steps in which ranks exchange nothing, because all listeners that are due are silent.

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
        """Return what a rank sends that expects `quiet` steps without a call: their number and its square."""
        expected = int(max(0, min(quiet, _MOST)))
        return [expected, expected * expected]

    def agree(self, votes: Sequence[float], ranks: int, step: int, elapsed_s: float) -> None:
        """Start the quiet window that all ranks voted for, or a part that is short enough at the pace of the last steps.

        There is none if ranks expect different numbers of steps: their callbacks are the same, so this does not last.

        Args:
            votes: The sums of the votes of all ranks.
            ranks: The number of ranks.
            step: The number of complete steps. The window starts after the current step.
            elapsed_s: The seconds since the fit began, by the clock of all ranks.
        """
        if self._measured is None or step > self._measured[0]:
            before, then_s = self._measured or (step - 1, 0.0)
            self._pace_s = (elapsed_s - then_s) / (step - before)  # since the last exchange: a pause is soon forgotten
            self._measured = step, elapsed_s
        total, squares = votes
        agreed = total // ranks if total * total == squares * ranks else 0  # which holds only if all numbers are equal
        steps = int(min(agreed, LONGEST_S / self._pace_s if self._pace_s else agreed))
        self._until = step + 1 + steps if steps else 0  # nor do they exchange in the other batches of the current step


@dataclass(eq=False, repr=False)
class SharedSync(RankSync):
    """The exchange among multiple ranks. No rank waits for another in a step in which nothing was requested or logged.

    Numbers that only the outputs of a batch say are sent with the next exchange. If the run depends on samples or tokens, there
    is no quiet window. If it depends on tokens that only the outputs say, a batch is announced when it is over: all ranks then
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
        self._leave = self._ends = False  # all ranks know that the epoch, or the run, is to end
        self._synchronized = False  # no request can have come since the last exchange
        self._speaks = True  # a hook may have made a request, or logged, in this step
        self._waits = False  # as all ranks know, a request or numbers of a rank wait for the end of this step
        self._given: int | None = 0
        self._tokens = 0  # those of this rank that are not sent yet
        units: set[str] = {length.unit for trigger in self._hooks.triggers.values() for length in trigger.schedule.lengths}
        units |= units_of_changes(self._step.most, self._progress) | ({"token"} if self._progress.max_tokens else set())
        self._by_tokens = "token" in units  # all ranks must know the tokens of each batch
        self._exact = bool(exchanged(units))  # no quiet window: the counters must be those of this step
        self._silence = Silence()
        self._announced: Callable[[], Tensor] | None = None  # what ranks exchange with a batch
        self._boundary: tuple[Counters, Callable[[], Tensor]] | None = None  # what they exchange at the end of a step
        self._holding = ExitStack()
        self._drops = False  # a batch may be dropped on this rank when its loss is known
        self._weighs = False  # a batch is announced with its weight
        self._weight: float | None = None
        self._shows_losses = False
        self._mean_loss: Callable[[], Tensor | None] | None = None  # that of the step, on its way

    def depends_on(self, units: Collection[str]) -> None:
        self._by_tokens |= "token" in units
        self._exact |= bool(exchanged(units))

    def over(self) -> bool:
        return self._progress.finished or (self.leaves() and self._ends)

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
        self._announce(AT_START)
        if self._uneven and not driver.shards:
            driver.share_buffers(self._model)  # as the wrapper of DDP does, which a step_fn does not call
        if not step.skipping and window.seen < window.size and not self._progress.at_last_batch and self._may_hold_back():
            self._holding.enter_context(driver.no_sync(self._model))  # gradients are reduced with the last batch
            self.holds_back: bool = True

    def end_batch(self) -> tuple[int, int]:
        step, window = self._step, self._step.window
        if self.holds_back:
            self.close()
            window.unreduced |= not step.skipping
        else:
            window.unreduced &= step.skipping
        if self._stepped:  # the gradients that no update has dropped, so that a checkpoint holds those of all ranks
            self._driver.average_gradients(dict.fromkeys(parameters_of(self._stepped)))
        self._collect()
        self._count_outputs()
        self._announce(AT_END)
        return self._read()

    def close(self) -> None:
        self._holding.close()
        self.holds_back = False

    def agree_on_skip(self, moment: Moment) -> None:
        if self._hooks.may_skip(moment) and self._driver.any_rank(self._step.skipping):
            self._step.skip()  # else the others would wait for its gradients

    def expect_drops(self) -> None:
        self._drops = True

    def expect_losses(self) -> None:
        self._shows_losses = not self._uneven

    def before_backward(self, weight: Any) -> float | None:
        own = None if self._uneven else number_on_host(weight)
        if own is not None:
            self._weigh(0.0 if self._step.dropped or not self._driver.counts else own)
        self._announce(AT_LOSS)
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
        if not self.holds_back:
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

    def _count(self, batch: Any) -> None:
        """Count `batch` before the forward pass."""
        source = self._cursor.source
        replicated = source.replicated_at == self._progress.batch_in_epoch and self._driver.data_rank > 0
        alike = replicated or not self._driver.counts
        self._given = None if alike else source.size_of(batch)  # a batch that multiple ranks train on counts once
        self._samples += self._given or 0
        self._tokens += 0 if alike else self._counted

    def _count_outputs(self) -> None:
        """Count what only the outputs of the batch say."""
        reported, tokens = count_in(self._step.outputs, "samples"), self._reported_tokens()
        if self._given is not None:
            self._samples += 0 if reported is None else reported - self._given
            self._tokens += tokens

    @property
    def _announces(self) -> int:
        """When a batch is announced: as early as all that is announced with it is known."""
        if self._by_tokens and self.count_tokens is None:
            return AT_END
        return AT_LOSS if self._drops or self._weighs else AT_START

    def _announce(self, when: int) -> None:
        """Start the exchange for a batch, unless it is early for that, it has started, or this is a quiet step."""
        progress = self._progress
        is_quiet = self._silence.covers(progress.step) and not self._weighs
        if when < self._announces or self._announced is not None or is_quiet:
            return
        following = self._hooks.next_call(progress)
        may_speak = self._uneven or self._buffer.holds_numbers or following <= progress.step + 1
        quiet = 0 if may_speak else following - progress.step - 2
        passed_ns = int(progress.own_s * 1e9) if isinstance(progress, SharedProgress) else 0
        dropped = self._step.dropped and self._driver.counts
        asks = self.requests.leave or bool(self.requests.save)
        flags = [self._samples, self._tokens, asks, may_speak, passed_ns, dropped]
        self._samples = self._tokens = 0
        own = [*flags, *Silence.votes(quiet), self._weight is not None, self._weight or 0]
        self._weight = None
        self._announced = self._driver.reduce_later(torch.tensor(own, dtype=torch.float64 if self._weighs else torch.int64))

    def _read(self) -> tuple[int, int]:
        """Read what all ranks have announced; return the samples and the tokens in their batches."""
        if self._announced is None:
            self._speaks = False
            return 0, 0
        samples, tokens, leave, may_speak, passed_ns, drops, *votes, weighed, weight = self._announced().tolist()
        self._announced = None
        self._step.drops = int(drops)
        self._step.window.left_out += int(drops)
        self._waits |= bool(leave)
        self._speaks = bool(may_speak)
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
            votes = Silence.votes(0)
        self._silence.agree(votes, ranks, progress.step, progress.elapsed_s)
        return int(samples), int(tokens)

    # -- the step boundary -------------------------------------------------------------------------

    def end_step(self, *, acts: bool) -> None:
        if self.broken:
            return
        self._collect()
        progress, requests = self._progress, self.requests
        ends = self._cursor.exhausted or progress.finished or progress.batch_in_epoch == progress.batches_per_epoch
        if ends or self._waits:
            self.synchronize()
            return
        may_speak, self._speaks = self._speaks, True
        self._leave, self._synchronized = False, True
        if not may_speak:
            return
        asks = requests.leave or bool(requests.save)
        speaks = acts or asks or self._buffer.holds_numbers or (self._exact and bool(self._samples or self._tokens))
        self._boundary = progress.now(), self._driver.reduce_later(self._own(speaks=speaks))
        if not speaks:
            return
        sums = self._boundary[1]().tolist()
        if sums[0] == self._driver.world_size:
            self._boundary = None
            self._complete(sums)
        elif self._buffer.holds_numbers:
            self._buffer.set_aside(self._boundary[0])  # all ranks complete it with the next batch

    def synchronize(self) -> None:
        if self.broken:
            self.saves: str = self.requests.save  # of this rank alone
            return
        self._collect()
        self._complete(self._driver.reduce_later(self._own(speaks=True))().tolist())

    def _own(self, *, speaks: bool) -> Tensor:
        """Return what the ranks exchange at a boundary: what `_complete` receives the sums of."""
        summary = self._buffer.summary(rank=self._driver.rank, counts=self._driver.counts)
        asks = self.requests.leave, bool(self.requests.save)
        own = [speaks, *asks, self._buffer.holds_numbers, self._samples, self._tokens, *summary]
        self._samples = self._tokens = 0
        return torch.tensor(own, dtype=torch.float64)

    def _complete(self, sums: Sequence[float]) -> None:
        """Complete the open record, and exchange requests if there are any."""
        _, leave, saves, holds, samples, tokens, *numbers = sums
        self._progress.add(int(samples), int(tokens))
        if holds:
            self._buffer.reduce(self._driver, numbers)
        if saves:
            reasons = dict.fromkeys([self.saves, *self._driver.gather(self.requests.save)])
            self.saves = "; ".join(filter(None, reasons))
            self.requests.save = ""
        self._settle(leave=bool(leave))

    def _collect(self) -> None:
        """Read the sums of the last boundary, and complete its record if a rank had numbers. Every rank must call this.

        The sums of a rank that has read them already are the same.
        """
        if self._boundary is None:
            return
        (at, arrived), self._boundary = self._boundary, None
        speaks, _, _, holds, samples, tokens, *numbers = arrived().tolist()
        self._progress.add(int(samples), int(tokens))
        self._waits |= bool(speaks)
        if holds:
            self._buffer.reduce_aside(self._driver, numbers, at)

    def take_requests(self) -> None:
        self._collect()
        self._settle(leave=True)

    def take_stop(self) -> Decision | None:
        return self.requests.stop or self.requests.signalled  # a signal is recorded when all ranks know of it

    def save(self, savers: Iterable[Saver]) -> None:
        if self.together:
            reason = self.saves  # a request that is not exchanged yet waits for the next boundary
            self.saves = ""
            for saver in savers if reason else ():
                saver.request(reason)
        else:
            super().save(savers)

    def mean_loss(self) -> Tensor | None:
        window = self._step.last_window
        return self._mean_loss() if self._mean_loss else mean_over_ranks(window, self._driver, uneven=self._uneven)

    def loss_to_log(self) -> Tensor | None:
        window = self._step.last_window
        return window.mean_loss() if is_number(window, uneven=self._uneven) else self.mean_loss()

    def _settle(self, *, leave: bool) -> None:
        """Note what all ranks know now. If the epoch is left, exchange the requests first, and find whether the run ends."""
        requests = self.requests
        if leave:
            self._note_signal()
            everyone = self._driver.gather((requests.stop, requests.end_epoch, requests.signalled, requests.signal))
            stops, ends, signalled, signals = zip(*everyone, strict=True)
            requests.stop, requests.end_epoch = self._first(stops), self._first(ends)
            requests.signalled = self._first(signalled)
            requests.signal = next((signal for signal in signals if signal is not None), None)
            requests.leave = True
        self._leave, self._ends, self._synchronized = leave, leave and requests.ends_run, True
        self._speaks, self._waits = True, False

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
