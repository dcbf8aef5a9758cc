"""How tensors are split over the ranks that wrote a checkpoint: noted once, from which the part of any rank follows."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import Any, NamedTuple, Protocol

import torch

from cadenza.checkpoint.store.tensor_files import Facts, checked_shape
from cadenza.drivers.sharding import Region, part_of
from cadenza.drivers.sharding import Split as Cut
from cadenza.errors import CheckpointFormatError, StateError
from cadenza.status.formats import counted

MODEL, STATE, RANK = "model", "state", "rank"
"""The kinds of files of a rank: its shards of the model, those of other tensors, and the state that only this rank has."""


class Chunk(NamedTuple):
    """A part of a tensor: the file, and where in the whole tensor it lies."""

    path: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Parts(Protocol):
    """Where the parts of tensors are."""

    def overlapping(self, wanted: Region) -> Sequence[Chunk]:
        """Return the parts that overlap with a region."""


@dataclass(frozen=True, slots=True)
class Listed:
    """Parts that the index lists one by one, as format 2 did."""

    chunks: tuple[Chunk, ...]

    def overlapping(self, wanted: Region) -> Sequence[Chunk]:
        return [one for one in self.chunks if _overlaps(one, wanted)]


@dataclass(frozen=True, slots=True)
class Split:
    """Parts that follow from the number of ranks, as ``torch.chunk`` splits the dimensions of the tensor."""

    folder: str
    kind: str
    shape: tuple[int, ...]
    itemsize: int
    splits: tuple[Cut, ...]
    """Each splits the parts of those before; none: the first rank has the whole tensor."""
    files: Sequence[Facts | None]
    """By rank, the facts of its file; None if it has none."""

    def overlapping(self, wanted: Region) -> Sequence[Chunk]:
        """Return the parts that overlap with a region.

        Raises:
            CheckpointFormatError: A part is larger than its file: an invented shape would ask for any amount of memory.
        """
        whole: Region = tuple(slice(0, size) for size in self.shape)
        found = []
        for rank, part in self._parts(0, whole, wanted, self.splits):
            facts, sizes = self.files[rank], tuple(cut.stop - cut.start for cut in part)
            chunk = Chunk(
                f"{self.folder}/{part_file(self.kind, rank, len(self.files))}", tuple(cut.start for cut in part), sizes
            )
            if not _overlaps(chunk, wanted):
                continue
            if facts is None or math.prod(chunk.sizes) * self.itemsize > facts["size"]:
                raise CheckpointFormatError(f"{chunk.path}: a part of the shape {chunk.sizes} is larger than its file")
            found.append(chunk)
        return found

    def _parts(self, rank: int, part: Region, wanted: Region, splits: Sequence[Cut]) -> Iterator[tuple[int, Region]]:
        """Yield the ranks that have the parts of `part` which may overlap with a region, and these parts."""
        if not splits:
            yield rank, part
            return
        (first, *rest), cut, has = splits, wanted[splits[0].dim], part[splits[0].dim]
        step = -(-(has.stop - has.start) // first.ranks) or 1
        for number in range(max(0, cut.start - has.start) // step, min(-(-(cut.stop - has.start) // step), first.ranks)):
            yield from self._parts(rank + number * first.stride, part_of(part, first, number), wanted, rest)


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
        found[kind] = [None if one is None else {"size": one[0], "crc32": one[1]} for one in content[kind]]
        if len(found[kind]) != ranks:
            raise ValueError(f"it lists {counted(len(found[kind]), 'rank')} instead of {ranks}")
        if not all(one is None or (type(one["size"]) is int and type(one["crc32"]) is str) for one in found[kind]):
            raise ValueError("it lists a file without a size or a checksum")
    return found


def split_of(folder: str, kind: str, entry: Mapping[str, Any], files: Sequence[Facts | None]) -> Split:
    """Return where the parts of a tensor are, from its entry in the layout.

    Raises:
        ValueError, LookupError, TypeError: It is not of the kind that a save writes.
    """
    shape, ranks = checked_shape(entry["shape"]), len(files)
    given = entry["split"]
    if not isinstance(given, list):
        given = [] if given is None else [[given, entry.get("over", ranks), 1]]
    splits = tuple(Cut(*one) for one in given)
    for one in splits:
        if not all(type(number) is int for number in one) or not 0 <= one.dim < len(shape):
            raise ValueError(f"a tensor of the shape {shape} is split along {one.dim!r}")
        if one.ranks < 1 or one.stride < (one.ranks > 1):
            raise ValueError(f"a tensor is split over {one.ranks!r} of {counted(ranks, 'rank')}")
    if sum((one.ranks - 1) * one.stride for one in splits) >= ranks:
        raise ValueError(f"a tensor is split over {[*map(tuple, splits)]}, and there are {counted(ranks, 'rank')}")
    return Split(folder, kind, shape, dtype_of(entry).itemsize, splits, files)


def split_entry(splits: Sequence[Cut], ranks: int) -> dict[str, Any]:
    """Return what the layout says of the splits of a tensor, in the shortest form."""
    if not splits:
        return {"split": None}
    if len(splits) == 1 and splits[0].stride == 1:
        dim, over, _ = splits[0]
        return {"split": dim} | ({} if over == ranks else {"over": over})
    return {"split": [list(one) for one in splits]}


def dtype_of(entry: Mapping[str, Any]) -> torch.dtype:
    """Return the number format in an entry. Raises ValueError or AttributeError if there is no such format."""
    dtype = getattr(torch, entry["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']!r} is no number format")
    return dtype
