"""A progress bar that reads the counters of the run in its own thread, so that steps cost nothing."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from cadenza.errors import MissingExtraError
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.lazy import imported
from cadenza.records.scalars import Arriving
from cadenza.sinks.console import best_lines
from cadenza.sinks.progress_renderers import (
    NotebookRenderer,
    PlainRenderer,
    Renderer,
    RichRenderer,
    Row,
    Stream,
    draws_on,
    in_notebook,
)
from cadenza.status.formats import amount, clock, for_screen, number, plural

if TYPE_CHECKING:
    from cadenza.hooks.moments import BaseCallback
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

_RENDERERS: dict[str, type[Renderer]] = {"rich": RichRenderer, "plain": PlainRenderer, "notebook": NotebookRenderer}


class ProgressBar(Callback):
    """Show the progress of training and evaluation: epoch, steps, last loss, speed, time left. On the main process only.

    A terminal shows a bar that its own thread refreshes four times a second; printed lines appear above it. A notebook shows
    HTML, which the saved file keeps. A file or a pipe gets a line from time to time, and so does a terminal if ``CI`` or
    ``SLURM_JOB_ID`` is set.

    With multiple ranks: only the main process draws, with its own loss and the samples of all ranks.

    Args:
        renderer: ``"rich"`` (terminal), ``"plain"`` (lines) or ``"notebook"``; ``"auto"`` chooses at the start of a run.
            ``"tqdm"`` draws with tqdm, which does not move printed lines above the bar.
        interval_s: Seconds between two refreshes; None: 0.25 in a terminal, 0.5 in a notebook and for tqdm, 10 between lines.
        stream: The stream of the bar or the lines, ``"stdout"`` or ``"stderr"``. ``"auto"`` depends on it. tqdm uses stderr.

    Raises:
        MissingExtraError: `renderer` is ``"rich"`` or ``"tqdm"`` and that package is not installed. ``"auto"`` then prints
            plain lines.

    >>> from cadenza.testing import tiny_run
    >>> run = tiny_run(callbacks=[ProgressBar("plain")], epochs=2)  # doctest: +ELLIPSIS
    epoch 2/2  step 10/10  100%  loss ...  in 0:00  ... steps/s  ... samples/s
    """

    on_fault: Literal["raise", "disable"] = "disable"

    shows_progress = True

    def __init__(
        self,
        renderer: Literal["auto", "rich", "plain", "notebook", "tqdm"] = "auto",
        *,
        interval_s: float | None = None,
        stream: Stream = "stdout",
    ) -> None:
        if renderer not in ("auto", "tqdm", *_RENDERERS):
            raise ValueError(f"renderer must be 'auto', 'rich', 'plain', 'notebook' or 'tqdm'; got {renderer!r}")
        if interval_s is not None and not interval_s > 0:
            raise ValueError(f"interval_s must be more than 0 seconds, or None; got {interval_s!r}")
        if renderer in ("rich", "tqdm") and find_spec(renderer) is None:
            raise MissingExtraError(renderer, needed_by=f"ProgressBar({renderer!r})", extra="progress")
        if stream not in ("stdout", "stderr"):
            raise ValueError(f"stream must be 'stdout' or 'stderr'; got {stream!r}")
        self.renderer = renderer
        self.interval_s: float | None = interval_s
        self.stream = stream
        self._view: FitView | EvaluationView | None = None
        self._show: _Show | None = None

    def listeners(self) -> list[Listener]:
        return silent(super().listeners())

    def on_fit_start(self, run: Run) -> None:
        run.at_end(self._end)
        self._begin(run, FitView(run))

    def on_step_end(self, run: Run) -> None:
        # The only cost of the bar in a step. Before each refresh the timer asks for the loss, which only this thread may read.
        if self._show is not None and self._show.asks:
            self._answer(run, self._show)

    def on_eval_start(self, run: Run, evaluation: Evaluation) -> None:
        if isinstance(self._view, FitView):
            self._view.begin_evaluation(evaluation)
        else:  # evaluate or predict of the trainer, outside of a fit
            self._begin(run, EvaluationView(evaluation))

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        if isinstance(self._view, FitView):
            self._view.end_evaluation()
        else:
            self._end()

    def _begin(self, run: Run, view: FitView | EvaluationView) -> None:
        if run.is_main:
            self._view = view
            try:
                self._show = _Show(_renderer(self._kind())(self.interval_s, self.stream), view, self.stream)
                self._show.begin()
            except BaseException:
                self._end()
                raise

    def _kind(self) -> str:
        kind = _kind_for_here(self.stream) if self.renderer == "auto" else self.renderer
        return "plain" if kind == "rich" and not draws_on(getattr(sys, self.stream)) else kind

    def _answer(self, run: Run, show: _Show) -> None:
        if show.error is not None:
            self._end()
        if isinstance(self._view, FitView):
            show.asks = self._view.read_loss()
            if not show.asks:
                show.answered.set()

    def _end(self) -> None:
        show, self._show, self._view = self._show, None, None
        if show is not None:
            show.end()


def _renderer(kind: str) -> type[Renderer]:
    if kind != "tqdm":
        return _RENDERERS[kind]
    found: type[Renderer] = imported("cadenza.trackers.tqdm_renderer", needed_by="ProgressBar('tqdm')").TqdmRenderer
    return found


_LONGEST_S = 1.0
"""How long a refresh may wait for the run."""


class _Show:
    """A renderer, and the thread that refreshes it."""

    def __init__(self, renderer: Renderer, view: FitView | EvaluationView, stream: Stream) -> None:
        self.asks = False
        """Whether the thread waits for the run: to read the loss, or to report an error."""
        self.answered = threading.Event()
        """Set when the run has read the loss."""
        self.error: Exception | None = None
        """The error that ended the thread early."""
        self._renderer, self._view, self._stream = renderer, view, stream
        self._over = threading.Event()
        self._timer = threading.Thread(target=self._refresh, name="cadenza-progress", daemon=True)

    def begin(self) -> None:
        _hold_forks_while_drawing()
        self._renderer.open(self._view.rows())
        self.asks = True
        self._timer.start()

    def end(self) -> None:
        """Stop the thread, and restore the terminal.

        Raises:
            Exception: The error that ended the thread early.
        """
        self._over.set()
        self.answered.set()
        try:
            if self._timer.ident is not None:  # it is started
                self._timer.join()
        finally:
            self._renderer.close(self._view.end())
            stream = getattr(sys, self._stream)
            for line in self._view.notes():
                print(for_screen(line, stream), file=stream, flush=True)
        if self.error is not None:
            raise self.error

    def _refresh(self) -> None:
        while not self._over.wait(self._renderer.interval_s):
            self._ask()
            try:
                with _drawing:
                    self._renderer.show(self._view.rows())
            except Exception as error:  # the thread of the run reports it, see `asks`
                self.error, self.asks = error, True
                return

    def _ask(self) -> None:
        """Let the run read the loss of the step that is shown. A step that takes longer does not delay the refresh."""
        if isinstance(self._view, FitView) and self._view.evaluation is None:
            self.answered.clear()
            self.asks = True
            if not self._over.is_set():
                self.answered.wait(min(self._renderer.interval_s, _LONGEST_S))


_drawing = threading.RLock()


@cache
def _hold_forks_while_drawing() -> None:
    """Let forks wait for the end of a refresh, from the first bar on.

    Else a forked worker of a loader gets a stream that is locked by a thread which it does not have, and waits forever in the
    first ``print``.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_drawing.acquire, after_in_parent=_drawing.release, after_in_child=_drawing.release)


def add_progress_bar(callbacks: list[BaseCallback]) -> list[str]:
    """Add a progress bar on stderr, unless a callback already shows progress. Return the note for the plan."""
    if any(getattr(callback, "shows_progress", False) for callback in callbacks):
        return []
    callbacks.append(ProgressBar(stream="stderr"))
    return ["progress bar (default; progress=False turns it off)"]


def _kind_for_here(stream: Stream) -> str:
    if in_notebook():
        return "notebook"
    if not getattr(sys, stream).isatty() or os.environ.get("CI") or os.environ.get("SLURM_JOB_ID") or find_spec("rich") is None:
        return "plain"
    return "rich"


# -- the rows --------------------------------------------------------------------------------------

_WINDOW_S = 20.0  # a speed is a mean over this time of training ...
_WINDOW_STEPS = 3  # ... and at least this many steps


class FitView:
    """The rows of a fit, and of an evaluation within it.

    It reads counters that the thread of the run writes. Each counter is one number, so that at worst one counter of a row is a
    batch ahead of another.
    """

    def __init__(self, run: Run) -> None:
        self.run: Run = run
        self.evaluation: EvaluationView | None = None
        self._loss: tuple[int, float] | None = None  # and its step
        self._results: dict[str, float] = {}  # of the last evaluation of each name
        self._coming: tuple[int, Arriving] | None = None
        progress = run.progress
        self._began, self._began_training = time.monotonic(), progress.training_s
        self._marks = deque([(0.0, progress.step, progress.samples, progress.tokens)])

    def read_loss(self, *, wait: bool = False) -> bool:
        """Read the loss of the step, on the thread of the run; return whether another call is needed.

        On CUDA the first call starts a copy, and a later one reads it, so that none waits for the device, but with `wait`.
        """
        step, loss = self.run.progress.step, self.run.loss
        if self._coming is not None and not wait:
            of, number = self._coming
            if number.arrived:
                self._loss, self._coming = (of, float(number)), None
        elif loss is not None and loss.is_cuda and not wait:
            self._coming = step, Arriving(loss)
        elif loss is not None:
            self._loss, self._coming = (step, float(loss)), None
        return self._coming is not None

    def begin_evaluation(self, evaluation: Evaluation) -> None:
        """Show an evaluation as well. Its time does not count as training."""
        self.read_loss(wait=True)  # no step asks for it until the evaluation is over
        self.evaluation = EvaluationView(evaluation)

    def end_evaluation(self) -> None:
        """Keep the results of the evaluation, to show them from now on."""
        if self.evaluation is not None:
            self._results = {**self._results, **self.evaluation.results}  # a new mapping, as the timer reads the old one
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
            facts = [self._left(passed_s / (step - first_step)), _speed((step - first_step) / passed_s)]
            facts += _rates(before, done, passed_s)
        known = self._loss  # the thread of the run replaces it
        row = self._row(progress.step if known is None else known[0], [*_shown(known), *_first(self._results, facts, digits=3)])
        return [row] if evaluation is None else [row, *evaluation.rows()]

    def end(self) -> list[Row]:
        """Return the final row, with means over the whole fit."""
        run, progress, origin = self.run, self.run.progress, self.run.progress.origin
        if run.outcome is None or run.outcome.kind != "failed":  # the read could hang on a failed device
            self.read_loss(wait=True)
        passed_s = time.monotonic() - self._began
        training_s = max(self._training_s, 1e-9)
        facts = [f"in {clock(passed_s)}"]
        if progress.step > origin.step:
            facts += [_speed((progress.step - origin.step) / training_s)]
            before, done = (origin.samples, origin.tokens), (progress.samples, progress.tokens)
            facts += _rates(before, done, training_s)
        facts = [*(fact.rstrip() for fact in _shown(self._loss)), *_first(self._results, facts)]
        if run.outcome is not None and run.outcome.kind != "finished":
            facts.insert(0, run.outcome.kind)
        return [self._row(progress.step, facts)]

    def notes(self) -> list[str]:
        """Return the lines below the final row: the best checkpoints."""
        return best_lines(self.run)

    def _row(self, step: int, facts: Sequence[str]) -> Row:
        progress = self.run.progress
        epoch, most = progress.now().current_epoch or 1, progress.max_epochs
        label = f"epoch {epoch}" + (f"/{most}" if most is not None else "") if progress.has_epochs else "train"
        if (tokens := progress.total("token")) is not None:
            return Row(label, "token", progress.tokens, tokens, (f"step {step}", *facts))
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
        progress, passed_s = self.run.progress, time.monotonic() - self._began
        total, step = progress.total("step"), progress.step
        if (tokens := progress.total("token")) is not None and (done := progress.tokens - progress.origin.tokens) > 0:
            return f"eta {clock(max(tokens - progress.tokens, 0) * passed_s / done)}"
        if total is None:
            return f"in {clock(passed_s)}"
        others_s = passed_s - self._training_s
        return f"eta {clock(max(total - step, 0) * (step_s + others_s / max(step - self.run.progress.origin.step, 1)))}"


def _shown(known: tuple[int, float] | None) -> list[str]:
    # A fixed width, so that the facts after it do not move at each refresh.
    return [] if known is None else [f"loss {known[1]:#.4g}".ljust(len("loss 0.01234"))]


_RESULTS = 8  # at most so many are shown


def _first(results: Mapping[str, float], facts: Sequence[str], digits: int = 4) -> list[str]:
    """Return the facts with the results of evaluations: the first one before them, the others after the time and the speed."""
    shown = [f"{name} {number(value, digits)}" for name, value in [*results.items()][:_RESULTS]]
    return [*shown[:1], *facts[:2], *shown[1:], *facts[2:]]


class EvaluationView:
    """The row of an evaluation."""

    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._began = time.monotonic()

    def rows(self) -> list[Row]:
        """Return the current row."""
        done, total, passed_s = self._evaluation.batch, self._evaluation.batches, time.monotonic() - self._began
        facts = [_speed(done / passed_s, "batch")] if done else []
        if done and total is not None:
            facts.append(f"eta {clock(max(total - done, 0) * passed_s / done)}")
        return [Row(self._evaluation.name, "batch", done, total, tuple(facts))]

    @property
    def results(self) -> Mapping[str, float]:
        """The results so far: none before the end."""
        return self._evaluation.results

    def end(self) -> list[Row]:
        """Return the final row, with the results."""
        [row], results = self.rows(), self.results
        facts = (*(f"{name} {number(value)}" for name, value in results.items()), f"in {clock(time.monotonic() - self._began)}")
        return [replace(row, facts=facts)]

    def notes(self) -> list[str]:
        """Return the lines below the final row."""
        return []


def _rates(before: Sequence[int], done: Sequence[int], passed_s: float) -> list[str]:
    """Return samples and tokens per second, if they are counted, of two readings of these counters."""
    counters = zip(before, done, ("samples", "tokens"), strict=True)
    return [f"{amount((now - then) / passed_s)} {unit}/s" for then, now, unit in counters if now]


def _speed(per_s: float, unit: str = "step") -> str:
    return f"{amount(per_s)} {plural(unit)}/s" if per_s >= 1 else f"{amount(1 / per_s)} s/{unit}"
