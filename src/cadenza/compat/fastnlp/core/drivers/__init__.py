"""``fastNLP.core.drivers``."""

from cadenza.compat.fastnlp.core.drivers.choose_driver import choose_driver
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.compat.fastnlp.core.drivers.torch_driver import (
    TorchDDPDriver,
    TorchDriver,
    TorchFSDPDriver,
    TorchSingleDriver,
    optimizer_state_to_device,
    torch_seed_everything,
)

__all__ = [
    "Driver",
    "TorchDDPDriver",
    "TorchDriver",
    "TorchFSDPDriver",
    "TorchSingleDriver",
    "choose_driver",
    "optimizer_state_to_device",
    "torch_seed_everything",
]
