"""pytorch-accelerated: its callbacks alongside native ones, and its trainer, under the original names."""

from cadenza.compat.absent import advise
from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues

__all__ = ["Trainer", "TrainerPlaceholderValues"]

__version__ = "0.1.61"  # the version of the original that this adapter follows

advise(__name__)
