"""End a training without further improvement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.has_monitor_callback import HasMonitorCallback
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.utils.utils import Watched

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView


class EarlyStopCallback(HasMonitorCallback):
    """End the training after `patience` evaluations in a row without improvement, before the next batch or epoch.

    Args:
        monitor: The result; None: the trainer's monitor, see `HasMonitorCallback`.
        larger_better: Whether a larger value is better.
        patience: The number of evaluations without improvement, at least 1.

    Raises:
        RuntimeError: Neither this nor the trainer has a monitor.
        ValueError: `patience` is below 1.
        TypeError: `monitor` is a number, as in fastNLP 0.5.
    """

    def __init__(self, monitor: Watched | None = None, larger_better: bool = True, patience: int = 10) -> None:
        if not isinstance(patience, int) or patience < 1:
            raise ValueError(f"patience must be a whole number of at least 1; got {patience!r}")
        if isinstance(monitor, int):
            raise TypeError(
                f"monitor must be the name of a result; got {monitor!r}. In fastNLP 0.5 the first argument was patience: write "
                f"EarlyStopCallback(patience={monitor})."
            )
        super().__init__(monitor, larger_better, must_have_monitor=True)
        self.patience = patience
        self.wait: int = 0

    @property
    def callback_name(self) -> str:
        return f"EarlyStopCallback#monitor-{self.monitor_name}#patience-{self.patience}"

    def forget(self) -> None:
        super().forget()
        self.wait = 0

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        value = self.get_monitor_value(results)
        if value is not None:
            self.wait = 0 if self.is_better_monitor_value(value) else self.wait + 1

    def on_fetch_data_begin(self, trainer: TrainerView) -> None:
        self._stop_if_due()

    def on_train_epoch_begin(self, trainer: TrainerView) -> None:
        self._stop_if_due()

    def _stop_if_due(self) -> None:
        if self.wait >= self.patience:
            raise EarlyStopException(
                f"{self.monitor_name!r} did not improve on {self.monitor_value} in {self.wait} evaluations"
            )

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any]:
        real = self._real_monitor if isinstance(self._real_monitor, str) else None
        return {"wait": self.wait, "monitor_value": self.monitor_value, "real_monitor": real}

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        if states:
            self.wait = states["wait"]
            self.monitor_value: Any = states["monitor_value"]
            self._real_monitor = states["real_monitor"] or self._real_monitor
