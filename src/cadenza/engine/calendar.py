"""The calendar of a run: when each listener with a schedule is called. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from cadenza.errors import MissingExtraError, ScheduleError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.length import Length
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment
from cadenza.hooks.parts import Between, First
from cadenza.hooks.schedule import Every, Schedule
from cadenza.status.accumulation import Accumulation
from cadenza.status.counting import counted
from cadenza.status.progress import Progress

if TYPE_CHECKING:
    import pandas

    from cadenza.status.markup import Html


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

    >>> from cadenza import on
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
    length: float
    """The number of steps, or of epochs if the steps are not known."""

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
        """Return what notebooks show: a line of time for each listener."""
        from cadenza.status.markup import element, joined, notebook_table  # imported here: few runs are in a notebook

        head = ("callback", "moment", "schedule", "", "")
        rows = [
            (owner, moment, schedule, self._picture(calls), _times(calls))
            for (moment, owner, schedule), calls in self._by_listener().items()
        ]
        return joined([notebook_table(self.headline, head, rows), *(element("div", line) for line in self._others())])

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

    def _picture(self, calls: Iterable[Call]) -> Html:
        from cadenza.status.markup import element

        at = {round(_WIDTH * (_value(call) or 0) / max(1.0, self.length)) for call in calls}
        marks = "".join(f"M{x + 1},2v10" for x in sorted(at))
        line = element("path", d=f"M1,12h{_WIDTH}", stroke="currentColor", stroke_opacity=".3", fill="none")
        ticks = element("path", d=marks, stroke="currentColor", stroke_width="1.5", fill="none")
        return element("svg", line, ticks, width=_WIDTH + 2, height=14, viewBox=f"0 0 {_WIDTH + 2} 14", role="img")


_WIDTH = 320  # of the picture, in pixels
_SHOWN = 8  # more calls of a listener are not listed one by one


def calendar_of(
    hooks: Hooks, limits: Progress, accumulate: int, sizes: Callable[[], Sequence[int] | None], until: str | int | None
) -> Calendar:
    """Return the calendar of a run.

    Args:
        hooks: The callbacks of a run that does not begin: their timers are used.
        limits: The limits of the run.
        accumulate: Batches per step.
        sizes: Returns the number of samples in each batch of an epoch, on all ranks; None if it is not known.
        until: The length of the part to list; None for the whole run.

    Raises:
        ScheduleError: `until` is no length in steps, batches, epochs or percent; or it is None, and the run has no known end;
            or a schedule does not work with this run.
    """
    end = _end(limits, accumulate, until)
    needed = any(length.unit == "sample" for one in _scheduled(hooks) for length in _lengths(one) or ())
    known, samples = list[Listener](), sizes() if needed else None
    unknown: list[tuple[str, str, str]] = []
    unscheduled: dict[str, int] = {}
    for moment, listeners in hooks.by_moment.items():
        for listener in listeners:
            if listener.schedule is None:
                unscheduled[moment.__name__] = unscheduled.get(moment.__name__, 0) + 1
                continue
            listener.schedule.check(limits)
            why = _why_unknown(listener, listener.schedule, limits, accumulate, samples is not None)
            if why:
                unknown.append((str(listener), moment.__name__, why))
            else:
                known.append(listener)
    course = _Course(known, limits, accumulate, samples, end)
    course.run()
    at, steps = course.progress, limits.batches_per_epoch is not None or limits.max_epochs is None
    parts = [counted(at.epoch, "epoch")] if limits.batches_per_epoch is not None or not steps else []
    parts += [counted(at.step, "step")] if steps else []
    return Calendar(course.rows, unknown, unscheduled, f"calendar of {', '.join(parts)}", at.step if steps else at.epoch)


def _scheduled(hooks: Hooks) -> Iterator[Schedule]:
    return (one.schedule for listeners in hooks.by_moment.values() for one in listeners if one.schedule is not None)


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


def _why_unknown(listener: Listener, schedule: Schedule, limits: Progress, accumulate: int, sized: bool) -> str | None:
    """Return why the calls of a listener are not known beforehand; None if they are."""
    lengths = _lengths(schedule)
    if lengths is None:
        return "a function decides"
    units, own = {length.unit for length in lengths}, listener.counting.unit
    if "s" in units:
        return "time decides"
    if "token" in units or (limits.total("step", accumulate) is None and "%" in units):
        return "it depends on the tokens of each batch"
    if own == "time" or listener.counting.main_only:
        return "it depends on when the moment fires"
    if "sample" in units and not sized:
        return "it depends on the samples of each batch"
    if limits.batches_per_epoch is None:
        by_epochs = limits.max_steps is None and own == "epoch" and units <= {"epoch"}
        of_steps = {"step", "batch", "%"} if accumulate == 1 else {"step", "%"}
        by_steps = limits.max_epochs is None and own in of_steps and units <= of_steps and not listener.counting.begun
        if not by_epochs and not by_steps:
            return "the loader does not say how many batches it has"
    return None


def _lengths(schedule: Schedule) -> list[Length] | None:
    """Return all lengths in a schedule; None if it has other parts."""
    found: list[Length] = []
    for leaf in schedule.leaves():
        if isinstance(leaf, Every | First):
            found.append(leaf.length)
        elif isinstance(leaf, Between):
            found += [leaf.start, leaf.end]
        else:
            return None
    return found


class _Course:
    """The moments of a run in their order, without the work between them. Steps in which nothing is due are passed over."""

    def __init__(
        self, listeners: Iterable[Listener], limits: Progress, accumulate: int, sizes: Sequence[int] | None, end: Length
    ) -> None:
        self.rows: list[Call] = []
        batches = limits.batches_per_epoch
        self.progress = Progress(max_epochs=limits.max_epochs, max_steps=limits.max_steps, batches_per_epoch=batches)
        self._run: Any = SimpleNamespace(progress=self.progress, info=SimpleNamespace(accumulate=accumulate))
        self._accumulate, self._sizes, self._end = accumulate, sizes, end
        self._steps_known, self._epochs_known = batches is not None or limits.max_epochs is None, batches is not None
        self._epochs_known |= limits.max_steps is None
        self._by_moment: dict[Moment, list[Listener]] = {}
        for listener in listeners:
            self._by_moment.setdefault(listener.moment, []).append(listener)
        self._short = False  # whether the last step found the loader empty

    def run(self) -> None:
        """Pass through the run, or through the part of it that is asked for."""
        while not self._over():
            self._epoch()

    def _over(self) -> bool:
        at, end = self.progress, self._end
        return at.finished or {"step": at.step, "batch": at.batch, "epoch": at.epoch}[end.unit] >= end.count

    def _epoch(self) -> None:
        at = self.progress
        self._fire(Callback.on_epoch_start)
        whole = math.inf if at.batches_per_epoch is None else at.batches_per_epoch
        while self._steps_known and at.batch_in_epoch < whole and not self._over():
            self._pass_over(whole)
            self._step(whole)
        if at.batch_in_epoch == whole and not at.finished and not self._short and not self._cut():
            self._fetch()
        if not self._steps_known or at.batch_in_epoch == whole:
            at.finish_epoch()
        if not self._cut():
            self._fire(Callback.on_epoch_end)

    def _cut(self) -> bool:
        """Return whether the part that is asked for ends inside an epoch."""
        at = self.progress
        return self._end.unit != "epoch" and at.batch_in_epoch > 0 and not at.finished and self._over()

    def _step(self, whole: float) -> None:
        at, fire = self.progress, self._fire
        full = self._window()
        size = min(full, whole - at.batch_in_epoch)
        for batch in range(int(size)):
            self._fetch()
            if not batch:
                fire(Callback.on_step_start)
            fire(Callback.on_batch_start)
            fire(Callback.on_before_backward)
            fire(Callback.on_after_backward)
            self._finish_batch()
            fire(Callback.on_batch_end)
        if size < full:
            self._fetch()  # the one that finds the loader empty
        self._short = size < full
        for moment in _UPDATE:
            fire(moment)
        at.finish_step()
        fire(Callback.on_step_end)

    def _fetch(self) -> None:
        self._fire(Callback.on_fetch_start)
        self._fire(Callback.on_fetch_end)

    def _pass_over(self, whole: float) -> None:
        """Count the steps in which no listener is due, but for the last one of the epoch."""
        at = self.progress
        timers = [one.timer for listeners in self._by_moment.values() for one in listeners if one.timer is not None]
        following = min((timer.next_step(at, self._accumulate) for timer in timers), default=math.inf)
        last_step = at.max_steps or math.inf
        if self._end.unit == "step":
            last_step = min(last_step, float(self._end.count))
        while at.step + 1 < min(following, last_step) and not self._over():
            size = self._window()
            if at.batch_in_epoch + size >= whole:
                break
            for _ in range(size):
                self._finish_batch()
            at.finish_step()

    def _window(self) -> int:
        """Return the number of batches in the next step."""
        accumulate = self._accumulate
        return accumulate.batches(self.progress, self.progress) if isinstance(accumulate, Accumulation) else accumulate

    def _finish_batch(self) -> None:
        at = self.progress
        at.finish_batch(self._sizes[at.batch_in_epoch] if self._sizes is not None else 1)

    def _fire(self, moment: Moment) -> None:
        at = self.progress
        for one in self._by_moment.get(moment, ()):
            if one.timer is None or not one.timer.due(self._run):
                continue
            if one.twin is not None:  # once a step, as `Listener.begin` has it
                if one.twin.last_step == at.step:
                    continue
                one.last_step = at.step
            step, batch = (at.step, at.batch) if self._steps_known else (None, None)
            epoch = at.epoch if self._epochs_known else None
            self.rows.append(Call(step, epoch, batch, moment.__name__, one.owner, str(one.schedule)))


_UPDATE: list[Moment] = [
    Callback.on_before_optimizer_step,
    Callback.on_after_optimizer_step,
    Callback.on_before_zero_grad,
    Callback.on_after_zero_grad,
]


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
