"""The default callbacks of a trainer."""

from __future__ import annotations

from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.compat.accelerated.callbacks.modules import MoveModulesToDeviceCallback
from cadenza.compat.accelerated.callbacks.showing import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from cadenza.compat.accelerated.callbacks.stopping import TerminateOnNaNCallback


def get_default_callbacks(progress_bar: bool = True) -> tuple[type[TrainerCallback], ...]:
    """Return the default callback classes of a trainer, in order."""
    bar = (ProgressBarCallback,) if progress_bar else ()
    return (MoveModulesToDeviceCallback, TerminateOnNaNCallback, PrintProgressCallback, *bar, LogMetricsCallback)
