"""The same model on every rank, each with its part of the data: torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cadenza.drivers.group import GroupDriver


class DdpDriver(GroupDriver):
    """Several processes, on one machine or many, each with a whole model: gloo between CPUs, NCCL between CUDA devices.

    A process group that exists is used, and never destroyed. Else one is started from the variables of torchrun or, without
    them, of SLURM, and ends with the process. Every rank must make one.

    Args:
        device: ``"cpu"`` or ``"cuda"``; None takes this rank's CUDA device if there is one.
        find_unused_parameters: Look after each forward pass which parameters took part; needed, and slower, if some do not.
        share_data: Whether each loader is shared out over the ranks, unless it has a distributed sampler. False: each rank
            gives its own part, as it must with a stream that it reads alone.
        timeout_s: How long to wait for the others, in seconds, until it is an error: at the start, and in each exchange.

    Raises:
        DistributedError: This process was not started as one of several; or the others cannot be reached.
    """

    def __init__(
        self,
        device: str | None = None,
        *,
        find_unused_parameters: bool = False,
        share_data: bool = True,
        timeout_s: float = 600,
    ) -> None:
        super().__init__(device, share_data=share_data, timeout_s=timeout_s)
        self.find_unused_parameters = find_unused_parameters

    def prepare(self, model: nn.Module) -> nn.Module:
        self._run += 1
        model = model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        return DistributedDataParallel(model, **self._options())

    def renew(self, model: nn.Module) -> None:
        # It waits for the gradients of the parameters that required one when it was made, so it is made again. In place: others
        # hold it. Those that are frozen now would be waited for in vain, and those that learn again not be reduced.
        if isinstance(model, DistributedDataParallel):
            training = model.training
            DistributedDataParallel.__init__(model, model.module, **self._options())
            model.training = training

    def _options(self) -> dict[str, Any]:
        devices = [self.device] if self.device.type == "cuda" else None
        return {"device_ids": devices, "find_unused_parameters": self.find_unused_parameters}

    def unwrap(self, model: nn.Module) -> nn.Module:
        inner: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        return inner

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        self.average_gradients(parameters)
