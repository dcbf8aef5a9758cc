"""``fastNLP.core.drivers.torch_driver.torch_fsdp``: several processes, with FSDP2."""

from __future__ import annotations

from typing import ClassVar

from cadenza import drivers
from cadenza.compat.fastnlp.core.drivers.torch_driver.torch_driver import LaunchedDriver


class TorchFSDPDriver(LaunchedDriver):
    """Several processes, each with a shard of the model; see `LaunchedDriver`."""

    kind: ClassVar[type[drivers.DdpDriver | drivers.FsdpDriver]] = drivers.FsdpDriver
