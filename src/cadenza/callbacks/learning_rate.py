"""Set the learning rate with a scheduler."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from cadenza.engine.monitor import Mode, Monitor, Pair, Watched, is_pair, watched_and_mode
from cadenza.engine.session import Loops, session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.schedule import Every
from cadenza.optim.rates import (
    CountedSchedule,
    RunUnit,
    Scheduler,
    SetsRates,
    check_can_go_to,
    check_one_each,
    count_of,
    go_to,
    length_of,
    optimizer_of,
    takes_total,
)
from cadenza.optim.settings import Compared, Settings, first_rates, plain, set_rates, settings_of
from cadenza.status.decisions import decide
from cadenza.status.formats import counted, plural
from cadenza.status.reprs import brief, signature_of
from cadenza.text.hints import answered

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run
    from cadenza.status.progress import Progress


_UNITS: dict[str, RunUnit] = {"1 step": "step", "1 epoch": "epoch"}
_LENGTHS = ("T_max", "milestones", "step_size", "total_iters", "total_steps")
"""The attributes of torch's schedulers that count calls of ``step``."""
_TAKE_TOTAL = "Take the total of the run: LearningRate(lambda optimizer, total: ...)"


class LearningRate(Callback, SetsRates, Compared):
    """Set the learning rate with a scheduler of torch, of transformers or of timm.

    With multiple ranks: each rank does the same; it does not communicate.

    Args:
        scheduler: A scheduler of an optimizer of the run, or a function ``(optimizer) -> scheduler`` or ``(optimizer, total) ->
            scheduler``. A scheduler of timm gets the number of completed epochs or updates. The total is the number of times
            that the scheduler is stepped in a run that ends at its limits. If ``max_tokens`` is the only limit, the total is
            this limit, and after each update the scheduler goes to the number of tokens so far. A run that continues keeps the
            total of its first start; see `stretch` for a run with a larger limit.
        every: Step the scheduler after each update (``"1 step"``) or after each whole epoch (``"1 epoch"``). A scheduler of
            timm with ``t_in_epochs=True``, the default of timm, needs ``"1 epoch"``.
        monitor: For ``ReduceLROnPlateau``: the result that steps it after each evaluation, such as ``"eval/loss"``, or a pair
            with the mode, such as ``("eval/acc", "max")``.
        mode: ``"max"`` or ``"min"``. It must be the mode of the scheduler. None takes the mode of the scheduler.
        optimizer: The index of the optimizer that the function gets. Each optimizer takes one `LearningRate`.
        stretch: If the run continues with another total, make the schedule for the new total. From the step of the checkpoint
            on, the rates are those of a run that had the new total from its first step. ``"rest"`` stretches the rest of the
            schedule alone: with s of T steps done and R steps left in the run, it is the schedule for the total
            T' = T * R / (T - s), rounded, from step T' - R on. So the rate continues where it was, if the schedule depends on
            step / total. Without `stretch`, a larger total is an error, and a smaller total cuts the schedule short. Needs a
            function of the optimizer and the total.

    Raises:
        CallbackError: Two `LearningRate` set the rates of one optimizer.
        ValueError: The scheduler belongs to an optimizer that the run does not have, `every` or `monitor` does not match the
            scheduler, the total is not known, the run is longer than the schedule, or the scheduler cannot count tokens.
        MonitorError: No evaluation of the run reports `monitor`.

    >>> from torch.optim.lr_scheduler import LinearLR
    >>> from cadenza.testing import tiny_run
    >>> fall = LearningRate(lambda optimizer, total: LinearLR(optimizer, 1.0, 0.5, total_iters=total))
    >>> round(tiny_run(callbacks=[fall], steps=4).optimizers[0].param_groups[0]["lr"], 9)
    0.05
    """

    phase: Phase | None = Phase.SCHEDULE
    after: Relation = (Phase.LENGTH,)

    unit: RunUnit
    """The unit that the scheduler counts: ``"step"``, ``"epoch"`` or, in a run of so many tokens, ``"token"``."""
    optimizer: int
    stretch: bool | Literal["rest"]
    made_with: Mapping[str, Any] = {}
    """The plain arguments of the scheduler, by name."""

    @answered("learning-rate")
    def __init__(
        self,
        scheduler: Scheduler | Callable[[Optimizer], Scheduler] | Callable[[Optimizer, int], Scheduler],
        every: Literal["1 step", "1 epoch"] = "1 step",
        monitor: Watched | Pair | None = None,
        mode: Mode | None = None,
        *,
        optimizer: int = 0,
        stretch: bool | Literal["rest"] = False,
    ) -> None:
        if stretch not in (True, False, "rest"):
            raise ValueError(f"stretch must be True, False or 'rest'; got {stretch!r}")
        if every not in _UNITS:
            raise ValueError(f"every must be '1 step' or '1 epoch'; got {every!r}")
        given = CountedSchedule.around(scheduler)
        if not callable(given) and not isinstance(given, LRScheduler):
            raise TypeError(
                f"expected a scheduler, or a function (optimizer) -> scheduler; got {scheduler!r}. Write LearningRate(lambda "
                "optimizer, total: CosineAnnealingLR(optimizer, total)); a constant rate is that of the optimizer."
            )
        if stretch and (isinstance(given, LRScheduler) or not takes_total(given)):
            raise ValueError(
                "stretch=True makes the schedule again for another total: expected a function (optimizer, total) -> scheduler; "
                f"got {scheduler!r}"
            )
        if monitor is None and mode is not None:
            raise ValueError(f"LearningRate: mode={mode!r} needs monitor=, such as 'eval/loss'; got none")
        self.given: Any = given
        self._used = given  # in the current run, which may override it
        self.every, self.unit, self.optimizer, self.stretch = every, _UNITS[every], optimizer, stretch
        self._mode = monitor[1] if mode is None and is_pair(monitor) else mode
        # A plateau scheduler keeps its own best result. This monitor only finds the value; the mode is for its check.
        self.monitor: Monitor | None = None
        if monitor is not None:
            watched, either = watched_and_mode(monitor, mode if is_pair(monitor) else mode or "min", owner="LearningRate")
            self.monitor = Monitor(watched, either, owner="LearningRate")
        self.scheduler: LRScheduler | None = None
        """The scheduler of the current run."""
        self.total: int | None = None
        """The total of the schedule; None if the function takes no total."""
        self._plan = self._made_for = 0
        """The total by the current limits and loader, and by those of the schedule."""
        self.made_anew: bool = False
        """Whether a run that continues makes the schedule again, from its current arguments, and steps it to its position."""
        self._position = self._total_before = 0
        """How often the scheduler was stepped before this resume, and the total that it had."""
        self._override: Sequence[str] = ()
        self._count: int | None = None
        """How often the scheduler was stepped in all, when this callback stepped it last."""

    def listeners(self) -> list[Listener]:
        # One method per mode, so that a step calls only the method in use.
        if self.monitor is not None:
            step = Listener(Callback.on_eval_end, self._step_with_result)
        elif self.every == "1 epoch":
            step = Listener(Callback.on_epoch_end, self._step, Every("1 epoch"))
        else:
            step = Listener(Callback.on_after_optimizer_step, self._step_if_updated)
        return silent([*super().listeners(), step])

    def on_setup(self, run: Run) -> None:
        hooks, session = hooks_of(run), session_of(run)
        check_one_each(hooks.callbacks, run.optimizers)
        name, given = hooks.name_of(self), session.given
        saved = session.restored.callback_states.get(name, {})
        self.total, self.unit = None, _UNITS[self.every]
        self.made_anew = False
        self._override = given.override
        self._used = _function_in(given, name) or self.given
        given.note("scheduler", brief(self.given), brief(self._used))
        if not isinstance(self._used, LRScheduler) and takes_total(self._used):
            self._set_total(run, saved)
        self.renew(run)
        assert self.scheduler is not None, "it was made"
        self.made_with = arguments_of(self.scheduler)
        self._check_override(self.scheduler, given, saved)
        if not any(self.scheduler.optimizer is optimizer for optimizer in run.optimizers):
            raise ValueError(
                "the scheduler of LearningRate belongs to an optimizer that this run does not have. Give a function "
                "(optimizer) -> scheduler, which gets the optimizer of the run."
            )
        self._check_monitor(self.scheduler)

    def _set_total(self, run: Run, saved: Mapping[str, Any]) -> None:
        """Set the total of the schedule. `saved` is the state in the checkpoint, empty for a new run."""
        now, self.unit = self._planned(run)
        if (before := saved.get("unit", self.unit)) != self.unit:
            raise ValueError(
                f"the schedule of LearningRate was made over {plural(before)}, and would now go over {plural(self.unit)}. "
                "Limit the run by the same unit as at its first start, and give the same every=."
            )
        self.total = self._plan = self._made_for = now
        total = saved.get("total")
        then = saved.get("planned", total)
        self._total_before = int(total or now)
        if self.stretch and "scheduler" in saved and then != now:  # `on_fit_start` sets it, after the counters are restored
            self.made_anew, self._position = True, _steps_of(saved["scheduler"])
            if self.stretch == "rest" and self._position >= self._total_before:
                raise ValueError(
                    f"the schedule of LearningRate is over after {counted(self._total_before, self.unit)}, so stretch='rest' "
                    "has no rest to stretch. stretch=True makes the schedule for the new total."
                )
        elif total is not None:
            self.total, self._made_for = int(total), then
            if now > then and self.monitor is None:
                raise ValueError(
                    f"the run was made longer: the schedule of LearningRate was made for {counted(then, self.unit)}, and the "
                    f"run now has {now}. After the end of the schedule, its last rate, often 0, would stay. Make it for the "
                    f"new total with LearningRate(..., stretch=True), or keep the run at {counted(then, self.unit)}."
                )
            if now < then:
                run.warn(
                    f"the schedule was made for {counted(then, self.unit)}, and the run now has {now}: the run ends before the "
                    "schedule. LearningRate(..., stretch=True) makes the schedule for the new total."
                )

    def _planned(self, run: Run) -> tuple[int, RunUnit]:
        total, unit = length_of(run, _UNITS[self.every], needed_by="LearningRate(a function of the optimizer and the total)")
        return max(1, total), unit  # a schedule over nothing divides by zero

    def _check_override(self, scheduler: LRScheduler, given: Settings, saved: Mapping[str, Any]) -> None:
        """Make the schedule anew if `override` names the rate or an argument; raise `ValueError` if that is not possible."""
        for name, value in _values_for(scheduler, given).items():
            if name in self.made_with and plain({name: value}).get(name) != self.made_with[name]:
                raise ValueError(
                    f"override gives {name}={value!r}, but the {self.made_with['scheduler']} of this run cannot be made again "
                    "with it. Give the whole schedule: override={'scheduler': function}."
                )
        named = [name for name in self._override if name in ("lr", *self.made_with)]
        if not named or "scheduler" not in saved or self.monitor is not None:  # a plateau scheduler changes the current rate
            return
        if isinstance(self._used, LRScheduler):
            raise ValueError(
                f"override={tuple(named)!r} makes the schedule again, for which LearningRate needs a function (optimizer) -> "
                f"scheduler; got a {type(self.given).__name__}. Give LearningRate(lambda optimizer: ...)."
            )
        self.made_anew, self._position = True, _steps_of(saved["scheduler"])

    def renew(self, run: Run) -> None:
        """Make the scheduler again, from the current rates of the optimizer. A scheduler instance is kept.

        Raises:
            TypeError: The function does not return a scheduler.
            ValueError: A scheduler of timm counts epochs, and `every` is ``"1 step"``, or the reverse; or the scheduler cannot
                count tokens.
        """
        optimizer, made = optimizer_of(run, self.optimizer, needed_by="LearningRate"), self._used
        if not isinstance(made, LRScheduler):
            made = made(optimizer) if self.total is None else made(optimizer, self.total)
            made = CountedSchedule.around(made)
            if not isinstance(made, LRScheduler):
                raise TypeError(
                    f"the function of LearningRate must return a scheduler of torch, transformers or timm; got {made!r}"
                )
            made = _with_arguments(made, session_of(run).given)
        unit = _UNITS[self.every]
        if isinstance(made, CountedSchedule) and made.unit != unit:
            counts = type(made.schedule).__name__
            raise ValueError(
                f"{counts} counts {plural(made.unit)}, but LearningRate steps it after each {unit}. Give LearningRate(..., "
                f"every='1 {made.unit}'), or {counts}(..., t_in_epochs={unit == 'epoch'}) with lengths in {plural(unit)}."
            )
        if self.unit == "token":
            check_can_go_to(made)
        self.scheduler, self._count = made, getattr(made, "_step_count", None)

    def on_fit_start(self, run: Run) -> None:
        if self.monitor is not None:
            self.monitor.check(run)
        if self.made_anew:
            self._make_anew(run)
        if self.total is not None and self._plan != (now := self._planned(run)[0]):
            raise ValueError(
                f"LearningRate made a schedule for {counted(self._plan, self.unit)}, but then a callback replaced the loader: "
                f"the run now has {now}. Put that callback before LearningRate."
            )
        self._check_one_cycle(run)
        self._warn_of_lengths(run)
        self._warn_of_new(run)
        self._count = getattr(self.scheduler, "_step_count", None)

    def _warn_of_lengths(self, run: Run) -> None:
        """Warn, once, of lengths in epochs or batches in a schedule that counts updates, and of a cosine that ends early."""
        total = run.progress.total(self.unit)
        if not total or self.unit == "token" or self.monitor is not None or not session_of(run).advises:
            return
        for doubt in islice(self._doubts(total, run.progress), 1):
            run.warn(f"LearningRate steps {doubt}")

    def _doubts(self, total: int, limits: Progress) -> Iterator[str]:
        epochs, batches = limits.total("epoch"), limits.total("batch")
        parts = getattr(self.scheduler, "_schedulers", [self.scheduler])
        each = f"after each of {counted(total, 'update' if self.unit == 'step' else 'epoch')}, and"
        for part, name in product(parts, _LENGTHS) if self.unit == "step" else ():
            length = getattr(part, name, None)
            is_warmup = name == "total_iters" and len(parts) > 1
            if length and epochs and not is_warmup and _in_epochs(part, name, total, epochs):
                shown = sorted(length) if isinstance(length, Mapping) else length
                yield (
                    f"{type(part).__name__} {each} {name}={shown} fits {counted(epochs, 'epoch')}: every='1 epoch' steps it "
                    "once an epoch. Otherwise give it lengths in updates."
                )
            if length and length == batches != total:
                yield (
                    f"{type(part).__name__} {each} {name}={length} is the number of batches, so the run ends before the "
                    f"schedule. {_TAKE_TOTAL}"
                )
        last = parts[-1]
        end = total - getattr(self.scheduler, "_milestones", [0])[-1]
        if type(last) is CosineAnnealingLR and 10 * last.T_max < 9 * end:
            yield f"CosineAnnealingLR {each} its rate rises again after T_max={last.T_max}. Unless you want this: {_TAKE_TOTAL}"

    def _warn_of_new(self, run: Run) -> None:
        """Warn of a schedule that begins in a run that continues, because the checkpoint does not have it."""
        done, session = count_of(run, self.unit), session_of(run)
        saved = session.restored.callback_states.get(session.hooks.name_of(self), {})
        if done and session.advises and "scheduler" not in saved and self.monitor is None and self.unit != "token":
            run.warn(
                f"the checkpoint has no schedule of LearningRate, which begins at position 0 after {counted(done, self.unit)}. "
                f"Make it for the rest of the run, such as with total - {done} for total, or train from the start"
            )

    def _make_anew(self, run: Run) -> None:
        """Make the schedule again, for the new total if `stretch`, and step it to the position of the run."""
        assert self.scheduler is not None, "on_setup comes first"
        self.made_anew = False
        position = self._position
        if self.stretch:
            self.total = total = max(1, run.progress.total(self.unit) or self._plan)
            if self.stretch == "rest":
                left = total - count_of(run, self.unit)
                self.total = max(left, round(self._total_before * left / (self._total_before - position)))
                position = self.total - left
        set_rates(self.scheduler.optimizer, first_rates(self.scheduler.optimizer))
        self.renew(run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns, because it has not seen the updates before the resume
            if self.unit == "token":
                go_to(self.scheduler, position)
            else:
                for _ in range(position):
                    self.scheduler.step()
        if self.stretch:
            why = f"to the new total of {counted(self.total or 0, self.unit)}; its position is {position}"
            decide(run, "schedule stretched", why, data={"total": self.total, "unit": self.unit, "position": position})

    def _check_one_cycle(self, run: Run) -> None:
        """Raise `ValueError` if the run is longer than its ``OneCycleLR``, which torch would find only at the end."""
        if not isinstance(self.scheduler, OneCycleLR) or session_of(run).step_fn is not None:
            return  # a step_fn may update more rarely
        total, cycle = run.progress.total(self.unit), self.scheduler.total_steps
        if total is not None and self.scheduler.last_epoch + total - count_of(run, self.unit) > cycle:
            raise ValueError(
                f"the OneCycleLR of LearningRate has total_steps={cycle}, and the run has {counted(total, self.unit)}: "
                f"torch would raise an error at {self.unit} {cycle + 1}. Take the total of the run, which also works for a "
                "longer run: LearningRate(lambda optimizer, total: OneCycleLR(optimizer, ..., total_steps=total), stretch=True)"
            )

    def _check_monitor(self, scheduler: LRScheduler) -> None:
        plateau = isinstance(scheduler, ReduceLROnPlateau)
        if self.monitor is not None and not plateau:
            raise ValueError(
                f"monitor= is for ReduceLROnPlateau; got a {type(scheduler).__name__}, which reads no result. Leave it out."
            )
        if self.monitor is None and plateau:
            raise ValueError('ReduceLROnPlateau needs a result; got none. Give LearningRate(..., monitor="eval/loss").')
        if isinstance(scheduler, ReduceLROnPlateau) and self._mode not in (None, scheduler.mode):
            raise ValueError(
                f"LearningRate has mode={self._mode!r}, but its ReduceLROnPlateau has mode={scheduler.mode!r}. Make both "
                f"the same: ReduceLROnPlateau(optimizer, mode={self._mode!r})."
            )
        if self.monitor is not None and isinstance(scheduler, ReduceLROnPlateau):
            self.monitor.mode = "max" if scheduler.mode == "max" else "min"

    def _step(self, run: Run) -> None:
        assert self.scheduler is not None, "on_setup comes first"
        if getattr(self.scheduler, "_step_count", None) != self._count:
            other = "a hook or step_fn" if session_of(run).loop is Loops.FIT else "the loop"
            raise RuntimeError(
                f"the scheduler of LearningRate was stepped by {other} too. Remove scheduler.step() from {other}: "
                f"LearningRate steps it after each {'epoch' if self.unit == 'epoch' else 'update'}."
            )
        if self.unit == "token":
            assert self.total is not None, "a schedule over tokens has a total"
            go_to(self.scheduler, min(run.progress.tokens, self.total))  # the last step may exceed the limit
        else:
            self.scheduler.step()
        self._count = getattr(self.scheduler, "_step_count", None)

    def _step_if_updated(self, run: Run) -> None:
        step = session_of(run).step
        if not step.updated or any(map(self.drives, step.left_out)):
            return
        if any(map(self.drives, step.updating)):
            self._step(run)

    def _step_with_result(self, run: Run, evaluation: Evaluation) -> None:
        value = None if self.monitor is None else self.monitor.value_of(run, evaluation)
        if value is not None and self.scheduler is not None:
            self.scheduler.step(value)  # type: ignore[arg-type]  # torch types the argument as an epoch

    def aim(self, optimizers: Sequence[Optimizer] | None) -> object:
        """Return the optimizer that it changes, or the index of the optimizer if the optimizers are not made yet."""
        if isinstance(self.given, LRScheduler):
            return self.given.optimizer
        if optimizers and 0 <= self.optimizer < len(optimizers):
            return optimizers[self.optimizer]
        return self.optimizer

    def drives(self, optimizer: Optimizer) -> bool:
        """Return whether it changes the rates of `optimizer` in the current run."""
        return self.scheduler is not None and self.scheduler.optimizer is optimizer

    def state_dict(self) -> dict[str, Any]:
        if self.scheduler is None:
            return {}
        state: dict[str, Any] = {"scheduler": self.scheduler.state_dict()}
        if self.total is not None:
            state |= {"total": self.total, "planned": self._made_for, "unit": self.unit}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.scheduler is None or "scheduler" not in state or self.made_anew:
            return
        if self.monitor is not None and "scheduler" in self._override:
            return  # the saved state belongs to another class: the plateau scheduler starts from the current rate
        present = self.scheduler.state_dict()
        taken = {name: present[name] for name in self._override if name in self.made_with and name in present}
        self.scheduler.load_state_dict(with_kinds({**state["scheduler"], **taken}, present))
        self._count = getattr(self.scheduler, "_step_count", None)


# -- schedulers ---------------------------------------------------------------------------------------

_MOVES = ("last_epoch", "base_lrs", "T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter")
_MOVES_OF_TIMM = ("base_values", "warmup_steps", "metric")
_IN_GROUPS: tuple[str, ...] = ("max_lr", "min_lr", "max_momentum", "base_momentum")
"""The arguments of cycles of torch, which the parameter groups hold."""


def arguments_of(scheduler: LRScheduler) -> dict[str, Any]:
    """Return the plain arguments of a scheduler. Call it before the first step of the scheduler."""
    options = scheduler.optimizer.param_groups[0]
    of_cycle = {name: options[name] for name in _IN_GROUPS if name in options}
    state = {name: value for name, value in scheduler.state_dict().items() if not name.startswith("_")}
    for name in (*_MOVES, *_MOVES_OF_TIMM):
        state.pop(name, None)
    kind = type(scheduler.schedule if isinstance(scheduler, CountedSchedule) else scheduler)
    return {"scheduler": kind.__name__, **plain(of_cycle), **plain(state)}


def _steps_of(scheduler: Mapping[str, Any]) -> int:
    """Return the number of steps in the saved state of a scheduler."""
    if "last_epoch" in scheduler:
        return int(scheduler["last_epoch"])
    return max((_steps_of(inner) for inner in scheduler.get("_schedulers", ())), default=0)  # a ChainedScheduler


def with_kinds(saved: Any, current: Any) -> Any:
    """Return saved state with a Counter where the scheduler has one: a checkpoint holds plain dicts only.

    ``MultiStepLR`` keeps its milestones in a Counter, and calls methods that a dict does not have.

    Raises:
        ValueError: The scheduler has a number, a list or a Counter where the saved state has another kind.
    """
    if isinstance(saved, Mapping) and isinstance(current, Mapping):
        inner = {key: with_kinds(value, current.get(key)) for key, value in saved.items()}
        return Counter(inner) if isinstance(current, Counter) else inner
    if isinstance(saved, list) and isinstance(current, list) and len(saved) == len(current):
        return [with_kinds(old, other) for old, other in zip(saved, current, strict=True)]
    for kind in (int | float | Tensor, list | tuple, Counter):
        if isinstance(current, kind) and not isinstance(saved, kind):
            raise ValueError(f"its scheduler has {current!r} where the saved state has {saved!r}")
    return saved


# -- values in `override` -----------------------------------------------------------------------------


def _function_in(given: Settings, callback: str) -> Callable[..., Any] | None:
    """Return the function for the schedule of a callback that ``override={"scheduler": ...}`` gives; None without one.

    Raises:
        TypeError: It is no function.
    """
    value = given.values.get("scheduler")
    scheduler = value.get(callback) if isinstance(value, Mapping) else value
    if scheduler is not None and (not callable(scheduler) or isinstance(scheduler, LRScheduler)):
        raise TypeError(
            f"override: scheduler must be a function (optimizer) -> scheduler or (optimizer, total) -> scheduler; got "
            f"{scheduler!r}"
        )
    return scheduler


def _values_for(scheduler: LRScheduler, given: Settings) -> dict[str, Any]:
    """Return the values that no argument of the optimizer has taken."""
    taken = {"scheduler", *settings_of(scheduler.optimizer)[0]}
    return {name: value for name, value in given.values.items() if name not in taken}


def _with_arguments(scheduler: LRScheduler, given: Settings) -> LRScheduler:
    """Return the scheduler, made again with the given values of its arguments; the same one if there are none.

    Raises:
        ValueError: The scheduler does not hold all of its arguments, or does not take a value.
    """
    names = [name for name in signature_of(type(scheduler)).parameters if name not in ("optimizer", "last_epoch", "verbose")]
    changes = {name: value for name, value in _values_for(scheduler, given).items() if name in names}
    if not changes:
        return scheduler
    kind = type(scheduler).__name__
    if missing := [name for name in names if not hasattr(scheduler, name)]:
        raise ValueError(
            f"override: {kind} does not keep its argument {missing[0]!r}, so it cannot be made again with {', '.join(changes)}."
            f" Give the whole schedule: override={{'scheduler': lambda optimizer: {kind}(optimizer, ...)}}."
        )
    held = {name: getattr(scheduler, name) for name in names}
    held = {
        name: sorted(value.elements()) if isinstance(value, Counter) else value for name, value in held.items()
    }  # milestones
    set_rates(scheduler.optimizer, first_rates(scheduler.optimizer))
    try:
        return type(scheduler)(scheduler.optimizer, **{**held, **changes})
    except (TypeError, ValueError) as error:
        raise type(error)(f"override: {kind} does not take {changes}: {error}") from None


def _in_epochs(scheduler: Any, name: str, steps: int, epochs: int) -> bool:
    """Return whether a length of a scheduler fits the epochs of a run, and ends in the first quarter of its steps."""
    length = getattr(scheduler, name)
    last = max(length) if isinstance(length, Mapping) else length
    given = signature_of(type(scheduler)).parameters.get(name)
    if last > epochs or 4 * last > steps or (given is not None and last == given.default):
        return False
    if name == "total_iters":  # a shorter one is often a warm-up
        return bool(last == epochs)
    return name != "step_size" or bool(scheduler.gamma ** (steps / last) < _NO_RATE)  # else a slow fall from step to step


_NO_RATE = 1e-4  # of the first rate
