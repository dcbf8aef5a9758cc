"""Parts of tensors in files: the shards that each rank writes, and whole tensors that are read back from such parts.

A part's file is a safetensors file with the offsets of its tensors in the header, as torch.distributed.checkpoint's
HuggingFaceStorageWriter(save_distributed=True) writes them, so that its HuggingFaceStorageReader reads these as well.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from cadenza.checkpoint.store.files import Files
from cadenza.checkpoint.store.layout import MODEL, STATE, Chunk, Layout, Listed, Parts, dtype_of, split_entry
from cadenza.checkpoint.store.tensor_files import checked_shape
from cadenza.drivers.sharding import Region, Splits, region_of
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError, StateError
from cadenza.status.plain import host_copy, is_built_of_tensors


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a tensor, copied to the host."""

    part: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    split: Mapping[str, Any] = field(default_factory=lambda: {"split": 0})
    """How the layout of the checkpoint says that it is split."""

    @staticmethod
    def of(tensor: Tensor, copy: Callable[[Tensor], Tensor] = host_copy) -> Shard:
        """Copy this rank's part of a DTensor to the host, with `copy`.

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
        splits, is_first = Splits.of(tensor)
        if not is_first:
            part = part.new_empty(0)  # not copied: another rank has the same, and writes it
        return Shard(copy(part), tuple(tensor.shape), offsets, split_entry(splits, dist.get_world_size()))


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor in the files of a checkpoint, of which any part can be read."""

    files: Files
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Parts
    held: dict[str, dict[str, Tensor]] = field(default_factory=dict, compare=False, repr=False)
    """Parts that were read when they were verified, by path and name. Each is given away when it is first read."""

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
        for chunk in self.parts.overlapping(wanted):
            cuts = zip(wanted, chunk.offsets, chunk.sizes, strict=True)
            overlaps.append((chunk, [_overlap(cut, offset, size) for cut, offset, size in cuts]))
        filled = sum(math.prod(stop - start for start, stop in found) for _, found in overlaps)
        if filled != math.prod(needed):  # before memory is taken for it
            raise CheckpointFormatError(f"the parts of {self.name!r} hold {filled} of {math.prod(needed)} numbers")
        if len(overlaps) == 1 and list(overlaps[0][0].sizes) == needed and (whole := self._held(overlaps[0][0])) is not None:
            return whole
        result = torch.empty(needed, dtype=self.dtype)
        for chunk, found in overlaps:
            inner = tuple(slice(a - offset, b - offset) for (a, b), offset in zip(found, chunk.offsets, strict=True))
            outer = tuple(slice(a - cut.start, b - cut.start) for (a, b), cut in zip(found, wanted, strict=True))
            held = self._held(chunk)
            result[outer] = self._part(chunk.path, inner) if held is None else held[inner]
        return result

    def _held(self, chunk: Chunk) -> Tensor | None:
        found = self.held.get(chunk.path, {}).pop(self.name, None)
        return found if found is not None and tuple(found.shape) == chunk.sizes else None

    def _part(self, path: str, region: Region) -> Tensor:
        try:
            return self.files.read_part(path, self.name, region)
        except OSError as error:
            raise CheckpointDamagedError(
                f"{path} cannot be read: {error}. All ranks must see the folder of the checkpoints under the same path."
            ) from None


def _overlap(cut: slice, offset: int, size: int) -> tuple[int, int]:
    return max(cut.start, offset), min(cut.stop, offset + size)


def header_of(shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return the header of a rank's file, with the offsets of its tensors."""
    offsets = {name: {"saved_offsets": list(shard.offsets)} for name, shard in shards.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


def layout_of(model: Mapping[str, Shard], state: Mapping[str, Shard]) -> Layout:
    """Return the layout of the tensors of which this rank has shards: the same on all ranks that hold the same tensors."""
    return {
        kind: {
            name: {"shape": list(one.shape), "dtype": str(one.part.dtype).removeprefix("torch."), **one.split}
            for name, one in shards.items()
        }
        for kind, shards in ((MODEL, model), (STATE, state))
    }


def stored_in(files: Files, folder: str, index: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the tensors of an index of format 2; `known` are the files that the manifest names.

    Raises:
        ValueError, LookupError, TypeError: It is not of the kind that a save wrote.
    """
    stored = {}
    for name, entry in index.items():
        dtype = dtype_of(entry)
        _check_parts(name, entry, dtype, known)
        chunks = tuple(Chunk(f"{folder}/{file}", tuple(offsets), tuple(sizes)) for file, offsets, sizes in entry["parts"])
        stored[name] = Stored(files, name, tuple(entry["shape"]), dtype, Listed(chunks))
    return stored


def _check_parts(name: str, entry: Mapping[str, Any], dtype: torch.dtype, known: Mapping[str, Any]) -> None:
    """Raise an error if a part of a tensor is not where it can be: an invented size would ask for any amount of memory."""
    shape = checked_shape(entry["shape"])
    for file, offsets, sizes in entry["parts"]:
        cuts = [*zip(offsets, sizes, shape, strict=True)]
        if not all(type(one) is int for cut in cuts for one in cut) or any(a < 0 or b < 0 or a + b > c for a, b, c in cuts):
            raise ValueError(f"a part of {name!r} does not lie inside of its shape {shape}")
        if math.prod(sizes) * dtype.itemsize > known[file]["size"]:
            raise ValueError(f"a part of {name!r} is larger than its file {file}")
