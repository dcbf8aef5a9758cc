"""Loaders with a position, and data that is random by its place alone."""

from cadenza.loading.position import Positioned, batches_in, positioned
from cadenza.loading.share import Past, Share

__all__ = ["Past", "Positioned", "Share", "batches_in", "positioned"]
