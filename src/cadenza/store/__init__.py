"""Checkpoints on disk."""

from cadenza.store.checkpoints import Content, Loaded, Saved, Store

__all__ = ["Content", "Loaded", "Saved", "Store"]
