"""Checkpoints on disk."""

from cadenza.store.checkpoints import Content, Loaded, Saved, Store
from cadenza.store.shards import Stored

__all__ = ["Content", "Loaded", "Saved", "Store", "Stored"]
