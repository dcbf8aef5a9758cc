"""The course of a run without its work: its moments in order, from any point on. It makes the calendar. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from cadenza.engine.arguments import units_of_changes
from cadenza.errors import MissingExtraError, ScheduleError
from cadenza.hooks.counters import COUNTERS, Length, exchanged
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment
from cadenza.hooks.schedule import Every, has_function
from cadenza.status.formats import counted, plural
from cadenza.status.progress import Accumulation, Progress

if TYPE_CHECKING:
    import pandas

    from cadenza.run import Run


# -- the calendar ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a listener: an element of `Calendar.rows`. The counters are those that its hook reads."""

    step: int | None
    """Completed steps; None if not known, as are epochs and batches with a loader of unknown length."""
    epoch: int | None
    """Completed epochs."""
    batch: int | None
    """Completed batches."""
    moment: str
    """The name of the moment."""
    callback: str
    """The name of the callback in the run."""
    schedule: str
    """The schedule as text."""


@dataclass(frozen=True, slots=True)
class Calendar:
    """The calls of all listeners with a schedule; ``print(trainer.calendar())`` shows it.

    >>> from cadenza import Callback, Every, First, on
    >>> from cadenza.testing import tiny_trainer
    >>> note = on(Callback.on_step_end, every=Every("2 steps") & ~First("4 steps"))(lambda run: None)
    >>> calendar = tiny_trainer(epochs=2, callbacks=[note]).calendar()
    >>> print(calendar)
    calendar of 2 epochs, 10 steps
    on_step_end  <lambda>  every 2 steps and not in the first 4 steps  3 times: steps 6, 8, 10
    >>> [(call.step, call.epoch) for call in calendar.rows]
    [(6, 1), (8, 1), (10, 1)]
    """

    rows: Sequence[Call]
    """The calls, in their order."""
    unknown: Sequence[tuple[str, str, str]]
    """Of each listener with calls that are not known beforehand: its name and schedule, its moment, and why."""
    unscheduled: dict[str, int]
    """By moment, the number of listeners without a schedule, which are called each time."""
    headline: str
    """The length of the run, or of its part, in one line."""

    def __str__(self) -> str:
        rows = [(*key, _times(calls)) for key, calls in self._by_listener().items()]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(3)]
        lines = ["  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([self.headline, *lines, *self._others()])

    def __repr__(self) -> str:
        return str(self)

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas DataFrame: a row for each call, with the columns of `Call`.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise MissingExtraError("pandas", needed_by="Calendar.to_frame()", extra="data") from None
        return pandas.DataFrame([asdict(row) for row in self.rows], columns=list(Call.__dataclass_fields__))

    def to_dict(self) -> dict[str, Any]:
        """Return the calendar as plain data, for JSON."""
        unknown = [{"listener": who, "moment": moment, "why": why} for who, moment, why in self.unknown]
        rows = [asdict(row) for row in self.rows]
        return {"headline": self.headline, "calls": rows, "unknown": unknown, "unscheduled": dict(self.unscheduled)}

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from cadenza.status.markup import notebook_pre  # imported here: few runs are in a notebook

        return notebook_pre(str(self))

    def _others(self) -> Iterator[str]:
        for who, moment, why in self.unknown:
            yield f"not known beforehand: {who}, {moment}: {why}"
        if self.unscheduled:
            calls = (f"{moment} {count}" for moment, count in self.unscheduled.items())
            yield f"called each time, by moment: {', '.join(calls)}"

    def _by_listener(self) -> dict[tuple[str, str, str], list[Call]]:
        found: dict[tuple[str, str, str], list[Call]] = {}
        for row in self.rows:
            found.setdefault((row.moment, row.callback, row.schedule), []).append(row)
        return found


_SHOWN = 8  # more calls of a listener are not listed one by one


def _value(call: Call) -> int | None:
    return call.step if call.step is not None else call.epoch


def _times(calls: Sequence[Call]) -> str:
    """Return how often and at which steps a listener is called; steps at equal distances are not listed one by one."""
    unit = "steps" if calls[0].step is not None else "epochs"
    at = list(dict.fromkeys(_value(call) or 0 for call in calls))
    shown = ", ".join(map(str, at))
    if len(at) > _SHOWN:
        distance = {later - earlier for earlier, later in pairwise(at)}
        first = at[:3] if len(distance) == 1 else at[: _SHOWN - 2]
        shown = f"{', '.join(map(str, first))}, ..., {at[-1]}"
    return f"{'once' if len(calls) == 1 else f'{len(calls):,} times'}: {unit if len(at) > 1 else unit[:-1]} {shown}"


@dataclass(frozen=True, slots=True)
class Beginning:
    """The point of the loop at which a run begins or continues. The counters are those of its `Progress`."""

    in_epoch: bool = False
    """Whether an epoch is under way, and its end is still to come."""
    leaves: bool = False
    """Whether the epoch under way has no more steps."""
    counts: bool = False
    """Whether that epoch then counts as whole, also without all of its batches."""
    stops: bool = False
    """Whether no further epoch begins."""
    sized: bool = True
    """Whether each batch of an epoch has as many samples as the loader says of it."""
    due: Collection[str] = ()
    """The callbacks with evaluations that a signal interrupted."""


def calendar_of(
    hooks: Hooks,
    progress: Progress,
    accumulate: int,
    sizes: Callable[[], Sequence[int] | None],
    until: str | int | None,
    begins: Beginning,
) -> Calendar:
    """Return the calendar of a run.

    Args:
        hooks: The callbacks of a run that does not begin: their timers are used.
        progress: The limits of the run, and the counters at which it begins or continues. It is moved to the end.
        accumulate: Batches per step.
        sizes: Returns the number of samples in each batch of an epoch, on all ranks; None if it is not known.
        until: The point of the run up to which to list; None for all of it.
        begins: Where in the loop the run begins or continues.

    Raises:
        ScheduleError: `until` is no length in steps, batches, epochs or percent; or it is None, and the run has no known end;
            or a schedule does not work with this run.
    """
    end = _end(progress, accumulate, until)
    scheduled = [listener for listeners in hooks.by_moment.values() for listener in listeners if listener.schedule is not None]
    changes = units_of_changes(accumulate, progress)
    units = changes | {length.unit for listener in scheduled if listener.schedule for length in listener.schedule.lengths}
    samples = sizes() if begins.sized and "sample" in units else None
    known: dict[Moment, list[Listener]] = {}
    unknown: list[tuple[str, str, str]] = []
    for listener in scheduled:
        why = _why_unknown(listener, progress, changes, sized=samples is not None, even=accumulate == 1)
        if why:
            unknown.append((str(listener), listener.moment.__name__, why))
        else:
            known.setdefault(listener.moment, []).append(listener)
    first, course = progress.now(), _Course(known, progress, accumulate, samples, end)
    rows = [*course.calls(begins)]
    numbers = [counted(progress.epoch, "epoch")] if course.sized or not course.steps_known else []
    numbers += [counted(progress.step, "step")] if course.steps_known else []
    numbers += [f"after {counted(first.step, 'step')}"] if first.batch else []
    unscheduled = {
        moment.__name__: count
        for moment, listeners in hooks.by_moment.items()
        if (count := sum(listener.schedule is None for listener in listeners))
    }
    return Calendar(rows, unknown, unscheduled, f"calendar of {', '.join(numbers)}")


def _end(limits: Progress, accumulate: int, until: str | int | None) -> Length:
    unlimited = limits.max_steps is None and limits.max_epochs is None
    if until is None:
        if unlimited:
            raise ScheduleError('the end of this run is not known: give the length of the part to list, such as "500 steps".')
        return Length(math.inf, "step")  # type: ignore[arg-type]  # the limits of the run end it
    end = Every(until).length.of("step")
    if end.unit == "%":
        steps = limits.total("step", accumulate)
        end = Length(math.ceil(end.count * steps / 100), "step") if steps is not None else end
    if end.unit not in ("step", "batch", "epoch") or not end.whole:
        raise ScheduleError(f'a calendar needs a length such as "2 epochs", "500 steps" or "10%"; got {until!r}')
    if end.unit == "epoch" and unlimited and limits.batches_per_epoch is None:
        raise ScheduleError(f'{until!r}: the loader has no length. Give a number of steps, such as "500 steps".')
    return end


def _why_unknown(listener: Listener, limits: Progress, changes: set[str], *, sized: bool, even: bool) -> str | None:
    """Return why the calls of a listener are not known beforehand; None if they are.

    `changes` are the units of the points at which steps get another number of batches; `sized`: whether the samples of each
    batch are known; `even`: whether each step has one batch.
    """
    assert listener.schedule is not None
    listener.schedule.check(limits)
    if has_function(listener.schedule):
        return "a function decides"
    counting = listener.counting
    units, unit = {length.unit for length in listener.schedule.lengths}, counting.unit
    if "s" in units:
        return "time decides"
    if not limits.has_epochs and not (unit == "step" and units <= {"step", "%", "token"}):
        return "the loop decides which batches a step has"
    by_tokens = {"token"} if "%" in units and limits.total("step") is None else set[str]()
    depends = exchanged(sorted(units | changes | by_tokens, reverse=True))
    if depends and depends != ["sample"]:
        return f"it depends on the {plural(depends[0])} of each batch"
    if unit == "time" or counting.main_only:
        return "it depends on when the moment fires"
    if depends and not sized:
        return "it depends on the samples of each batch"
    if limits.batches_per_epoch is None:
        counts = {"step", "batch", "%"} if even else {"step", "%"}
        by_epochs = limits.max_steps is None and unit == "epoch" and units <= {"epoch"}
        by_steps = limits.max_epochs is None and {unit} | units <= counts and not counting.begun
        if not by_epochs and not by_steps:
            return "the loader does not say how many batches it has"
    return None


@dataclass(eq=False, repr=False)
class _Course:
    """The moments of a run in their order, without the work between them. Steps in which nothing is due are passed over."""

    _listeners: dict[Moment, list[Listener]]
    _at: Progress
    _accumulate: int
    _sizes: Sequence[int] | None
    _end: Length

    def __post_init__(self) -> None:
        several = chain.from_iterable(self._listeners.values())
        self._triggers = {listener.trigger for listener in several if listener.trigger is not None}
        self.sized = self._at.batches_per_epoch is not None
        self.steps_known = self.sized or self._at.max_epochs is None

    def calls(self, begins: Beginning) -> Iterator[Call]:
        """Yield the calls of the run, or of the part of it that is asked for."""
        if self._ended:
            return
        run = cast("Run", SimpleNamespace(progress=self._at))
        interrupted = self._listeners.get(Callback.on_step_end if begins.in_epoch else Callback.on_epoch_end, ())
        yield from (self._call(listener) for listener in interrupted if listener.owner in begins.due)
        for moment in self._moments(begins):
            listeners = self._listeners.get(moment, ())
            asked = dict.fromkeys(listener.trigger for listener in listeners if listener.trigger is not None)
            due = {trigger for trigger in asked if trigger.due(run)}
            yield from [self._call(listener) for listener in listeners if listener.trigger in due]

    def _call(self, listener: Listener) -> Call:
        at, moment = self._at, listener.moment.__name__
        step, batch = (at.step, at.batch) if self.steps_known else (None, None)
        epoch = at.epoch if self.sized or at.max_steps is None else None
        return Call(step, epoch, batch, moment, listener.owner, str(listener.schedule))

    def _moments(self, begins: Beginning) -> Iterator[Moment]:
        at, inside = self._at, begins.in_epoch
        while inside or not (begins.stops or self._over):
            yield Callback.on_epoch_start
            over = inside and begins.leaves
            while self.steps_known and not over and not self._over:
                self._pass_over()
                over = yield from self._step()
            is_whole = not self.steps_known or at.batch_in_epoch == at.batches_per_epoch
            if is_whole or (inside and begins.counts):
                at.finish_epoch()
            if not at.batch_in_epoch or at.finished or not self._ended:  # else the listed part ends inside the epoch
                yield Callback.on_epoch_end
            inside = False

    def _step(self) -> Generator[Moment, None, bool]:
        """Yield the moments of a step; return whether the loader was found empty."""
        at, window, done = self._at, self._window, 0
        while done < window:
            yield from (Callback.on_fetch_start, Callback.on_fetch_end)
            if at.batch_in_epoch == at.batches_per_epoch:
                break
            if not done:
                yield Callback.on_step_start
            yield from (Callback.on_batch_start, Callback.on_before_backward, Callback.on_after_backward)
            self._finish_batch()
            yield Callback.on_batch_end
            done += 1
        if done:
            yield from (Callback.on_before_optimizer_step, Callback.on_after_optimizer_step)
            yield from (Callback.on_before_zero_grad, Callback.on_after_zero_grad)
            at.finish_step()
            yield Callback.on_step_end
        return done < window

    def _pass_over(self) -> None:
        """Count the steps in which no listener is due, but for the last one of the epoch."""
        at, whole = self._at, math.inf if self._at.batches_per_epoch is None else self._at.batches_per_epoch
        last = min(at.max_steps or math.inf, float(self._end.count) if self._end.unit == "step" else math.inf)
        following = min([last, *(trigger.next_step(at) for trigger in self._triggers)])
        while at.step + 1 < following and not self._over and at.batch_in_epoch + self._window < whole:
            for _ in range(self._window):
                self._finish_batch()
            at.finish_step()

    @property
    def _window(self) -> int:
        """The number of batches in the next step."""
        accumulate = self._accumulate
        return accumulate.batches(self._at, self._at) if isinstance(accumulate, Accumulation) else accumulate

    def _finish_batch(self) -> None:
        self._at.finish_batch(self._sizes[self._at.batch_in_epoch] if self._sizes is not None else 1)

    @property
    def _ended(self) -> bool:
        """Whether the part that is asked for is over."""
        return COUNTERS[self._end.unit].read(self._at) >= self._end.count

    @property
    def _over(self) -> bool:
        return self._at.finished or self._ended
