"""Parts of tensors in files: the shards that each rank writes, and whole tensors that are read back from such parts.

A part's file is a safetensors file with the offsets of its tensors in the header, as torch.distributed.checkpoint's
HuggingFaceStorageWriter(save_distributed=True) writes them, so that its HuggingFaceStorageReader reads these as well.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json import dumps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from cadenza.checkpoint.store.files import Facts, Files, checked_shape
from cadenza.drivers.sharding import Region, Split, Splits, part_of, region_of
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError, StateError
from cadenza.status.encoding import host_copy, is_built_of_tensors
from cadenza.status.formats import counted

MODEL, STATE, RANK = "model", "state", "rank"
"""The kinds of files of a rank: its shards of the model, those of other tensors, and the state that only this rank has."""


class Chunk(NamedTuple):
    """A part of a tensor: the file, and where in the whole tensor it lies."""

    path: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def _overlaps(chunk: Chunk, wanted: Region) -> bool:
    cuts = zip(wanted, chunk.offsets, chunk.sizes, strict=True)
    return all(max(cut.start, offset) < min(cut.stop, offset + size) for cut, offset, size in cuts)


def part_file(kind: str, rank: int, ranks: int) -> str:
    """Return the file of a rank.

    >>> part_file("model", 0, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"{kind}-{rank + 1:05}-of-{ranks:05}.safetensors"


Layout = dict[str, dict[str, dict[str, Any]]]
"""By ``"model"`` and ``"state"``, by name of a tensor: its shape, its number format, and how it is split.

``"split"`` is the dimension that is split over all ranks, or over the first ones, of which ``"over"`` is the number; None if
the first rank has the whole tensor; or a list of several splits, each ``[dimension, ranks, stride]``: see `drivers.sharding`.
``"first"`` is the first of these ranks, if it is not 0.
"""


def checksum_of(layout: Layout) -> str:
    """Return a checksum of a layout: equal on ranks that hold parts of the same tensors."""
    return f"{zlib.crc32(dumps(layout, sort_keys=True).encode()):08x}"


def joined(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of all tensors. A rank may have tensors that others do not have.

    Raises:
        StateError: Ranks hold parts of different tensors under one name.
    """
    whole: Layout = {MODEL: {}, STATE: {}}
    for layout in layouts:
        for kind, entries in layout.items():
            for name, entry in entries.items():
                if whole[kind].setdefault(name, entry) != entry:
                    raise StateError(f"{name!r} has the layout {entry} on one rank and {whole[kind][name]} on another")
    return whole


def files_by_rank(content: Any, ranks: int) -> dict[str, list[Facts | None]]:
    """Return the facts of the files of each rank, by kind, from the content of ``parts.json``.

    Raises:
        ValueError, LookupError, TypeError: It is not of the kind that a save writes.
    """
    found: dict[str, list[Facts | None]] = {}
    for kind in (MODEL, STATE, RANK):
        found[kind] = [None if file is None else {"size": file[0], "crc32": file[1]} for file in content[kind]]
        if len(found[kind]) != ranks:
            raise ValueError(f"it lists {counted(len(found[kind]), 'rank')} instead of {ranks}")
        if not all(match is None or (type(match["size"]) is int and type(match["crc32"]) is str) for match in found[kind]):
            raise ValueError("it lists a file without a size or a checksum")
    return found


def splits_of(entry: Mapping[str, Any], ranks: int) -> tuple[tuple[Split, ...], int]:
    """Return how the parts of a tensor are split over the ranks, and the first of these, from its entry in the layout.

    Raises:
        ValueError, LookupError, TypeError: It is not of the kind that a save writes.
    """
    shape, given = checked_shape(entry["shape"]), entry["split"]
    if not isinstance(given, list):
        given = [] if given is None else [[given, entry.get("over", ranks), 1]]
    splits = tuple(Split(*item) for item in given)
    for split in splits:
        if not all(type(number) is int for number in split) or not 0 <= split.dim < len(shape):
            raise ValueError(f"a tensor of the shape {shape} is split along {split.dim!r}")
        if split.ranks < 1 or split.stride < (split.ranks > 1):
            raise ValueError(f"a tensor is split over {split.ranks!r} of {counted(ranks, 'rank')}")
    first = entry.get("first", 0)
    if type(first) is not int or first < 0 or first + sum((split.ranks - 1) * split.stride for split in splits) >= ranks:
        raise ValueError(
            f"a tensor is split over {[*map(tuple, splits)]} from rank {first!r} on, and there are {counted(ranks, 'rank')}"
        )
    return splits, first


def split_entry(splits: Sequence[Split], ranks: int, origin: int = 0) -> dict[str, Any]:
    """Return what the layout says of the splits of a tensor, in the shortest form."""
    if origin:
        return {"split": [list(split) for split in splits], "first": origin}
    if not splits:
        return {"split": None}
    if len(splits) == 1 and splits[0].stride == 1:
        dim, over, _ = splits[0]
        return {"split": dim} | ({} if over == ranks else {"over": over})
    return {"split": [list(split) for split in splits]}


def dtype_of(entry: Mapping[str, Any]) -> torch.dtype:
    """Return the number format in an entry. Raises ValueError or AttributeError if there is no such format."""
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is no number format")
    return dtype


# -- tensors in parts --------------------------------------------------------------------------------


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
        splits, is_first, origin = Splits.of(tensor)
        if not is_first:
            part = part.new_empty(0)  # not copied: another rank has the same, and writes it
        return Shard(copy(part), tuple(tensor.shape), offsets, split_entry(splits, dist.get_world_size(), origin))


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor in the files of a checkpoint, of which any part can be read.

    Its parts follow from the number of ranks, as ``torch.chunk`` splits the dimensions of the tensor.
    """

    files: Files
    folder: str
    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splits: tuple[Split, ...]
    """Each splits the parts of those before; none: the first rank has the whole tensor."""
    first: int
    """The first rank with a part."""
    of_ranks: Sequence[Facts | None]
    """By rank, the facts of its file; None if it has none."""
    held: dict[str, dict[str, Tensor]] = field(default_factory=dict, compare=False, repr=False)
    """Parts that were read when they were verified, by path and name. Each is given away when it is first read."""

    def numel(self) -> int:
        """Return how many numbers it has."""
        return int(torch.Size(self.shape).numel())

    def read(self, region: Region | None = None) -> Tensor:
        """Return the tensor, or a part of it, on the host.

        Raises:
            CheckpointDamagedError: A file cannot be read here.
            CheckpointFormatError: A part is larger than its file.
        """
        wanted = tuple(slice(0, size) for size in self.shape) if region is None else region
        needed, chunks = [cut.stop - cut.start for cut in wanted], self._overlapping(wanted)
        if len(chunks) == 1 and list(chunks[0].sizes) == needed and (whole := self._held(chunks[0])) is not None:
            return whole
        result = torch.empty(needed, dtype=self.dtype)
        for chunk in chunks:
            cuts = [*zip(wanted, chunk.offsets, chunk.sizes, strict=True)]
            found = [(max(cut.start, at), min(cut.stop, at + size)) for cut, at, size in cuts]
            inner = tuple(slice(a - at, b - at) for (a, b), (_, at, _) in zip(found, cuts, strict=True))
            outer = tuple(slice(a - cut.start, b - cut.start) for (a, b), (cut, _, _) in zip(found, cuts, strict=True))
            held = self._held(chunk)
            result[outer] = self._part(chunk.path, inner) if held is None else held[inner]
        return result

    def _overlapping(self, wanted: Region) -> list[Chunk]:
        """Return the parts that overlap with a region. An invented shape must not ask for any amount of memory."""
        whole: Region = tuple(slice(0, size) for size in self.shape)
        found = []
        for rank, part in self._parts(self.first, whole, wanted, self.splits):
            facts, sizes = self.of_ranks[rank], tuple(cut.stop - cut.start for cut in part)
            path = f"{self.folder}/{part_file(self.kind, rank, len(self.of_ranks))}"
            chunk = Chunk(path, tuple(cut.start for cut in part), sizes)
            if not _overlaps(chunk, wanted):
                continue
            if facts is None or math.prod(sizes) * self.dtype.itemsize > facts["size"]:
                raise CheckpointFormatError(f"{path}: a part of the shape {sizes} is larger than its file")
            found.append(chunk)
        return found

    def _parts(self, rank: int, part: Region, wanted: Region, splits: Sequence[Split]) -> Iterator[tuple[int, Region]]:
        """Yield the ranks that have the parts of `part` which may overlap with a region, and these parts."""
        if not splits:
            yield rank, part
            return
        (first, *rest), cut, has = splits, wanted[splits[0].dim], part[splits[0].dim]
        step = -(-(has.stop - has.start) // first.ranks) or 1
        for number in range(max(0, cut.start - has.start) // step, min(-(-(cut.stop - has.start) // step), first.ranks)):
            yield from self._parts(rank + number * first.stride, part_of(part, first, number), wanted, rest)

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


def header_of(shards: Mapping[str, Shard]) -> dict[str, str]:
    """Return the header of a rank's file, with the offsets of its tensors."""
    offsets = {name: {"saved_offsets": list(shard.offsets)} for name, shard in shards.items()}
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}


def shards_in(values: Mapping[str, Any]) -> dict[str, Shard]:
    """Return the shards among the tensors of this rank."""
    return {name: value for name, value in values.items() if isinstance(value, Shard)}


def layout_of(model: Mapping[str, Any], state: Mapping[str, Any]) -> Layout:
    """Return the layout of the tensors of which this rank has shards: the same on all ranks that hold the same tensors."""
    return {
        kind: {
            name: {"shape": list(shard.shape), "dtype": str(shard.part.dtype).removeprefix("torch."), **shard.split}
            for name, shard in shards_in(values).items()
        }
        for kind, values in ((MODEL, model), (STATE, state))
    }
