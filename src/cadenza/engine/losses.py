"""Detect a loss that is not finite, among the numbers that are copied to the host anyway."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from cadenza.records.record import Book, Record
from cadenza.status.decisions import Outcome

if TYPE_CHECKING:
    from cadenza.run import Run


class LossCheck:
    """Checks the losses in records, and the training loss at the end of each epoch and of the run.

    The training loss of the last step of an epoch is copied to the host as records are, so nothing waits for it. It is checked
    on arrival, at the latest after the next epoch or at the end of the run. `StopOnNonFinite` checks each batch, and waits.
    """

    def __init__(self) -> None:
        self.quiet = False
        """Whether nothing is reported, as in a trial of learning rates."""
        self._since: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._told: tuple[str, int] | None = None
        self._on_way, self._looked_at = Book(), 0

    def look_at(self, run: Run, record: Record) -> None:
        """Check the losses in a record."""
        for name, value in record.values.items():
            if name.endswith("loss"):
                self._look(run, name, value, record.step)

    def look_at_epoch(self, run: Run, *, wait: bool = False) -> None:
        """Check the training loss of the last step once it is on the host. With `wait`, wait for it."""
        if run.progress.step != self._looked_at and (loss := run.loss) is not None and not loss.is_meta:
            self._looked_at = run.progress.step
            self._on_way.add("the loss", loss)
            self._on_way.close(run.progress.now())
        for record in self._on_way.ready(wait=wait):
            self.look_at(run, record)

    def ended(self, run: Run, outcome: Outcome) -> Outcome:
        """Return the outcome of a run, extended if a loss was not finite. Every rank must call this."""
        self.look_at_epoch(run, wait=True)
        where = self._told
        if run.driver.world_size > 1:  # one rank's last loss may be the first that is not finite
            where = next((told for told in run.driver.gather(where) if told is not None), None)
        if where is None or self.quiet:
            return outcome
        name, step = where
        until = "from step {} on" if name in self._since or self._told is None else "at step {}"
        return replace(outcome, reason=f"{outcome.reason}; {name} was not finite {until.format(step)}")

    def _look(self, run: Run, name: str, value: float, step: int) -> None:
        if math.isfinite(value):
            self._since.pop(name, None)
            self._seen.pop(name, None)
            return
        since = self._since.setdefault(name, step)
        self._seen[name] = self._seen.get(name, 0) + 1
        # In fp16 a loss may overflow occasionally; the scaler skips the update, and the next loss is finite.
        if self._told is not None or self.quiet or (run.precision.name == "fp16" and self._seen[name] < 2):
            return
        self._told = name, since
        data = {"name": name, "value": value, "step": step}
        run.decide("loss not finite", f"{name} is {value} at step {step}", who="the run", data=data)
        if run.is_main:
            run.warn(
                f"{name} is {value} at step {step}, and training goes on. Weights that have become NaN stay NaN: add "
                "StopOnNonFinite() to stop at the first such batch, lower the learning rate, or clip gradients."
            )
