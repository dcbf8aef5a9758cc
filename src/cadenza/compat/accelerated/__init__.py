"""pytorch-accelerated: its callbacks beside native ones, and its trainer, with the original's names."""

from cadenza.compat.absent import advise
from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues

__all__ = ["Trainer", "TrainerPlaceholderValues"]

__version__ = "0.1.61"  # of the original that this adapter follows

advise(__name__)
