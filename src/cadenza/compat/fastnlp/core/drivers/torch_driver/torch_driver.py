"""``fastNLP.core.drivers.torch_driver.torch_driver``: the base class of the drivers of torch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn

from cadenza import drivers
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.drivers.rendezvous import rendezvous_of


class TorchDriver(Driver):
    """The base class of all drivers of this adapter: Cadenza trains with torch."""

    @classmethod
    def around(cls, native: drivers.Driver, model: nn.Module, optimizers: Any = None, **kwargs: Any) -> Self:
        """Return a driver of this class around a native one."""
        made = cls.__new__(cls)
        Driver.__init__(made, native, model, optimizers, **kwargs)
        return made

    @staticmethod
    def worker_init_function(worker_id: int, rank: int | None = None) -> None:
        """Seed the random generators of a loader's worker: ``random``, numpy and torch, each from a seed of its own.

        Args:
            worker_id: The index of the worker.
            rank: The rank of the process; None: that of the launcher.
        """
        if rank is None:
            meeting = rendezvous_of()
            rank = 0 if meeting is None else meeting.rank
        base = torch.initial_seed() - worker_id  # the loader's seed, which is the same in all workers
        for_numpy, for_torch, for_random = np.random.SeedSequence([base, worker_id, rank]).spawn(3)
        np.random.seed(for_numpy.generate_state(4))
        torch.manual_seed(int(for_torch.generate_state(1, dtype=np.uint64)[0]))
        random.seed(int.from_bytes(for_random.generate_state(4).tobytes(), "little"))

    def set_deterministic_dataloader(self, dataloader: Any) -> None:
        """Let each worker of a loader seed its random generators, unless the loader has a ``worker_init_fn``."""
        if dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(self.worker_init_function, rank=self.global_rank)


class LaunchedDriver(TorchDriver):
    """The base class for several processes that a launcher started.

    Args:
        model: The model.
        parallel_device: Ignored: each process takes its own device.
        is_pull_by_torch_run: Ignored, because the launcher may be any.
        fp16: As in `Driver`.
        torch_kwargs: As in `Driver`.
        kwargs: The other arguments of `Driver`.

    Raises:
        DistributedError: The other processes cannot be reached.
    """

    kind: ClassVar[type[drivers.DdpDriver | drivers.FsdpDriver]]
    """The native driver."""

    def __init__(
        self,
        model: nn.Module,
        parallel_device: Any = None,
        is_pull_by_torch_run: bool = True,
        fp16: bool = False,
        torch_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(self.kind(), model, fp16=fp16, torch_kwargs=torch_kwargs, **kwargs)
