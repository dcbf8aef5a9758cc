"""An evaluation by ``validation_step``, ``test_step`` or ``predict_step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from cadenza.compat.lightning.module.attached import Attached
from cadenza.compat.lightning.module.logging import ModuleLog
from cadenza.compat.lightning.module.training import redirected
from cadenza.compat.lightning.module.transfer import Transfer
from cadenza.errors import AdapterError
from cadenza.loading.evaluation import Evaluation
from cadenza.run import Run
from cadenza.status.reprs import signature_of

NAMES: Mapping[str, str] = {"validate": "val", "test": "test", "predict": "predict"}
"""The evaluation name of each stage."""

HOOK_NAMES: Mapping[str, str] = {"validate": "validation", "test": "test", "predict": "predict"}
"""The name of each stage in hooks."""


class ModuleEvaluation(Evaluation):
    """An evaluation by a method of a LightningModule. Its results have the names passed to ``self.log``.

    Args:
        attached: The LightningModule.
        stage: ``"validate"``, ``"test"`` or ``"predict"``.
        loader: The loader; a `Mixture` of several.
        limit: The largest number of batches of each loader.
    """

    own_names: bool = True

    def __init__(self, attached: Attached, stage: str, loader: Iterable[Any], *, limit: int | None = None) -> None:
        super().__init__(loader, name=NAMES[stage], limit=limit)
        self.attached: Attached = attached
        self.stage: str = stage
        self.outputs: list[dict[str, float]] = []
        """For each loader, its values with ``logger=True``."""
        self.predictions: list[list[Any]] = []
        """For each loader, the result of ``predict_step`` for each batch of this rank, on the host."""
        self.batch_index: int = 0
        """The index of the current batch in its loader, on this rank."""
        self.loader_index: int = 0
        """The index of the current loader."""
        self.ended: bool = False
        """Whether ``on_*_epoch_end`` was called."""

    @property
    def log(self) -> ModuleLog:
        """The values of ``self.log``."""
        log: ModuleLog = self.attached.log
        return log

    @property
    def hook(self) -> str:
        """The stage in the names of hooks: ``"validation"``, ``"test"`` or ``"predict"``."""
        return HOOK_NAMES[self.stage]

    @property
    def several(self) -> bool:
        """Whether there are several loaders, which are read one after another."""
        return len(self.sources) > 1

    def trial(self, batches: int) -> ModuleEvaluation:
        """Return an evaluation of the first `batches` batches of each loader."""
        limit = batches if self.limit is None else min(batches, self.limit)
        return ModuleEvaluation(self.attached, self.stage, self.loader, limit=limit)

    def read(self, run: Run, data_seed: int) -> Iterator[Any]:
        transfer, names = self.attached.driver.to_device, list(self.sources)
        for batch in super().read(run, data_seed):
            if isinstance(transfer, Transfer):
                transfer.dataloader_idx = names.index(self.source) if self.source in names else 0
            yield batch
        if isinstance(transfer, Transfer):
            transfer.dataloader_idx = 0

    def step(self, model: nn.Module | None) -> Callable[[Any], Any]:
        """Return the function that calls the step with a batch and its indices.

        Args:
            model: The model of the run if the step must be called inside its forward pass, where sharded weights are complete.

        Raises:
            AdapterError, RuntimeError: The method does not accept the arguments.
        """
        attached, name = self.attached, f"{self.hook}_step"
        parameters = signature_of(getattr(attached.module, name)).parameters
        some = [parameter for parameter in parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
        anything = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in some)
        owner = f"{type(attached.module).__name__}.{name}"
        if "dataloader_iter" in parameters:
            raise AdapterError(f"{owner} takes dataloader_iter, but a native run reads the loader. Take (batch, batch_idx).")
        takes_index = "batch_idx" in parameters or len(some) > 1 or anything
        takes_loader = "dataloader_idx" in parameters or anything
        if self.several and not takes_loader:
            raise RuntimeError(
                f"You provided multiple `{NAMES[self.stage]}_dataloader`, but no `dataloader_idx` argument in `{owner}()`. Try "
                "adding `dataloader_idx=0` to its signature."
            )

        def call(batch: Any) -> Any:
            arguments = [self.batch_index] if takes_index else []
            arguments += [self.loader_index] if self.several else []
            if model is not None:
                return redirected(attached, name, model, (batch, *arguments))
            return attached.call(name, batch, *arguments)

        return call
