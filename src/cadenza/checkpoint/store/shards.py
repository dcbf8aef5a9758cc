"""Parts of tensors in files: the shards that each rank writes, and whole tensors that are read back from such parts.

A part's file is a safetensors file with the offsets of its tensors in the header, as torch.distributed.checkpoint's
HuggingFaceStorageWriter(save_distributed=True) writes them, so that its HuggingFaceStorageReader reads these as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.checkpoint.store.files import Files
from cadenza.drivers.sharding import Region, region_of
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError, StateError
from cadenza.status.plain import host_copy
from cadenza.status.tensor_parts import is_built_of_tensors


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor, copied to the host."""

    part: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> Shard:
        """Copy this rank's part of a DTensor.

        Raises:
            StateError: It is laid out in a way that cannot be saved.
        """
        detached: Any = tensor.detach()
        part = detached.to_local()
        if is_built_of_tensors(part):
            raise StateError(
                f"a shard of the class {type(part).__name__} cannot be saved: expected plain tensors. With FSDP, use an "
                "optimizer with plain states."
            )
        offsets = tuple(cut.start for cut in region_of(tensor))
        if not detached.placements[0].is_shard() and detached.device_mesh.get_local_rank():
            part = part.new_empty(0)  # all have the same, and the first one writes it
        return Shard(host_copy(part), tuple(tensor.shape), offsets)


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor in the files of a checkpoint, of which any part can be read."""

    files: Files
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """Path, offsets and sizes of each part; empty ones are left out."""

    def numel(self) -> int:
        """Return how many numbers it has."""
        return int(torch.Size(self.shape).numel())

    def read(self, region: Region | None = None) -> Tensor:
        """Return the tensor, or a part of it, on the host.

        Raises:
            CheckpointDamagedError: A file cannot be read here.
            CheckpointFormatError: The stored parts do not cover the requested region.
        """
        wanted = tuple(slice(0, size) for size in self.shape) if region is None else region
        needed, overlaps = [cut.stop - cut.start for cut in wanted], []
        for path, offsets, sizes in self.chunks:
            found = [_overlap(cut, offset, size) for cut, offset, size in zip(wanted, offsets, sizes, strict=True)]
            if all(start < stop for start, stop in found):
                overlaps.append((path, offsets, found))
        filled = sum(math.prod(stop - start for start, stop in found) for _, _, found in overlaps)
        if filled != math.prod(needed):  # before memory is taken for it
            raise CheckpointFormatError(f"the parts of {self.name!r} hold {filled} of {math.prod(needed)} numbers")
        result = torch.empty(needed, dtype=self.dtype)
        for path, offsets, found in overlaps:
            inner = tuple(slice(a - offset, b - offset) for (a, b), offset in zip(found, offsets, strict=True))
            outer = tuple(slice(a - cut.start, b - cut.start) for (a, b), cut in zip(found, wanted, strict=True))
            result[outer] = self._part(path, inner)
        return result

    def _part(self, path: str, region: Region) -> Tensor:
        try:
            return self.files.read_part(path, self.name, region)
        except OSError as error:
            raise CheckpointDamagedError(
                f"{path} cannot be read: {error}. All ranks must see the folder of the checkpoints under the same path."
            ) from None


def _overlap(cut: slice, offset: int, size: int) -> tuple[int, int]:
    return max(cut.start, offset), min(cut.stop, offset + size)


class Part(NamedTuple):
    """The files and the index entries of one rank."""

    files: dict[str, Any]
    """Size and checksum of each file."""
    model: dict[str, Any]
    state: dict[str, Any]
    finite: bool


def header_of(shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return the header of a rank's file, with the offsets of its tensors."""
    offsets = {name: {"saved_offsets": list(shard.offsets)} for name, shard in shards.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


def index_of(shards: Mapping[str, Shard]) -> dict[str, Any]:
    """Return a rank's part of the index: shape and number format of each tensor, and which part of it this rank has."""
    return {
        name: {
            "shape": list(shard.shape),
            "dtype": str(shard.part.dtype).removeprefix("torch."),
            "offsets": list(shard.offsets),
            "sizes": list(shard.part.shape) if shard.part.numel() else None,
        }
        for name, shard in shards.items()
    }


def joined_index(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the index of all ranks: for each tensor shape, number format, and ``[file, offsets, sizes]`` of each part."""
    return {
        "model": _joined([part.model for part in parts], "model"),
        "state": _joined([part.state for part in parts], "state"),
    }


def _joined(indices: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for rank, index in enumerate(indices):
        for key, one in index.items():
            entry = joined.setdefault(key, {"shape": one["shape"], "dtype": one["dtype"], "parts": []})
            if one["sizes"] is not None:
                entry["parts"].append([part_file(name, rank, len(indices)), one["offsets"], one["sizes"]])
    return joined


def part_file(name: str, rank: int, ranks: int) -> str:
    """Return the file that a rank writes its parts to.

    >>> part_file("model", 0, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"{name}-{rank + 1:05}-of-{ranks:05}.safetensors"


def stored_in(files: Files, folder: str, index: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of an index; `known` are the files that the manifest names.

    Raises:
        ValueError, LookupError, TypeError: It is not of the kind that `joined_index` makes.
    """
    stored = {}
    for name, entry in index.items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{entry['dtype']!r} is no number format")
        _check_parts(name, entry, dtype, known)
        chunks = tuple((f"{folder}/{file}", tuple(offsets), tuple(sizes)) for file, offsets, sizes in entry["parts"])
        stored[name] = Stored(files, name, tuple(entry["shape"]), dtype, chunks)
    return stored


def _check_parts(name: str, entry: Mapping[str, Any], dtype: torch.dtype, known: Mapping[str, Any]) -> None:
    """Raise an error if a part of a tensor is not where it can be: an invented size would ask for any amount of memory."""
    shape = entry["shape"]
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{name!r} has the shape {shape!r}")
    for file, offsets, sizes in entry["parts"]:
        cuts = [*zip(offsets, sizes, shape, strict=True)]
        if not all(type(one) is int for cut in cuts for one in cut) or any(a < 0 or b < 0 or a + b > c for a, b, c in cuts):
            raise ValueError(f"a part of {name!r} does not lie inside of its shape {shape}")
        if math.prod(sizes) * dtype.itemsize > known[file]["size"]:
            raise ValueError(f"a part of {name!r} is larger than its file {file}")
