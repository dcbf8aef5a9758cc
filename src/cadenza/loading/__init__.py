"""Loaders that can be resumed at any batch, with random numbers that depend on the index of the batch alone."""

from cadenza.loading.resumable_loader import ResumableLoader, num_batches, resumable
from cadenza.loading.shards import Consumed, Shard
from cadenza.loading.tensors import TensorBatches

__all__ = ["Consumed", "ResumableLoader", "Shard", "TensorBatches", "num_batches", "resumable"]
