"""Memory on the host for the content of checkpoints: each checkpoint is copied to the memory of the one before."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cadenza.status.plain import host_copy


class HostBuffers:
    """The memory of the checkpoint that was written last. New memory costs more than the copy: the system clears each page.

    It never holds more than one checkpoint. The memory of a checkpoint comes here when it is written, never before.

    >>> buffers = HostBuffers()
    >>> first = buffers.copy(torch.ones(3))
    >>> buffers.take_back([first])
    >>> buffers.copy(torch.zeros(3)) is first
    True
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on the host, as `host_copy` does, in free memory if there is some of the same shape."""
        free = self._free.get((tensor.dtype, tensor.shape))
        return host_copy(tensor, free.pop() if free else None)

    def clear(self) -> None:
        """Give the free memory back to the system."""
        self._free = {}

    def take_back(self, tensors: Iterable[Tensor]) -> None:
        """Take the copies of a checkpoint that is written, and clear the rest. Nothing may read them any more."""
        self._free = {}
        for one in tensors:
            if one.layout is torch.strided:
                self._free.setdefault((one.dtype, one.shape), []).append(one)


def host_view(tensor: Tensor) -> Tensor:
    """Return the tensor itself, detached, if it is contiguous and on the host; else a copy as of `host_copy`.

    >>> weight = torch.ones(2)
    >>> host_view(weight).data_ptr() == weight.data_ptr()
    True
    """
    detached = tensor.detach()
    plain = detached.layout is torch.strided and not detached.is_conj() and not detached.is_neg()
    return detached if plain and detached.device.type == "cpu" and detached.is_contiguous() else host_copy(detached)
