"""Loaders with a position, and data that is random by its place alone."""

from cadenza.loading.position import Positioned, positioned

__all__ = ["Positioned", "positioned"]
