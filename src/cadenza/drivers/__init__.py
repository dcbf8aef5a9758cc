"""How tensors and processes are run."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.drivers.base import Driver as Driver
    from cadenza.drivers.ddp import DdpDriver as DdpDriver
    from cadenza.drivers.fsdp import FsdpDriver as FsdpDriver
    from cadenza.drivers.selection import driver_of as driver_of
    from cadenza.drivers.single import SingleDriver as SingleDriver
    from cadenza.drivers.tensor_parallel import TensorParallel as TensorParallel

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
