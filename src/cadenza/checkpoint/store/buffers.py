"""Memory for the content of checkpoints: each checkpoint is copied to the memory of the one before.

What lies on a CUDA device is first copied there, if memory is free: a gigabyte takes about a millisecond. The training goes
on, and the thread that writes copies to the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from cadenza.checkpoint.store.content import Content
from cadenza.status.plain import host_copy


class HostBuffers:
    """The memory of the checkpoint that was written last. New memory costs more than the copy: the system clears each page.

    It never holds more than one checkpoint. The memory of a checkpoint comes here when it is written, never before. Copies on
    a device take half of its free memory at most, until they are on the host; the rest is copied to the host at once.

    >>> buffers = HostBuffers()
    >>> first = buffers.copy(torch.ones(3))
    >>> buffers.take_back([first])
    >>> buffers.copy(torch.zeros(3)) is first
    True
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
        self._room: dict[torch.device, int] = {}  # the bytes that copies may still take on a device
        self._pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # tensors to copy on a device, and their copies
        self._ready: dict[torch.device, torch.cuda.Event] = {}  # when the copies on a device are made

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, which holds the numbers after `copied`: on the device, if it has room; else contiguous on the host."""
        if not tensor.is_cuda or tensor.layout is not torch.strided or not self._takes(tensor):
            return self._on_host(tensor)
        try:
            copy = torch.empty_like(tensor, requires_grad=False)
        except torch.OutOfMemoryError:  # no single piece is large enough
            return self._on_host(tensor)
        sources, copies = self._pairs.setdefault(tensor.dtype, ([], []))
        sources.append(tensor.detach())
        copies.append(copy)
        return copy

    def copied(self) -> None:
        """Copy what stays on a device for now, as all tensors are known. Clear the memory that nothing needs any more."""
        for sources, copies in self._pairs.values():
            torch._foreach_copy_(copies, sources)
        self._ready = {device: torch.cuda.current_stream(device).record_event() for device in self._room}
        self._pairs, self._room = {}, {}
        if not self._ready:
            self.clear()

    def fetched(self, content: Content) -> Content:
        """Return the content on the host. The thread that writes calls this; the devices do their work beside it."""
        streams = {device: torch.cuda.Stream(device) for device in self._ready}
        for device, stream in streams.items():
            stream.wait_event(self._ready[device])

        def on_host(tensor: Tensor) -> Tensor:
            if not tensor.is_cuda:
                return tensor
            with torch.cuda.stream(streams[tensor.device]):
                return self._on_host(tensor)

        if self._ready:
            content, self._ready = content.mapped(on_host), {}
            self.clear()
        return content

    def _takes(self, tensor: Tensor) -> bool:
        """Return whether a copy may stay on the device, and count its bytes then."""
        if tensor.device not in self._room:
            self._room[tensor.device] = torch.cuda.mem_get_info(tensor.device)[0] // 2
        fits = tensor.nbytes <= self._room[tensor.device]
        self._room[tensor.device] -= tensor.nbytes * fits
        return fits

    def _on_host(self, tensor: Tensor) -> Tensor:
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
