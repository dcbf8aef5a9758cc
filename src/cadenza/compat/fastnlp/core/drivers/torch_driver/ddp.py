"""``fastNLP.core.drivers.torch_driver.ddp``: one process a device, with DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from cadenza import drivers
from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.drivers.torch_driver.torch_driver import TorchDriver

advise(__name__)


class TorchDDPDriver(TorchDriver):
    """Several processes that a launcher started, each with a whole model.

    Args:
        model: The model.
        parallel_device: Ignored: each process takes its own device.
        fp16: As in `Driver`.
        torch_kwargs: As in `Driver`.
        kwargs: The other arguments of `Driver`.

    Raises:
        DistributedError: The other processes cannot be reached.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel_device: Any = None,
        is_pull_by_torch_run: bool = True,
        fp16: bool = False,
        torch_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(drivers.DdpDriver(), model, fp16=fp16, torch_kwargs=torch_kwargs, **kwargs)
