"""A number on its way to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class ArrivingNumber:
    """A 0-d tensor that is copied to the host. To read it waits for the work before the copy, not for the work launched since.

    >>> ArrivingNumber(torch.tensor(0.5)).read()
    0.5
    """

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        value = value.detach()
        self._event: torch.cuda.Event | None = None
        self._value = value
        if value.is_cuda:
            self._value = value.to("cpu", non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        """Return the number."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value)
