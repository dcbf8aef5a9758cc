"""Checkpoints on disk."""

from cadenza.checkpoint.store.branches import Branch, Point, Saved
from cadenza.checkpoint.store.checkpoints import Entry, Loaded, Store
from cadenza.checkpoint.store.content import Content
from cadenza.checkpoint.store.shards import Stored

__all__ = ["Branch", "Content", "Entry", "Loaded", "Point", "Saved", "Store", "Stored"]
