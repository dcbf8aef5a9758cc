"""Choose the driver and the device of a trainer."""

from __future__ import annotations

import os
import warnings

import torch

from cadenza.drivers.base import Driver
from cadenza.drivers.rendezvous import launched
from cadenza.drivers.single import SingleDriver

NAMES = ("auto", "single", "ddp", "fsdp")


def driver_of(driver: str | Driver = "auto", device: str | torch.device | None = None) -> Driver:
    """Return the driver for ``Trainer(device=..., driver=...)``.

    Args:
        driver: ``"auto"`` takes DDP if this process was started as one of several, for example by torchrun, and otherwise one
            process. ``"single"`` takes one process, ``"ddp"`` DDP, ``"fsdp"`` FSDP2 with the model in one piece.
        device: Where tensors are. None takes the best device that exists; on several processes, each rank's own.

    Raises:
        ValueError, TypeError: No such device or driver, the two contradict each other, or a single process is requested and
            this one was started as one of several.
        DistributedError: The other processes cannot be reached.

    >>> driver_of(device="cpu").device
    device(type='cpu')
    """
    if isinstance(driver, str) and driver not in NAMES and device is None:
        driver, device = "single", _given_as_driver(driver)
    chosen = None if device is None else _device(device)
    if isinstance(driver, Driver):
        _check_agrees(driver, chosen)
        return driver
    if driver not in NAMES:
        raise ValueError(f"driver must be one of {', '.join(map(repr, NAMES))}, or a Driver; got {driver!r}")
    if driver == "ddp" or (driver == "auto" and launched()):
        from cadenza.drivers.ddp import DdpDriver  # here, as most runs are of one process

        return DdpDriver(_kind(chosen, driver))
    if driver == "fsdp":
        from cadenza.drivers.fsdp import FsdpDriver

        return FsdpDriver(_kind(chosen, driver))
    _check_alone(driver)
    return SingleDriver(chosen)


def _check_alone(driver: str) -> None:
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1" and driver == "auto":
        raise ValueError(f"WORLD_SIZE={processes}, and RANK is not set: start all processes with torchrun or srun, or unset it")
    if processes != "1":
        raise ValueError(
            f"driver='single' is for one process, and this one was started as one of WORLD_SIZE={processes}: each would train "
            "a model of its own and write to the same directory. Use driver='auto', 'ddp' or 'fsdp', or start it without a "
            "launcher."
        )


def _given_as_driver(device: str) -> torch.device:
    """Return the device that ``driver=`` names, as it did before 0.2; this goes in 0.3."""
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"driver must be one of {', '.join(map(repr, NAMES))}, or a Driver; got {device!r}") from None
    warnings.warn(f"driver={device!r} is deprecated: use device={device!r}", DeprecationWarning, stacklevel=5)
    return chosen


def _device(device: object) -> torch.device:
    expected = "device must be a name such as 'cpu', 'cuda', 'cuda:1' or 'mps', a torch.device, or None for the best there is"
    if not isinstance(device, str | torch.device):
        raise TypeError(f"{expected}; got {device!r}")
    if device in NAMES:
        raise ValueError(f"{expected}; got {device!r}. Use driver={device!r}.")
    try:
        return torch.device(device)
    except RuntimeError:
        raise ValueError(f"{expected}; got {device!r}") from None


def _check_agrees(driver: Driver, device: torch.device | None) -> None:
    if device is None or (device.type == driver.device.type and device.index in (None, driver.device.index)):
        return
    raise ValueError(
        f"device='{device}' contradicts driver={driver!r}, which computes on '{driver.device}'. Leave device out, or pass it "
        "to the driver."
    )


def _kind(device: torch.device | None, driver: str) -> str | None:
    """Return the type of device for several processes."""
    if device is not None and device.index is not None and device.type != "cpu":
        raise ValueError(
            f"device='{device}' names one device, but with driver={driver!r} each process takes its own. Use "
            f"device={device.type!r}, or driver='single'."
        )
    return None if device is None else device.type
