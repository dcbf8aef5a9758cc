"""Keep the best weights and restore them at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza.callbacks.best import BestCopy
from cadenza.engine.monitor import Mode, Monitor, Pair, Watched, watched_and_mode
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class BestWeights(Callback):
    """Keep a copy of the weights of the best evaluation in memory, and load it into the model when the run ends.

    With multiple ranks: each rank keeps and restores its own copy, based on results that are equal on all ranks; it does not
    communicate.

    Args:
        monitor: The result to watch, such as ``"eval/loss"``, or a pair with the mode, such as ``("eval/acc", "max")``.
        mode: ``"max"`` or ``"min"``: which way is better. A loss needs none.
        restore: Load the best weights at the end, unless an error or a signal ended the run.

    >>> from cadenza.testing import simulate
    >>> best = BestWeights("eval/loss", "min")
    >>> run = simulate([best], metrics={"eval/loss": [3.0, 1.0, 2.0]})
    >>> best.monitor.best, best.step
    (1.0, 4)
    """

    after: Relation = (Phase.SAVE,)  # the last checkpoint holds the weights of the last step, so that the run can continue

    def __init__(self, monitor: Watched | Pair, mode: Mode | None = None, *, restore: bool = True) -> None:
        self._copy = BestCopy(*watched_and_mode(monitor, mode, owner="BestWeights"), owner="BestWeights")
        self.monitor: Monitor = self._copy.monitor
        self.restore = restore

    @property
    def weights(self) -> dict[str, Any] | None:
        """The best weights so far, on the device; None before the first evaluation."""
        return self._copy.weights

    @property
    def step(self) -> int | None:
        """The step of the best result."""
        return self._copy.step

    def on_setup(self, run: Run) -> None:
        self._copy.reset()

    def on_fit_start(self, run: Run) -> None:
        self.monitor.check(run)

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        value = self.monitor.value_of(run, evaluation)
        if value is not None:
            self._copy.offer(run, value)

    def on_fit_end(self, run: Run) -> None:
        if self.restore:
            self._copy.put_back(run)

    def put_in_place_again(self, run: Run, state: Mapping[str, Any]) -> None:
        if self.restore:
            self._copy.put_back_again(run, state)

    def state_dict(self) -> dict[str, Any]:
        return self._copy.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._copy.load_state_dict(state)
