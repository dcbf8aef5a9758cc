"""Loaders that can be resumed at any batch, with random numbers that depend on the index of the batch alone."""

from cadenza.loading.mixture import Mixture, current_source
from cadenza.loading.resumable_base import ResumableLoader
from cadenza.loading.resumable_loader import num_batches, resumable
from cadenza.loading.shards import Consumed, Shard
from cadenza.loading.tensors import TensorBatches

__all__ = [
    "Consumed",
    "Mixture",
    "ResumableLoader",
    "Shard",
    "TensorBatches",
    "current_source",
    "num_batches",
    "resumable",
]
