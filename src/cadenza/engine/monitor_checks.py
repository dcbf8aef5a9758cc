"""Check, when a trainer is made, that an evaluation reports each monitored result, if all results are known by then."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.engine.monitor import Monitor
from cadenza.engine.objective import supervised
from cadenza.errors import MonitorError, nearest
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.moments import BaseCallback
from cadenza.loading.evaluation import Evaluation

_ADDS = {"on_setup", "on_fit_start", "on_eval_start", "on_eval_batch_start", "on_eval_batch_end", "on_eval_end"}
_OWN = ("callbacks", "sinks", "loops", "trackers", "timetravel")


def check_monitors(hooks: Hooks, compute_loss: object) -> None:
    """Raise `MonitorError` for a monitored result that no evaluation in the list reports.

    All names are known if only callbacks of Cadenza listen to moments at which a hook could add an evaluation or a result, and
    if the batches are computed by `supervised`. Another function may return numbers of any name. Else the run
    checks the names at its start and at the first evaluation.
    """
    if not _only_own(hooks):
        return
    parts = [_part(callback, "evaluation") for callback in hooks.callbacks.values()]
    evaluations = {one.name: one for one in parts if isinstance(one, Evaluation)}
    for callback in hooks.callbacks.values():
        others = {name: one for name, one in evaluations.items() if one is not _part(callback, "evaluation")}
        for monitor in monitors_of(callback):
            monitor.check_reported_by(others)
            _check_name(monitor, others, compute_loss)


def check_reported(hooks: Hooks, trial: Evaluation) -> None:
    """Raise `MonitorError` if the trial of an evaluation did not report a monitored result."""
    if _only_own(hooks):
        for callback in hooks.callbacks.values():
            for monitor in monitors_of(callback):
                if isinstance(monitor.watched, str):
                    monitor.value_in(trial.name, trial.results)


def reports_nothing(hooks: Hooks, results: Mapping[str, float]) -> bool:
    """Return whether an evaluation has no result, and no hook can have used its batches."""
    used = any(moment.__name__ == "on_eval_batch_end" and listeners for moment, listeners in hooks.by_moment.items())
    return not results and not used and _only_own(hooks)


def monitors_in(hooks: Hooks) -> list[dict[str, str]]:
    """Return the monitors of all callbacks as plain data: monitor, mode, and the name of the callback."""
    return [
        {"monitor": monitor.name, "mode": monitor.mode, "callback": name}
        for name, callback in hooks.callbacks.items()
        for monitor in monitors_of(callback)
    ]


def monitors_of(callback: BaseCallback) -> list[Monitor]:
    """Return the monitors of a callback of Cadenza: its ``monitor``, or all of its ``monitors``."""
    several = _part(callback, "monitors")
    return [one for one in [_part(callback, "monitor"), *(several or ())] if isinstance(one, Monitor)]


def _only_own(hooks: Hooks) -> bool:
    """Return whether only callbacks of Cadenza listen to moments at which a hook could add an evaluation or a result."""
    listening = (listeners for moment, listeners in hooks.by_moment.items() if moment.__name__ in _ADDS)
    return all(_is_own(hooks.callbacks[listener.owner]) for listeners in listening for listener in listeners)


def _part(callback: BaseCallback, name: str) -> Any:
    return getattr(callback, name, None) if _is_own(callback) else None


def _is_own(callback: BaseCallback) -> bool:
    package, room, *_ = *type(callback).__module__.split("."), ""
    return package == "cadenza" and room in _OWN and not type(callback).__name__.startswith("_")  # a player adds evaluations


def _check_name(monitor: Monitor, evaluations: Mapping[str, Evaluation], compute_loss: object) -> None:
    if not isinstance(monitor.watched, str):
        return
    name, _, rest = monitor.watched.partition("/")
    if type(evaluations[name].compute or compute_loss) is not supervised:
        return
    reported = ["loss", *evaluations[name].metrics]
    keys = [*(f"{source}/{key}" for source in evaluations[name].sources for key in reported), *reported]
    if any(rest == key or rest.startswith(f"{key}/") for key in keys):  # a metric may compute a mapping
        return
    known = [f"{name}/{key}" for key in keys]
    raise MonitorError(
        f"{monitor.owner} watches {monitor.watched!r}, but the evaluation {name!r} will report only {known}."
        f"{nearest(monitor.watched, known)} Add this metric to Evaluate(metrics=...), or watch a reported one."
    )
