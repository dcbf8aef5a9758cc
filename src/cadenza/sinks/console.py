"""Print records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from cadenza.hooks.counters import counting_of, reading
from cadenza.hooks.listener import Listener, Trigger
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.status.formats import clock, counted, number
from cadenza.status.progress import Counters
from cadenza.status.run_info import working_directory

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.run import Run


class Console(Callback):
    """Print each record as a line, ``epoch 1  step 50  train/loss 0.4321  train/lr 0.001  12.3 s``, and the outcome of the run.

    After the outcome, a line for each result of ``Checkpoint(keep_best=...)`` has its best value, the step and the checkpoint.

    A line shows the epoch, counted from 1, the completed steps, the values, and the time since the fit began. A loop of
    ``cadenza.attach`` has no epochs, so none are shown. Of a throughput in samples and in steps, a line shows the samples. In a
    terminal, a line that is too wide goes on below, and no value is cut. ``console.log`` in the directory of the run has the
    whole lines.

    With multiple ranks: only the main process opens, writes and closes it.

    Args:
        every: Print at most one record with the same names per interval, such as ``"500 steps"``. None prints all.
        epochs: Print a line at the start of each epoch, and one at its end with its steps and time. Values that are logged at
            the end of an epoch, such as those of an evaluation, follow the second line.
        media: Show the kinds and names of images, figures, sounds, histograms and texts as well.

    Raises:
        ScheduleError: `every` cannot be parsed, or this run has no such unit.

    >>> from cadenza.callbacks import LogTraining
    >>> from cadenza.testing import tiny_run
    >>> log = LogTraining(every="2 steps", throughput=False)
    >>> run = tiny_run(callbacks=[log, Console()], steps=4)  # doctest: +ELLIPSIS
    epoch 1  step 2  train/loss 0.1738  train/lr 0.1  ... s
    epoch 1  step 4  train/loss 1.541   train/lr 0.1  ... s
    finished after 4 steps, in epoch 1, ... s: the limit is reached
    >>> run = tiny_run(callbacks=[Console(epochs=True)], epochs=2, batches=3)  # doctest: +ELLIPSIS
    epoch 1 of 2 begins
    epoch 1 is over after 3 steps, ... s
    epoch 2 of 2 begins
    epoch 2 is over after 3 steps, ... s
    finished after 2 epochs, 6 steps, ... s: the limit is reached
    """

    shows_progress = True
    on_fault: Literal["raise", "disable"] = "disable"  # a closed terminal does not stop a run

    def __init__(self, every: Interval | None = None, *, epochs: bool = False, media: bool = False) -> None:
        self.every: Schedule | None = None if every is None else Schedule.parse(every)
        self.epochs: bool = epochs
        self.media: bool = media
        self._forget()

    def listeners(self) -> list[Listener]:
        around = [
            Listener(Callback.on_epoch_start, self._print_epoch_start),
            Listener(Callback.on_epoch_end, self._print_epoch_end),
        ]
        return [*super().listeners(), *(around if self.epochs else ())]

    def _forget(self) -> None:
        self._began = self._epoch_began = time.time()
        self._epoch = Counters()
        self._widths: dict[str, int] = {}
        self._counter_widths = [1, 1]
        self._gates: dict[frozenset[str], Callable[[Run], bool]] = {}  # one for all records of the same names

    def on_fit_start(self, run: Run) -> None:
        self._forget()
        totals = run.progress.at_most("epoch"), run.progress.at_most("step")
        self._counter_widths = [len(str(total or 1)) for total in totals]
        if self.every is not None:
            self.every.check(run.progress)
        run.at_end(lambda: self._print_outcome(run))

    def on_log(self, run: Run, record: Record) -> None:
        if (record.values or self.media) and self._due(run, record):
            run.print(self._line(run, record))

    def _print_epoch_start(self, run: Run) -> None:
        if not run.progress.has_epochs:
            return
        self._epoch, self._epoch_began = run.progress.now(), time.time()
        total = run.progress.max_epochs
        run.print(f"epoch {self._epoch.epoch + 1}{f' of {total}' if total else ''} begins")

    def _print_epoch_end(self, run: Run) -> None:
        done, began = run.progress, self._epoch
        if not done.has_epochs:
            return
        ends = "is over" if done.epoch > began.epoch else "is left"
        steps = counted(done.step - began.step, "step")
        run.print(f"epoch {began.epoch + 1} {ends} after {steps}, {_passed(time.time() - self._epoch_began)}")

    def _print_outcome(self, run: Run) -> None:
        if run.outcome is not None:
            done, kind = run.progress, run.outcome.kind
            inside = done.has_epochs and (done.batch_in_epoch or not done.epoch)
            length = f"{counted(done.epoch, 'epoch')}, " if done.has_epochs and not inside else ""
            length += counted(done.step, "step") + (f", in epoch {done.epoch + 1}" if inside else "")
            run.print(f"{kind} after {length}, {_passed(time.time() - self._began)}: {run.outcome.reason}")
            for line in best_lines(run):
                run.print(line)

    def _due(self, run: Run, record: Record) -> bool:
        if self.every is None:
            return True
        names = frozenset((*record.values, *record.media))
        if names not in self._gates:
            self._gates[names] = self._gate(run, record)
        return self._gates[names](run)

    def _gate(self, run: Run, record: Record) -> Callable[[Run], bool]:
        """Return what tells whether a record of these names is due. The first one is, also in a run that continues."""
        assert self.every is not None
        trigger = Trigger(self.every, ("on_log",), _ON_LOG)
        before = ({step for step, _ in run.history[name] if step < record.step} for name in record.values)
        if not all(before):
            trigger.restart(reading(Counters(), run.progress, _ON_LOG, trigger.units, begun=False))
        return trigger.due

    def _line(self, run: Run, record: Record) -> str:
        at, (epochs, steps) = record.at, self._counter_widths
        parts = [
            *([f"epoch {at.current_epoch:>{epochs}}"] if run.progress.has_epochs else ()),
            f"step {at.step:>{steps}}",
            *[self._aligned(name, number(value)) for name, value in record.values.items() if not _repeats(name, record.values)],
            *(f"{type(value).__name__.lower()} {name}" for name, value in record.media.items() if self.media),
            _passed(record.time - self._began),
        ]
        return "  ".join(parts)

    def _aligned(self, name: str, value: str) -> str:
        """Return name and value, padded to the widest value of this name so far."""
        width = self._widths.get(name, 0)
        if len(value) > width:
            width = self._widths[name] = len(value)
        return f"{name} {value.ljust(width)}"


_ON_LOG = counting_of(Callback.on_log)


def _repeats(name: str, values: Mapping[str, float]) -> bool:
    """Return whether a value is the throughput in steps, where the record has it in samples."""
    return name.endswith("/steps_per_s") and name.removesuffix("steps_per_s") + "samples_per_s" in values


def _passed(seconds: float) -> str:
    return f"{max(seconds, 0.0):.1f} s" if seconds < 60 else clock(seconds)


def best_lines(run: Run) -> list[str]:
    """Return a line for each result by which a checkpoint was kept as the best: value, step and path.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint, Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> callbacks = [Evaluate(tiny_loader(), "2 steps"), Checkpoint(keep_best=("eval/loss", "min"))]
    >>> best_lines(tiny_run(directory=tempfile.mkdtemp(), callbacks=callbacks))  # doctest: +ELLIPSIS
    ['best eval/loss ... at step 4: ...checkpoints/step-00000004']
    """
    found = [best for decision in run.decisions if decision.what == "best kept" for best in decision.data["best"]]
    return [
        f"best {match['monitor']} {number(float(match['value']))} at step {match['step']}: {_path(run, match['path'])}"
        for match in found
    ]


def _path(run: Run, path: str) -> str:
    if "://" in path:
        return path
    whole, here = run.info.base / path, working_directory()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)
