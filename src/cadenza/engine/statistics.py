"""The buffers that a forward pass changes, such as the statistics of normalization layers, kept as they were before it."""

from __future__ import annotations

from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from cadenza.drivers.checksums import same_bits

_LEARNED = 3  # the first `keep` is that of the constructor, the second that before the first forward pass
_version = attrgetter("_version")


class Statistics:
    """The buffers of a model that its forward pass changes, and copies of them.

    Before the first batch, all buffers are copied. After it, only those that it changed, and those of layers with running
    statistics, such as BatchNorm. `keep` notices when another one changes later, or when a layer replaces a buffer by a new
    tensor.

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
        held = [(layer, name) for layer in model.modules() for name, one in layer._buffers.items() if one is not None]
        self._holders: list[dict[str, Tensor | None]] = [layer._buffers for layer, _ in held]
        self._names: list[str] = [name for _, name in held]
        self._running = {index for index, (layer, _) in enumerate(held) if getattr(layer, "running_mean", None) is not None}
        self._changing = {*range(len(held))}
        self._others: list[Tensor] = []  # those that did not change, and their versions
        self._versions: list[int] = []
        self._keeps = 0
        self._arrange()
        self.keep()

    def keep(self) -> None:
        """Copy the present values."""
        if self._keeps < _LEARNED:
            self._learn()
        elif any(map(is_not, map(dict.get, self._holders, self._names), self._buffers)) or (
            self._others and [*map(_version, self._others)] != self._versions
        ):
            self._look_again()
        self._bytes = b"".join(self._views)
        if self._lists:
            for copies, buffers in self._lists.values():
                torch._foreach_copy_(copies, buffers)

    @property
    def copies(self) -> dict[int, Tensor]:
        """The values at the last `keep`, or when the object was made, by the ids of the tensors that the layers hold now."""
        return {id(self._holders[index].get(self._names[index])): copy for index, copy in self._copied()}

    def restore(self) -> None:
        """Set the buffers to the values of the last `keep`."""
        for index, copy in self._copied():
            buffer: Any = self._buffers[index]
            self._holders[index][self._names[index]] = buffer
            if not same_bits(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)

    def _copied(self) -> list[tuple[int, Tensor]]:
        copies, end = dict(self._copies), 0
        for index, view in zip(self._on_host, self._views, strict=True):
            begin, end = end, end + view.nbytes
            buffer: Any = self._buffers[index]
            copies[index] = copy = torch.empty_like(buffer)
            _memory(copy)[:] = self._bytes[begin:end]
        return [*copies.items()]

    def _learn(self) -> None:
        """After the first forward pass, copy those buffers alone that it changed."""
        self._keeps += 1
        if self._keeps == _LEARNED:
            copied, now = self._copied(), self._now()
            self._changing = self._running | {index for index, copy in copied if _differ(now[index], copy)}
            self._arrange()

    def _look_again(self) -> None:
        """Copy those buffers too that changed for the first time."""
        now, versions = self._now(), dict(zip(map(id, self._others), self._versions, strict=True))
        for index, (one, before) in enumerate(zip(now, self._buffers, strict=True)):
            if one is not before or (one is not None and versions.get(id(one), one._version) != one._version):
                self._changing.add(index)
        self._arrange()

    def _now(self) -> list[Tensor | None]:
        return [*map(dict.get, self._holders, self._names)]

    def _arrange(self) -> None:
        self._buffers = self._now()
        held = [(index, one) for index, one in enumerate(self._buffers) if one is not None and _can_be_set(one)]
        self._on_host: list[int] = []
        self._views: list[memoryview] = []
        self._copies: dict[int, Tensor] = {}
        self._lists: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        for index, buffer in held:
            if index not in self._changing:
                continue
            if type(buffer) is Tensor and buffer.is_cpu and buffer.layout is torch.strided and buffer.is_contiguous():
                self._on_host.append(index)
                self._views.append(_memory(buffer))
            else:
                self._copies[index] = buffer.clone()
                copies, buffers = self._lists.setdefault(buffer.dtype, ([], []))
                copies.append(self._copies[index])
                buffers.append(buffer)
        self._bytes = b"".join(self._views)
        self._others = [one for index, one in held if index not in self._changing]
        self._versions = [*map(_version, self._others)]


def _differ(now: Tensor | None, copy: Tensor) -> bool:
    return now is None or not same_bits(now, copy)


def _can_be_set(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_inference() or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    strides = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return not any(size > 1 and not stride for size, stride in strides)  # several elements of an expanded tensor are one number


def _memory(tensor: Tensor) -> memoryview:
    numbers: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(numbers)
