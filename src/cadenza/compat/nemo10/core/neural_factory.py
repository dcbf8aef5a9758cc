"""``nemo.core.neural_factory`` of NeMo 0.10."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.nemo10.backends.pytorch import common, tutorials
from cadenza.compat.neural.actions import Actions
from cadenza.compat.neural.adapted import AdaptedRun
from cadenza.compat.neural.factory import NeuralModuleFactory as _Factory
from cadenza.compat.neural.kinds import Backend, DeviceType, ModelMode, Optimization
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.tensors import NeuralModule
from cadenza.errors import nearest
from cadenza.hooks.moments import BaseCallback, Callback

if TYPE_CHECKING:
    from cadenza.run import Run

__all__ = ["Actions", "Backend", "DeviceType", "ModelMode", "NeuralModuleFactory", "Optimization", "logging"]


class NeuralModuleFactory(_Factory):
    """The entry point of NeMo 0.10 scripts. Its first argument is the backend; for the others see its base class."""

    epoch_key = "epoch_num"

    def __init__(
        self, backend: Backend = Backend.PyTorch, local_rank: int | None = None, *arguments: Any, **keywords: Any
    ) -> None:
        super().__init__(local_rank, *arguments, **{**keywords, "backend": backend})

    def get_trainer(self, tb_writer: Any = None) -> NeuralModuleFactory:
        """Return this factory, which trains, evaluates and infers."""
        return self

    def get_module(
        self, name: str, collection: str, params: Mapping[str, Any] | None = None, pretrained: bool = False
    ) -> NeuralModule:
        """Create a module of the collection ``"tutorials"`` (also ``"toys"`` or ``"other"``) or ``"common"``.

        Raises:
            ValueError: The collection or the module is not available, or it would be `pretrained`.
        """
        known = {"tutorials": tutorials, "toys": tutorials, "other": tutorials, "common": common}
        if collection not in known or pretrained:
            raise ValueError(
                f"get_module creates modules of {', '.join(known)}, without pretrained weights; got {name!r} of {collection!r}."
                " Wrap a torch.nn.Module with TrainableNM.of instead."
            )
        names = known[collection].__all__
        if name not in names:
            raise ValueError(
                f"collection {collection!r} has no module {name!r}.{nearest(name, names)} It has {', '.join(names)}"
            )
        module: NeuralModule = getattr(known[collection], name)(**params or {})
        return module

    def loop_callbacks(self) -> list[BaseCallback]:
        return [_WriteRate(self.tb_writer)] if self.writes else []  # on all processes: their lists must be equal


class _WriteRate(Callback):
    """Writes ``param/lr`` for each batch, like the loop of 0.10."""

    def __init__(self, writer: Any) -> None:
        self.writer = writer

    def on_batch_start(self, run: Run, batch: Any) -> None:
        if self.writer is not None:
            self.writer.add_scalar("param/lr", AdaptedRun.of(run).learning_rate, run.progress.step)
