"""The connectors of Lightning's ``Trainer`` that callbacks of other packages read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from cadenza.adapters.lightning.parts import Parts
from cadenza.adapters.lightning.saving import lightning_checkpoint
from cadenza.adapters.view import View


class ConnectorOfTrainer(View):
    """A private part of Lightning's ``Trainer``."""

    def __init__(self, trainer: Parts) -> None:
        super().__init__(trainer._run)
        self._trainer = trainer


class AcceleratorConnectorView(ConnectorOfTrainer):
    """What callbacks ask about processes and devices, such as the pruning callback of Optuna."""

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


class CheckpointConnectorView(ConnectorOfTrainer):
    """What callbacks ask for a checkpoint that they write themselves, such as that of MLflow."""

    title: ClassVar[str] = "trainer._checkpoint_connector"
    absent: ClassVar[Mapping[str, str]] = {
        "restore": "Call trainer.fit(resume=...) of the native trainer.",
        "save_checkpoint": "Use trainer.save_checkpoint(path).",
    }

    def dump_checkpoint(self, weights_only: bool = False) -> dict[str, Any]:
        """Return what ``trainer.save_checkpoint`` writes."""
        return lightning_checkpoint(self._run, self._trainer, weights_only=bool(weights_only))
