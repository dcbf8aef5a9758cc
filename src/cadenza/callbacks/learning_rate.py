"""Change the learning rate by a schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from cadenza.cadence import Every
from cadenza.callbacks.find_batch_size import FindBatchSize
from cadenza.callbacks.limit import Limit
from cadenza.listener import Listener
from cadenza.moments import Callback
from cadenza.monitor import Mode, Monitor, Watched
from cadenza.planned import planned, takes_total

if TYPE_CHECKING:
    from cadenza.evaluation import Evaluation
    from cadenza.run import Run


class LearningRate(Callback):
    """Let a torch scheduler set the learning rate.

    Args:
        scheduler: A scheduler of one of the run's optimizers, or a function that makes one of the optimizer. A function with a
            second argument gets the total as well: how often the scheduler will be stepped if nothing stops the run. A run
            that continues keeps the total of its first start.
        per: Step it after each update (``"step"``) or after each whole epoch (``"epoch"``).
        monitor: For ``ReduceLROnPlateau``: the result to hand to it, such as ``"eval/loss"``; stepped after each evaluation.
            In a pair such as ``("eval/acc", "max")`` the mode is compared with the scheduler's own, which counts.
        optimizer: Which of the run's optimizers, from 0, a function gets.

    Raises:
        ValueError: The scheduler belongs to another optimizer, `per` and `monitor` do not fit it, or the total is not known.
        MonitorError: No evaluation of the run reports `monitor`.

    >>> from torch.optim.lr_scheduler import LinearLR
    >>> from cadenza.testing import tiny_run
    >>> fall = LearningRate(lambda optimizer, total: LinearLR(optimizer, 1.0, 0.5, total_iters=total))
    >>> round(tiny_run(callbacks=[fall], steps=4).optimizers[0].param_groups[0]["lr"], 9)
    0.05
    """

    after = (FindBatchSize, Limit)  # they change how many steps there are

    asks = False

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | Callable[[Optimizer, int], LRScheduler],
        *,
        per: Literal["step", "epoch"] = "step",
        monitor: Watched | tuple[Watched, Mode] | None = None,
        optimizer: int = 0,
    ) -> None:
        if per not in ("step", "epoch"):
            raise ValueError(f"per must be 'step' or 'epoch'; got {per!r}")
        if not callable(scheduler) and not isinstance(scheduler, LRScheduler):
            raise TypeError(f"expected a torch scheduler, or a function (optimizer) -> scheduler; got {scheduler!r}")
        self.given: Any = scheduler
        self.per, self.optimizer = per, optimizer
        watched = monitor[0] if isinstance(monitor, tuple) else monitor
        self._mode: Mode | None = monitor[1] if isinstance(monitor, tuple) else None
        # A plateau scheduler keeps its own best; the monitor here only finds the value.
        self.monitor = None if watched is None else Monitor(watched, self._mode or "min", owner="LearningRate")
        self.scheduler: LRScheduler | None = None
        """The scheduler of the run under way."""
        self.total: int | None = None
        """The total for which the scheduler was made; None if its function takes none."""
        self._restored = False

    def listeners(self) -> list[Listener]:
        # A method of its own for each way, so that only the one in use is called.
        if self.monitor is not None:
            return [*super().listeners(), Listener(Callback.on_eval_end, self._step_with_result)]
        if self.per == "epoch":
            return [*super().listeners(), Listener(Callback.on_epoch_end, self._step, Every(1, "epoch"))]
        return [*super().listeners(), Listener(Callback.on_after_optimizer_step, self._step_if_updated)]

    def on_setup(self, run: Run) -> None:
        self._restored, self.total = False, None
        if not isinstance(self.given, LRScheduler) and takes_total(self.given):
            self.total = self._planned(run)
        self.renew(run)
        assert self.scheduler is not None, "it was made"
        if not any(self.scheduler.optimizer is one for one in run.optimizers):
            raise ValueError(
                "LearningRate's scheduler belongs to an optimizer that this run does not have. Give a function "
                "(optimizer) -> scheduler instead; it gets the run's own."
            )
        self._check_monitor(self.scheduler)

    def renew(self, run: Run) -> None:
        """Make the scheduler anew, from the rates that the optimizer has now. One that was given as it is stays.

        Raises:
            TypeError: The function returned no scheduler.
        """
        optimizer = optimizer_of(run, self.optimizer, needed_by="LearningRate")
        if isinstance(self.given, LRScheduler):
            self.scheduler = self.given
        else:
            self.scheduler = self.given(optimizer) if self.total is None else self.given(optimizer, self.total)
        if not isinstance(self.scheduler, LRScheduler):
            raise TypeError(f"LearningRate's function must return a torch scheduler; got {self.scheduler!r}")

    def on_fit_start(self, run: Run) -> None:
        if self.monitor is not None:
            self.monitor.check_reported_by(run.evaluations)
        if self.total is None or self.total == (now := self._planned(run)):
            return
        if not self._restored:
            raise ValueError(
                f"LearningRate made a schedule for {self.total} {self.per}s, and then a callback gave the run another loader: "
                f"now there are {now}. Put that callback before LearningRate."
            )
        run.warn(
            f"the schedule was made for {self.total} {self.per}s when the run first began, and goes on as it was made; the run "
            f"now has {now}. If that is not meant, do not let the schedule depend on the total."
        )

    def _planned(self, run: Run) -> int:
        who = "LearningRate(a function of the optimizer and the total)"
        return max(1, planned(run, self.per, needed_by=who))  # a schedule over nothing divides by zero

    def _check_monitor(self, scheduler: LRScheduler) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):
            if self.monitor is not None:
                raise ValueError(
                    f"monitor= is for ReduceLROnPlateau; {type(scheduler).__name__} looks at no result: leave it out"
                )
            return
        if self.monitor is None:
            raise ValueError('ReduceLROnPlateau needs a result to look at: LearningRate(..., monitor="eval/loss")')
        if self._mode not in (None, scheduler.mode):
            raise ValueError(
                f"LearningRate(monitor=) says that {self._mode!r} is better, and its ReduceLROnPlateau has "
                f"mode={scheduler.mode!r}. Make both the same: ReduceLROnPlateau(optimizer, mode={self._mode!r})"
            )

    def _step(self, run: Run) -> None:
        assert self.scheduler is not None, "on_setup comes first"
        self.scheduler.step()

    def _step_if_updated(self, run: Run) -> None:
        if run.updated and any(map(self.drives, run.updating)):
            self._step(run)

    def _step_with_result(self, run: Run, evaluation: Evaluation) -> None:
        assert self.monitor is not None, "or this is not a listener"
        value = self.monitor.value_of(run, evaluation)
        if value is not None:
            assert self.scheduler is not None, "on_setup comes first"
            self.scheduler.step(value)  # type: ignore[arg-type]  # torch types the argument as an epoch

    def drives(self, optimizer: Optimizer) -> bool:
        """Return whether the scheduler of the run under way is one of this optimizer."""
        return self.scheduler is not None and self.scheduler.optimizer is optimizer

    def state_dict(self) -> dict[str, Any]:
        if self.scheduler is None:
            return {}
        total = {} if self.total is None else {"total": self.total}
        return {"scheduler": self.scheduler.state_dict(), **total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is None or "scheduler" not in state:
            return
        self.scheduler.load_state_dict(_with_kinds(state["scheduler"], self.scheduler.state_dict()))
        if self.total is not None:
            self.total, self._restored = state.get("total", self.total), True


def optimizer_of(run: Run, place: int, *, needed_by: str) -> Optimizer:
    """Return one of the run's optimizers by its place, from 0.

    Raises:
        ValueError: The run has fewer.
    """
    if not 0 <= place < len(run.optimizers):
        raise ValueError(f"{needed_by}(optimizer={place}): the run has {len(run.optimizers)}, counted from 0")
    return run.optimizers[place]


def put_rate(group: dict[str, Any], rate: float) -> None:
    """Set the learning rate of a parameter group; one that is a tensor, for graphs on the device, is filled."""
    if isinstance(group["lr"], Tensor):
        with torch.no_grad():
            group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _with_kinds(saved: Any, current: Any) -> Any:
    """Return saved state with the kinds of mappings that the scheduler has: a checkpoint knows plain dicts alone.

    ``MultiStepLR`` counts its milestones with a Counter, and asks it for more than a dict has when it is one part of several.
    """
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        inner = {key: _with_kinds(value, current.get(key)) for key, value in saved.items()}
        return Counter(inner) if isinstance(current, Counter) else inner
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        return [_with_kinds(one, other) for one, other in zip(saved, current, strict=True)]
    return saved
