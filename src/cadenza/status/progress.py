"""Counters of completed work, the limits of a run, and numbers of batches in a step that change during it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from cadenza.status.formats import counted

if TYPE_CHECKING:
    from fractions import Fraction


# -- the clock -------------------------------------------------------------------------------------


class TrainingClock:
    """Counts seconds, except inside of `paused`.

    >>> clock = TrainingClock()
    >>> with clock.paused():
    ...     before = clock.elapsed_s
    ...     clock.elapsed_s == before
    True
    """

    __slots__ = ("_began", "_paused_at", "_paused_s", "_pauses")

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._paused_s = self._paused_at = 0.0
        self._pauses = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the clock was made, without pauses."""
        now = self._paused_at if self._pauses else time.perf_counter()
        return now - self._began - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the clock does not count. Pauses may be nested."""
        if not self._pauses:
            self._paused_at = time.perf_counter()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._paused_s += time.perf_counter() - self._paused_at


Unit = Literal["epoch", "step", "batch"]


@dataclass(frozen=True, slots=True)
class Counters:
    """One reading of the counters. They count completed work.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(batches=4, epochs=2).progress.now()
    Counters(epoch=2, step=8, batch=8, batch_in_epoch=0, samples=16, tokens=0)
    """

    epoch: int = 0
    """Completed epochs."""
    step: int = 0
    """Completed steps: updates of the weights."""
    batch: int = 0
    """Completed batches, over all epochs."""
    batch_in_epoch: int = 0
    """Completed batches of this epoch."""
    samples: int = 0
    """Samples seen, on all ranks."""
    tokens: int = 0
    """Tokens seen, on all ranks; 0 if they are not counted."""

    @property
    def current_epoch(self) -> int:
        """The epoch of the last completed batch, counted from 1; 0 before the first batch."""
        return self.epoch + (self.batch_in_epoch > 0)

    def __str__(self) -> str:
        if not self.step and not self.batch:
            return "the start"
        if not self.batch:  # a loop of ``cadenza.attach``, which has no epochs and names no batches
            return f"step {self.step}"
        return f"epoch {self.current_epoch}, step {self.step}, batch {self.batch}"


def _read(name: str) -> Any:
    """Return a property that reads an attribute. `Final` says to type checkers that it cannot be set."""
    return property(attrgetter(name))


class Progress:
    """How far a run has come: after the 5th update ``progress.step == 5``.

    Callbacks read it; only the loop moves it.

    >>> progress = Progress(max_steps=3)
    >>> progress.finish_batch(samples=16)
    >>> progress.batch, progress.samples, progress.step
    (1, 16, 0)
    >>> progress.step = 7
    Traceback (most recent call last):
        ...
    AttributeError: property 'step' of 'Progress' object has no setter
    """

    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_tokens: int | None = None,
        batches_per_epoch: int | None = None,
        has_epochs: bool = True,
        accumulate: int = 1,
    ) -> None:
        self._max_epochs, self._max_steps, self._max_tokens = max_epochs, max_steps, max_tokens
        self._has_epochs, self._accumulate = has_epochs, accumulate
        self._last_step = math.inf if max_steps is None else max_steps
        self._last_epoch = math.inf if max_epochs is None else max_epochs
        self._last_token = math.inf if max_tokens is None else max_tokens
        self.begin(Counters(), batches_per_epoch)

    def __repr__(self) -> str:
        limits = {"epoch": self._max_epochs, "step": self._max_steps, "token": self._max_tokens}
        ends = ", ".join(counted(most, unit) for unit, most in limits.items() if most is not None)
        return f"<Progress: {self.now()}{f'; ends after {ends}' if ends else ''}>"

    def __str__(self) -> str:
        return str(self.now())

    # -- counters: completed, in all ---------------------------------------------------------------

    epoch: Final[int] = _read("_epoch")
    """Whole passes over the training loader."""

    has_epochs: Final[bool] = _read("_has_epochs")
    """Whether epochs are counted: not in a loop of ``cadenza.attach``."""

    step: Final[int] = _read("_step")
    """Updates of the weights."""

    batch: Final[int] = _read("_batch")
    """Batches trained on, in all."""

    batch_in_epoch: Final[int] = _read("_batch_in_epoch")
    """Batches trained on in the current epoch; 0 again when the epoch is complete."""

    samples: Final[int] = _read("_samples")
    """Samples trained on, in all: of each batch as many as its outputs, its loader or its first tensor say."""

    tokens: Final[int] = _read("_tokens")
    """Tokens trained on, in all: of each batch as many as ``outputs["tokens"]`` or ``Trainer(tokens=...)`` say; else 0."""

    @staticmethod
    def position_reader() -> Callable[[Progress], tuple[int, int, int, int | None]]:
        """Return the fastest way to read the epochs, the steps, the batches of this epoch, and how many batches it has."""
        return attrgetter("_epoch", "_step", "_batch_in_epoch", "_batches_per_epoch")

    # -- limits: None if there is none, or it is not known -----------------------------------------

    max_epochs: Final[int | None] = _read("_max_epochs")
    """The run ends after this many epochs."""

    max_steps: Final[int | None] = _read("_max_steps")
    """The run ends after this many steps, also inside an epoch."""

    max_tokens: Final[int | None] = _read("_max_tokens")
    """The run ends with the step in which this many tokens are reached, also inside an epoch."""

    batches_per_epoch: Final[int | None] = _read("_batches_per_epoch")
    """Batches of each rank in one pass over the loader; None if the loader does not say.

    In an epoch that another number of ranks began: those they did, and those that are left.
    """

    batches_per_whole_epoch: Final[int | None] = _read("_batches_per_whole_epoch")
    """Batches of each rank in an epoch that as many ranks do from its beginning; None if the loader does not say."""

    batches_said: Final[int | None] = _read("_batches_said")
    """Batches of each rank in a whole epoch by the loader's own length, which may be wrong; see `correct`."""

    @property
    def corrected(self) -> int | None:
        """Batches of each rank in an epoch if the loader's own length is wrong, else None; see `correct`."""
        whole = self._batches_per_whole_epoch
        return None if whole == self._batches_said else whole

    @property
    def lengths(self) -> tuple[int | None, ...]:
        """The limits, and the batches of a whole epoch."""
        return self._max_epochs, self._max_steps, self._max_tokens, self._batches_per_whole_epoch

    @property
    def most_batches(self) -> int:
        """The most batches that a step of the run has."""
        return int(self._accumulate)

    def total(self, unit: Unit | Literal["token"], accumulate: int | None = None, *, corrected: bool = True) -> int | None:
        """Return how many of `unit` the run will complete if nothing stops it; None if not known.

        A step holds `accumulate` batches; None: as many as the run's. Without `corrected` the result is what the loader's own
        length says, even if that turned out wrong.

        With both limits and a loader of unknown length nothing is known: either limit may come first. See `at_most`. The same
        is true of ``max_tokens``: how many tokens a step has is not known. As the only limit it is the total of tokens, which
        the last step may exceed.

        >>> progress = Progress(max_epochs=2, batches_per_epoch=5, accumulate=2)
        >>> progress.total("step"), progress.total("batch"), progress.total("epoch")
        (6, 10, 2)
        """
        if unit == "token" or self._max_tokens is not None:
            alone = self._max_epochs is None and self._max_steps is None
            return self._max_tokens if unit == "token" and alone else None
        return self._without_tokens(unit, accumulate, corrected=corrected)

    def _without_tokens(self, unit: Unit, accumulate: int | None, *, corrected: bool = True) -> int | None:
        """Return the total by the limits of epochs and steps alone."""
        end = self._end(accumulate, corrected=corrected)
        if end is not None:
            return {"epoch": end[0].epoch, "step": end[0].step, "batch": end[0].batch}[unit]
        return None if self._max_epochs is not None and self._max_steps is not None else self._limit(unit)

    def _end(self, accumulate: int | None, *, corrected: bool = True) -> tuple[Counters, int] | None:
        """Return the counters at the limits of epochs and steps, and the last number of batches in a step; None if not known.

        Of the counters, `batch_in_epoch` are the batches that this fit does in an epoch that it leaves early.
        """
        size = self._accumulate if accumulate is None else accumulate
        per_epoch, at = self._batches_per_whole_epoch if corrected else self._batches_said, self._origin
        if per_epoch is None:
            return None
        first = self._batches_per_first_epoch or 0
        if isinstance(size, Accumulation):
            changed = size.after_changes(at, self, per_epoch, first)
            if changed is None:
                return None
            at, size = changed
            first = first if at.epoch == self._origin.epoch else per_epoch
        inside = at.batch_in_epoch > 0
        left = max(0, first - at.batch_in_epoch) if inside else 0
        whole = at.step + -(-left // size)  # steps at the end of the epoch in which this fit began
        steps_per_epoch = max(1, -(-per_epoch // size))  # an empty loader is refused elsewhere
        steps = min(self._last_step, whole + max(0, self._last_epoch - at.epoch - inside) * steps_per_epoch)
        if steps == math.inf:
            return None
        if steps < whole:
            batches, before = int(steps - at.step) * size, min(at.batch - self._origin.batch, at.batch_in_epoch)
            return Counters(at.epoch, int(steps), at.batch + batches, before + batches), size
        epochs, rest = divmod(int(steps) - whole, steps_per_epoch)
        batches = left + epochs * per_epoch + rest * size
        return Counters(at.epoch + inside + epochs, int(steps), at.batch + batches, rest * size), size

    def at_most(self, unit: Unit, accumulate: int | None = None) -> int | None:
        """Return how many of `unit` the run will not exceed: the total or, if it is not known, the limit; None without one.

        ``max_tokens`` is no such limit: how many steps it allows is not known.

        >>> progress = Progress(max_epochs=2, max_steps=9)
        >>> progress.total("step"), progress.at_most("step"), progress.at_most("batch")
        (None, 9, None)
        """
        total = self._without_tokens(unit, accumulate)
        return self._limit(unit) if total is None else total

    def _limit(self, unit: Unit) -> int | None:
        return {"epoch": self._max_epochs, "step": self._max_steps, "batch": None}[unit]

    def begun(self, unit: Unit, accumulate: int | None = None) -> int | None:
        """Return how many of `unit` the run will begin if nothing stops it; None if not known.

        More than `total` by an epoch that `max_steps` cuts short, or by the fetch that finds the loader empty.

        >>> progress = Progress(max_steps=7, batches_per_epoch=5)
        >>> progress.begun("epoch"), progress.begun("batch"), Progress(max_epochs=1, batches_per_epoch=5).begun("batch")
        (2, 7, 6)
        """
        end = self._end(accumulate)
        if end is None or self._max_tokens is not None or unit == "step":
            return self.total(unit, accumulate)
        at, size = end
        if unit == "epoch":
            return at.epoch + (at.batch_in_epoch > 0)
        short = (self._batches_per_whole_epoch or 0) % size  # a short group is closed after the fetch that gets nothing
        return at.batch + (at.batch_in_epoch == 0 and (at.step < self._last_step or short > 0))

    @property
    def finished(self) -> bool:
        """Whether a limit is reached; whichever of them comes first."""
        return self._step >= self._last_step or self._epoch >= self._last_epoch or self._tokens >= self._last_token

    @property
    def at_last_batch(self) -> bool:
        """Whether the batch under way is known to be the last of its epoch."""
        return self._batch_in_epoch + 1 == self._batches_per_epoch

    # -- since this fit began ----------------------------------------------------------------------

    origin: Final[Counters] = _read("_origin")
    """The counters at which this fit began: all 0, or those that were restored."""

    @property
    def resumed_in_epoch(self) -> bool:
        """Whether the epoch under way was begun before this fit, which continues inside it.

        `Callback.on_epoch_start` fires again for such an epoch. True until the epoch is whole, also in an ``on_epoch_end``
        that cuts it short.
        """
        return self._origin.batch_in_epoch > 0 and self._epoch == self._origin.epoch

    @property
    def elapsed_s(self) -> float:
        """Seconds since this fit began."""
        return time.monotonic() - self._began

    @property
    def training_s(self) -> float:
        """Seconds since this fit began, without evaluations and saves."""
        return self._training.elapsed_s

    def now(self) -> Counters:
        """Return the counters as they stand."""
        return Counters(self._epoch, self._step, self._batch, self._batch_in_epoch, self._samples, self._tokens)

    # -- for the loop ------------------------------------------------------------------------------

    def limit_epochs(self, max_epochs: int | None) -> None:
        """Change the limit of epochs while the run goes on, for a callback of another system. Every rank must call this."""
        self._max_epochs, self._last_epoch = max_epochs, math.inf if max_epochs is None else max_epochs

    def begin(self, origin: Counters, batches_per_epoch: int | None) -> None:
        """Start counting from `origin`, and the clock from 0."""
        self._origin, self._began, self._training = origin, time.monotonic(), TrainingClock()
        self._batches_per_epoch = self._batches_per_first_epoch = self._batches_per_whole_epoch = batches_per_epoch
        self._batches_said = batches_per_epoch
        self._epoch, self._step, self._batch = origin.epoch, origin.step, origin.batch
        self._batch_in_epoch, self._samples, self._tokens = origin.batch_in_epoch, origin.samples, origin.tokens

    def correct(self, batches: int) -> None:
        """Have an epoch count as this many batches from the next one on: the loader has another number than it says.

        Call it at the end of an epoch, before that is counted; or when a run is restored that had done so.
        """
        if self._epoch == self._origin.epoch and self._origin.batch_in_epoch and self._batch_in_epoch:
            self._batches_per_first_epoch = batches
        self._batches_per_epoch = self._batches_per_whole_epoch = batches

    def take_over(self, batches_per_epoch: int | None) -> None:
        """Have the epoch under way, which another number of ranks began, end after this many batches."""
        self._batches_per_epoch = self._batches_per_first_epoch = batches_per_epoch

    def aside(self) -> AbstractContextManager[None]:
        """Return a context in which time does not count as training."""
        return self._training.paused()

    def finish_batch(self, samples: int, tokens: int = 0) -> None:
        """Count one batch of `samples` samples and `tokens` tokens."""
        self._batch += 1
        self._batch_in_epoch += 1
        self._samples += samples
        self._tokens += tokens

    def add(self, samples: int, tokens: int) -> None:
        """Count samples and tokens of batches that are counted already."""
        self._samples += samples
        self._tokens += tokens

    def finish_step(self) -> None:
        """Count one update."""
        self._step += 1

    def finish_epoch(self) -> None:
        """Count one epoch; the next one starts at batch 0."""
        self._epoch += 1
        self._batch_in_epoch = 0
        self._batches_per_epoch = self._batches_per_whole_epoch


# -- the number of batches in a step, where it changes during a run --------------------------------


@dataclass(frozen=True, slots=True)
class Change:
    """A point of the run, and the batches in a step from there on. Whether it is reached is a function of the counters."""

    count: Fraction | int
    unit: Literal["step", "batch", "epoch", "sample", "token", "%"]
    batches: int
    text: str
    """The point, as the user wrote it."""

    def reached(self, at: Counters | Progress, limits: Progress) -> bool:
        """Return whether these counters are at this point of the run, or after it."""
        if self.unit == "sample":
            return at.samples >= self.count
        if self.unit == "token":
            return at.tokens >= self.count
        return self.steps_left(at, limits, 1) <= 0

    def steps_left(self, at: Counters | Progress, limits: Progress, size: int) -> float:
        """Return after how many steps of `size` batches it is reached, inside of the epoch; infinite if not in this epoch."""
        count, per_epoch = self.count, limits.batches_per_whole_epoch
        if self.unit == "step":
            return float(count - at.step)
        if self.unit == "batch":
            return math.ceil((count - at.batch) / size)
        if self.unit == "epoch":
            return _steps_to(count, at, per_epoch, size)
        if self.unit == "%":  # of the limit to which the run is nearest
            part, left = count / 100, math.inf
            if limits.max_steps is not None:
                left = min(left, math.ceil(part * limits.max_steps) - at.step)
            if limits.max_epochs is not None:
                left = min(left, _steps_to(part * limits.max_epochs, at, per_epoch, size))
            if limits.max_tokens is not None:
                left = min(left, 0 if at.tokens >= part * limits.max_tokens else 1)
            return left
        return 1  # how many samples or tokens the next step has is not known

    def is_countable(self, limits: Progress) -> bool:
        """Return whether the step at which it is reached can be computed."""
        if self.unit == "%":  # of no limit, it is never reached
            return limits.max_tokens is None and (limits.max_steps is not None or limits.max_epochs is not None)
        return self.unit not in ("sample", "token")


def _steps_to(epochs: Fraction | float, at: Counters | Progress, per_epoch: int | None, size: int) -> float:
    """Return after how many steps so many epochs, whole or not, are complete; whole epochs only count as such."""
    if at.epoch >= epochs:
        return 0
    if int(epochs) == epochs or per_epoch is None:
        return math.inf
    left = math.ceil((epochs - at.epoch) * per_epoch) - at.batch_in_epoch
    return math.ceil(left / size)


class Accumulation(int):
    """The batches in a step by points of the run: ``Trainer(accumulate={0: 1, "2000 steps": 4})`` makes one.

    As a number it is the most batches that a step of the run has. Of the points that are reached, the last one in order holds,
    from the next step on. It depends on the counters of the run alone, so it is the same on all ranks and after a resume.
    """

    first: int
    """The batches in a step until the first change."""
    changes: tuple[Change, ...]
    """The changes, in order."""

    def __new__(cls, first: int, changes: Sequence[Change]) -> Self:
        self = super().__new__(cls, max(first, *(change.batches for change in changes)))
        self.first, self.changes = first, tuple(changes)
        return self

    def __getnewargs__(self) -> Any:
        return self.first, self.changes

    def plain(self) -> dict[str, int]:
        """Return the batches by the text of the point."""
        return {"0": self.first, **{change.text: change.batches for change in self.changes}}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Accumulation) and self.plain() == other.plain()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.first, self.changes))

    def __str__(self) -> str:
        return ", ".join(
            [counted(self.first, "batch"), *(f"{change.batches} from {change.text} on" for change in self.changes)]
        )

    def __repr__(self) -> str:
        return repr(self.plain())

    def batches(self, at: Counters | Progress, limits: Progress) -> int:
        """Return the number of batches in the step after these counters."""
        reached = [change.batches for change in self.changes if change.reached(at, limits)]
        return reached[-1] if reached else self.first

    def next_step(self, at: Progress) -> float:
        """Return how many steps are complete, at the earliest, at the next change in this epoch; infinite for none."""
        size = self.batches(at, at)
        left = [change.steps_left(at, at, size) for change in self.changes if not change.reached(at, at)]
        return at.step + max(1.0, min(left)) if left else math.inf

    def after_changes(self, origin: Counters, limits: Progress, per_epoch: int, first: int) -> tuple[Counters, int] | None:
        """Return the counters from which on steps have a constant number of batches, and that number; None if not known.

        Args:
            origin: The counters at which the run began.
            limits: The limits of the run.
            per_epoch: Batches in an epoch.
            first: Batches in the epoch in which the run began.
        """
        if per_epoch < 1:
            return None
        at = origin
        most_steps = math.inf if limits.max_steps is None else limits.max_steps
        most_epochs = math.inf if limits.max_epochs is None else limits.max_epochs
        while True:
            size = self.batches(at, limits)
            pending = [change for change in self.changes if not change.reached(at, limits)]
            if not pending or at.step >= most_steps or at.epoch >= most_epochs:
                return at, size
            if not all(change.is_countable(limits) for change in pending):
                return None
            left = (first if at.epoch == origin.epoch and at.batch_in_epoch else per_epoch) - at.batch_in_epoch
            nearest = max(1, min(change.steps_left(at, limits, size) for change in pending))
            steps = int(min(nearest, -(-left // size), most_steps - at.step))  # 0 after the last batch of an epoch
            at = _advanced(at, steps, min(steps * size, left), ends=steps * size >= left)


def _advanced(at: Counters, steps: int, batches: int, *, ends: bool) -> Counters:
    """Return the counters after so many steps; `ends`: these complete the epoch."""
    inside = 0 if ends else at.batch_in_epoch + batches
    return replace(at, epoch=at.epoch + ends, step=at.step + steps, batch=at.batch + batches, batch_in_epoch=inside)
