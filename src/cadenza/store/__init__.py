"""Checkpoints on disk."""

from cadenza.store.branches import Branch, Point, Saved
from cadenza.store.checkpoints import Entry, Loaded, Store
from cadenza.store.content import Content
from cadenza.store.shards import Stored

__all__ = ["Branch", "Content", "Entry", "Loaded", "Point", "Saved", "Store", "Stored"]
