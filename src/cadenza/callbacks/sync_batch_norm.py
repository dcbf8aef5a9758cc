"""Convert BatchNorm layers to SyncBatchNorm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cadenza.hooks.moments import Callback
from cadenza.status.decisions import decide
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.run import Run


class ConvertSyncBatchNorm(Callback):
    """With multiple ranks, replace every BatchNorm layer with ``torch.nn.SyncBatchNorm`` when a run is set up.

    On one rank the model does not change. The new layers hold the parameter and buffer objects of the old layers, so that
    optimizers and wrappers stay valid. They stay in the model after the run. Without a process group they compute the same as
    BatchNorm, and their weights have the same names. SyncBatchNorm trains on GPUs only.

    With multiple ranks: each rank converts its own model; the layers then communicate in every forward pass of the training.

    Raises:
        ValueError: The model itself is a BatchNorm layer, or the model is sharded.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[ConvertSyncBatchNorm()]).why("left alone")
    'left alone by ConvertSyncBatchNorm at the start: BatchNorm, as there is one rank'
    """

    def on_setup(self, run: Run) -> None:
        if run.driver.world_size == 1:
            decide(run, "left alone", "BatchNorm, as there is one rank")
            return
        if run.driver.shards:
            raise ValueError(
                "ConvertSyncBatchNorm cannot replace layers that FSDP has already sharded. Call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before you pass the model to the trainer."
            )
        model = run.model
        old = [
            module for module in model.modules() if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        ]
        if model in old:
            raise ValueError("ConvertSyncBatchNorm replaces layers inside a model; got a model that is one. Wrap it.")
        if old:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        decide(run, "converted", f"{len(old)} BatchNorm layers, to SyncBatchNorm over {counted(run.driver.world_size, 'rank')}")
