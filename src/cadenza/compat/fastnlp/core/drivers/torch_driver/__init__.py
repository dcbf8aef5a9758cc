"""``fastNLP.core.drivers.torch_driver``: the drivers of torch."""

from cadenza.compat.fastnlp.core.drivers.torch_driver.ddp import TorchDDPDriver
from cadenza.compat.fastnlp.core.drivers.torch_driver.single_device import TorchSingleDriver
from cadenza.compat.fastnlp.core.drivers.torch_driver.torch_driver import TorchDriver
from cadenza.compat.fastnlp.core.drivers.torch_driver.torch_fsdp import TorchFSDPDriver
from cadenza.compat.fastnlp.core.drivers.torch_driver.utils import optimizer_state_to_device, torch_seed_everything

__all__ = [
    "TorchDDPDriver",
    "TorchDriver",
    "TorchFSDPDriver",
    "TorchSingleDriver",
    "optimizer_state_to_device",
    "torch_seed_everything",
]
