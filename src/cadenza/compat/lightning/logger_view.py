"""``trainer.logger``: values are logged to the run's records and thus to all sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from cadenza.compat.lightning.experiment_view import ExperimentView
from cadenza.compat.lightning.part_view import PartView
from cadenza.errors import AdapterError
from cadenza.records.record import RESERVED, Media, Text


class LoggerView(PartView):
    """The records of a run as a ``Logger`` of Lightning."""

    title: ClassVar[str] = "trainer.logger"
    absent: ClassVar[Mapping[str, str]] = {
        "log_image": "Use run.log(name, Image(...)) in a native callback.",
        "log_text": "Use run.log(name, Text(...)) in a native callback.",
        "log_table": "Use run.log(name, Text(...)) in a native callback.",
        "watch": "Put cadenza.callbacks.Histograms into callbacks.",
    }

    @property
    def experiment(self) -> ExperimentView:
        """An object with the methods of a ``SummaryWriter``."""
        return ExperimentView(self._run)

    @property
    def name(self) -> str:
        """``"cadenza"``."""
        return "cadenza"

    @property
    def version(self) -> str:
        """The id of the run; empty without a directory."""
        return self._run.info.id

    @property
    def save_dir(self) -> str | None:
        """The run directory; None without one."""
        return self._trainer.log_dir

    @property
    def root_dir(self) -> str | None:
        """The run directory; None without one."""
        return self._trainer.log_dir

    @property
    def log_dir(self) -> str | None:
        """The run directory; None without one."""
        return self._trainer.log_dir

    @property
    def group_separator(self) -> str:
        """``"/"``."""
        return "/"

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the record of the current step. `step` is ignored."""
        for name, value in metrics.items():
            if isinstance(value, Mapping):
                self.log_metrics({f"{name}/{part}": item for part, item in value.items()})
            elif name not in RESERVED:
                self._run.log(name, _loggable(name, value))

    def log_hyperparams(self, params: Any, *args: Any, **keywords: Any) -> None:
        """Do nothing: the run directory holds the arguments of the trainer."""

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        """Do nothing."""

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Do nothing: each record is written at the end of its step."""

    def finalize(self, status: str) -> None:
        """Do nothing: sinks are closed at the end of the run."""


def _loggable(name: str, value: Any) -> Any:
    """Convert a value to a type that records accept."""
    if isinstance(value, str):
        return Text(value)
    if isinstance(value, Media | int | float):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.reshape(())
    try:
        return float(value)  # a number of NumPy
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise AdapterError(
            f"trainer.logger.log_metrics takes numbers, texts and mappings of them; {name!r} is {what}. Log a number, such as "
            "value.mean()."
        ) from None
