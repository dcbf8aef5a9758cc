"""Stop when it no longer gets better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza.moments import Callback
from cadenza.monitor import Mode, Monitor, Watched

if TYPE_CHECKING:
    from cadenza.evaluation import Evaluation
    from cadenza.run import Run


class EarlyStopping(Callback):
    """Stop after `patience` evaluations in a row without gain.

    Args:
        monitor: The result to watch, such as ``"eval/acc"``, or a function of the results.
        mode: ``"max"`` or ``"min"``: which way is better. Never guessed from the name.
        patience: Evaluations without gain after which to stop; at least 1.
        min_delta: Only a gain of more than this counts, in the unit of the result.
        name: What plan, errors and saved state call it.

    Raises:
        MonitorError: No evaluation of the run reports `monitor`.

    >>> from cadenza.testing import simulate
    >>> run = simulate([EarlyStopping("eval/loss", mode="min", patience=2)], metrics={"eval/loss": [3, 2, 2.1, 2.2, 1]})
    >>> run.progress.epoch, run.why("stopped")  # doctest: +ELLIPSIS
    (4, "stopped by EarlyStopping at epoch 4, ...: 'eval/loss' did not get better than 2 in 2 evaluations")
    """

    def __init__(
        self, monitor: Watched, *, mode: Mode, patience: int = 1, min_delta: float = 0.0, name: str | None = None
    ) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience must be a whole number of at least 1; got {patience!r}")
        if min_delta < 0:
            raise ValueError(f"min_delta must be 0 or more; got {min_delta!r}")
        self.name = name
        self.monitor = Monitor(monitor, mode, owner=name or "EarlyStopping", min_delta=min_delta)
        self.patience = patience
        self.stale = 0

    def on_setup(self, run: Run) -> None:
        self.stale = 0
        self.monitor.reset()

    def on_fit_start(self, run: Run) -> None:
        self.monitor.check_reported_by(run.evaluations)

    def on_sanity_end(self, run: Run, evaluation: Evaluation) -> None:
        self.monitor.value_in(evaluation.name, evaluation.results)  # an unknown name shows before the first epoch

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        value = self.monitor.value_of(run, evaluation)
        if value is None:
            return
        self.stale = 0 if self.monitor.update(run, value) else self.stale + 1
        if self.stale >= self.patience:
            times = "evaluation" if self.stale == 1 else f"{self.stale} evaluations"
            run.stop(f"{self.monitor.name!r} did not get better than {self.monitor.best:g} in {times}")

    def state_dict(self) -> dict[str, Any]:
        return {"stale": self.stale, **self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.stale = state["stale"]
        self.monitor.load_state_dict(state)
