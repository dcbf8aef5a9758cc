"""Stop when a result no longer improves, or is good enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza.callbacks.best import BestCopy
from cadenza.engine.monitor import Mode, Monitor, Pair, Watched, watched_and_mode
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least, check_real
from cadenza.hooks.order import Phase
from cadenza.optim.settings import Compared
from cadenza.status.formats import counted
from cadenza.text.hints import answered, renamed

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class EarlyStopping(Callback, Compared):
    """Stop after `patience` evaluations without gain, or when the result reaches `threshold` or `diverged`.

    With multiple ranks: each rank decides by results that are equal on all ranks; it does not communicate.

    Args:
        monitor: The result of an evaluation or of the training to watch, such as ``"train/loss"``, a function of the results of
            an evaluation, or a pair with the mode, such as ``("eval/acc", "max")``.
        mode: ``"max"`` or ``"min"``: which way is better. A loss needs none; for other names it is never guessed.
        patience: The number of consecutive evaluations without gain after which the run stops; at least 1. NaN is no gain.
        min_delta: A gain counts only if it is greater than this, in the unit of the result.
        threshold: Stop when the result is at least as good as this. None: no such limit.
        diverged: Stop when the result is worse than this. None: no such limit.
        ignore_first: The number of first evaluations that only set the best result. They do not count as evaluations without
            gain, and `threshold` and `diverged` do not apply to them.
        restore_best: When the run ends, load the weights of the best evaluation, unless an error or a signal ended the run.
            `min_delta` does not apply here. Memory and checkpoints hold a copy of these weights.
        name: The name of this callback in the plan, errors and saved state.

    Raises:
        ValueError: A number is out of range, or `diverged` is not worse than `threshold`.
        MonitorError: Neither an evaluation nor the training of the run reports `monitor`.

    >>> from cadenza.testing import simulate
    >>> run = simulate([EarlyStopping("eval/loss", mode="min", patience=2)], metrics={"eval/loss": [3, 2, 2.1, 2.2, 1]})
    >>> run.progress.epoch, run.why("stopped")  # doctest: +ELLIPSIS
    (4, "stopped by EarlyStopping at epoch 4, ...: 'eval/loss' did not get better than 2 in 2 evaluations")
    >>> enough = EarlyStopping("eval/acc", mode="max", patience=9, threshold=0.9, restore_best=True)
    >>> simulate([enough], metrics={"eval/acc": [0.5, 0.95, 0.99]}).outcome.reason
    "'eval/acc' is 0.95, as good as 0.9"
    """

    decides: tuple[str, ...] = ("stopped",)

    seen: int
    stale: int

    @renamed(warmup="ignore_first")
    @answered("early-stopping")
    def __init__(
        self,
        monitor: Watched | Pair,
        mode: Mode | None = None,
        *,
        patience: int = 1,
        min_delta: float = 0.0,
        threshold: float | None = None,
        diverged: float | None = None,
        ignore_first: int = 0,
        restore_best: bool = False,
        name: str | None = None,
    ) -> None:
        self.patience: int = at_least(1, "patience", patience)
        self.ignore_first: int = at_least(0, "ignore_first", ignore_first)
        check_real("min_delta", min_delta)
        if not min_delta >= 0:
            raise ValueError(f"min_delta must be 0 or more; got {min_delta!r}")
        owner = name or "EarlyStopping"
        self.name = name
        watched, mode = watched_and_mode(monitor, mode, owner="EarlyStopping")
        self.monitor: Monitor = Monitor(watched, mode, owner=owner, min_delta=min_delta)
        if threshold is not None and diverged is not None and not self._worse(diverged, threshold):
            raise ValueError(f"with mode={mode!r}, diverged must be worse than threshold={threshold!r}; got {diverged!r}")
        self.threshold: float | None = threshold
        self.diverged: float | None = diverged
        self.best: BestCopy | None = BestCopy(watched, mode, owner=owner) if restore_best else None
        """The weights of the best evaluation so far, with ``restore_best=True``."""
        if restore_best:
            self.after: tuple[Phase] = (Phase.SAVE,)  # the last checkpoint holds the weights of the last step
        self.seen = self.stale = 0

    @property
    def made_with(self) -> dict[str, Any]:
        monitor = {"monitor": self.monitor.name, "mode": self.monitor.mode}
        return {**super().made_with, **monitor}  # a monitor shows its best value, which is no argument

    def on_setup(self, run: Run) -> None:
        self.seen = self.stale = 0
        self.monitor.reset()
        if self.best is not None:
            self.best.reset()

    def on_fit_start(self, run: Run) -> None:
        self.monitor.check(run)

    def on_sanity_end(self, run: Run, evaluation: Evaluation) -> None:
        self.monitor.value_reported(run, evaluation)  # an unknown name is an error before the first epoch

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        value = self.monitor.value_of(run, evaluation)
        if value is not None:
            self.judge(run, value)

    def on_fit_end(self, run: Run) -> None:
        if self.best is not None:
            self.best.put_back(run)

    def put_in_place_again(self, run: Run, state: Mapping[str, Any]) -> None:
        if self.best is not None and "weights" in state:
            self.best.put_back_again(run, state["weights"])

    def judge(self, run: Run, value: float) -> None:
        """Evaluate the next result, and request a stop if one is due."""
        if self.best is not None and not math.isnan(value):  # the monitor below warns about NaN, once
            self.best.offer(run, value)
        better = self.monitor.update(run, value)
        self.seen += 1
        if self.seen <= self.ignore_first:
            return
        self.stale = 0 if better else self.stale + 1
        reason = self._reason(value)
        if reason is not None:
            data = {"value": value, "evaluations_without_gain": self.stale, "best": [self.monitor.best_data()]}
            run.stop(f"{self.monitor.name!r} {reason}", data=data)

    def waits_for(self) -> list[str]:
        best = f" over {self.monitor.name!r} = {self.monitor.best:.6g}" if math.isfinite(self.monitor.best) else ""
        first = self.ignore_first - self.seen
        more = [f"the first {counted(first, 'evaluation')} from now on do not count"] if first > 0 else []
        return [*more, f"{self.stale} of {counted(self.patience, 'evaluation')} without gain{best}"]

    def _reason(self, value: float) -> str | None:
        if self.threshold is not None and (value == self.threshold or self._worse(self.threshold, value)):
            return f"is {value:g}, as good as {self.threshold:g}"
        if self.diverged is not None and self._worse(value, self.diverged):
            return f"is {value:g}, worse than {self.diverged:g}"
        if self.stale >= self.patience:
            times = counted(self.stale, "evaluation")
            if not math.isfinite(self.monitor.best):
                return f"was never finite in {times}"
            return f"did not get better than {self.monitor.best:g} in {times}"
        return None

    def _worse(self, value: float, other: float) -> bool:
        return value < other if self.monitor.mode == "max" else value > other

    def state_dict(self) -> dict[str, Any]:
        best = {} if self.best is None else {"weights": self.best.state_dict()}
        return {"seen": self.seen, "stale": self.stale, **self.monitor.state_dict(), **best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.stale = state["seen"], state["stale"]
        self.monitor.load_state_dict(state)
        if self.best is not None and "weights" in state:
            self.best.load_state_dict(state["weights"])
