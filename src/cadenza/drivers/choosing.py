"""Which driver is meant."""

from __future__ import annotations

import os

import torch

from cadenza.drivers.base import Driver
from cadenza.drivers.joining import launched
from cadenza.drivers.single import SingleDriver


def driver_of(driver: str | Driver) -> Driver:
    """Return the driver that ``Trainer(driver=...)`` names.

    ``"auto"`` takes DDP if this process was started as one of several, by torchrun say, and else one process on the best
    device that is there; ``"ddp"`` takes DDP, ``"fsdp"`` FSDP2 with the model in one piece, ``"single"`` one process; a device
    such as ``"cpu"`` or ``"cuda:1"`` one on that.

    Raises:
        ValueError: No such device or driver, or one process is asked for and this one was started as one of several.
        DistributedError: The other processes cannot be reached.
    """
    if isinstance(driver, Driver):
        return driver
    if driver == "ddp" or (driver == "auto" and launched()):
        from cadenza.drivers.ddp import DdpDriver  # here, as most runs are of one process

        return DdpDriver()
    if driver == "fsdp":
        from cadenza.drivers.fsdp import FsdpDriver

        return FsdpDriver()
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1" and driver == "auto":
        raise ValueError(f"WORLD_SIZE={processes}, and RANK is not set: start all processes with torchrun or srun, or unset it")
    if processes != "1":
        raise ValueError(
            f"driver={driver!r} is for one process, and this one was started as one of WORLD_SIZE={processes}: each would "
            "train by itself and write to the same place. Give driver='auto', 'ddp' or 'fsdp', or start it without a launcher."
        )
    if driver in ("auto", "single"):
        return SingleDriver()
    try:
        return SingleDriver(torch.device(driver))
    except RuntimeError:
        raise ValueError(
            "driver must be 'auto', a device such as 'cpu', 'cuda:1' or 'mps', 'ddp', 'fsdp', 'single', or a Driver; got "
            f"{driver!r}"
        ) from None
