"""Checksums of tensors: CRC-32 of their bytes, as in the manifest of a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from cadenza.drivers.sharding import local
from cadenza.status.plain import is_built_of_tensors, parts_of_tensor


def checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the values of a tensor of any shape; of a sharded tensor, of the shard of this rank.

    It finds every changed bit. Waits for the device.

    >>> checksum(torch.zeros(3)) == checksum(-torch.zeros(3)), checksum(torch.zeros(3)) == checksum(torch.zeros(3))
    (False, True)
    """
    if is_built_of_tensors(tensor):
        inner: dict[str, Tensor] = parts_of_tensor(tensor)["tensors"]
        return checksum_of_all(inner.values())
    part = local(tensor)
    if part.layout is not torch.strided:
        if not part.is_sparse:
            return checksum(part.to_dense())
        part = part.coalesce()
        return checksum_of_all([part.indices(), part.values()])
    return zlib.crc32(bytes_of(part))


def checksum_of_all(tensors: Iterable[Tensor]) -> int:
    """Return the checksum of several tensors in this order."""
    total = 0
    for tensor in tensors:
        total = zlib.crc32(checksum(tensor).to_bytes(4, "little"), total)
    return total


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal values bit for bit; of sharded tensors, the shards of this rank.

    >>> nan = torch.tensor(float("nan"))
    >>> same_bits(nan, nan.clone()), same_bits(torch.zeros(1), -torch.zeros(1))
    (True, False)
    """
    one, other = local(one), local(other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.layout is not torch.strided or other.layout is not torch.strided or is_built_of_tensors(one):
        return checksum(one) == checksum(other)
    first, second = (part.contiguous().reshape(-1).view(torch.uint8) for part in (one, other))
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of a dense tensor as bytes on the host."""
    import numpy  # here: without it torch gives no view of the memory, and its own error does not name the package

    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data: memoryview = numpy.asarray(plain.reshape(-1).view(torch.uint8)).data
    return data
