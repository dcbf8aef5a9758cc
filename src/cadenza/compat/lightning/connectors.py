"""The connectors of Lightning's ``Trainer`` that third-party callbacks read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cadenza.compat.lightning.library import imported
from cadenza.compat.lightning.logger_view import LoggerView
from cadenza.compat.lightning.part_view import PartView
from cadenza.compat.lightning.saving import lightning_checkpoint
from cadenza.compat.lightning.setup_view import SetupView
from cadenza.hooks.dispatch import hooks_of


class AcceleratorConnectorView(PartView):
    """Processes and devices, as read by callbacks such as Optuna's pruning callback."""

    title: ClassVar[str] = "trainer._accelerator_connector"
    absent: ClassVar[Mapping[str, str]] = {"cluster_environment": "Read trainer.global_rank and trainer.world_size."}

    @property
    def is_distributed(self) -> bool:
        """Whether the run has several processes."""
        return self._run.driver.world_size > 1

    @property
    def accelerator(self) -> Any:
        """The accelerator of Lightning for the device."""
        return self._trainer.accelerator


class CheckpointConnectorView(PartView):
    """Checkpoint contents for callbacks that write files themselves, such as MLflow's."""

    title: ClassVar[str] = "trainer._checkpoint_connector"
    absent: ClassVar[Mapping[str, str]] = {
        "restore": "Call trainer.fit(resume=...) of the native trainer.",
        "save_checkpoint": "Use trainer.save_checkpoint(path).",
    }

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return the content written by ``trainer.save_checkpoint``."""
        return lightning_checkpoint(self._run, self._trainer, weights_only=bool(weights_only))


class LoggerConnectorView(PartView):
    """The part of ``trainer._logger_connector`` that Lightning's callbacks read."""

    title: ClassVar[str] = "trainer._logger_connector"

    def __init__(self, trainer: SetupView, logger: LoggerView) -> None:
        super().__init__(trainer)
        self._logger = logger

    @property
    def should_update_logs(self) -> bool:
        """Whether the current step is logged: every ``log_every_n_steps`` steps and before a stop."""
        trainer = self._trainer
        evaluation = trainer._evaluation
        step = self._run.progress.step + 1 if evaluation is None else max(1, evaluation.batch)
        return step % trainer.log_every_n_steps == 0 or trainer.should_stop

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add values to the record of the current step."""
        self._logger.log_metrics(metrics, step)


class StateView(PartView):
    """The state of a run as Lightning's ``TrainerState``."""

    title: ClassVar[str] = "trainer.state"

    @property
    def fn(self) -> Any:
        """``TrainerFn``: FITTING in a fit; VALIDATING, TESTING or PREDICTING outside."""
        return imported("trainer.states", "TrainerFn")("fit" if self._trainer._fits else self._trainer._stage)

    @property
    def stage(self) -> Any:
        """``RunningStage``: TRAINING, SANITY_CHECKING, VALIDATING, TESTING or PREDICTING."""
        return imported("trainer.states", "RunningStage")(self._trainer._stage)

    @property
    def status(self) -> Any:
        """``TrainerStatus``: RUNNING, FINISHED or INTERRUPTED."""
        name = "interrupted" if self._trainer._interrupted else "finished" if self.finished else "running"
        return imported("trainer.states", "TrainerStatus")(name)

    @property
    def finished(self) -> bool:
        """Whether the run has ended without an error, and its last hook has returned."""
        outcome = self._run.outcome
        inside = hooks_of(self._run).here().listener is not None
        return outcome is not None and outcome.kind != "failed" and not inside

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self._trainer._interrupted or self.finished
