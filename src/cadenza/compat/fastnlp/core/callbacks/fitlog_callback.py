"""Log a training to fitlog."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.compat.fastnlp.core.callbacks.has_monitor_callback import HasMonitorCallback
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.utils.utils import Watched
from cadenza.compat.fastnlp.envs.utils import launch_time

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver


INSTEAD = (
    "Use a sink of cadenza.sinks instead, such as TensorBoard(), Csv(), JsonLines() or Mlflow(), in the same list of callbacks."
)


class FitlogCallback(HasMonitorCallback):
    """Log each evaluation, the best one, the loss and the exception that ended the training to fitlog.

    Call ``fitlog.set_log_dir`` or ``fitlog.commit`` before. fitlog is not maintained: its last version, 0.9.15, fails with
    current numpy if it gets a dict, such as ``fitlog.add_hyper({...})``. This callback does not pass dicts. The sinks of
    Cadenza log the same values without fitlog.

    Args:
        monitor: The result that defines the best evaluation; None: the trainer's monitor. Without one no best is logged.
        larger_better: Whether a larger value is better.
        log_exception: Log the error that ended the training.
        log_loss_every: Log the mean loss of every n batches; 0 logs none.

    Raises:
        ImportError: fitlog is not installed, or cannot be imported.
    """

    def __init__(
        self,
        monitor: Watched | None = None,
        larger_better: bool = True,
        log_exception: bool = True,
        log_loss_every: int = 0,
    ) -> None:
        if not isinstance(log_loss_every, int) or log_loss_every < 0:
            raise ValueError(f"log_loss_every must be a whole number of at least 0; got {log_loss_every!r}")
        self.fitlog: Any = _fitlog()
        super().__init__(monitor, larger_better)
        self.log_exception: bool = log_exception
        self.log_loss_every: int = log_loss_every
        self._loss: Tensor | float = 0.0
        self._failed = False

    def on_after_trainer_initialized(self, trainer: TrainerView, driver: Driver) -> None:
        super().on_after_trainer_initialized(trainer, driver)
        if not driver.is_global_zero():
            self.fitlog.debug()
        self.fitlog.add_other(launch_time(), name="launch_time")

    def on_train_begin(self, trainer: TrainerView) -> None:
        self._loss, self._failed = 0.0, False

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        plain = self.itemize_results(results)
        at = {"step": trainer.global_forward_batches, "epoch": trainer.cur_epoch_idx}
        # One by one: for a dict, fitlog 0.9.15 uses numpy.str, which current numpy does not have.
        for name, value in plain.items():
            self.fitlog.add_metric(value, name=name, **at)
        if self.is_better_results(plain):
            for name, value in {**plain, **at}.items():
                self.fitlog.add_best_metric(value, name=name)

    def on_before_backward(self, trainer: TrainerView, outputs: Any) -> None:
        if self.log_loss_every:
            self._loss = self._loss + trainer.extract_loss_from_outputs(outputs).detach()

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        step = trainer.global_forward_batches
        if self.log_loss_every and step % self.log_loss_every == 0:
            mean = float(self._loss) / self.log_loss_every
            self.fitlog.add_loss(mean, name="loss", step=step, epoch=trainer.cur_epoch_idx)
            self._loss = 0.0

    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        if isinstance(exception, EarlyStopException):
            return
        self._failed = True
        if self.log_exception:
            self.fitlog.add_other(repr(exception), name="except_info")

    def on_train_end(self, trainer: TrainerView) -> None:
        self.fitlog.finish(status=int(self._failed))


def _fitlog() -> Any:
    try:
        return importlib.import_module("fitlog")
    except ModuleNotFoundError as error:
        if error.name != "fitlog":
            raise ImportError(f"fitlog is installed, but cannot be imported: {error!r}. {INSTEAD}") from error
        raise ImportError(
            f"FitlogCallback needs the package 'fitlog', which is not installed. It is not maintained: its last "
            f"version, 0.9.15, fails with current numpy if it gets a dict. {INSTEAD}"
        ) from None
    except Exception as error:
        raise ImportError(
            f"fitlog is installed, but cannot be imported: {error!r}. It is not maintained, and uses names that current numpy "
            f"does not have. {INSTEAD}"
        ) from error
