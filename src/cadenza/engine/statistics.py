"""The statistics of normalization layers, which a forward pass changes, kept as they were before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Statistics:
    """The buffers of all layers with running statistics, such as BatchNorm, and copies of them.

    On the host the bytes are copied without torch, which takes a third of the time for small layers. On other devices each
    kind of numbers is one call: torch copies lists of different kinds one tensor after another.

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
        self.copies: list[Tensor] = [buffer.clone() for buffer in self.buffers]
        """The values at the last `keep`."""
        self._bytes: list[tuple[memoryview, memoryview]] = []
        self._lists: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for buffer, copy in zip(self.buffers, self.copies, strict=True):
            if type(buffer) is Tensor and buffer.is_cpu and buffer.is_contiguous():
                self._bytes.append((_memory(copy), _memory(buffer)))
            else:
                copies, buffers = self._lists.setdefault(buffer.dtype, ([], []))
                copies.append(copy)
                buffers.append(buffer)

    def keep(self) -> None:
        """Copy the present values."""
        for copy, buffer in self._bytes:
            copy[:] = buffer
        if self._lists:
            for copies, buffers in self._lists.values():
                torch._foreach_copy_(copies, buffers)

    def restore(self) -> None:
        """Set the buffers to the values of the last `keep`."""
        if self.buffers:
            with torch.no_grad():
                torch._foreach_copy_(self.buffers, self.copies)


def _memory(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
