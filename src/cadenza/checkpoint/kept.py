"""The best checkpoint by a monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.engine.monitor import Mode, Monitor

Best = tuple[str, Mode]
Kept = tuple[str | None, float]


class KeptBest:
    """The best checkpoint by one monitor: its name and its value."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.kept: Kept = (None, monitor.best)
        self.pending = False
        """Whether a better value has come and is not saved yet."""
        self.weights: str | None = None
        """The name of the averaged weights that had the best value; None for the weights of the model."""
        self.chosen_at: int | None = None
        """The step after which the weights had the best value."""

    @property
    def name(self) -> str | None:
        """The name of the checkpoint; None before the first."""
        return self.kept[0]

    @property
    def value(self) -> float:
        """The value of the checkpoint."""
        return self.kept[1]

    def put_back(self, kept: Kept) -> None:
        """Set the best checkpoint."""
        self.kept, self.monitor.best, self.pending = kept, kept[1], False

    def forget(self) -> None:
        """Forget the best, before another run."""
        self.monitor.reset()
        self.put_back((None, self.monitor.best))
        self.weights = self.chosen_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        judged = {} if self.weights is None else {"weights": self.weights, "chosen_at": self.chosen_at}
        return {"name": self.name, "best": self.value, **judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.put_back((state["name"], state["best"]))
        self.weights, self.chosen_at = state.get("weights"), state.get("chosen_at")


def pairs_of(keep_best: Best | Sequence[Best]) -> list[Best]:
    """Return one or several pairs as a list."""
    given: Sequence[Any] = [keep_best] if keep_best and isinstance(keep_best[0], str) else keep_best
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f'keep_best must be a pair such as ("eval/acc", "max"), or several; got {keep_best!r}')
    return list(given)
