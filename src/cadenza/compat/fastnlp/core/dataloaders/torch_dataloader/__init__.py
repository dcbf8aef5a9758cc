"""Loaders of torch batches."""

from cadenza.compat.fastnlp.core.dataloaders.torch_dataloader.fdl import TorchDataLoader, prepare_torch_dataloader

__all__ = ["TorchDataLoader", "prepare_torch_dataloader"]
