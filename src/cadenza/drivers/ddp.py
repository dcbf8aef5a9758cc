"""The whole model on every rank, and a shard of the data on each: torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from cadenza.drivers.group import GroupDriver


class DdpDriver(GroupDriver):
    """Several processes, on one machine or many, each with a whole model: gloo between CPUs, NCCL between CUDA devices.

    An existing process group is used and never destroyed. Otherwise the driver starts one from the variables of torchrun or, if
    they are not set, of SLURM; it ends with the process. Every rank must make a driver.

    Args:
        device: ``"cpu"`` or ``"cuda"``; None takes the CUDA device of this rank if there is one.
        find_unused_parameters: Find after each forward pass the parameters that took no part. Needed if there are any; slower.
        share_data: Split each loader over the ranks, unless it has a distributed sampler. False: the loaders return
            different shards on each rank, as streams must.
        timeout_s: Seconds to wait for the other ranks, at the start and in each exchange, before an error is raised.

    Raises:
        DistributedError: This process was started alone, or the other ranks cannot be reached.

    >>> import torch.distributed as dist
    >>> from cadenza.testing import tiny_run
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun needs no such line
    >>> run = tiny_run(driver=DdpDriver("cpu", find_unused_parameters=True))
    >>> run.driver.world_size, run.outcome.kind
    (1, 'finished')
    >>> dist.destroy_process_group()
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
        self._wrappers: WeakValueDictionary[int, DistributedDataParallel] = WeakValueDictionary()

    def prepare(self, model: nn.Module) -> nn.Module:
        self._run += 1
        model = model.to(self.device)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        wrapper = self._wrappers[id(model)] = DistributedDataParallel(model, **self._options())
        return wrapper

    def renew(self, model: nn.Module) -> None:
        # It waits for the gradients of the parameters that required one when it was made: it would wait forever for parameters
        # that are frozen since, and not reduce those that are trained again. It is made again in place, as others refer to it.
        model = self._wrappers.get(id(model), model)
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
