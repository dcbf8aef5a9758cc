"""How tensors and processes are run."""

from __future__ import annotations

import os

import torch

from cadenza.drivers.base import Driver
from cadenza.drivers.single import SingleDriver

__all__ = ["Driver", "SingleDriver", "driver_of"]


def driver_of(driver: str | Driver) -> Driver:
    """Return the driver that ``Trainer(driver=...)`` names.

    ``"auto"`` takes one process on the best device that is there; a device such as ``"cpu"`` or ``"cuda:1"`` takes that.

    Raises:
        ValueError: No such device or driver, or this process was started as one of several.
    """
    if isinstance(driver, Driver):
        return driver
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise ValueError(
            f"WORLD_SIZE={processes}: this process was started as one of several, and only one is supported so far. "
            "Start it without a launcher, or with one process."
        )
    if driver == "auto":
        return SingleDriver()
    try:
        return SingleDriver(torch.device(driver))
    except RuntimeError:
        raise ValueError(
            f"driver must be 'auto', a device such as 'cpu', 'cuda:1' or 'mps', or a Driver; got {driver!r}"
        ) from None
