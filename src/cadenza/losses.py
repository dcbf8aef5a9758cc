"""Notice a loss that is not finite, among the numbers that reach the host anyway."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from cadenza.decisions import Outcome
from cadenza.records import Book, Record

if TYPE_CHECKING:
    from cadenza.run import Run


class LossCheck:
    """Looks at the losses in records, and at the training loss when an epoch and when the run is over.

    The training loss of an epoch's last step leaves the device as records do, so nothing waits for it: it is looked at when it
    has arrived, with the next epoch at the latest, or when the run ends. `StopOnNonFinite` looks at each batch, and waits.
    """

    def __init__(self) -> None:
        self.quiet = False
        """Whether nothing is told, as in a trial of learning rates."""
        self._since: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self._told: tuple[str, int] | None = None
        self._on_way, self._looked_at = Book(), 0

    def look_at(self, run: Run, record: Record) -> None:
        """Look at the losses in a record."""
        for name, value in record.values.items():
            if name.endswith("loss"):
                self._look(run, name, value, record.step)

    def look_at_epoch(self, run: Run, *, wait: bool = False) -> None:
        """Look at the training loss of the last step, as soon as it is on the host; with `wait` now."""
        if run.progress.step != self._looked_at and (loss := run.loss) is not None and not loss.is_meta:
            self._looked_at = run.progress.step
            self._on_way.add("the loss", loss)
            self._on_way.close(run.progress.now())
        for record in self._on_way.ready(wait=wait):
            self.look_at(run, record)

    def ended(self, run: Run, outcome: Outcome) -> Outcome:
        """Return how a run ended, with a loss that was not finite. Every rank must call this."""
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
        # In fp16 a loss may overflow now and then; the scaler leaves out the update, and the next loss is finite.
        if self._told is not None or self.quiet or (run.precision.name == "fp16" and self._seen[name] < 2):
            return
        self._told = name, since
        run.decide("loss not finite", f"{name} is {value} at step {step}", who="the run")
        if run.is_main:
            run.warn(
                f"{name} is {value} at step {step}, and training goes on. Weights that have become NaN stay so: add "
                "StopOnNonFinite() to stop at the batch that begins it, lower the learning rate, or clip gradients."
            )
