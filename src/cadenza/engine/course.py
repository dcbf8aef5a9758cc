"""The course of a run without its work: its moments in order, from any point on. It makes the calendar. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from cadenza.engine import accumulating
from cadenza.engine.calendar import Calendar, Call
from cadenza.errors import ScheduleError
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.length import Length
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback, Moment
from cadenza.hooks.schedule import Every, Schedule, lengths_in
from cadenza.hooks.trigger import Trigger
from cadenza.status.accumulation import Accumulation
from cadenza.status.counting import counted
from cadenza.status.progress import Progress


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
    units = {length.unit for one in _scheduled(hooks) for length in lengths_in(one) or ()} | accumulating.units_of(
        accumulate, progress
    )
    needed = begins.sized and "sample" in units
    known, samples = list[Listener](), sizes() if needed else None
    unknown: list[tuple[str, str, str]] = []
    unscheduled: dict[str, int] = {}
    for moment, listeners in hooks.by_moment.items():
        for listener in listeners:
            if listener.schedule is None:
                unscheduled[moment.__name__] = unscheduled.get(moment.__name__, 0) + 1
                continue
            listener.schedule.check(progress)
            why = _why_unknown(listener, listener.schedule, progress, accumulate, samples is not None)
            if why:
                unknown.append((str(listener), moment.__name__, why))
            else:
                known.append(listener)
    first, course = progress.now(), _Course(known, progress, accumulate, samples, end)
    course.run(begins)
    sized, steps = progress.batches_per_epoch is not None, progress.batches_per_epoch is not None or progress.max_epochs is None
    parts = [counted(progress.epoch, "epoch")] if sized or not steps else []
    parts += [counted(progress.step, "step")] if steps else []
    after = f", after {counted(first.step, 'step')}" if first.batch else ""
    headline = f"calendar of {', '.join(parts)}{after}"
    return Calendar(course.rows, unknown, unscheduled, headline, progress.step if steps else progress.epoch)


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
    lengths = lengths_in(schedule)
    if lengths is None:
        return "a function decides"
    units, own = {length.unit for length in lengths}, listener.counting.unit
    if "s" in units:
        return "time decides"
    if not limits.has_epochs and not (own == "step" and units <= {"step", "%", "token"}):
        return "the loop decides which batches a step has"
    changes = accumulating.units_of(accumulate, limits)
    if "token" in units | changes or (limits.total("step", accumulate) is None and "%" in units):
        return "it depends on the tokens of each batch"
    if own == "time" or listener.counting.main_only:
        return "it depends on when the moment fires"
    if "sample" in units | changes and not sized:
        return "it depends on the samples of each batch"
    if limits.batches_per_epoch is None:
        by_epochs = limits.max_steps is None and own == "epoch" and units <= {"epoch"}
        of_steps = {"step", "batch", "%"} if accumulate == 1 else {"step", "%"}
        by_steps = limits.max_epochs is None and own in of_steps and units <= of_steps and not listener.counting.begun
        if not by_epochs and not by_steps:
            return "the loader does not say how many batches it has"
    return None


class _Course:
    """The moments of a run in their order, without the work between them. Steps in which nothing is due are passed over."""

    def __init__(
        self, listeners: Iterable[Listener], progress: Progress, accumulate: int, sizes: Sequence[int] | None, end: Length
    ) -> None:
        self.rows: list[Call] = []
        self.progress, batches = progress, progress.batches_per_epoch
        self._run: Any = SimpleNamespace(progress=progress)
        self._accumulate, self._sizes, self._end = accumulate, sizes, end
        self._steps_known, self._epochs_known = batches is not None or progress.max_epochs is None, batches is not None
        self._epochs_known |= progress.max_steps is None
        self._by_moment: dict[Moment, list[Listener]] = {}
        for listener in listeners:
            self._by_moment.setdefault(listener.moment, []).append(listener)
        self._short = False  # whether the last step found the loader empty

    def run(self, begins: Beginning) -> None:
        """Pass through the run, or through the part of it that is asked for."""
        if self._ended():
            return
        interrupted = Callback.on_step_end if begins.in_epoch else Callback.on_epoch_end
        for one in self._by_moment.get(interrupted, ()):
            if one.owner in begins.due:
                self._list(one)
        if begins.in_epoch:
            self._fire(Callback.on_epoch_start)
            self._rest_of_epoch(leaves=begins.leaves, counts=begins.counts)
        while not begins.stops and not self._over():
            self._fire(Callback.on_epoch_start)
            self._rest_of_epoch()

    def _ended(self) -> bool:
        at, end = self.progress, self._end
        return {"step": at.step, "batch": at.batch, "epoch": at.epoch}[end.unit] >= end.count

    def _over(self) -> bool:
        return self.progress.finished or self._ended()

    def _rest_of_epoch(self, *, leaves: bool = False, counts: bool = False) -> None:
        at = self.progress
        whole = math.inf if at.batches_per_epoch is None else at.batches_per_epoch
        while self._steps_known and not leaves and at.batch_in_epoch < whole and not self._over():
            self._pass_over(whole)
            self._step(whole)
        if at.batch_in_epoch == whole and not leaves and not at.finished and not self._short and not self._cut():
            self._fetch()
        if not self._steps_known or at.batch_in_epoch == whole or counts:
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
        triggers = {one.trigger for listeners in self._by_moment.values() for one in listeners if one.trigger is not None}
        following = min((trigger.next_step(at) for trigger in triggers), default=math.inf)
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
        asked = dict[Trigger, bool]()
        for one in self._by_moment.get(moment, ()):
            if one.trigger is None:
                continue
            asked[one.trigger] = asked[one.trigger] if one.trigger in asked else one.trigger.due(self._run)
            if asked[one.trigger]:
                self._list(one)

    def _list(self, one: Listener) -> None:
        at = self.progress
        step, batch = (at.step, at.batch) if self._steps_known else (None, None)
        epoch = at.epoch if self._epochs_known else None
        self.rows.append(Call(step, epoch, batch, one.moment.__name__, one.owner, str(one.schedule)))


_UPDATE: list[Moment] = [
    Callback.on_before_optimizer_step,
    Callback.on_after_optimizer_step,
    Callback.on_before_zero_grad,
    Callback.on_after_zero_grad,
]
