"""Guest: pytorch-accelerated. Its callbacks work beside native ones, and its trainer is here, under the original's names."""

from cadenza.compat.accelerated.trainer import Trainer, TrainerPlaceholderValues

__all__ = ["Trainer", "TrainerPlaceholderValues"]
