"""``fastNLP.core.drivers``: the device of the model and the rank of this process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cadenza import drivers
from cadenza.compat.absent import advise

advise(__name__)


class Driver:
    """A native driver with fastNLP's names, and the model that it runs.

    Args:
        native: The driver.
        model: The user's own module, on the device.
        optimizers: The argument of the trainer.
    """

    def __init__(self, native: drivers.Driver, model: nn.Module, optimizers: Any = None) -> None:
        self.native, self.model = native, model
        self.optimizers = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers] if optimizers else []

    @property
    def model_device(self) -> torch.device:
        """The device of the model."""
        return self.native.device

    @property
    def data_device(self) -> torch.device:
        """The device of batches."""
        return self.native.device

    device = model_device

    @property
    def global_rank(self) -> int:
        """The rank of this process, from 0."""
        return self.native.rank

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self.native.world_size

    def unwrap_model(self) -> nn.Module:
        """Return the user's own module."""
        return self.model

    def is_distributed(self) -> bool:
        """Return whether there are several processes."""
        return self.native.world_size > 1

    def is_global_zero(self) -> bool:
        """Return whether this process prints and writes."""
        return self.native.is_main

    def get_local_rank(self) -> int:
        """Return the rank of this process on its machine."""
        return self.native.local_rank

    def barrier(self) -> None:
        """Wait for all processes."""
        self.native.barrier()

    def move_data_to_device(self, batch: Any) -> Any:
        """Return a batch with every tensor in it on the device."""
        return self.native.to_device(batch)

    def set_model_mode(self, mode: str) -> None:
        """Put the model in mode ``"train"`` or ``"eval"``."""
        if mode not in ("train", "eval"):
            raise ValueError(f"mode must be 'train' or 'eval'; got {mode!r}")
        self.model.train(mode == "train")

    def __repr__(self) -> str:
        return f"Driver({self.native!r})"
