"""Triggers: schedules in a run. `cadenza.hooks.schedule` says what their answers mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from cadenza.hooks.counting import (
    COUNTERS,
    NEVER,
    NOW,
    STEP_END,
    STEPS,
    Bound,
    Counting,
    Reading,
    an_answer,
    counters_for,
    kept,
    measure_of,
    no_answer,
    reading_at,
    steps_until,
)
from cadenza.hooks.schedule import Schedule, When, lengths_in

if TYPE_CHECKING:
    from cadenza.run import Run
    from cadenza.status.progress import Counters, Progress


class Trigger:
    """A schedule in one run, for all listeners of a moment that have it. It asks only where the answer is not sure.

    Args:
        schedule: The schedule.
        moments: The name of the moment. Two, if the listeners are called at the end of steps and at the end of epochs: then
            they are due once in a step.
        on: How the moment counts.
    """

    def __init__(self, schedule: Schedule, moments: Sequence[str], on: Counting) -> None:
        self.schedule: Schedule = schedule
        self.moments: tuple[str, ...] = tuple(moments)
        self.on: Counting = on
        self._units = schedule.units
        self._readers = [(name, COUNTERS[name].read) for name in counters_for(self._units)]
        self.functions: dict[When, Callable[[Run], bool]] = {
            leaf: self._asks(leaf) for leaf in schedule.leaves() if isinstance(leaf, When)
        }
        """The functions of the user in the schedule, as they are asked."""
        self.times_due: int = 0
        """How often it was due in this run."""
        self.restart()

    def restart(self, before: Reading | None = None, last_step: int = -1, *, owed: bool = False) -> None:
        """Go on from a reading at an earlier firing, that of a checkpoint; None: from where the fit begins."""
        self.before: Reading | None = before
        self.last_step: int = last_step  # in which it was due, if it has two moments
        self.owed: bool = owed  # it is due at the next firing, by what came before a checkpoint
        self._ask_anew()
        if before is not None and before.begun and self._of is not None and not owed and lengths_in(self.schedule):
            self._take(*self.steady(before))  # it asks where it would have asked without the resume

    def change_length(self, at: Progress) -> None:
        """Ask at the next firing: the run has another length now. Parts of an epoch that ended early are not due any more."""
        if self.before is not None and self.before.counts["epoch"] < at.epoch:
            self.before = self.before._replace(in_epoch=1, batches=1)
        self._ask_anew()

    def _ask_anew(self) -> None:
        self._of: tuple[str, int] | None = None if "%" in self._units else STEPS
        self._take(False, NOW)

    def _take(self, answer: bool, bound: Bound) -> None:
        bound = NOW if answer and len(self.moments) > 1 else bound  # the second moment must not be sure to be due
        self._answer, self._bound = answer, bound
        self._counter, self._until = COUNTERS[bound[0]].read, bound[1]

    def steady(self, now: Reading) -> tuple[bool, Bound]:
        """Return the answer at the firings after `now`, and a counter with the value below which it is sure."""
        possible = [now._replace(ask=ask) for ask in (no_answer, an_answer)] if self.functions else [now]
        answer, *others = (self.schedule.due(one, now) for one in possible)
        if others and others != [answer]:
            return False, NOW  # the functions decide
        bounds = [*self.schedule.following(now)]
        if len({counter for counter, _ in bounds}) > 1:
            return answer, ("step", min(steps_until(bound, now.limits) for bound in bounds))
        return answer, min(bounds, default=NEVER)

    @property
    def asked_from(self) -> Bound:
        """The value of a counter from which on it must be asked at a firing."""
        return NOW if self._answer else self._bound

    # -- at a firing -------------------------------------------------------------------------------

    def due(self, run: Run) -> bool:
        """Return whether its listeners are called now. The first of them asks this at each firing of the moment."""
        if self._counter(run.progress) < self._until:
            self.times_due += self._answer
            return self._answer
        return self._ask(run)

    def _ask(self, run: Run) -> bool:
        progress, before = run.progress, self.before or self.between(run.progress.origin, run.progress)
        counts = {name: read(progress) for name, read in self._readers}
        if "time" in self._units:
            counts["time"] = before.counts["time"] + 1
        if "s" in self._units and counts["step"] == before.counts["step"]:  # the clock is read once a step
            counts["s"] = before.counts["s"]
        if self._of is None:
            self._of = measure_of(progress)
        ask = (lambda when: self.functions[when](run)) if self.functions else no_answer
        now = Reading(counts, self.on, progress, progress.batch_in_epoch, progress.batches_per_epoch or 0, self._of, True, ask)
        due = self.schedule.due(now, before) or self.owed
        self.before, self.owed = now._replace(ask=no_answer) if self.functions else now, False
        if len(self.moments) > 1:
            due = due and self.last_step != progress.step
            self.last_step = progress.step if due else self.last_step
        self._take(*self.steady(now))
        self.times_due += due
        return due

    def next_step(self, at: Progress) -> float:
        """Return how many steps are complete, at the earliest, when it is due; those complete now if that is not known."""
        answer, bound = self._answer, self._bound
        if self.before is None or not self.before.begun:  # it asks at its first firing, resumed or not
            answer, bound = self.steady(self.before or self.between(at.origin, at))
        if answer or self.owed or COUNTERS[bound[0]].read(at) >= bound[1]:
            return at.step
        return steps_until(bound, at)

    def leave_out_the_past(self, at: Progress) -> None:
        """Have the points that the run has passed not be due: the listeners come to a run under way."""
        self.before = self.before or self.between(at.now(), at)

    def between(self, counters: Counters, limits: Progress) -> Reading:
        """Return the reading of these counters between two steps: where a fit begins, or a listener comes."""
        return reading_at(counters, limits, self.on, self._units, begun=False)

    # -- functions of the user ---------------------------------------------------------------------

    def _asks(self, when: When) -> Callable[[Run], bool]:
        """Return how a function is asked: by each rank alone, or by all ranks."""
        if when.alone or self.on.main_only:
            return lambda run: bool(when.function(run))
        if self.on.unit == "time":
            return partial(_on_any_rank, when.function)
        alone_in_schedule = self.schedule is when and len(self.moments) == 1
        return (LateFunction if self.on == STEP_END and alone_in_schedule else StepFunction)(when.function)

    def owes(self) -> bool:
        """Return whether it is due at the next firing, whatever the counters are then. Every rank must call this."""
        return self.owed or any(one.is_late() for one in self.functions.values() if isinstance(one, LateFunction))


def _on_any_rank(function: Callable[[Run], bool], run: Run) -> bool:
    return run.driver.any_rank(bool(function(run)))


class StepFunction:
    """A function of the user that is asked once after each completed step: ranks do not meet in a step that failed."""

    def __init__(self, function: Callable[[Run], bool]) -> None:
        self.function = function
        self._last: int | None = None

    def __call__(self, run: Run) -> bool:
        step = run.progress.step
        if step == (run.progress.origin.step if self._last is None else self._last):
            return False
        self._last = step
        return self._answer(run)

    def _answer(self, run: Run) -> bool:
        return _on_any_rank(self.function, run)


class LateFunction(StepFunction):
    """The same at the end of steps: a rank waits for the others only if the function is true on it.

    It is due at this step if the function is true on all ranks, and at the next one if it is true on some. At the last step of
    an epoch and of the run, all ranks wait, and it is due if the function is true on one.
    """

    def __init__(self, function: Callable[[Run], bool]) -> None:
        super().__init__(function)
        self._arrives: Callable[[], int] | None = None
        """Waits for the number of ranks on which the function was true at the last step; set only if it was false here."""
        self._late = False

    def _answer(self, run: Run) -> bool:
        late, self._late = self.is_late(), False
        own, driver = bool(self.function(run)), run.driver
        if driver.world_size == 1:
            return late or own
        if _may_be_last(run.progress):
            return late or driver.any_rank(own)
        arrives = driver.count_later(own)
        if own:
            everywhere = arrives() == driver.world_size
            self._late = not everywhere
            return late or everywhere
        # After an error, other ranks may never begin this exchange.
        self._arrives = lambda: 0 if run.outcome is not None and run.outcome.kind == "failed" else arrives()
        return late

    def is_late(self) -> bool:
        """Return whether the function was true on some ranks at the last step: the same on all ranks."""
        arrives, self._arrives = self._arrives, None
        if arrives is not None:
            self._late = arrives() > 0
        return self._late


def _may_be_last(at: Progress) -> bool:
    """Return whether this step may be the last of its epoch or of the run: the same on all ranks."""
    unknown = at.batches_per_epoch is None and at.max_epochs is not None
    return unknown or at.finished or at.batch_in_epoch == at.batches_per_epoch


# -- in a checkpoint --------------------------------------------------------------------------------


def state_of(triggers: Iterable[Trigger], at: Progress) -> dict[str, Any]:
    """Return what a checkpoint holds of the schedules: for each moment one reading. Every rank must call this.

    It is that of the trigger which asked last. For the others, nothing was due since they asked.
    """
    state: dict[str, Any] = {}
    for trigger in (one for one in triggers if one.functions or one.schedule.lengths):  # others have no need of the past
        reading = trigger.before or trigger.between(at.origin, at)
        counts = {name: count for name, count in reading.counts.items() if kept(name)}
        own = {"counts": counts, "in_epoch": reading.in_epoch, "batches": reading.batches, "begun": reading.begun}
        moment = state.setdefault(" and ".join(trigger.moments), {**own, "due": [], "owed": []})
        earlier, later = sorted((moment, own), key=_position)
        moment |= {**later, "counts": earlier["counts"] | later["counts"]}
        moment["due"] += [str(trigger.schedule)] if trigger.last_step == at.step else []
        moment["owed"] += [str(trigger.schedule)] if trigger.owes() else []
    return state


def _position(reading: Mapping[str, Any]) -> list[float]:
    return [reading["counts"].get(name, 0) for name in ("epoch", "step", "batch", "time")] + [reading["begun"]]


def restore(triggers: Iterable[Trigger], state: Mapping[str, Any], at: Progress) -> None:
    """Have the triggers go on from what `state_of` returned. Moments that were not there begin where the fit does."""
    for trigger in triggers:
        saved = state.get(" and ".join(trigger.moments))
        if saved is None:
            trigger.restart()
        else:
            begins = trigger.between(at.origin, at)
            counts = {name: saved["counts"].get(name, count) for name, count in begins.counts.items()}
            before = begins._replace(counts=counts, **{name: saved[name] for name in ("in_epoch", "batches", "begun")})
            schedule = str(trigger.schedule)
            trigger.restart(before, at.step if schedule in saved["due"] else -1, owed=schedule in saved["owed"])
