"""Checkpoints on disk."""

from cadenza.checkpoint.store.checkpoints import Entry, Store
from cadenza.checkpoint.store.content import Content
from cadenza.checkpoint.store.reading import Loaded
from cadenza.checkpoint.store.shards import Stored
from cadenza.status.branches import Branch, Point, Saved

__all__ = ["Branch", "Content", "Entry", "Loaded", "Point", "Saved", "Store", "Stored"]
