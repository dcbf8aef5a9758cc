"""Numbers on their way to the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def arriving(value: Tensor) -> float | Arriving:
    """Return a number to read with ``float`` later, after it has come from the device of a 0-d tensor.

    >>> float(arriving(torch.tensor(0.5)))
    0.5
    """
    return value.item() if value.is_cpu else Arriving(value)


class Arriving:
    """A tensor that is copied to the host. To read it waits for the work before the copy, not for later work."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value = value.detach()
        if value.is_cuda:
            self._value = value.to("cpu", non_blocking=True)
            self._event = torch.cuda.current_stream(value.device).record_event()  # of its device, not of the current one

    @property
    def arrived(self) -> bool:
        """Whether reading it does not wait."""
        return self._event is None or self._event.query()

    def tolist(self) -> Any:
        """Return its numbers, as ``Tensor.tolist`` does."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.tolist()

    def __float__(self) -> float:
        return float(self.tolist())


class ArrivingNumbers:
    """Tensors of shape () that are copied to the host, those of one device and dtype in one operation.

    >>> [*ArrivingNumbers([torch.tensor(0.5), torch.tensor(3), torch.tensor(1.5)])]
    [0.5, 3, 1.5]
    """

    __slots__ = ("_copies", "_kinds")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = [(one.device, one.dtype) for one in tensors]
        alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for kind, one in zip(self._kinds, tensors, strict=True):
            alike[kind].append(one)
        self._copies = {kind: Arriving(torch.stack(those)) for kind, those in alike.items()}

    @property
    def arrived(self) -> bool:
        """Whether reading them does not wait."""
        return all(one.arrived for one in self._copies.values())

    def __iter__(self) -> Iterator[Any]:
        numbers = {kind: iter(one.tolist()) for kind, one in self._copies.items()}
        if len(numbers) == 1:
            return next(iter(numbers.values()))
        return (next(numbers[kind]) for kind in self._kinds)
