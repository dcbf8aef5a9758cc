"""The best result of a run, as ``TrainerState`` holds it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from cadenza.compat.transformers.logs import evaluation_prefix
from cadenza.errors import MonitorError, nearest

_SPEEDS = ("_runtime", "_per_second")


def note_best(state: Any, args: Any, metrics: Mapping[str, Any], prefix: str, evaluations: Collection[str]) -> None:
    """Record the result named by ``args.metric_for_best_model`` in ``state`` if it is the best so far.

    Args:
        state: The ``TrainerState``.
        args: The arguments of the run.
        metrics: The results of an evaluation, under the names of transformers.
        prefix: The prefix of their names.
        evaluations: The names of all evaluations of the run.

    Raises:
        MonitorError: No evaluation can report the result.
    """
    watched = args.metric_for_best_model
    if watched is None:
        return
    whole = watched if watched.startswith("eval_") else f"eval_{watched}"
    value = metrics.get(whole)
    if value is None:
        _check_other(watched, whole, metrics, prefix, evaluations)
        return
    greater = bool(args.greater_is_better)
    if state.best_metric is None:
        state.best_metric = -math.inf if greater else math.inf
    if value > state.best_metric if greater else value < state.best_metric:
        state.best_metric = value
        if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
            state.best_global_step = state.global_step


def _check_other(watched: str, whole: str, metrics: Mapping[str, Any], prefix: str, evaluations: Collection[str]) -> None:
    """Check that another evaluation reports the result: the one with the longest prefix that fits."""
    prefixes = {evaluation_prefix(name, evaluations) for name in evaluations}
    fitting = [prefix for prefix in prefixes if whole.startswith(f"{prefix}_")]
    if fitting and max(fitting, key=len) != prefix:
        return
    reported = [name for name in metrics if name.startswith("eval") and not name.endswith(_SPEEDS)]
    raise MonitorError(
        f"args.metric_for_best_model is {watched!r}, but the evaluation reported only {', '.join(reported)}."
        f"{nearest(whole, reported) or ' Give one of these names.'}"
    )
