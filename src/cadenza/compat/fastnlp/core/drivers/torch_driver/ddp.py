"""``fastNLP.core.drivers.torch_driver.ddp``: one process a device, with DistributedDataParallel."""

from __future__ import annotations

from typing import ClassVar

from cadenza import drivers
from cadenza.compat.fastnlp.core.drivers.torch_driver.torch_driver import LaunchedDriver


class TorchDDPDriver(LaunchedDriver):
    """Several processes, each with a whole model; see `LaunchedDriver`."""

    kind: ClassVar[type[drivers.DdpDriver | drivers.FsdpDriver]] = drivers.DdpDriver
