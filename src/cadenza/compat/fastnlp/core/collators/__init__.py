"""From samples to batches."""

from cadenza.compat.fastnlp.core.collators.collator import Batch, Collator

__all__ = ["Batch", "Collator"]
