"""Change the learning rate by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cadenza.cadence import Every
from cadenza.listener import Listener
from cadenza.moments import Callback
from cadenza.monitor import Monitor, Watched

if TYPE_CHECKING:
    from cadenza.evaluation import Evaluation
    from cadenza.run import Run


class LearningRate(Callback):
    """Let a torch scheduler set the learning rate.

    Args:
        scheduler: A scheduler of one of the run's optimizers, or a function that makes one of the optimizer.
        per: Step it after each update (``"step"``) or after each whole epoch (``"epoch"``).
        monitor: For ``ReduceLROnPlateau``: the result to hand to it, such as ``"eval/loss"``; stepped after each evaluation.
        optimizer: Which of the run's optimizers, from 0, a function gets.

    Raises:
        ValueError: The scheduler belongs to another optimizer, or `per` and `monitor` do not fit it.
        MonitorError: No evaluation of the run reports `monitor`.

    >>> import torch
    >>> from cadenza.testing import tiny_run
    >>> halve = LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5))
    >>> tiny_run(callbacks=[halve], steps=2).optimizers[0].param_groups[0]["lr"]
    0.025
    """

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler],
        *,
        per: Literal["step", "epoch"] = "step",
        monitor: Watched | None = None,
        optimizer: int = 0,
    ) -> None:
        if per not in ("step", "epoch"):
            raise ValueError(f"per must be 'step' or 'epoch'; got {per!r}")
        if not callable(scheduler) and not isinstance(scheduler, LRScheduler):
            raise TypeError(f"expected a torch scheduler, or a function (optimizer) -> scheduler; got {scheduler!r}")
        self.given, self.per, self.optimizer = scheduler, per, optimizer
        # A plateau scheduler keeps its own best; the monitor here only finds the value.
        self.monitor = None if monitor is None else Monitor(monitor, "min", owner="LearningRate")
        self.scheduler: LRScheduler | None = None
        """The scheduler of the run under way."""

    def listeners(self) -> list[Listener]:
        # A method of its own for each way, so that only the one in use is called.
        if self.monitor is not None:
            return [*super().listeners(), Listener(Callback.on_eval_end, self._step_with_result)]
        if self.per == "epoch":
            return [*super().listeners(), Listener(Callback.on_epoch_end, self._step, Every(1, "epoch"))]
        return [*super().listeners(), Listener(Callback.on_after_optimizer_step, self._step_if_updated)]

    def on_setup(self, run: Run) -> None:
        if not 0 <= self.optimizer < len(run.optimizers):
            raise ValueError(f"LearningRate(optimizer={self.optimizer}): the run has {len(run.optimizers)}, counted from 0")
        optimizer = run.optimizers[self.optimizer]
        self.scheduler = self.given if isinstance(self.given, LRScheduler) else self.given(optimizer)
        if not isinstance(self.scheduler, LRScheduler):
            raise TypeError(f"LearningRate's function must return a torch scheduler; got {self.scheduler!r}")
        if not any(self.scheduler.optimizer is one for one in run.optimizers):
            raise ValueError(
                "LearningRate's scheduler belongs to an optimizer that this run does not have. Give a function "
                "(optimizer) -> scheduler instead; it gets the run's own."
            )
        if isinstance(self.scheduler, ReduceLROnPlateau) and self.monitor is None:
            raise ValueError('ReduceLROnPlateau needs a result to look at: LearningRate(..., monitor="eval/loss")')
        if self.monitor is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"monitor= is for ReduceLROnPlateau; {type(self.scheduler).__name__} looks at no result: leave it out"
            )

    def on_fit_start(self, run: Run) -> None:
        if self.monitor is not None:
            self.monitor.check_reported_by(run.evaluations)

    def _step(self, run: Run) -> None:
        assert self.scheduler is not None, "on_setup comes first"
        self.scheduler.step()

    def _step_if_updated(self, run: Run) -> None:
        if run.updated and any(self._of(optimizer) for optimizer in run.updating):
            self._step(run)

    def _step_with_result(self, run: Run, evaluation: Evaluation) -> None:
        assert self.monitor is not None, "or this is not a listener"
        value = self.monitor.value_of(run, evaluation)
        if value is not None:
            assert self.scheduler is not None, "on_setup comes first"
            self.scheduler.step(value)  # type: ignore[arg-type]  # torch types the argument as an epoch

    def _of(self, optimizer: Optimizer) -> bool:
        return self.scheduler is not None and self.scheduler.optimizer is optimizer

    def state_dict(self) -> dict[str, Any]:
        return {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])
