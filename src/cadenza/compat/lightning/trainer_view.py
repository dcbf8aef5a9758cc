"""``trainer``: a native run with the names of Lightning's ``Trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.callbacks.evaluate import Evaluate
from cadenza.compat.absent import facts_of
from cadenza.compat.adapter.foreign import callbacks_of, foreign_callbacks
from cadenza.compat.lightning.connectors import (
    AcceleratorConnectorView,
    CheckpointConnectorView,
    LoggerConnectorView,
    StateView,
)
from cadenza.compat.lightning.library import imported, library, library_of, set_rank
from cadenza.compat.lightning.logger_view import LoggerView
from cadenza.compat.lightning.loops_view import EvaluationLoopView, FitLoopView, PredictLoopView
from cadenza.compat.lightning.metrics import Metrics
from cadenza.compat.lightning.saving import save_checkpoint
from cadenza.compat.lightning.setup_view import SetupView
from cadenza.compat.lightning.strategy_view import StrategyView
from cadenza.engine.session import session_of

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run


KEY = "lightning"
"""The key of the view in ``Session.adapters``."""

STEP_OUTPUT = "step_output"
"""The key of the LightningModule step's result in the outputs of an evaluation batch."""


def trainer_view(run: Run) -> TrainerView:
    """Return the ``trainer`` of a run, shared by all callbacks."""
    adapters = session_of(run).adapters
    view = adapters.get(KEY)
    if view is None:
        view = adapters[KEY] = TrainerView(run)
    own: TrainerView = view
    return own


class TrainerView(SetupView):
    """The ``trainer`` argument of Lightning's hooks, and ``self.trainer`` of a LightningModule."""

    title: ClassVar[str] = "trainer"
    absent: ClassVar[Mapping[str, str]] = facts_of("lightning", "advice.toml")["attributes"]

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        set_rank(run.driver.rank)
        self._begun = self._trained = False
        self._broken: bool = False
        """Whether an error is propagating. Lightning then calls only ``on_exception``."""
        self._conductor: Callable[[], object] | None = None
        self._names: list[str] = []
        self._metrics = Metrics(run)
        self._state, self._strategy, self._logger = StateView(self), StrategyView(self), LoggerView(self)
        self._connector = LoggerConnectorView(self, self._logger)
        self._fit_loop, self._predict_loop = FitLoopView(self), PredictLoopView(self)
        self._modules = WeakValueDictionary[str, Any]()  # each refers to this view

    # -- values -------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name that was logged or evaluated, such as ``val_loss`` and ``eval/loss``."""
        return self._metrics.newest(self._evaluation)

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest value of each name in the records of the run."""
        latest = self._run.history.latest
        return {name: torch.tensor(value, dtype=torch.float32) for name, value in latest.items()}

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values of ``pl_module.log(..., prog_bar=True)``, and the loss if it is logged."""
        latest = self._run.history.latest
        shown = {"train_loss": latest["train/loss"]} if "train/loss" in latest else {}
        return shown | {name: float(value) for name, value in self._metrics.shown.items()}

    # -- state --------------------------------------------------------------------------------------

    @property
    def state(self) -> StateView:
        """``fn``, ``stage`` and ``status``."""
        return self._state

    @property
    def training(self) -> bool:
        """Whether the stage is training."""
        return self._stage == "train"

    @property
    def validating(self) -> bool:
        """Whether an evaluation is in progress."""
        return self._stage == "validate"

    @property
    def testing(self) -> bool:
        """Whether ``Trainer.evaluate(name="test")`` is in progress."""
        return self._stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether ``Trainer.predict`` is in progress."""
        return self._stage == "predict"

    @property
    def sanity_checking(self) -> bool:
        """Whether a sanity check is in progress."""
        return self._stage == "sanity_check"

    @property
    def evaluating(self) -> bool:
        """Whether an evaluation, a test or a sanity check is in progress."""
        return self._stage in ("validate", "test", "sanity_check")

    # -- parts --------------------------------------------------------------------------------------

    @property
    def lightning_module(self) -> Any:
        """The ``pl_module``: the model, or a view of it if it is not a LightningModule."""
        return self._module(library())

    @property
    def model(self) -> nn.Module:
        """The prepared model: wrapped, on multiple ranks."""
        return session_of(self._run).model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the run."""
        return list(self._run.optimizers)

    @property
    def callbacks(self) -> list[Any]:
        """The callbacks of Lightning in the list, in order."""
        return foreign(self._run)

    @property
    def strategy(self) -> StrategyView:
        """The driver."""
        return self._strategy

    @property
    def logger(self) -> LoggerView | None:
        """The records of the run; None without a directory, as with ``logger=False``."""
        return None if self._run.info.directory is None else self._logger

    @property
    def loggers(self) -> list[LoggerView]:
        """The records in a list, even without a directory, because ``LearningRateMonitor`` and others need one."""
        return [self._logger]

    @property
    def _logger_connector(self) -> LoggerConnectorView:
        return self._connector

    @property
    def _accelerator_connector(self) -> AcceleratorConnectorView:
        return AcceleratorConnectorView(self)

    @property
    def _checkpoint_connector(self) -> CheckpointConnectorView:
        return CheckpointConnectorView(self)

    @property
    def fit_loop(self) -> FitLoopView:
        """The part of the epoch loop that callbacks read and set."""
        return self._fit_loop

    @property
    def _evaluation_loop(self) -> EvaluationLoopView:
        return EvaluationLoopView(self)

    @property
    def validate_loop(self) -> EvaluationLoopView:
        """The loop of the current evaluation."""
        return EvaluationLoopView(self)

    @property
    def test_loop(self) -> EvaluationLoopView:
        """The loop of the current evaluation."""
        return EvaluationLoopView(self)

    @property
    def predict_loop(self) -> PredictLoopView:
        """The loop of ``Trainer.predict``: the predictions, and the indices of their samples."""
        return self._predict_loop

    @property
    def _active_loop(self) -> FitLoopView | EvaluationLoopView:
        return FitLoopView(self) if self._evaluation is None else EvaluationLoopView(self)

    @property
    def profiler(self) -> Any:
        """Lightning's default profiler, which measures nothing. Use `Profile` in callbacks to measure."""
        return imported("profilers", "PassThroughProfiler")()

    @property
    def num_sanity_val_steps(self) -> int:
        """The number of batches that `Evaluate` tries before the first epoch."""
        return max((evaluate.sanity_batches for evaluate in callbacks_of(self._run, Evaluate)), default=0)

    @property
    def overfit_batches(self) -> float:
        """0.0: put `Limit` into callbacks."""
        return 0.0

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        """0: give a loader that changes with the epoch."""
        return 0

    # -- methods ------------------------------------------------------------------------------------

    def print(self, *values: Any, **keywords: Any) -> None:
        """Print a line on the main process."""
        self._run.print(*values)

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Write a checkpoint file of Lightning. Every rank must call this.

        A run resumes only from the checkpoints of `Checkpoint`, not from this file.
        """
        save_checkpoint(self._run, self, filepath, weights_only=bool(weights_only))

    # -- for the adapter ----------------------------------------------------------------------------

    def provide(self, **values: Any) -> None:
        """Set attributes that a LightningModule provides, such as ``datamodule`` or ``lr_scheduler_configs``.

        ``global_step`` is a function; the others are values.
        """
        self._own.update(values)

    def _module_for(self, base: type[Any]) -> Any:
        return self._module(library_of(base))

    def _module(self, package: str) -> Any:
        """Return the ``pl_module`` for callbacks of `package`."""
        from cadenza.compat.lightning.module_view import module_of  # imported here because it needs Lightning's class

        if (module := self._modules.get(package)) is None:
            module = self._modules[package] = module_of(self, package)
        return module

    def _stage_of(self, evaluation: Evaluation) -> str:
        if self._fits:
            return "validate"
        return "predict" if evaluation.name == "predict" else "test" if evaluation.name.startswith("test") else "validate"

    def _batch_of(self, evaluation: Evaluation, done: int) -> tuple[int, ...]:
        """Return ``batch_idx`` of the current batch, of which `done` is counted; of several loaders ``dataloader_idx`` too."""
        if evaluation.source is None:
            return (evaluation.batch - done,)
        return evaluation._number - 1, list(evaluation.sources).index(evaluation.source)

    def _outputs_of(self, outputs: Mapping[str, Any]) -> Any:
        names = {*outputs}  # without outputs that are computed on demand
        if STEP_OUTPUT in names:
            return outputs[STEP_OUTPUT]
        return outputs["predictions"] if self._stage == "predict" and "predictions" in names else outputs

    @property
    def max_time(self) -> timedelta | None:
        """None: put `TimeLimit` or a ``Timer`` into callbacks."""
        return None


def foreign(run: Run) -> list[Any]:
    """Return the callbacks of Lightning in the list, in order."""
    return [callback.callback for callback in foreign_callbacks(run, KEY)]
