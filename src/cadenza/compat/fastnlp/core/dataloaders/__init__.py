"""Loaders."""

from cadenza.compat.fastnlp.core.dataloaders.prepare_dataloader import prepare_dataloader
from cadenza.compat.fastnlp.core.dataloaders.torch_dataloader import TorchDataLoader, prepare_torch_dataloader

__all__ = ["TorchDataLoader", "prepare_dataloader", "prepare_torch_dataloader"]
