"""A progress bar that reads the counters of the run in its own thread, so that steps cost nothing."""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from cadenza.errors import MissingExtraError
from cadenza.hooks.moments import Callback
from cadenza.sinks.progress_notebook import NotebookRenderer, in_notebook
from cadenza.sinks.progress_plain import PlainRenderer
from cadenza.sinks.progress_rich import RichRenderer, draws_on
from cadenza.sinks.progress_tqdm import TqdmRenderer
from cadenza.sinks.progress_view import EvaluationView, FitView, Renderer, Stream
from cadenza.status.folding import for_screen

if TYPE_CHECKING:
    from cadenza.hooks.moments import BaseCallback
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

_RENDERERS: dict[str, type[RichRenderer] | type[PlainRenderer] | type[NotebookRenderer] | type[TqdmRenderer]] = {
    "rich": RichRenderer,
    "plain": PlainRenderer,
    "notebook": NotebookRenderer,
    "tqdm": TqdmRenderer,
}


class ProgressBar(Callback):
    """Show the progress of training and evaluation: epoch, steps, last loss, speed, time left. On the main process only.

    A terminal shows a bar that its own thread refreshes four times a second; printed lines appear above it. A notebook shows
    HTML, which the saved file keeps. A file or a pipe gets a line from time to time, and so does a terminal if ``CI`` or
    ``SLURM_JOB_ID`` is set.

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

    asks = False

    shows_progress = True

    def __init__(
        self,
        renderer: Literal["auto", "rich", "plain", "notebook", "tqdm"] = "auto",
        *,
        interval_s: float | None = None,
        stream: Stream = "stdout",
    ) -> None:
        if renderer not in ("auto", *_RENDERERS):
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
                self._show = _Show(_RENDERERS[self._kind()](self.interval_s, self.stream), view, self.stream)
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
            show.asks = self._view.loss.visit(run.progress.step, run.loss)
            if not show.asks:
                show.answered.set()

    def _end(self) -> None:
        show, self._show, self._view = self._show, None, None
        if show is not None:
            show.end()


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
    if any(getattr(one, "shows_progress", False) for one in callbacks):
        return []
    callbacks.append(ProgressBar(stream="stderr"))
    return ["progress bar (default; progress=False turns it off)"]


def _kind_for_here(stream: Stream) -> str:
    if in_notebook():
        return "notebook"
    if not getattr(sys, stream).isatty() or os.environ.get("CI") or os.environ.get("SLURM_JOB_ID") or find_spec("rich") is None:
        return "plain"
    return "rich"
