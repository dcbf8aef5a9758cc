"""Change the learning rate by a schedule."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from cadenza.engine.monitor import Mode, Monitor, Pair, Watched, watched_and_mode
from cadenza.engine.planned import planned, takes_total
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase
from cadenza.hooks.schedule import Every
from cadenza.optim.rates import SetsRates, check_one_each, optimizer_of
from cadenza.optim.settings import plain, set_option
from cadenza.status.decisions import decide

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


class LearningRate(Callback, SetsRates):
    """Let a torch scheduler set the learning rate.

    Args:
        scheduler: A scheduler of one of the run's optimizers, or a function that makes one of the optimizer. A function with a
            second argument gets the total as well: how often the scheduler will be stepped if nothing stops the run. A run
            that continues keeps the total of its first start; see `stretch` for a run that is made longer.
        monitor: For ``ReduceLROnPlateau``: the result that it gets after each evaluation, such as ``"eval/loss"``, or a pair
            with the mode, such as ``("eval/acc", "max")``.
        mode: ``"max"`` or ``"min"``. It must be the mode of the scheduler; None takes that.
        per: Step it after each update (``"step"``) or after each whole epoch (``"epoch"``).
        optimizer: Which of the run's optimizers, from 0, a function gets. Each optimizer takes one `LearningRate`.
        stretch: If the run continues with another total, make the schedule for the new total: from the step of the checkpoint
            on, the rates are those of a run that had the new total from its first step. Without it, a larger total is an
            error, and a smaller one cuts the schedule short. Needs a function of the optimizer and the total.

    Raises:
        CallbackError: Two `LearningRate` set the rates of one optimizer.
        ValueError: The scheduler belongs to another optimizer, `per` and `monitor` do not fit it, the total is not known, or
            the run was made longer than the schedule.
        MonitorError: No evaluation of the run reports `monitor`.

    >>> from torch.optim.lr_scheduler import LinearLR
    >>> from cadenza.testing import tiny_run
    >>> fall = LearningRate(lambda optimizer, total: LinearLR(optimizer, 1.0, 0.5, total_iters=total))
    >>> round(tiny_run(callbacks=[fall], steps=4).optimizers[0].param_groups[0]["lr"], 9)
    0.05
    """

    phase = Phase.SCHEDULE
    after = (Phase.LENGTH,)

    asks = False

    def __init__(
        self,
        scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | Callable[[Optimizer, int], LRScheduler],
        monitor: Watched | Pair | None = None,
        mode: Mode | None = None,
        *,
        per: Literal["step", "epoch"] = "step",
        optimizer: int = 0,
        stretch: bool = False,
    ) -> None:
        if per not in ("step", "epoch"):
            raise ValueError(f"per must be 'step' or 'epoch'; got {per!r}")
        if not callable(scheduler) and not isinstance(scheduler, LRScheduler):
            raise TypeError(f"expected a torch scheduler, or a function (optimizer) -> scheduler; got {scheduler!r}")
        if stretch and (isinstance(scheduler, LRScheduler) or not takes_total(scheduler)):
            raise ValueError(
                "stretch=True makes the schedule anew for another total: expected a function (optimizer, total) -> scheduler; "
                f"got {scheduler!r}"
            )
        self.given: Any = scheduler
        self.per, self.optimizer, self.stretch = per, optimizer, stretch
        if monitor is None and mode is not None:
            raise ValueError(f"LearningRate: mode={mode!r} needs monitor=, such as 'eval/loss'; got none")
        self._mode = mode if mode is not None or not isinstance(monitor, tuple) else monitor[1]
        # A plateau scheduler keeps its own best. The monitor here only finds the value, so that any mode does.
        self.monitor = None
        if monitor is not None:
            watched, either = watched_and_mode(
                monitor, mode if isinstance(monitor, tuple) else mode or "min", owner="LearningRate"
            )
            self.monitor = Monitor(watched, either, owner="LearningRate")
        self.scheduler: LRScheduler | None = None
        """The scheduler of the run under way."""
        self.total: int | None = None
        """The total for which the scheduler was made; None if its function takes none."""
        self._plan = self._made_for = 0
        """The total by the present limits and loader; and by those for which the schedule was made."""
        self._steps_before: int | None = None
        """How often the scheduler was stepped before a resume that makes the schedule anew."""
        self.made_with: Mapping[str, Any] = {}
        """The plain arguments of the scheduler, by name."""
        self._override: Sequence[str] = ()

    def listeners(self) -> list[Listener]:
        # A method of its own for each way, so that only the one in use is called.
        if self.monitor is not None:
            return [*super().listeners(), Listener(Callback.on_eval_end, self._step_with_result)]
        if self.per == "epoch":
            return [*super().listeners(), Listener(Callback.on_epoch_end, self._step, Every(1, "epoch"))]
        return [*super().listeners(), Listener(Callback.on_after_optimizer_step, self._step_if_updated)]

    def on_setup(self, run: Run) -> None:
        check_one_each(hooks_of(run).callbacks, run.optimizers)
        self.total = self._steps_before = None
        if not isinstance(self.given, LRScheduler) and takes_total(self.given):
            self._plan = self._made_for = self._planned(run)
            self.total = self._total_of(run, session_of(run).restored.callback_states.get(hooks_of(run).name_of(self), {}))
        self.renew(run)
        assert self.scheduler is not None, "it was made"
        self.made_with, self._override = arguments_of(self.scheduler), session_of(run).given.override
        self._make_anew_for_override(run)
        if not any(self.scheduler.optimizer is one for one in run.optimizers):
            raise ValueError(
                "LearningRate's scheduler belongs to an optimizer that this run does not have. Give a function "
                "(optimizer) -> scheduler instead; it gets the run's own."
            )
        self._check_monitor(self.scheduler)

    @property
    def made_anew(self) -> bool:
        """Whether a run that continues makes the schedule anew, from its present arguments."""
        return self._steps_before is not None

    def _make_anew_for_override(self, run: Run) -> None:
        saved = session_of(run).restored.callback_states.get(hooks_of(run).name_of(self), {}).get("scheduler")
        named = [name for name in session_of(run).given.override if name in ("lr", *self.made_with)]
        if (
            not named or saved is None or self.monitor is not None
        ):  # a plateau has no schedule: it changes the rate that is there
            return
        if isinstance(self.given, LRScheduler):
            raise ValueError(
                f"override={tuple(named)!r} makes the schedule anew: LearningRate must have a function (optimizer) -> "
                f"scheduler for that; got a {type(self.given).__name__}. Give LearningRate(lambda optimizer: ...)."
            )
        self._steps_before = _steps_of(saved)

    def renew(self, run: Run) -> None:
        """Make the scheduler anew, from the rates that the optimizer has now. An instance that the user gave stays.

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
        if self._steps_before is not None:
            self._stretch_from(run, self._steps_before)
        if self.total is not None and self._plan != (now := self._planned(run)):
            raise ValueError(
                f"LearningRate made a schedule for {self._plan} {self.per}s, and then a callback gave the run another loader: "
                f"now there are {now}. Put that callback before LearningRate."
            )
        self._check_one_cycle(run)

    def _total_of(self, run: Run, saved: Mapping[str, Any]) -> int:
        """Return the total to make the schedule for; `saved` is the state in the checkpoint, empty for a new run."""
        now, total = self._plan, saved.get("total")
        then = saved.get("planned", total)
        if self.stretch and "scheduler" in saved and then != now:
            self._steps_before = _steps_of(saved["scheduler"])
            return now  # until `on_fit_start`, where the counters are restored
        if total is None or then is None:
            return now
        self._made_for = then
        if now > then and self.monitor is None:
            raise ValueError(
                f"the run was made longer: LearningRate's schedule was made for {then} {self.per}s, and the run now has {now}. "
                "A schedule that is over trains at its last rate, often 0. Make it for the new total with "
                f"LearningRate(..., stretch=True), or keep the run at {then} {self.per}s."
            )
        if now < then:
            run.warn(
                f"the schedule was made for {then} {self.per}s, and the run now has {now}: it ends before the schedule does. "
                "LearningRate(..., stretch=True) makes the schedule for the new total."
            )
        return int(total)

    def _stretch_from(self, run: Run, steps: int) -> None:
        """Make the schedule anew, with `stretch` for the new total, and step it to where the run is."""
        assert self.scheduler is not None, "on_setup comes first"
        self._steps_before = None
        if self.stretch:
            self.total = max(1, run.progress.total(self.per, run.info.accumulate) or self._plan)
        for group in self.scheduler.optimizer.param_groups:
            set_option(group, "lr", float(group.get("initial_lr", group["lr"])))
        self.renew(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the updates before the resume
            for _ in range(steps):
                self.scheduler.step()
        if self.stretch:
            told = f"it is made for {self.total} {self.per}s, the new total, and stands at {steps}"
            decide(run, "schedule stretched", told, data={"total": self.total, "unit": self.per, "position": steps})

    def _planned(self, run: Run) -> int:
        who = "LearningRate(a function of the optimizer and the total)"
        return max(1, planned(run, self.per, needed_by=who))  # a schedule over nothing divides by zero

    def _check_one_cycle(self, run: Run) -> None:
        """Raise now what torch raises in the first step after the last one of a ``OneCycleLR``."""
        if (
            not isinstance(self.scheduler, OneCycleLR) or session_of(run).step_fn is not None
        ):  # a step_fn may update more rarely
            return
        total, cycle = run.progress.total(self.per, run.info.accumulate), self.scheduler.total_steps
        left = None if total is None else total - getattr(run.progress, self.per)
        if left is not None and self.scheduler.last_epoch + left > cycle:
            raise ValueError(
                f"LearningRate's OneCycleLR has total_steps={cycle}, and the run has {total} {self.per}s: torch raises an "
                f"error at {self.per} {cycle + 1}. Make it of the run's own total, which also fits a run that is made longer: "
                "LearningRate(lambda optimizer, total: OneCycleLR(optimizer, ..., total_steps=total), stretch=True)"
            )

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
        if (
            session_of(run).step.updated
            and any(map(self.drives, session_of(run).step.updating))
            and not any(map(self.drives, session_of(run).step.left_out))
        ):
            self._step(run)

    def _step_with_result(self, run: Run, evaluation: Evaluation) -> None:
        assert self.monitor is not None, "or this is not a listener"
        value = self.monitor.value_of(run, evaluation)
        if value is not None:
            assert self.scheduler is not None, "on_setup comes first"
            self.scheduler.step(value)  # type: ignore[arg-type]  # torch types the argument as an epoch

    def aim(self, optimizers: Sequence[Optimizer] | None) -> object:
        """Return the optimizer of which the rates are set, or its index in the run if that is all that is known yet."""
        if isinstance(self.given, LRScheduler):
            return self.given.optimizer
        known = optimizers is not None and 0 <= self.optimizer < len(optimizers)
        return optimizers[self.optimizer] if known and optimizers else self.optimizer

    def drives(self, optimizer: Optimizer) -> bool:
        """Return whether the scheduler of the run under way is one of this optimizer."""
        return self.scheduler is not None and self.scheduler.optimizer is optimizer

    def state_dict(self) -> dict[str, Any]:
        if self.scheduler is None:
            return {}
        total = {} if self.total is None else {"total": self.total, "planned": self._made_for}
        return {"scheduler": self.scheduler.state_dict(), **total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is None or "scheduler" not in state or self._steps_before is not None:
            return
        if self.monitor is not None and "scheduler" in self._override:
            return  # the saved state is that of another class: the plateau starts from the present rate
        present = self.scheduler.state_dict()
        taken = {name: present[name] for name in self._override if name in self.made_with and name in present}
        self.scheduler.load_state_dict(_with_kinds({**state["scheduler"], **taken}, present))


_MOVES = ("last_epoch", "_step_count", "_last_lr", "base_lrs", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter")


def arguments_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the plain arguments that a scheduler was made with; ask before it is stepped."""
    state = scheduler.state_dict()
    options = scheduler.optimizer.param_groups[0]
    rates: dict[str, Any] = {
        name: options[name] for name in ("max_lr", "min_lr", "max_momentum", "base_momentum") if name in options
    }
    named = {name: value for name, value in state.items() if name not in _MOVES and not name.startswith("_")}
    return {"scheduler": type(scheduler).__name__, **plain(rates), **plain(named)}


def _steps_of(scheduler: Mapping[str, Any]) -> int:
    """Return how often a scheduler was stepped, by its saved state."""
    if "last_epoch" in scheduler:
        return int(scheduler["last_epoch"])
    return max((_steps_of(inner) for inner in scheduler.get("_schedulers", ())), default=0)  # a ChainedScheduler


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
