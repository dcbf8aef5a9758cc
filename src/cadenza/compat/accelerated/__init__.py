"""pytorch-accelerated: its callbacks beside native ones, and its trainer, with the original's names."""

from cadenza.compat.absent import advise
from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues

__all__ = ["Trainer", "TrainerPlaceholderValues"]

advise(__name__)
