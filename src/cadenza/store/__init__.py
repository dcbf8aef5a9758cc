"""Checkpoints on disk."""

from cadenza.store.checkpoints import Loaded, Saved, Store
from cadenza.store.content import Content
from cadenza.store.shards import Stored

__all__ = ["Content", "Loaded", "Saved", "Store", "Stored"]
