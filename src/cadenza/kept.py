"""Which checkpoint is the best by one monitor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cadenza.monitor import Mode, Monitor

Best = tuple[str, Mode]
Kept = tuple[str | None, float]


class KeptBest:
    """The best checkpoint by one monitor: its name, and the value that it had."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.kept: Kept = (None, monitor.best)
        self.pending = False
        """Whether a better value came, and is not saved yet."""
        self.weights: str | None = None
        """The averaged weights, by name, that had the best value; None for the model's own."""
        self.chosen_at: int | None = None
        """The step after which they had it."""

    @property
    def name(self) -> str | None:
        """The name of the checkpoint; None if there is none yet."""
        return self.kept[0]

    @property
    def value(self) -> float:
        """The value that it had."""
        return self.kept[1]

    def put_back(self, kept: Kept) -> None:
        """Let the best be this one."""
        self.kept, self.monitor.best, self.pending = kept, kept[1], False

    def forget(self) -> None:
        """Start anew: another run begins."""
        self.monitor.reset()
        self.put_back((None, self.monitor.best))
        self.weights = self.chosen_at = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""
        judged = {} if self.weights is None else {"weights": self.weights, "chosen_at": self.chosen_at}
        return {"name": self.name, "best": self.value, **judged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.put_back((state["name"], state["best"]))
        self.weights, self.chosen_at = state.get("weights"), state.get("chosen_at")


def pairs_of(keep_best: Best | Sequence[Best]) -> list[Best]:
    """Return one or several pairs as a list."""
    given: Sequence[Any] = [keep_best] if keep_best and isinstance(keep_best[0], str) else keep_best
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f'keep_best must be a pair such as ("eval/acc", "max"), or several; got {keep_best!r}')
    return list(given)
