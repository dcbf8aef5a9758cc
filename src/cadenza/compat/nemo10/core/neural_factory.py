"""``nemo.core.neural_factory`` of NeMo 0.10."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cadenza.compat.absent import advise
from cadenza.compat.neural.actions import Actions
from cadenza.compat.neural.factory import NeuralModuleFactory as _Factory
from cadenza.compat.neural.kinds import Backend, DeviceType, ModelMode, Optimization
from cadenza.compat.neural.logs import logging
from cadenza.hooks.moments import BaseCallback, Callback

if TYPE_CHECKING:
    from cadenza.run import Run

__all__ = ["Actions", "Backend", "DeviceType", "ModelMode", "NeuralModuleFactory", "Optimization", "logging"]

advise(__name__)


class NeuralModuleFactory(_Factory):
    """The entry point of NeMo 0.10 scripts. Its first argument is the backend; for the others see its base class."""

    epoch_key = "epoch_num"

    def __init__(
        self, backend: Backend = Backend.PyTorch, local_rank: int | None = None, *arguments: Any, **keywords: Any
    ) -> None:
        super().__init__(local_rank, *arguments, **{**keywords, "backend": backend})

    def loop_callbacks(self) -> list[BaseCallback]:
        return [_WriteRate(self.tb_writer)] if self.writes else []  # on all processes: their lists must be equal


class _WriteRate(Callback):
    """Writes ``param/lr`` for each batch, like the loop of 0.10."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def on_batch_start(self, run: Run, batch: Any) -> None:
        if self.writer is not None:
            self.writer.add_scalar("param/lr", run.optimizers[0].param_groups[0]["lr"], run.progress.step)
