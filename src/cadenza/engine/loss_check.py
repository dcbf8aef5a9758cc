"""Detect a loss that is not finite, among the numbers that are copied to the host anyway."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from cadenza.drivers.base import Driver
from cadenza.engine.rank_sync import Decide
from cadenza.engine.step_state import StepState
from cadenza.records.metric_buffer import MetricBuffer
from cadenza.records.record import Record
from cadenza.status.decisions import Outcome
from cadenza.status.progress import Progress


class LossCheck:
    """Checks the losses in records, and the training loss at the end of each epoch and of the run.

    The training loss of the last step of an epoch is copied to the host as records are, so nothing waits for it. It is checked
    on arrival, at the latest after the next epoch or at the end of the run. `StopOnNonFinite` checks each batch, and waits.
    """

    def __init__(
        self,
        step: StepState,
        progress: Progress,
        driver: Driver,
        decide: Decide,
        warn: Callable[[str], None],
        *,
        may_overflow: bool,
    ) -> None:
        self._step, self._progress, self._driver, self._decide, self._warn = step, progress, driver, decide, warn
        self._may_overflow = may_overflow
        self.quiet = False
        """Whether nothing is reported, as in a trial of learning rates."""
        self._since: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._reported: tuple[str, int] | None = None
        self._on_way, self._looked_at = MetricBuffer(), 0

    def look_at(self, record: Record) -> None:
        """Check the losses in a record."""
        for name, value in record.values.items():
            if name.endswith("loss"):
                self._look(name, value, record.step)

    def look_at_epoch(self, *, wait: bool = False) -> None:
        """Check the training loss of the last step once it is on the host. With `wait`, wait for it."""
        step = self._progress.step
        if step != self._looked_at and (loss := self._step.last_window.mean_loss()) is not None and not loss.is_meta:
            self._looked_at = step
            self._on_way.add("the loss", loss)
        for record in self._on_way.take(self._progress.now(), wait=wait):
            self.look_at(record)

    def ended(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a run, extended if a loss was not finite. Every rank must call this."""
        self.look_at_epoch(wait=True)
        where = self._reported
        if self._driver.world_size > 1:  # one rank's last loss may be the first that is not finite
            where = next((one for one in self._driver.gather(where) if one is not None), None)
        if where is None or self.quiet:
            return outcome
        name, step = where
        until = "from step {} on" if name in self._since or self._reported is None else "at step {}"
        return replace(outcome, reason=f"{outcome.reason}; {name} was not finite {until.format(step)}")

    def _look(self, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            if name in self._since:
                del self._since[name], self._seen[name]
            return
        since = self._since.setdefault(name, step)
        self._seen[name] = self._seen.get(name, 0) + 1
        # In fp16 a loss may overflow occasionally; the scaler skips the update, and the next loss is finite.
        if self._reported is not None or self.quiet or (self._may_overflow and self._seen[name] < 2):
            return
        self._reported = name, since
        data = {"name": name, "value": value, "step": step}
        self._decide("loss not finite", f"{name} is {value} at step {step}", who="the run", data=data)
        if self._driver.is_main:
            self._warn(
                f"{name} is {value} at step {step}, and training goes on. Weights that have become NaN stay NaN: add "
                "StopOnNonFinite() to stop at the first such batch, lower the learning rate, or clip gradients."
            )
