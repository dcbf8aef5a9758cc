"""Loaders that can be resumed at any batch, with random numbers that depend on the index of the batch alone."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.loading.resumable_base import ResumableLoader as ResumableLoader
    from cadenza.loading.resumable_base import current_source as current_source
    from cadenza.loading.resumable_loader import num_batches as num_batches
    from cadenza.loading.resumable_loader import resumable as resumable
    from cadenza.loading.shards import Consumed as Consumed
    from cadenza.loading.shards import Shard as Shard
    from cadenza.loading.tensors import TensorBatches as TensorBatches
    from cadenza.sources.mixture import Mixture as Mixture

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
