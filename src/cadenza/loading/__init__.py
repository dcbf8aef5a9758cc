"""Loaders with a position, and data that is random by its place alone."""

from cadenza.loading.position import Positioned, batches_in, positioned
from cadenza.loading.shards import Past, Share
from cadenza.loading.tensors import TensorBatches

__all__ = ["Past", "Positioned", "Share", "TensorBatches", "batches_in", "positioned"]
