"""Callbacks that act outside of a run, which a replay leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.save_predictions import SavePredictions
from cadenza.callbacks.slurm_requeue import SlurmRequeue
from cadenza.compat.adapter.foreign import ForeignCallback
from cadenza.engine.monitor import Monitor
from cadenza.engine.session import session_of
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.run import Run
from cadenza.sinks.sink import Sink
from cadenza.trackers.alert import Alert
from cadenza.trackers.optuna_pruning import OptunaPruning

_NATIVE = (Sink, Alert, Checkpoint, OptunaPruning, SavePredictions, SlurmRequeue)
_MODULES = ("loggers", "integrations")
_PARTS = ("Checkpoint", "Logger", "Tracker", "TensorBoard", "BackupAndRestore", "RemoteMonitor", "Wandb", "MLflow")
"""Modules, and parts of the names of classes, that other systems have for loggers and for what saves the model."""


class LeftOut(Callback):
    """Stands for a callback that a replay leaves out: its name and its saved state are known, and it does nothing."""

    def __init__(self, name: str) -> None:
        self.name: str | None = name

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Ignore the state."""


class LeftOutCheckpoint(LeftOut):
    """Stands for a `Checkpoint`: others see what it watches, and may request saves, which write nothing."""

    def __init__(self, name: str, given: Checkpoint) -> None:
        super().__init__(name)
        self.monitors: list[Monitor] = given.monitors

    def on_setup(self, run: Run) -> None:
        session_of(run).savers.append(self)

    def request(self, reason: str) -> None:
        """Write nothing."""


def left_out(callback: BaseCallback, name: str) -> LeftOut:
    """Return what stands for a callback that a replay leaves out."""
    return LeftOutCheckpoint(name, callback) if isinstance(callback, Checkpoint) else LeftOut(name)


def acts_outside(callback: BaseCallback, others: type | tuple[type, ...] = ()) -> bool:
    """Return whether a callback writes files, or calls a service, outside of the directory of its run; or is one of `others`.

    Sinks count, also those that only show the run.
    """
    if isinstance(callback, ForeignCallback):
        kind = type(callback.callback)
        names = [one.__name__ for one in kind.__mro__]
        parts = {part for one in kind.__mro__ for part in one.__module__.split(".")}
        known = any(part in name for part in _PARTS for name in names) or any(one in parts for one in _MODULES)
        return known or isinstance(callback.callback, others)
    return isinstance(callback, (*_NATIVE, others)) or type(callback).__module__.startswith("cadenza.sinks.")
