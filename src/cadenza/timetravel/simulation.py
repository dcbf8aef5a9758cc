"""The recorded course of a run through the engine, without a step of training."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from cadenza.callbacks.early_stopping import EarlyStopping
from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.drivers.single import SingleDriver
from cadenza.engine import boundary
from cadenza.engine.evaluation import record_evaluated
from cadenza.engine.loop import Training
from cadenza.engine.monitor import monitors_of
from cadenza.engine.session import Session, session_of
from cadenza.engine.step_state import Deferred, Saver
from cadenza.errors import CadenzaError, CallbackError
from cadenza.hooks.counters import exchanged, kept
from cadenza.hooks.dispatch import Hooks, hooks_of
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.order import Phase
from cadenza.hooks.subscription import Subscription
from cadenza.loading.batch_log import BatchLog, Window
from cadenza.loading.evaluation import Evaluation
from cadenza.records.directory import RecordedRun, read_info
from cadenza.records.reading import read_decisions, read_records, read_values
from cadenza.records.record import Record
from cadenza.run import Run
from cadenza.status.decisions import Decision
from cadenza.status.formats import plural
from cadenza.status.progress import Progress
from cadenza.testing.tiny import tiny_model
from cadenza.timetravel.dry_checkpoint import DryCheckpoint
from cadenza.trainer import Trainer

PLAYED = (
    *("on_setup", "on_fit_start", "on_epoch_start", "on_step_end", "on_eval_start", "on_eval_end", "on_log", "on_stop"),
    *("on_epoch_end", "on_fit_end", "on_exception", "on_sanity_start", "on_sanity_end", "on_save", "on_load"),
)
"""The moments of a run that its records hold; and those that do not come, so a hook in them does no harm."""

_NATIVE = tuple(f"cadenza.{room}." for room in ("callbacks", "compat", "sinks", "timetravel", "trackers"))

ABSENT = ("model", "optimizers", "loader", "batch", "outputs", "loss", "profile")
"""The attributes of a run that its records do not hold."""


@dataclass(frozen=True, slots=True)
class Played:
    """The end of a run that was played."""

    step: int
    decisions: Sequence[Decision]
    savers: Sequence[Saver]


def play(recording: Recording, callbacks: Sequence[BaseCallback]) -> Played:
    """Play a recorded run through callbacks; return how it ends.

    Raises:
        CallbackError: A callback reads a part of the run that was not recorded.
    """
    recording = recording.with_training(callbacks)
    player = _Player(
        recording, reads_records=not all(isinstance(callback, EarlyStopping | DryCheckpoint) for callback in callbacks)
    )
    epochs, steps = (recording.arguments.get(name) for name in ("max_epochs", "max_steps"))
    trainer = _Playing(
        tiny_model(),
        _no_optimizer,
        _Batches(recording.batches_per_epoch),
        _nothing,
        max_epochs=epochs,
        max_steps=recording.steps if epochs is None and steps is None else steps,
        accumulate=recording.arguments.get("accumulate", 1),
        callbacks=[player, *callbacks],
        driver=SingleDriver("cpu"),  # also in one of several processes
        progress=False,
    )
    trainer.recorded_arguments, trainer.player = recording.arguments, player
    run = trainer.fit()
    session = session_of(run)
    decisions = [decision for decision in run.decisions if decision is not player.end and decision.who != "the trainer"]
    return Played(run.progress.step, decisions, session.savers)


def check_playable(callbacks: Sequence[BaseCallback]) -> None:
    """Raise `CallbackError` for a callback that needs more than the records of a run."""
    for callback in callbacks:
        if isinstance(callback, ForeignCallback):
            raise CallbackError(
                f"what_if cannot play {callback.name}, a callback of {callback.system}: expected EarlyStopping, "
                "Checkpoint or callbacks of your own. Write its settings as those of cadenza.callbacks.EarlyStopping or "
                "Checkpoint."
            )
    for name, callback in Hooks(callbacks).callbacks.items():
        kinds = [kind for kind in type(callback).__mro__ if kind.__module__.startswith(_NATIVE)]
        native = kinds or type(callback).__module__.startswith("cadenza.")
        if native and not isinstance(callback, EarlyStopping | DryCheckpoint | Subscription):
            raise CallbackError(
                f"what_if cannot play {name}: it needs the model, batches or gradients, depends on the clock, or acts outside "
                "of the run. Records decide for EarlyStopping, Checkpoint and callbacks of your own. Leave it out."
            )
    for moment, listeners in Hooks(callbacks).by_moment.items():
        for listener in listeners:
            _check_listener(listener, moment.__name__)


def _check_listener(listener: Listener, moment: str) -> None:
    if moment not in PLAYED:
        raise CallbackError(
            f"what_if cannot play {listener.owner}: its hook {moment} needs the model, batches or gradients, and a run records "
            "only evaluations, values and decisions. Leave it out."
        )
    for unit in () if listener.schedule is None else (length.unit for length in listener.schedule.lengths):
        if exchanged([unit]) or not kept(unit):
            raise CallbackError(
                f"what_if cannot play {listener.owner}: its schedule {str(listener.schedule)!r} counts "
                f"{plural(unit) if kept(unit) else 'time'}, and no record says it for each step. Use steps, batches or epochs."
            )


class _RecordedRun(Run):
    """A run without what its records do not hold."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in ABSENT:
            hooks = session_of(self).hooks
            owner = hooks.current_owner()
            if owner is not None and not isinstance(hooks.callbacks[owner], EarlyStopping | DryCheckpoint | _Player):
                raise CallbackError(
                    f"what_if cannot play {owner}: it reads run.{name}, and a run records only evaluations, values and "
                    "decisions. Leave it out, or read run.progress, run.history and the results of evaluations."
                )
        value = super().__getattribute__(name)
        owner = session_of(self).hooks.current_owner() if name == "progress" else None
        return value if owner is None else _RecordedProgress(value, owner)


class _RecordedProgress:
    """The progress of a recorded run, as hooks see it: without the counters that are not recorded at each step."""

    def __init__(self, progress: Progress, owner: str) -> None:
        self._progress, self._owner = progress, owner

    def __getattr__(self, name: str) -> Any:
        if name in ("samples", "tokens"):
            raise CallbackError(
                f"what_if cannot play {self._owner}: it reads run.progress.{name}, and no record says it for each step. Leave "
                "it out, or read steps, batches or epochs."
            )
        return getattr(self._progress, name)

    def __str__(self) -> str:
        return str(self._progress)


class _Playing(Trainer):
    """A trainer of nothing."""

    recorded_arguments: Mapping[str, Any]
    player: _Player

    def _do_steps(self, training: Training) -> None:
        while training.next_epoch():
            self.player.play_epoch(training.session)

    def _make_session(self, part: Any = None, files: Any = None, make_run: Any = _RecordedRun) -> Session:
        session = super()._make_session(part, files, make_run)
        session.advises = False
        session.arguments = dict(self.recorded_arguments)
        return session


class _Player(Callback):
    """Passes through the recorded steps, and reports the recorded evaluations."""

    phase: Phase | None = Phase.EVALUATE
    logs_training = True  # its records are there

    def __init__(self, recording: Recording, *, reads_records: bool) -> None:
        self.recording: Recording = recording
        self.reads_records: bool = reads_records
        self.end: Decision | None = None
        events = {*recording.evaluations, *(recording.records if reads_records else ())}
        self._events: list[int] = sorted(events)
        self._epochs: Iterator[Sequence[Window]] = recording.epochs()
        names = dict.fromkeys(evaluation.name for some in recording.evaluations.values() for evaluation in some)
        self._evaluations = {name: Evaluation([], name=name) for name in names}
        for value in chain.from_iterable(recording.evaluations.values()):
            if any(not result.startswith(f"{value.name}/") for result in value.results):  # those of a LightningModule
                self._evaluations[value.name].own_names = True

    def listeners(self) -> list[Listener]:
        of_steps, of_epochs = (Deferred(partial(self._evaluate, at_epoch_end=ends)) for ends in (False, True))
        at_ends = any(evaluation.at_epoch_end for some in self.recording.evaluations.values() for evaluation in some)
        ends = [Listener(Callback.on_epoch_end, of_epochs)] if at_ends else []
        return [*super().listeners(), Listener(Callback.on_step_end, of_steps), *ends]

    def on_setup(self, run: Run) -> None:
        run.evaluations.update(self._evaluations)

    def _evaluate(self, run: Run, *, at_epoch_end: bool) -> None:
        for decision in self.recording.evaluations.get(run.progress.step, ()):
            if decision.at_epoch_end is at_epoch_end:
                evaluation = self._evaluations[decision.name]
                hooks_of(run).on_eval_start(run, evaluation)
                evaluation.results = dict(decision.results)
                record_evaluated(session_of(run), evaluation, who=decision.name)
                hooks_of(run).on_eval_end(run, evaluation)

    def play_epoch(self, session: Session) -> None:
        """Pass through the steps of an epoch."""
        windows: Sequence[Window] = next(self._epochs)
        index = 0
        while index < len(windows) and not session.sync.leaving_epoch():
            index = self._pass_over(session, windows, index)
            self._step(session, windows[index])
            index += 1
        progress, is_last = session.progress, windows[-1].step == self.recording.steps
        whole = progress.batches_per_epoch
        exhausted = index == len(windows) and (not is_last or (whole is not None and progress.batch_in_epoch >= whole))
        session.cursor.exhausted = exhausted
        goes_on = not exhausted or progress.max_epochs is None or progress.epoch + 1 < progress.max_epochs
        if is_last and index == len(windows) and goes_on and not session.sync.over():
            self.end = session.decide("stopped", "the records end here", who="what_if")
            session.sync.requests.ask_stop(self.end)
        boundary.take_stop(session)
        boundary.count_epoch(session)

    def _pass_over(self, session: Session, windows: Sequence[Window], index: int) -> int:
        """Count the steps in which nothing happens; return the index of the next step in which something may."""
        progress, first = session.progress, windows[index].step
        listeners = session.hooks.by_moment.get(Callback.on_step_end, ())
        own = [listener for listener in listeners if listener.owner != "_Player"]
        if any(item.trigger is None for item in own):
            return index
        following = min((item.trigger.next_step(progress) for item in own if item.trigger), default=math.inf)
        after = bisect_left(self._events, first)
        following = min(following, *self._events[after : after + 1], windows[-1].step)
        while windows[index].step < following:
            for _ in range(windows[index].size):
                progress.finish_batch(0)
            progress.finish_step()
            index += 1
        return index

    def _step(self, session: Session, window: Window) -> None:
        session.cursor.at_boundary = False
        for _ in range(window.size):
            session.progress.finish_batch(0)
        boundary.count_step(session)
        for record in self.recording.records.get(window.step, ()) if self.reads_records else ():
            session.metrics.history.add(record)
            session.hooks.on_log(session.run, record)
        session.hooks.on_step_end(session.run)
        boundary.run_boundary(session, after_step=True)


class _Batches:
    """A loader that has a length and no batches."""

    def __init__(self, count: int | None) -> None:
        self._count = count

    def __len__(self) -> int:
        if self._count is None:
            raise TypeError("the length of an epoch is not known")
        return self._count

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def _no_optimizer(parameters: Any) -> Any:
    from torch.optim import SGD

    return SGD(parameters, lr=0.0)


def _nothing(model: Any, batch: Any) -> Any:
    raise RuntimeError("what_if trains nothing")


class Evaluated(NamedTuple):
    """One evaluation of the run."""

    name: str
    results: Mapping[str, float]
    at_epoch_end: bool


@dataclass(frozen=True)
class Recording:
    """What a run directory holds of a run."""

    path: Path
    arguments: Mapping[str, Any]
    windows: Sequence[Window]
    """All steps, in order."""
    batches_per_epoch: int | None
    evaluations: Mapping[int, Sequence[Evaluated]]
    """By step."""
    started_s: float
    """When the run began, in seconds since 1970; 0 if that is not known."""

    @staticmethod
    def read(path: Path) -> Recording:
        """Read a run.

        Raises:
            DirectoryError: The directory holds no run.
            CadenzaError: The run did no step, or an earlier version wrote it.
        """
        info, facts = read_info(path), RecordedRun(path).previous or {}
        if not facts.get("data"):
            raise CadenzaError(f"{path}: what_if needs the part 'data' of run.json, which earlier versions did not write.")
        evaluations: dict[int, list[Evaluated]] = {}
        last = info.step
        for decision in read_decisions(path / "decisions.jsonl"):
            last = max(last, decision.when.step) if not facts.get("progress") else last
            if decision.what == "evaluated" and "results" in decision.data:
                results = {name: float(value) for name, value in decision.data["results"].items()}
                name, at_end = str(decision.data["evaluation"]), decision.when.batch_in_epoch == 0 and decision.when.step > 0
                evaluations.setdefault(decision.when.step, []).append(Evaluated(name, results, at_end))
        if not facts.get("progress"):  # it goes on, or was killed
            last = max([last, *(record.step for record in read_records(path / "metrics.jsonl", names=()))])
        course = BatchLog.from_plain(facts["data"])
        windows = list(course.windows(last))
        if not windows:
            raise CadenzaError(f"{path}: the run has recorded no step, so there is nothing to play.")
        batches = course.segments[0].points[0].whole
        started = str(facts.get("started", ""))
        started_s = datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp() if started else 0.0
        return Recording(path, info.arguments, windows, batches, evaluations, started_s)

    @property
    def steps(self) -> int:
        """The number of recorded steps."""
        return self.windows[-1].step

    @cached_property
    def records(self) -> Mapping[int, Sequence[Record]]:
        """The records by step."""
        found: dict[int, list[Record]] = {}
        for record in read_records(self.path / "metrics.jsonl"):
            found.setdefault(record.step, []).append(record)
        return found

    def with_training(self, callbacks: Iterable[BaseCallback]) -> Recording:
        """Return the recording with logged results of the training as evaluations, if the callbacks monitor one of them."""
        known = {evaluation.name for some in self.evaluations.values() for evaluation in some}
        watched = {monitor.name for callback in callbacks for monitor in monitors_of(callback)}
        watched = {name for name in watched if "/" in name and name.partition("/")[0] not in known}
        if not watched:
            return self
        ends = {windows[-1].step for windows in self.epochs()}
        found = {step: [*some] for step, some in self.evaluations.items()}
        for step, records in self.records.items():
            values = {name: value for record in records for name, value in record.values.items()}
            for prefix in {name.partition("/")[0] for name in watched & values.keys()}:
                own = {name: value for name, value in values.items() if name.startswith(f"{prefix}/")}
                found.setdefault(step, []).append(Evaluated(prefix, own, step in ends))
        return replace(self, evaluations=found)

    @cached_property
    def _times(self) -> tuple[list[int], list[float]]:
        last = {step: time for (_, step, *_), time, _ in read_values(self.path / "metrics.jsonl")}
        rows = sorted(last.items())
        return [step for step, _ in rows], [time for _, time in rows]

    def time_at(self, step: int) -> float:
        """Return when a step was complete, in seconds since 1970, by the last record before or at it."""
        steps, times = self._times
        index = bisect_right(steps, step)
        return times[index - 1] if index else self.started_s

    def epochs(self) -> Iterator[Sequence[Window]]:
        """Yield the steps of each epoch."""
        first = 0
        for index, window in enumerate(self.windows):
            if window.epoch != self.windows[first].epoch:
                yield self.windows[first:index]
                first = index
        yield self.windows[first:]
