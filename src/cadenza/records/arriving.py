"""A number on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


def arriving(value: Tensor) -> float | ArrivingNumber:
    """Return a number to read with ``float`` later, after it has come from the device of a 0-d tensor.

    >>> float(arriving(torch.tensor(0.5)))
    0.5
    """
    return value.item() if value.is_cpu else ArrivingNumber(value)


class ArrivingNumber:
    """A 0-d tensor that is copied to the host. To read it waits for the work before the copy, not for later work."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value = value.detach()
        if value.is_cuda:
            self._value = value.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def __float__(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)
