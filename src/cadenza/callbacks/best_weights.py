"""Remember the best weights, and end with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.moments import Callback
from cadenza.monitor import Mode, Monitor, Watched

if TYPE_CHECKING:
    from cadenza.evaluation import Evaluation
    from cadenza.run import Run


class BestWeights(Callback):
    """Keep a copy of the weights of the best evaluation in memory, and put it back when the run ends.

    Args:
        monitor: The result to watch, such as ``"eval/acc"``.
        mode: ``"max"`` or ``"min"``: which way is better.
        restore: Put the best weights back at the end, unless an error or a signal ended the run.

    >>> from cadenza.testing import simulate
    >>> best = BestWeights("eval/loss", "min")
    >>> run = simulate([best], metrics={"eval/loss": [3.0, 1.0, 2.0]})
    >>> best.monitor.best, best.step
    (1.0, 4)
    """

    after = (Checkpoint,)  # what is saved last are the weights of the last step, with which the run could go on

    def __init__(self, monitor: Watched, mode: Mode, *, restore: bool = True) -> None:
        self.monitor = Monitor(monitor, mode, owner="BestWeights")
        self.restore = restore
        self.weights: dict[str, Tensor] | None = None
        """The best weights so far, on the device; None before the first evaluation."""
        self.step: int | None = None
        """The step after which they were best."""

    def on_setup(self, run: Run) -> None:
        self.weights = self.step = None
        self.monitor.reset()

    def on_fit_start(self, run: Run) -> None:
        self.monitor.check_reported_by(run.evaluations)

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        value = self.monitor.value_of(run, evaluation)
        if value is not None and self.monitor.update(run, value):
            model = run.driver.unwrap(run.model)
            self.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
            self.step = run.progress.step

    def on_fit_end(self, run: Run) -> None:
        over = run.outcome is not None and run.outcome.kind in ("finished", "stopped")
        if self.restore and over and self.weights is not None:
            run.driver.unwrap(run.model).load_state_dict(self.weights)
            run.decide("restored", f"the weights of step {self.step}: {self.monitor.name} was {self.monitor.best:g}")

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "step": self.step, **self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.weights, self.step = state["weights"], state["step"]
        self.monitor.load_state_dict(state)
