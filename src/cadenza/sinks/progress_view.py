"""The texts and numbers of a progress bar, which a renderer draws."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from torch import Tensor

from cadenza.records.formats import amount, clock, number
from cadenza.records.scalars import Arriving
from cadenza.sinks.best_kept import best_lines
from cadenza.status.counting import counted, plural

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

_WINDOW_S = 20.0  # a speed is a mean over this time of training ...
_WINDOW_STEPS = 3  # ... and at least this many steps

# The line of the cursor, and all lines below, from the second column: tmux takes an erased whole screen into its history.
ERASE = "\r\x1b[2K\x1b[C\x1b[J\r"

Stream = Literal["stdout", "stderr"]


@dataclass(frozen=True, slots=True)
class Row:
    """The content of one bar. The facts are in order of importance."""

    label: str
    unit: str
    done: int
    total: int | None
    facts: tuple[str, ...] = ()

    @property
    def fraction(self) -> float | None:
        """The completed fraction, 0 to 1; None if the total is not known."""
        return min(self.done / self.total, 1.0) if self.total else None

    @property
    def count(self) -> str:
        """``120/938``, or ``120 steps``."""
        return counted(self.done, self.unit) if self.total is None else f"{self.done:>{len(str(self.total))}}/{self.total}"

    @property
    def percent(self) -> str:
        """``13%``; nothing if the total is not known."""
        return "" if self.fraction is None else f"{math.floor(self.fraction * 100):>3}%"

    def line(self) -> str:
        """Return the row as one line of plain text."""
        count = self.count if self.total is None else f"{self.unit} {self.count}"
        return "  ".join(part for part in (self.label, count, self.percent, *self.facts) if part)


class Renderer(Protocol):
    """Draws rows. The timer thread calls `show`; the thread of the run calls `open` and `close`."""

    interval_s: float

    def open(self, rows: Sequence[Row]) -> None:
        """Draw the first rows."""

    def show(self, rows: Sequence[Row]) -> None:
        """Draw the current rows."""

    def close(self, rows: Sequence[Row]) -> None:
        """Draw the final rows, and restore the streams and the terminal, also after an error."""


class LossReader:
    """A loss as a number, and its step, read on the thread of the run. On CUDA this takes two visits, so that none waits."""

    def __init__(self) -> None:
        self.known: tuple[int, float] | None = None
        """The step and its loss."""
        self._coming: tuple[int, Arriving] | None = None

    def visit(self, step: int, loss: Tensor | None) -> bool:
        """Read the loss of a step, or start its copy to the host. Return whether another visit is needed."""
        if self._coming is not None:
            of, number = self._coming
            if number.arrived:
                self.known, self._coming = (of, float(number)), None
        elif loss is not None and loss.is_cuda:
            self._coming = step, Arriving(loss)
        elif loss is not None:
            self.known = step, float(loss)
        return self._coming is not None

    def last(self, step: int, loss: Tensor | None) -> None:
        """Read the loss, waiting for the device."""
        self._coming = None
        if loss is not None:
            self.known = step, float(loss)


class FitView:
    """The rows of a fit, and of an evaluation within it.

    It reads counters that the thread of the run writes. Each counter is one number, so that at worst one counter of a row is a
    batch ahead of another.
    """

    def __init__(self, run: Run) -> None:
        self.run: Run = run
        self.loss: LossReader = LossReader()
        self.evaluation: EvaluationView | None = None
        progress = run.progress
        self._began, self._began_training = time.monotonic(), progress.training_s
        self._marks = deque([(0.0, progress.step, progress.samples, progress.tokens)])

    def begin_evaluation(self, evaluation: Evaluation) -> None:
        """Show an evaluation as well. Its time does not count as training."""
        self.loss.last(self.run.progress.step, self.run.loss)  # no step asks for it until the evaluation is over
        self.evaluation = EvaluationView(evaluation)

    def end_evaluation(self) -> None:
        """Show the training alone again."""
        self.evaluation = None

    def rows(self) -> list[Row]:
        """Return the current rows."""
        progress, evaluation = self.run.progress, self.evaluation
        if evaluation is None:
            self._mark()
        (began, first_step, *before), (now, step, *done) = self._marks[0], self._marks[-1]
        facts: list[str] = []
        if step > first_step and now > began:
            passed_s = now - began
            facts = [_speed((step - first_step) / passed_s), self._left(passed_s / (step - first_step))]
            facts += _rates(before, done, passed_s)
        known = self.loss.known  # the thread of the run replaces it
        row = self._row(progress.step if known is None else known[0], [*_shown(known), *facts])
        return [row] if evaluation is None else [row, evaluation.row()]

    def end(self) -> list[Row]:
        """Return the final row, with means over the whole fit."""
        run, progress, origin = self.run, self.run.progress, self.run.progress.origin
        if run.outcome is None or run.outcome.kind != "failed":  # the read could hang on a failed device
            self.loss.last(progress.step, run.loss)
        passed_s = time.monotonic() - self._began
        training_s = max(self._training_s, 1e-9)
        facts = [*(fact.rstrip() for fact in _shown(self.loss.known)), f"in {clock(passed_s)}"]
        if progress.step > origin.step:
            facts += [_speed((progress.step - origin.step) / training_s)]
            before, done = (origin.samples, origin.tokens), (progress.samples, progress.tokens)
            facts += _rates(before, done, training_s)
        if run.outcome is not None and run.outcome.kind != "finished":
            facts.insert(0, run.outcome.kind)
        return [self._row(progress.step, facts)]

    def notes(self) -> list[str]:
        """Return the lines below the final row: the best checkpoints."""
        return best_lines(self.run)

    def _row(self, step: int, facts: Sequence[str]) -> Row:
        progress = self.run.progress
        label = f"epoch {progress.epoch}" + (f"/{progress.max_epochs}" if progress.max_epochs is not None else "")
        label = label if progress.has_epochs else "train"
        return Row(label, "step", step, progress.total("step"), tuple(facts))

    def _mark(self) -> None:
        now, progress, marks = self._training_s, self.run.progress, self._marks
        marks.append((now, progress.step, progress.samples, progress.tokens))
        while now - marks[1][0] > _WINDOW_S and marks[-1][1] - marks[1][1] >= _WINDOW_STEPS:
            marks.popleft()

    @property
    def _training_s(self) -> float:
        """Seconds of this fit without evaluations and saves."""
        return self.run.progress.training_s - self._began_training

    def _left(self, step_s: float) -> str:
        """Return the time left: for steps at the current speed, and for evaluations and saves at their mean so far."""
        total, step = self.run.progress.total("step"), self.run.progress.step
        if total is None:
            return f"in {clock(time.monotonic() - self._began)}"
        others_s = time.monotonic() - self._began - self._training_s
        return f"eta {clock(max(total - step, 0) * (step_s + others_s / max(step - self.run.progress.origin.step, 1)))}"


def _shown(known: tuple[int, float] | None) -> list[str]:
    # A fixed width, so that the facts after it do not move at each refresh.
    return [] if known is None else [f"loss {known[1]:#.4g}".ljust(len("loss 0.01234"))]


class EvaluationView:
    """The row of an evaluation."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._began = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the evaluation began."""
        return time.monotonic() - self._began

    def row(self) -> Row:
        """Return the current row."""
        done, total, passed_s = self._evaluation.batch, self._evaluation.batches, self.elapsed_s
        facts = [_speed(done / passed_s, "batch")] if done else []
        if done and total is not None:
            facts.append(f"eta {clock(max(total - done, 0) * passed_s / done)}")
        return self._row(done, total, facts)

    def rows(self) -> list[Row]:
        """Return the current rows."""
        return [self.row()]

    def end(self) -> list[Row]:
        """Return the final row, with the results."""
        results = [f"{name} {number(value)}" for name, value in self._evaluation.results.items()]
        done = self._evaluation.batch
        return [self._row(done, self._evaluation.batches, [*results, f"in {clock(self.elapsed_s)}"])]

    def notes(self) -> list[str]:
        """Return the lines below the final row."""
        return []

    def _row(self, done: int, total: int | None, facts: Sequence[str]) -> Row:
        return Row(self._evaluation.name, "batch", done, total, tuple(facts))


def _rates(before: Sequence[int], done: Sequence[int], passed_s: float) -> list[str]:
    """Return samples and tokens per second, if they are counted, of two readings of these counters."""
    counters = zip(before, done, ("samples", "tokens"), strict=True)
    return [f"{amount((now - then) / passed_s)} {unit}/s" for then, now, unit in counters if now]


def _speed(per_s: float, unit: str = "step") -> str:
    return f"{amount(per_s)} {plural(unit)}/s" if per_s >= 1 else f"{amount(1 / per_s)} s/{unit}"
