"""The results of a run, as two runs are compared by them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import BaseCallback
from cadenza.loading.rng import RNGState
from cadenza.run import Run
from cadenza.status.plain import host_copy
from cadenza.trainer import Trainer

CLOCKS = ("*_per_s", "*_per_second", "*_runtime", "*/mfu", "time/*")
"""Patterns of the names in records and in states of callbacks that depend on the clock."""


def results_of(trainer: Trainer, run: Run, leave_out: tuple[type[BaseCallback], ...] = ()) -> dict[str, Any]:
    """Return copies of the results of a complete run, on the host. They can be pickled.

    Args:
        trainer: The trainer of the run.
        run: The run.
        leave_out: Classes of callbacks without results.
    """
    return {
        "model": on_host(dict(trainer.model.state_dict())),
        "states": on_host(states_of(run, leave_out)),
        "random streams": RNGState.capture().to_plain(),
        "history": {name: run.history[name] for name in run.history.names},
        "records": _records(trainer),
    }


def states_of(run: Run, leave_out: tuple[type[BaseCallback], ...] = ()) -> dict[str, Any]:
    """Return all states of a run but those of the model and the random generators."""
    callbacks = {name: one.state_dict() for name, one in hooks_of(run).callbacks.items() if not isinstance(one, leave_out)}
    optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
    own = {
        "progress": str(run.progress.now()),
        "run.state": dict(run.state),
        "precision": session_of(run).precision.state_dict(),
    }
    return {**own, "optimizers": optimizers, "callbacks": callbacks}


def without_clocks(results: Mapping[str, Any], ignore: Sequence[str]) -> dict[str, Any]:
    """Return the results without the values with names that fit a pattern of `ignore`, and without the times of records."""

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: part(value) for name, value in values.items() if not _fits(name, ignore)}

    def part(value: Any) -> Any:
        if type(value) is dict:
            return kept(value)
        return [*map(part, value)] if type(value) is list else value

    records = [kept({name: value for name, value in one.items() if name != "time"}) for one in results["records"]]
    states = {name: kept(state) for name, state in results["states"]["callbacks"].items()}
    return {
        **results,
        "records": records,
        "history": kept(results["history"]),
        "states": {**results["states"], "callbacks": states},
    }


def depends_on_clock(name: str) -> bool:
    """Return whether the value of this name depends on the clock."""
    return _fits(name, CLOCKS)


def _fits(name: object, patterns: Sequence[str]) -> bool:
    return isinstance(name, str) and any(fnmatch(name, pattern) for pattern in patterns)


def on_host(tree: Any) -> Any:
    """Return a nested value with a copy on the host of each tensor."""
    return pytree.tree_map_only(Tensor, host_copy, tree)


def _records(trainer: Trainer) -> list[dict[str, Any]]:
    path = Path(str(trainer.directory), "metrics.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]
