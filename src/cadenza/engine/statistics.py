"""The statistics of normalization layers, which a forward pass changes, kept as they were before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Statistics:
    """The buffers of all layers with running statistics, such as BatchNorm, and copies of them.

    On the host all bytes are joined in one call, without torch. On other devices each kind of numbers is one call: torch copies
    lists of different kinds one tensor after another.

    Args:
        model: The model, with the layers that it keeps. Make a new object if layers are replaced.

    >>> model = nn.BatchNorm1d(2)
    >>> statistics = Statistics(model)
    >>> output = model(torch.rand(4, 2))
    >>> statistics.restore()
    >>> model.running_mean, model.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, model: nn.Module) -> None:
        layers = [one for one in model.modules() if getattr(one, "running_mean", None) is not None]
        self.buffers: list[Tensor] = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        on_host: list[Tensor] = []
        elsewhere: list[Tensor] = []
        for one in self.buffers:
            (on_host if type(one) is Tensor and one.is_cpu and one.is_contiguous() else elsewhere).append(one)
        self._on_host: list[tuple[Tensor, memoryview]] = [(one, _memory(one)) for one in on_host]
        self._views: list[memoryview] = [view for _, view in self._on_host]
        self._bytes = b""
        self._copies: dict[int, Tensor] = {id(one): one.clone() for one in elsewhere}
        self._lists: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer in elsewhere:
            copies, buffers = self._lists.setdefault(buffer.dtype, ([], []))
            copies.append(self._copies[id(buffer)])
            buffers.append(buffer)
        self.keep()

    def keep(self) -> None:
        """Copy the present values."""
        self._bytes = b"".join(self._views)
        if self._lists:
            for copies, buffers in self._lists.values():
                torch._foreach_copy_(copies, buffers)

    @property
    def copies(self) -> list[Tensor]:
        """The values at the last `keep`, or when the object was made."""
        copies, end = dict(self._copies), 0
        for buffer, view in self._on_host:
            begin, end = end, end + view.nbytes
            copies[id(buffer)] = copy = torch.empty_like(buffer)
            _memory(copy)[:] = self._bytes[begin:end]
        return [copies[id(buffer)] for buffer in self.buffers]

    def restore(self) -> None:
        """Set the buffers to the values of the last `keep`."""
        if self.buffers:
            with torch.no_grad():
                torch._foreach_copy_(self.buffers, self.copies)


def _memory(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
