"""The pending requests of a run, and what ranks exchange in a step: the interface, and the run in one process.

`RankSync` is that of one process and exchanges nothing. `cadenza.engine.shared_sync` is that of several ranks: every rank must
call its methods in the same order. Methods that communicate say so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from signal import Signals
from typing import Any, Protocol

from torch import Tensor

from cadenza.engine.outputs import count_in, whole_count
from cadenza.engine.step_state import Cursor, StepState
from cadenza.errors import DataError, LossError
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Moment
from cadenza.status.decisions import Decision, Requests
from cadenza.status.progress import Counters, Progress

# -- tokens ----------------------------------------------------------------------------------------


class TokenCount:
    """The tokens of the current batch on this rank.

    Args:
        function: ``function(batch)`` returns the tokens of a batch of the loader; None: the outputs of a batch say them.
        limit: The ``max_tokens`` of the run.
    """

    __slots__ = ("_limit", "asked", "function", "in_batch")

    def __init__(self, function: Callable[[Any], int] | None = None, limit: int | None = None) -> None:
        self.function: Callable[[Any], int] | None = function
        self._limit = limit
        self.asked: bool = function is not None or limit is not None
        """Whether tokens are counted in any case; else they are if the outputs of a batch say them."""
        self.in_batch: int = 0
        """The tokens that the function counted in the current batch."""

    def read(self, batch: Any) -> None:
        """Count a batch by the function, before the transfer to the device: a count of its values needs no wait.

        Raises:
            DataError: The function returns no whole number of at least 0 that is on the host.
        """
        assert self.function is not None, "only called with a function"
        counted = self.function(batch)
        number = whole_count(counted)
        if number is None:
            raise DataError(
                f"tokens={self.function!r} must return a whole number of at least 0, on the host; got {counted!r}. It is "
                "called with the batch as the loader yields it. Return a shape, such as batch['input_ids'].numel(), or "
                "int((labels != -100).sum())."
            )
        self.in_batch = number

    def of(self, step: StepState) -> int:
        """Return the tokens of the current batch, after its forward pass.

        Raises:
            LossError: The outputs give no whole number; give one beside the function; or give none, and the run needs it.
        """
        reported = count_in(step.outputs, "tokens")
        if self.function is not None:
            if reported is not None:
                raise LossError(
                    f"tokens are counted twice: by Trainer(tokens={self.function!r}), and by outputs['tokens'], which is "
                    f"{reported}. Leave out one of the two."
                )
            return self.in_batch
        if reported is None and self._limit is not None and not step.skipping:
            raise LossError(
                f"max_tokens={self._limit} needs the number of tokens in each batch: expected outputs['tokens']; got outputs "
                f"{list(step.outputs)}. Return it from compute_loss (or step_fn), as in {{'loss': loss, 'tokens': "
                "batch['input_ids'].numel()}, or give Trainer(tokens=...), a function (batch) -> int."
            )
        return reported or 0


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

    @property
    def holds_back(self) -> bool:
        """Whether the gradients of the current batch stay on this rank until a later batch."""
        return False

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

    def check_skip(self, listener: Listener | None) -> None:
        """Raise `RuntimeError` if `listener` may not skip a batch, as the other ranks do not expect it."""

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
