"""A copy of the weights of the best evaluation. It is made when a result improves and restored when the run ends."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.engine.monitor import Mode, Monitor, Watched
from cadenza.optim.model_state import load_into, state_of
from cadenza.status.decisions import COMPLETE, decide

if TYPE_CHECKING:
    from cadenza.run import Run


class BestCopy:
    """The weights at the best result so far.

    Args:
        watched: The name of the result, such as ``"eval/acc"``.
        mode: ``"max"`` or ``"min"``: which way is better.
        owner: The callback that keeps the copy; for messages.
    """

    def __init__(self, watched: Watched, mode: Mode, *, owner: str) -> None:
        self.monitor: Monitor = Monitor(watched, mode, owner=owner)
        self.weights: dict[str, Any] | None = None
        """The ``state_dict`` of the model at the best result, on the device; None before the first evaluation."""
        self.step: int | None = None
        """The step of the best result."""

    def reset(self) -> None:
        """Drop the copy and the best result, for another run."""
        self.weights = self.step = None
        self.monitor.reset()

    def offer(self, run: Run, value: float) -> None:
        """Copy the current weights if `value` is better than the best result so far."""
        if self.monitor.update(run, value):
            self.weights = {name: _copied(part) for name, part in state_of(run.model).items()}
            self.step = run.progress.step

    def put_back(self, run: Run) -> None:
        """Load the best weights into the model, unless an error or a signal ended the run. Call it in ``on_fit_end``."""
        over = run.outcome is not None and run.outcome.kind in COMPLETE
        if over and self.weights is not None:
            self._load(run)
            data = {"step": self.step, "best": [self.monitor.best_data(step=self.step)]}
            decide(
                run, "restored", f"the weights of step {self.step}: {self.monitor.name} was {self.monitor.best:g}", data=data
            )

    def put_back_again(self, run: Run, state: Mapping[str, Any]) -> None:
        """Load the best weights of a state that `state_dict` returned into the model of a run that is over."""
        self.load_state_dict(state)
        if self.weights is not None:
            self._load(run)

    def _load(self, run: Run) -> None:
        assert self.weights is not None, "the caller has checked it"
        load_into(run.model, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"weights": self.weights, "step": self.step, **self.monitor.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.weights, self.step = state["weights"], state["step"]
        self.monitor.load_state_dict(state)


def _copied(part: Any) -> Any:
    """Return a copy of an entry of a ``state_dict``: a tensor, or the extra state of a module."""
    return part.detach().clone() if isinstance(part, Tensor) else deepcopy(part)
