"""Warm up the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from cadenza.engine.session import session_of
from cadenza.hooks.counters import Length
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.schedule import Until
from cadenza.optim.rates import RunUnit, length_of, optimizer_of, rates_of
from cadenza.optim.settings import Compared
from cadenza.status.formats import counted
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    from cadenza.run import Run

Shape = Literal["linear", "constant", "cosine"]


class Warmup(Callback, Compared):
    """Scale the learning rate up from a small value in the first steps, with any schedule.

    Before each update, the rate is multiplied by a factor that depends only on the step. After the update, the original rate
    is restored. So schedulers and checkpoints never see a scaled rate. The factors of several warm-ups of one optimizer
    multiply. `LogTraining` logs the rates with the factor.

    With multiple ranks: each rank does the same; it does not communicate.

    Args:
        length: The length, such as ``"500 steps"`` or ``"1 epoch"``, or a fraction of the run: ``"10%"``, or 0.1 as a float. A
            run that continues keeps the number of steps of its first start. If ``max_tokens`` is the only limit, a fraction is
            one of its tokens.
        shape: In step n of N the factor is ``start + (1 - start) * n / N`` if linear, ``start + (1 - start) *
            (1 - cos(pi * n / N)) / 2`` if cosine, and `start` if constant. No step has a rate of 0. Step N
            has the full rate, or step N + 1 if constant.
        start: The factor at the beginning.
        optimizer: The index of the optimizer in the run. All its parameter groups are scaled alike.

    Raises:
        ValueError: An argument is wrong, or `length` needs the length of the run and it is not known.
        ScheduleError: `length` cannot be parsed.

    >>> from cadenza.testing import tiny_run
    >>> warmup = Warmup("4 steps")
    >>> run = tiny_run(callbacks=[warmup], steps=5)
    >>> [warmup.factor(step) for step in (1, 2, 3, 4, 5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    >>> run.optimizers[0].param_groups[0]["lr"]
    0.1
    """

    # The original rates are restored before a scheduler steps, and before a save after an error.
    before: Relation = (Phase.SCHEDULE, Phase.SAVE)

    def __init__(self, length: str | float, *, shape: Shape = "linear", start: float = 0.0, optimizer: int = 0) -> None:
        if shape not in ("linear", "constant", "cosine"):
            raise ValueError(f"shape must be 'linear', 'constant' or 'cosine'; got {shape!r}")
        if not 0 <= start <= 1:
            raise ValueError(f"start must be a factor from 0 to 1; got {start!r}")
        if shape == "constant" and start == 0:
            raise ValueError("a constant warm-up with start=0 has a rate of 0 in all of its steps. Give start=, such as 0.1.")
        self.length: Length | float = _checked(length)
        self.shape = shape
        self.start: float = float(start)
        self.optimizer: int = optimizer
        self.unit: RunUnit = "step"
        """The unit of `count`: ``"token"`` for a fraction of a run of so many tokens, else ``"step"``."""
        self.count: float | None = None
        """The length in the current run; it can have a fractional part if `length` is a fraction."""
        self._last_step = 0.0  # before which the rates are scaled; infinite until so many tokens are seen
        self._tokens = self._tokens_of_step = 0  # up to the last scaled update, and of its step

    def factor(self, position: int) -> float:
        """Return the factor in a step, counted from 1; if `unit` is ``"token"``, in the step with which so many are seen."""
        if self.count is None or position > self.count:
            return 1.0
        if self.shape == "constant":
            return self.start
        if position == self.count:
            return 1.0
        done = position / self.count
        if self.shape == "cosine":
            done = (1 - math.cos(math.pi * position / self.count)) / 2
        return self.start + (1 - self.start) * done

    def listeners(self) -> list[Listener]:
        lasting = Until(lambda: self._last_step)
        own = [
            Listener(Callback.on_before_optimizer_step, self._scale_rates, lasting, splits=False),
            Listener(Callback.on_after_optimizer_step, self._put_rates_back, lasting),
        ]
        return silent([*super().listeners(), *own])

    def on_setup(self, run: Run) -> None:
        optimizer_of(run, self.optimizer, needed_by="Warmup")
        self.count, self.unit, self._last_step = None, "step", 0.0
        self._tokens_of_step = 0
        factors, progress = rates_of(run).factors.setdefault(self.optimizer, []), run.progress
        factors.append(lambda step: self.factor(self._tokens_with_step(progress) if self.unit == "token" else step))

    def on_fit_start(self, run: Run) -> None:
        if self.count is None:  # otherwise it is restored
            self.count, self.unit = self._count_in(run)
        self._last_step = math.inf if self.unit == "token" else self.count
        self._tokens = run.progress.tokens

    def _tokens_with_step(self, progress: Progress) -> int:
        """Return the tokens with those of the step. After an update, the next step is expected to have as many as the last."""
        return progress.tokens + (self._tokens_of_step if progress.tokens == self._tokens else 0)

    def _scale_rates(self, run: Run) -> None:
        optimizer = run.optimizers[self.optimizer]
        tokens = run.progress.tokens
        if any(optimizer is other for other in session_of(run).step.updating):
            rates_of(run).apply(self.optimizer, optimizer, run.progress.step + 1)
            if self.unit == "token":
                self._tokens_of_step = tokens - self._tokens
                self._tokens = tokens

    def _put_rates_back(self, run: Run) -> None:
        rates_of(run).put_back(self.optimizer)
        if self.unit == "token" and self.count is not None and run.progress.tokens > self.count:
            self._last_step = 0.0

    def on_exception(self, run: Run, error: BaseException) -> None:
        rates_of(run).put_back(self.optimizer)  # if the update itself failed

    def _count_in(self, run: Run) -> tuple[float, RunUnit]:
        if isinstance(self.length, float):
            total, unit = length_of(run, needed_by=f"Warmup({self.length:g}), a fraction of the run,")
            return self.length * total, unit
        count = self._steps_in(self.length, run.progress, run.info.accumulate)
        if count is None:
            raise ValueError(
                f"Warmup({self.length.text!r}) needs a loader with __len__; this loader has none. Give the length in steps, "
                'such as "500 steps".'
            )
        return count, "step"

    def _steps_in(self, length: Length, limits: Progress, accumulate: int) -> float | None:
        if length.unit == "step":
            return float(length.count)
        batches = limits.batches_said  # not the counted number, so that a resume does not change it
        if batches is None:
            return None
        whole = int(length.count)
        both = (Progress(max_epochs=most, batches_per_epoch=batches) for most in (whole, whole + 1))
        before, after = (limit.total("step", accumulate) or 0 for limit in both)
        return float(before + (length.count - whole) * (after - before))  # the last epoch may be a part

    def outlasts(self, limits: Progress, accumulate: int) -> str | None:
        """Return a warning if a run with these limits ends before the warm-up."""
        if isinstance(self.length, float):
            return None
        count = self._steps_in(self.length, limits, accumulate)
        total = limits.total("step", accumulate)
        if count is None or total is None or count <= total:
            return None
        return (
            f"Warmup({self.length.text!r}) never reaches the full rate: it takes {counted(math.ceil(count), 'step')}, and the "
            f'run ends after {total}. Make it shorter, such as Warmup("10%")'
        )

    def state_dict(self) -> dict[str, Any]:
        # A run that continues may have larger limits, which must not lengthen its warm-up.
        return {f"{self.unit}s": self.count} if isinstance(self.length, float) and self.count is not None else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for unit in ("step", "token"):
            if isinstance(self.length, float) and f"{unit}s" in state:
                self.unit, self.count = unit, state[f"{unit}s"]


def _checked(length: object) -> Length | float:
    bare = isinstance(length, str) and length.strip().isdigit()
    if isinstance(length, str) and not bare:
        read = Length.parse(length)
        if read.unit in ("step", "epoch"):
            return read
        if read.unit == "%":
            return float(read.count / 100)
    elif isinstance(length, float) and 0 < length <= 1:
        return length
    bare = bare or (isinstance(length, int | float) and length >= 1)
    hint = f' Did you mean "{float(length):g} steps"?' if bare else ""  # type: ignore[arg-type]
    raise ValueError(
        f'length must be such as "500 steps" or "1 epoch", or a fraction of the run such as 0.1; got {length!r}.' + hint
    )
