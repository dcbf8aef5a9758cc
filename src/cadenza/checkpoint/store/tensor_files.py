"""The safetensors format, written and read in one pass with a checksum, so that no file is read a second time to verify it."""

from __future__ import annotations

import json
import math
import sys
import threading
import zlib
from collections.abc import Iterator, Mapping
from queue import SimpleQueue
from typing import Any, BinaryIO

import torch
from torch import Tensor

CHUNK = 1 << 20
Facts = dict[str, Any]
"""``size``, in bytes, and ``crc32``, in hexadecimal digits, of a file."""

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32,
    "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_MOST_DIMENSIONS = 64  # of numpy
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Sum:
    """The size and the checksum of bytes that are written or read."""

    def __init__(self) -> None:
        self.size: int = 0
        self.crc: int = 0

    def add(self, chunk: bytes | memoryview) -> None:
        """Add the next bytes."""
        self.size += len(chunk)
        self.crc = zlib.crc32(chunk, self.crc)

    def close(self) -> None:
        """Return when all bytes are added."""

    @property
    def facts(self) -> Facts:
        """Size and checksum of the bytes so far."""
        return {"size": self.size, "crc32": f"{self.crc:08x}"}


class SumBeside(Sum):
    """A `Sum` that a thread of its own computes, while the caller writes the same bytes. They must not change until `close`.

    `close` raises the error of the thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chunks: SimpleQueue[bytes | memoryview | None] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._add_all, name="cadenza-checksum")
        self._thread.start()

    def add(self, chunk: bytes | memoryview) -> None:
        self._chunks.put(chunk)

    def close(self) -> None:
        self._chunks.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _add_all(self) -> None:
        try:
            while (chunk := self._chunks.get()) is not None:
                super().add(chunk)
        except Exception as error:  # such as a lack of memory
            self._error = error


def facts_of(content: bytes) -> Facts:
    """Return size and checksum of the bytes of a file.

    >>> facts_of(b"abc")
    {'size': 3, 'crc32': '352441c2'}
    """
    return {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}


def facts_of_file(file: BinaryIO, total: Sum | None = None) -> Facts:
    """Return size and checksum of an open file, which is read to its end; `total` is the sum so far."""
    total = total or Sum()
    while chunk := file.read(CHUNK):
        total.add(chunk)
    return total.facts


def read_bytes(file: BinaryIO) -> tuple[bytes, Facts]:
    """Read a whole file once; return its content, and its size and checksum."""
    content = file.read()
    return content, facts_of(content)


def pieces(tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file in pieces of at most 1 MiB, without a copy of the numbers.

    Args:
        tensors: Contiguous tensors on the host, by name.
        header: Texts for the header.

    Raises:
        ValueError: The format has no name for a number format.
    """
    if sys.byteorder == "big":  # the numbers in the file are little-endian
        from safetensors.torch import save

        yield save(dict(tensors), None if header is None else dict(header))
        return
    for name, one in tensors.items():
        if one.dtype not in _NAMES:
            raise ValueError(f"the tensor {name!r} has the number format {one.dtype}, which a safetensors file cannot hold")
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that all numbers are aligned
    entries: dict[str, Any] = {} if header is None else {"__metadata__": dict(header)}
    at = 0
    for name in order:
        one, start = tensors[name], at
        at += one.nbytes
        entries[name] = {"dtype": _NAMES[one.dtype], "shape": list(one.shape), "data_offsets": [start, at]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        data = _bytes_of(tensors[name])
        yield from (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def read_tensors(
    file: BinaryIO, size: int, header: dict[str, str] | None = None
) -> tuple[dict[str, Tensor] | ValueError, Facts]:
    """Read a whole safetensors file once; return its tensors, and its size and checksum.

    Each tensor is in memory of its own, which torch has aligned. In the file they are adjacent and 8-byte aligned, and some
    builds of torch's kernels round differently there: an optimizer that kept such tensors would not continue bit for bit.

    Args:
        file: The open file.
        size: The size that the file is expected to have, in bytes. No more memory is taken.
        header: Gets the texts of the header.

    Returns:
        The tensors, and the facts. If the bytes have another format, the error in place of the tensors.
    """
    total = Sum()
    found: dict[str, Tensor] | ValueError
    try:
        found = _tensors_in(file, size, total, {} if header is None else header)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        found = ValueError(str(error))
    return found, facts_of_file(file, total)


def _tensors_in(file: BinaryIO, size: int, total: Sum, header: dict[str, str]) -> dict[str, Tensor]:
    length = int.from_bytes(_read(file, 8, total), "little")
    if 8 + length > size:
        raise ValueError(f"its header has {length} bytes, more than the file")
    entries = json.loads(_read(file, length, total))
    header.update(entries.pop("__metadata__", None) or {})
    tensors: dict[str, Tensor] = {}
    at, end = 0, size - 8 - length
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], checked_shape(entry["shape"]), entry["data_offsets"]
        if not all(type(one) is int and one >= 0 for one in (start, stop)) or start != at or stop > end:
            raise ValueError(f"the tensor {name!r} is not where it can be")
        count = dtype.itemsize * math.prod(shape)
        if count != stop - start:
            raise ValueError(f"the tensor {name!r} has {stop - start} bytes instead of {count}")
        tensors[name] = torch.empty(shape, dtype=dtype)
        _fill(tensors[name], file, total)
        at = stop
    return tensors


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Return a shape. Raises ValueError if no tensor can have it: PyTorch computes its strides in 64 bits."""
    sizes = tuple(shape)
    if len(sizes) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor has {len(sizes)} dimensions")
    if not all(type(size) is int and size >= 0 for size in sizes) or math.prod(size or 1 for size in sizes) >= 1 << 60:
        raise ValueError(f"a tensor has the shape {str(shape)[:80]}")
    return sizes


def _fill(tensor: Tensor, file: BinaryIO, total: Sum) -> None:
    if sys.byteorder == "big":
        _byte_swapped(tensor, _read(file, tensor.nbytes, total))
        return
    data = _bytes_of(tensor)
    for start in range(0, len(data), CHUNK):
        piece = data[start : start + CHUNK]
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]  # all buffered files have it
            raise ValueError("the file ends before its last tensor")
        total.add(piece)


def _byte_swapped(tensor: Tensor, content: bytes) -> None:
    width = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
    numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    tensor.copy_(numbers.view(-1, width).flip(1).contiguous().view(-1).view(tensor.dtype).view(tensor.shape))


def _read(file: BinaryIO, count: int, total: Sum) -> bytes:
    content = file.read(count)
    total.add(content)
    if len(content) < count:
        raise ValueError("the file ends too early")
    return content


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; it can be written to."""
    import numpy  # here: without it torch gives no view of the memory, and its own error does not name the package

    return numpy.asarray(tensor.detach().reshape(-1).view(torch.uint8)).data
