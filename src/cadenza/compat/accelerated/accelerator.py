"""The part of ``accelerate.Accelerator`` that the documents of pytorch-accelerated use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cadenza.drivers import Driver


class Accelerator:
    """The object behind ``trainer._accelerator``."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self.driver.device

    @property
    def num_processes(self) -> int:
        """The number of processes."""
        return self.driver.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process, from 0."""
        return self.driver.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine, from 0."""
        return self.driver.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first of all processes."""
        return self.driver.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process on this machine."""
        return self.driver.local_rank == 0

    def wait_for_everyone(self) -> None:
        """Wait for all processes. Every process must call this."""
        self.driver.barrier()

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        """Return the user's own module inside a prepared one."""
        return self.driver.unwrap(model)

    def gather(self, value: Any) -> Any:
        """Return the tensors of all processes, joined along the first dimension. Every process must call this."""
        if self.driver.world_size == 1:
            return value
        if isinstance(value, Mapping):
            return {key: self.gather(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.gather(part) for part in value)
        parts = self.driver.gather(value)
        return torch.cat([part.to(self.device) if part.ndim else part.to(self.device).reshape(1) for part in parts])
