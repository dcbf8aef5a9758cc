"""Let BatchNorm see the batches of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from cadenza.hooks.moments import Callback
from cadenza.status.decisions import decide

if TYPE_CHECKING:
    from cadenza.run import Run


class ConvertSyncBatchNorm(Callback):
    """On several ranks, replace every BatchNorm layer by ``torch.nn.SyncBatchNorm`` when a run is set up.

    On one rank the model is left alone. The new layers hold the parameters and buffers of the old ones, the same objects, so
    optimizers and wrappers that hold them need not know. They stay after the run: outside of distributed training they
    compute what BatchNorm does, and their weights have the same names. They train on GPUs only.

    Raises:
        ValueError: The whole model is a BatchNorm layer, which cannot be replaced inside of itself; or the model is sharded.

    >>> from cadenza.testing import tiny_run
    >>> tiny_run(callbacks=[ConvertSyncBatchNorm()]).why("left alone")
    'left alone by ConvertSyncBatchNorm at epoch 0, step 0, batch 0: BatchNorm, as there is one rank'
    """

    def on_setup(self, run: Run) -> None:
        if run.driver.world_size == 1:
            decide(run, "left alone", "BatchNorm, as there is one rank")
            return
        if run.driver.shards:
            raise ValueError(
                "ConvertSyncBatchNorm replaces layers when a run is set up, and FSDP has sharded them by then: call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before you give the model to the trainer"
            )
        model = run.model
        old = [one for one in model.modules() if isinstance(one, _BatchNorm) and not isinstance(one, nn.SyncBatchNorm)]
        if model in old:
            raise ValueError("ConvertSyncBatchNorm replaces layers inside of a model; got a model that is one: wrap it")
        if old:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)
        decide(run, "converted", f"{len(old)} BatchNorm layers, to SyncBatchNorm over {run.driver.world_size} ranks")
