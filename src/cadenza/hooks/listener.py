"""Listeners: a function, the moment that calls it, and its schedule. And triggers: schedules in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import proxy

from cadenza.hooks.counters import COUNTERS, NEVER, NOW, STEP_END, Bound, Counting, Reading, counting_of, reading, steps_until
from cadenza.hooks.schedule import Schedule, When
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from cadenza.profiling.spans import Span
    from cadenza.run import Run
    from cadenza.status.progress import Progress


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Listener:
    """A function that one moment calls, on a schedule or each time.

    If the arguments of a callback decide about its moments, it returns listeners from `Callback.listeners`.

    >>> from cadenza import Callback
    >>> from cadenza.testing import tiny_run
    >>> class Count(Callback):
    ...     steps = 0
    ...     def listeners(self):
    ...         return [Listener(Callback.on_step_end, self.add)]
    ...     def add(self, run):
    ...         self.steps += 1
    >>> count = Count()
    >>> run = tiny_run(callbacks=[count])
    >>> count.steps
    5
    """

    moment: Callable[..., None]
    """The entry of the table, such as ``Callback.on_step_end``."""

    function: Callable[..., Any]
    """Called with the moment's arguments. Its return value is ignored."""

    schedule: Schedule | None = None
    """None calls the function each time. What ``every=`` accepts, such as ``"5 min"``, is read."""

    note: str = ""
    """A remark for the plan, such as a limit."""

    silent: bool = False
    """Whether the function neither logs, nor makes requests, nor reads samples, tokens or the time of the run: multiple ranks
    need no exchange for it in a step."""

    splits: bool = True
    """Whether a step in which it is called is not compiled as a whole: it may read gradients or change them."""

    event: str = ""
    """The name of the hook in another system, which errors show; empty: the name of the moment."""

    inner: bool = False
    """Whether it prepares other listeners of its callback, and plans leave it out."""

    shared: bool = False
    """Whether it works for other callbacks too. It goes on if its callback is disabled for an error, and its own are raised."""

    on_error: Callable[[BaseException], object] | None = None
    """Called with an error of the function, unless the callback is disabled for it, before the next listener is called."""

    owner: str = ""
    """The name of the callback in the run. `Hooks` sets it."""

    calls: int | None = None
    """The number of its calls, if each of them asks a function of the user first; else None."""

    twin: Listener | None = None
    """The other one of two listeners that share a schedule: this one at the end of steps, the twin at the end of epochs.

    The twin refers to this one weakly.
    """

    # -- in a run, for the dispatch ----------------------------------------------------------------

    call: Callable[..., Any] = field(init=False, repr=False)
    """The function, a wrapper that checks the schedule, or `nothing` if the callback is disabled."""

    trigger: Trigger | None = field(init=False, default=None, repr=False)
    """The schedule in the run."""

    disabled: bool = field(init=False, default=False, repr=False)
    """Whether its callback is disabled for an error."""

    span: Span | None = field(init=False, default=None, repr=False)
    """Its time in a run with a profile."""

    def __post_init__(self) -> None:
        if self.schedule is not None:
            self.schedule = Schedule.parse(self.schedule, self.counting.unit)

    @property
    def counting(self) -> Counting:
        """How its schedule counts."""
        return counting_of(self.moment)

    @property
    def moments(self) -> tuple[str, ...]:
        """The name of its moment; with a twin, both names."""
        pair = (self,) if self.twin is None else (self, self.twin)
        return tuple(sorted({listener.moment.__name__ for listener in pair}))

    def begin(self, owner: str) -> None:
        """Reset all state for a run that starts."""
        self.owner, self.call, self.trigger, self.span = owner, self.function, None, None
        self.disabled, self.calls = False, None

    def follow(self, trigger: Trigger) -> None:
        """Call the function when a trigger is due. If that has a function of the user, it is asked by the call."""
        function, self.trigger = self.function, trigger
        own = proxy(self)  # which holds the wrapper

        def call_if_due(run: Run, *values: Any) -> None:
            if trigger.due(run) and not own.disabled:
                own.calls += 1
                function(run, *values)

        if trigger.functions:
            self.call, self.calls = call_if_due, 0

    def disable(self) -> None:
        """Call the function no more in this run. A schedule goes on, as it does on the ranks that did not fail."""
        self.disabled = True
        if self.trigger is None or not self.trigger.functions:
            self.call = nothing

    def __repr__(self) -> str:
        return f"<Listener: {self.moment.__name__} calls {brief(self.function)}{f' of {self}' if self.owner else ''}>"

    def __str__(self) -> str:
        remarks = ", ".join(str(remark) for remark in (self.schedule, self.note) if remark)
        return f"{self.owner} ({remarks})" if remarks else self.owner


def inner(listeners: list[Listener]) -> list[Listener]:
    """Return the same listeners, marked as those that plans leave out: they prepare other listeners of their callback."""
    for listener in listeners:
        listener.inner = True
    return listeners


def silent(listeners: list[Listener]) -> list[Listener]:
    """Return the same listeners, marked as silent: see `Listener.silent`."""
    for listener in listeners:
        listener.silent = True
    return listeners


def nothing(*_: object) -> None:
    """Replace the function of a listener of a disabled callback."""


# -- schedules in a run: `cadenza.hooks.schedule` says what their answers mean ----------------------


class Trigger:
    """A schedule in one run, for all listeners of a moment that have it.

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
        # each reading has epochs, steps and batches
        self.units: set[str] = {length.measure for length in schedule.lengths} - {"epoch", "step", "batch"}
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
        self.ask_anew()
        lengths = self.schedule.lengths
        if before is not None and before.begun and not owed and lengths and all(length.unit != "%" for length in lengths):
            self._answer, self._bound = self.steady(before)  # it is asked at the same firings as without the resume

    def ask_anew(self) -> None:
        """Ask the schedule at the next firing: the counters may have another value than was sure."""
        self._answer = False
        self._bound = NOW  # a counter, and the value of it below which this answer is sure

    @property
    def asked_from(self) -> Bound:
        """A counter, and the value of it below which it need not be asked: it is not due."""
        return NOW if self._answer else self._bound

    def due(self, run: Run) -> bool:
        """Return whether its listeners are called now. Ask this once at a firing of the moment."""
        at = run.progress
        if COUNTERS[self._bound[0]].read(at) < self._bound[1]:
            self.times_due += self._answer
            return self._answer
        now, before = reading(at, at, self.on, self.units), self.before_at(at)
        if "time" in self.units:
            now.counts["time"] = before.counts["time"] + 1
        if "s" in self.units and now.counts["step"] == before.counts["step"]:  # the clock is read once a step
            now.counts["s"] = before.counts["s"]
        asking = now._replace(ask=lambda when: self.functions[when](run)) if self.functions else now
        due = self.schedule.due(asking, before) or self.owed
        self.before, self.owed = now, False
        self._answer, self._bound = self.steady(now)
        if len(self.moments) > 1:
            due = due and self.last_step != at.step
            self.last_step = at.step if due else self.last_step
        self.times_due += due
        return due

    def steady(self, now: Reading) -> tuple[bool, Bound]:
        """Return the answer at the firings after `now`, and a counter with the value below which it is sure."""
        answer, bounds = self.schedule.steady(now)
        if answer is None or (answer and len(self.moments) > 1):
            return False, NOW
        if len(bounds) > 1 and len({counter for counter, _ in bounds}) > 1:
            return answer, ("step", min(steps_until(bound, now.limits) for bound in bounds))
        return answer, min(bounds, default=NEVER)

    def next_step(self, at: Progress) -> float:
        """Return how many steps are complete, at the earliest, when it is due; those complete now if that is not known."""
        before = self.before_at(at)
        answer, bound = (self._answer, self._bound) if before.begun else self.steady(before)
        if answer or self.owed or COUNTERS[bound[0]].read(at) >= bound[1]:
            return at.step
        return steps_until(bound, at)

    def before_at(self, at: Progress) -> Reading:
        """Return the reading at the last firing at which it was asked, or where the fit begins."""
        return self.before or reading(at.origin, at, self.on, self.units, begun=False)

    def leave_out_the_past(self, at: Progress) -> None:
        """Have the points that the run has passed not be due: the listeners join a run that has begun."""
        self.before = self.before or reading(at, at, self.on, self.units, begun=False)

    def end_epoch(self, at: Progress, *, changed: bool) -> None:
        """Ask a schedule in parts of an epoch anew, which may have ended early; and each one if the run has another length now.

        Then the parts of the epoch that was left early are not due any more.
        """
        entered = self.before is not None and self.before.counts["epoch"] < at.epoch
        if entered and changed:
            self.before = self.before_at(at)._replace(in_epoch=1, batches=1)
        if changed or (entered and "fraction" in self.units):
            self.ask_anew()

    # -- functions of the user ---------------------------------------------------------------------

    def _asks(self, when: When) -> Callable[[Run], bool]:
        """Return how a function is asked: by each rank alone, or by all ranks."""
        if when.alone or self.on.main_only:
            return lambda run: bool(when.function(run))
        if self.on.unit == "time":
            return lambda run: run.driver.any_rank(bool(when.function(run)))
        alone = self.schedule is when and len(self.moments) == 1
        return StepFunction(when.function, may_be_late=self.on == STEP_END and alone)

    def owes(self) -> bool:
        """Return whether it is due at the next firing, whatever the counters are then. Every rank must call this."""
        return self.owed or any(asked.is_late() for asked in self.functions.values() if isinstance(asked, StepFunction))


class StepFunction:
    """A function of the user that ranks ask once after each completed step: they do not meet in a step that failed.

    If it may be late, a rank waits for the others only if the function is true on it. It is due at this step if the function is
    true on all ranks, and at the next one if it is true on some. At the last step of an epoch and of the run, and if it may not
    be late, all ranks wait, and it is due if the function is true on one.
    """

    def __init__(self, function: Callable[[Run], bool], *, may_be_late: bool) -> None:
        self._function, self._may_be_late = function, may_be_late
        self._last: int | None = None
        self._arrives: Callable[[], int] | None = None
        """Waits for the number of ranks on which the function was true at the last step; set only if it was false here."""
        self._late = False

    def __call__(self, run: Run) -> bool:
        step, driver = run.progress.step, run.driver
        if step == (run.progress.origin.step if self._last is None else self._last):
            return False
        self._last = step
        late, self._late = self.is_late(), False
        own = bool(self._function(run))
        if not self._may_be_late or driver.world_size == 1 or _may_be_last(run.progress):
            return driver.any_rank(own) or late
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
    with_a_past = [trigger for trigger in triggers if trigger.functions or trigger.schedule.lengths]
    for trigger in with_a_past:
        own = trigger.before_at(at).to_plain()
        moment = state.setdefault(" and ".join(trigger.moments), {**own, "due": [], "owed": []})
        earlier, later = sorted((moment, own), key=_position)
        moment |= {**later, "counts": earlier["counts"] | later["counts"]}
        moment["due"] += [str(trigger.schedule)] if trigger.last_step == at.step else []
        moment["owed"] += [str(trigger.schedule)] if trigger.owes() else []
    return state


def _position(saved: Mapping[str, Any]) -> list[float]:
    return [saved["counts"].get(name, 0) for name in ("epoch", "step", "batch", "time")] + [saved["begun"]]


def restore(triggers: Iterable[Trigger], state: Mapping[str, Any], at: Progress) -> None:
    """Have the triggers go on from what `state_of` returned. Moments that were not there begin where the fit does."""
    for trigger in triggers:
        saved = state.get(" and ".join(trigger.moments))
        if saved is None:
            trigger.restart()
        else:
            begins = reading(at.origin, at, trigger.on, trigger.units)
            counts = {name: saved["counts"].get(name, count) for name, count in begins.counts.items()}
            before = begins._replace(counts=counts, **{name: saved[name] for name in ("in_epoch", "batches", "begun")})
            schedule = str(trigger.schedule)
            trigger.restart(before, at.step if schedule in saved["due"] else -1, owed=schedule in saved["owed"])
