"""The exchange between the ranks of a run in a step: flags, sample counts, sums; and the pending requests.

`RankSync` is that of one process and exchanges nothing. `SharedSync` is that of several ranks: every rank must call its
methods in the same order. Methods that communicate say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from signal import Signals
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.engine.accumulating import units_of
from cadenza.engine.outputs import count_in
from cadenza.engine.step_state import Cursor, StepState
from cadenza.engine.token_count import TokenCount
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import Callback, Moment
from cadenza.hooks.parts import lengths_in
from cadenza.optim.parameters import parameters_of
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.scalars import as_number, quotient, widened
from cadenza.status.decisions import Decision
from cadenza.status.progress import Counters, Progress
from cadenza.status.requests import Requests


class Decide(Protocol):
    """Records a decision: see `Session.decide`."""

    def __call__(self, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> Decision: ...


class SharedProgress(Progress):
    """Counters of one among several ranks. The elapsed time is the one that all ranks agreed on before the current step.

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


class RankSync:
    """The pending requests of a run in one process. Nothing is exchanged."""

    several = False
    """Whether there are other ranks."""

    def __init__(
        self, progress: Progress, cursor: Cursor, step: StepState, decide: Decide, tokens: TokenCount | None = None
    ) -> None:
        self.requests: Requests = Requests()
        """The requests that are not carried out yet."""
        self.broken = False
        """Whether the run has failed: other ranks may not know it yet, so nothing is exchanged any more."""
        self._progress, self._cursor, self._step, self._decide = progress, cursor, step, decide
        self._samples = 0
        self.tokens: TokenCount = tokens or TokenCount()
        """Counts the tokens of a batch."""

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

    def begin_batch(self, batch: Any) -> None:
        """Begin a batch, after ``on_batch_start``. Communicates: every rank must call this."""
        self._samples = self._cursor.source.size_of(batch)

    def end_batch(self) -> tuple[int, int]:
        """Return the samples and the tokens in the batch, over all ranks. Communicates: every rank must call this."""
        outputs, samples = self._step.outputs, self._samples
        if dict.get(outputs, "samples") is not None:
            samples = count_in(outputs, "samples") or 0
        return samples, self.tokens.of(self._step) if self.tokens.asked or dict.get(outputs, "tokens") is not None else 0

    def agree_on_skip(self, moment: Moment) -> None:
        """Skip the batch on all ranks if a hook of `moment` skips it on one. Communicates: every rank must call this."""

    def settle(self) -> None:
        """Exchange requests and logged numbers at the step boundary. Communicates: every rank must call this."""

    def take_requests(self) -> None:
        """Exchange requests now. Communicates: call it only if all ranks know that one has a request."""
        self._note_signal()

    def take_stop(self) -> Decision | None:
        """Return the stop that was requested, if there is one. A signal is recorded as a decision now."""
        self._note_signal()
        return self.requests.stop or self.requests.signalled

    def mean_loss(self) -> Tensor | None:
        """Return the (weighted) mean loss of the last step; None before the first. Communicates: every rank must call this."""
        return self._step.last_window.mean_loss()

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


class SharedSync(RankSync):
    """The exchange among several ranks.

    With a batch, while they compute, ranks exchange without waiting: the numbers of samples and tokens, whether a stop was
    requested, the time, and whether a hook may still make a request or log in this step. Only if one may, there is a second
    exchange at the step boundary, for which they wait. If no listener is due for some steps on any rank, nothing is exchanged
    in these steps; a signal and unexpected requests are exchanged at the end of this quiet window.

    Numbers that only the outputs of a batch say are sent with the next exchange. If the run depends on samples or tokens, there
    is no quiet window. If it depends on tokens that only the outputs say, a batch is exchanged when it is over: all ranks then
    know its tokens before ``on_batch_end``.
    """

    several = True

    def __init__(
        self,
        driver: Driver,
        model: nn.Module,
        hooks: Hooks,
        progress: Progress,
        cursor: Cursor,
        step: StepState,
        buffer: MetricBuffer,
        decide: Decide,
        *,
        stepped: Sequence[Optimizer] = (),
        own_loop: bool = False,
        tokens: TokenCount | None = None,
    ) -> None:
        super().__init__(progress, cursor, step, decide, tokens)
        self._driver, self._model, self._hooks, self._buffer = driver, model, hooks, buffer
        self._stepped = stepped  # the optimizers of a step_fn
        self._by_hand = own_loop or bool(stepped)  # code that may speak at any time calls the user's own module
        self._leave = self._ends = False  # all ranks know that the epoch, or the run, is to end
        self._settled = False  # no request can have come since the last exchange
        self._quiet = self._leave_sent = False
        self._given: int | None = 0
        self._tokens = 0  # those of this rank that are not sent yet
        schedules = (one.schedule for listeners in hooks.by_moment.values() for one in listeners if one.schedule is not None)
        units = {length.unit for schedule in schedules for length in lengths_in(schedule) or ()}
        self._by_tokens = progress.max_tokens is not None  # all ranks must know the tokens of each batch
        self._exact = self._by_tokens  # no quiet window: the counters must be those of this step
        self.depends_on(units | units_of(step.most, progress))
        self._silent_until = 0
        self._arrived: Callable[[], Tensor] | None = None
        self._held_back: AbstractContextManager[None] | None = None

    def depends_on(self, units: Collection[str]) -> None:
        self._by_tokens |= "token" in units
        self._exact |= not {"sample", "token"}.isdisjoint(units)

    def over(self) -> bool:
        if self._progress.finished:
            return True
        self.leaves()
        return self._ends

    def leaving_epoch(self) -> bool:
        return self._cursor.exhausted or self._progress.finished or self.leaves()

    def leaves(self) -> bool:
        if not self._settled:
            self.settle()
        self._settled = self._leave  # no request comes before the epoch is left
        return self._leave

    # -- a batch -----------------------------------------------------------------------------------

    def begin_batch(self, batch: Any) -> None:
        step, window, driver = self._step, self._step.window, self._driver
        self.agree_on_skip(Callback.on_batch_start)
        self._count(batch)
        if not self._late:
            self._announce()
        if self._by_hand and not driver.shards:
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

    def close(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back is not None:
            held_back.__exit__(None, None, None)

    def agree_on_skip(self, moment: Moment) -> None:
        if self._hooks.calls(moment) and self._driver.any_rank(self._step.skipping):
            self._step.skip()  # else the others would wait for its gradients

    def _may_hold_back(self) -> bool:
        """Return whether gradients may be left on each rank until the last batch of the window, by a rule that all ranks share.

        If they can only be reduced in a backward pass, the last batch must have one: the length of the epoch is known, and no
        hook can skip a batch.
        """
        if self._driver.reduces_later:
            return True
        listeners = self._hooks.by_moment
        may_skip = self._by_hand or listeners.get(Callback.on_batch_start) or listeners.get(Callback.on_before_backward)
        return self._progress.batches_per_epoch is not None and not may_skip

    @property
    def _late(self) -> bool:
        """Whether a batch is announced when it is over, because only its outputs say how many tokens it has."""
        return self._by_tokens and self.tokens.function is None

    def _count(self, batch: Any) -> None:
        """Count `batch` before the forward pass."""
        source = self._cursor.source
        alike = source.replicated_at == self._progress.batch_in_epoch and self._driver.rank > 0
        self._given = None if alike else source.size_of(batch)  # a batch that all ranks train on counts once
        self._samples += self._given or 0
        if self.tokens.function is not None and not alike:
            self._tokens += self.tokens.in_batch

    def _count_outputs(self) -> None:
        """Count what only the outputs of the batch say."""
        reported = count_in(self._step.outputs, "samples")
        tokens = self.tokens.of(self._step)
        if self._given is not None:
            self._samples += 0 if reported is None else reported - self._given
            self._tokens += tokens if self.tokens.function is None else 0

    def _announce(self) -> None:
        """Start the exchange for a batch, unless this is a quiet step."""
        progress = self._progress
        if progress.step < self._silent_until:
            return
        may_speak = self._may_speak()
        quiet = 0 if may_speak else self._next_call(asking=False) - progress.step - 2
        passed_ns = int(progress.own_s * 1e9) if isinstance(progress, SharedProgress) else 0
        flags = [self._samples, self._tokens, self.requests.leave, may_speak, passed_ns]
        self._samples = self._tokens = 0
        self._arrived = self._driver.reduce_later(torch.tensor([*flags, *(quiet >= steps for steps in _SILENCES)]))

    def _summed(self) -> tuple[int, int]:
        """Return the samples and the tokens in the announced batches of all ranks."""
        self._count_outputs()
        if self._late:
            self._announce()
        if self._arrived is None:
            self._leave_sent, self._quiet = False, True
            return 0, 0
        samples, tokens, leave, may_speak, passed_ns, *quiet = self._arrived().tolist()
        self._arrived = None
        self._leave_sent, self._quiet = bool(leave), not may_speak
        ranks, progress = self._driver.world_size, self._progress
        if isinstance(progress, SharedProgress):
            progress.agree(passed_ns / ranks / 1e9)
        steps = max(
            (steps for steps, sure in zip(_SILENCES, quiet, strict=True) if sure == ranks and not self._exact), default=0
        )
        pace_s = progress.elapsed_s / max(1, progress.step - progress.origin.step)  # the mean until now, with all pauses
        self._silent_until = progress.step + 1 + steps if steps and not leave and steps * pace_s <= _SILENCE_S else 0
        return int(samples), int(tokens)

    def _may_speak(self) -> bool:
        """Return whether a hook may still make a request, or log, in this step."""
        if self._by_hand or self._buffer.holds_numbers:
            return True
        return self._next_call(asking=True) <= self._progress.step + 1

    def _next_call(self, *, asking: bool) -> float:
        return self._hooks.next_call(self._progress, self._step.most, asking=asking)

    # -- the step boundary -------------------------------------------------------------------------

    def settle(self) -> None:
        if self.broken:
            return
        quiet, self._quiet = self._quiet, False
        if quiet and not self._cursor.exhausted and not self._progress.finished:
            leave = self._leave_sent
        else:
            own = [self.requests.leave, self._samples, self._tokens, *self._buffer.summary(first=self._driver.rank == 0)]
            flag, samples, tokens, *sums = self._driver.reduce(torch.tensor(own, dtype=torch.float64), "sum").tolist()
            leave, self._samples, self._tokens = bool(flag), 0, 0
            self._progress.add(int(samples), int(tokens))
            self._buffer.reduce(self._driver, sums)
        if leave:
            self._exchange_requests()
        self._leave, self._ends, self._settled = leave, leave and self.requests.ends_run, True

    def take_requests(self) -> None:
        self._exchange_requests()
        self._leave = self._settled = True
        self._ends = self.requests.ends_run

    def take_stop(self) -> Decision | None:
        return self.requests.stop or self.requests.signalled  # a signal is recorded when all ranks know of it

    def mean_loss(self) -> Tensor | None:
        own, reduce, window = super().mean_loss(), self._driver.reduce, self._step.last_window
        if self._driver.world_size == 1 or (own is None and not self._by_hand):
            return own
        own = torch.zeros((), device=self._driver.device) if own is None else widened(own)
        weight = as_number(window.total if window.weights or self._by_hand else 1.0, own.device, own.dtype)
        total = reduce(torch.stack([own * weight, weight]), "sum")
        return quotient(total[0], total[1])

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


_SILENCES = (2, 8, 32, 128)  # the steps for which ranks may agree to exchange nothing
_SILENCE_S = 0.25  # but no longer than this, as a signal waits for so long
