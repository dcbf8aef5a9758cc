"""From samples to batches."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.collators.collator import Batch, Collator

__all__ = ["Batch", "Collator"]

advise(__name__)
