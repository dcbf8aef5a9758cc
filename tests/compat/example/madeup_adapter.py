"""The adapter of the made-up trainer's callbacks, as a package of its own would hold it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from cadenza import Callback, Evaluation, Run
from cadenza.compat import Event, ForeignCallback

Hook = Callable[..., None]


def _begin(adapter: MadeUpCallback, hook: Hook) -> Hook:
    def call(run: Run) -> None:
        hook(run.progress.max_steps)

    return call


def _step_done(adapter: MadeUpCallback, hook: Hook) -> Hook:
    def call(run: Run) -> None:
        hook(run.progress.step, float("nan") if run.loss is None else run.loss.item())

    return call


def _checked(adapter: MadeUpCallback, hook: Hook) -> Hook:
    def call(run: Run, evaluation: Evaluation) -> None:
        hook(dict(evaluation.results))

    return call


class MadeUpCallback(ForeignCallback):
    """A callback of the made-up trainer."""

    system: ClassVar[str] = "madeup"
    events: ClassVar[Mapping[str, Event]] = {
        "on_begin": Event(Callback.on_setup, _begin),
        "on_step_done": Event(Callback.on_step_end, _step_done),
        "on_checked": Event(Callback.on_eval_end, _checked),
        "on_pause": Event(None, note="a native run has no pauses"),
    }
