"""A folder of torch's distributed checkpoint, read without executing anything in it.

Its ``.metadata`` is a pickle. Here it may only name the classes that torch writes into it, and each stands for a record of
plain values. What the records say is checked before torch's reader gets it.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cadenza.checkpoint.store.files import checked_shape
from cadenza.drivers.sharding import Region
from cadenza.errors import CheckpointDamagedError, CheckpointFormatError
from cadenza.files.paths import local_path

METADATA = ".metadata"


class DcpFolder:
    """A folder that ``torch.distributed.checkpoint.save`` wrote. Only its ``.metadata`` is read at first.

    Args:
        path: The folder.

    Raises:
        CheckpointFormatError: Its ``.metadata`` is of another format, or names something that could run code.
        CheckpointDamagedError: A file is missing or too short.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path: Path = local_path(path)
        try:
            content = _Unpickler.records_in(self.path / METADATA)
            metadata = _metadata(content, self.path)
        except (CheckpointFormatError, CheckpointDamagedError, OSError):
            raise
        except Exception as error:  # whatever a damaged or hostile pickle raises
            raise CheckpointFormatError(
                f"{self.path / METADATA} does not have the format that torch.distributed.checkpoint writes "
                f"({type(error).__name__}: {str(error)[:200]}). Nothing of it is used."
            ) from None
        self.paths: dict[str, tuple[Any, ...]] = metadata.planner_data
        """By name of an entry, the keys that lead to it in the nested state that was saved."""
        self._reader: Any = FileSystemReader(self.path)
        self._reader.set_up_storage_reader(metadata, True)
        entries = metadata.state_dict_metadata
        self.tensors: dict[str, DcpTensor] = {
            name: DcpTensor(self, name, tuple(entry.size), entry)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        """The tensors by name. They are not in memory."""
        self.objects: list[str] = [name for name in entries if name not in self.tensors]
        """The names of the entries that are pickled objects; see `object_of`."""

    def depth_of(self, name: str) -> int:
        """Return how many keys lead to an entry in the nested state that was saved."""
        return len(self.paths.get(name, (name,)))

    def object_of(self, name: str) -> Any:
        """Return a pickled object, read with ``torch.load(weights_only=True)``.

        Raises:
            CheckpointDamagedError: It cannot be read so.
        """
        landing, index = _Landing(torch.empty(0)), MetadataIndex(name)
        zero = torch.Size([0])
        self.read([ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)], landing)
        return landing.value

    def read(self, items: list[ReadItem], landing: _Landing) -> None:
        """Read the parts of an entry with torch's reader.

        Raises:
            CheckpointDamagedError: They cannot be read.
        """
        try:
            self._reader.read_data(LoadPlan(items), landing).wait()
        except Exception as error:
            raise CheckpointDamagedError(
                f"{self.path} cannot be read at {items[0].storage_index.fqn!r}: {type(error).__name__}: {error}. All ranks "
                "must see the folder under the same path, and an object in it must load with torch.load(weights_only=True)."
            ) from None


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor in the files of a DCP folder, of which any part can be read."""

    folder: DcpFolder
    name: str
    shape: tuple[int, ...]
    entry: TensorStorageMetadata

    def read(self, region: Region | None = None) -> Tensor:
        """Return the tensor, or a part of it, on the host.

        Raises:
            CheckpointDamagedError: The files do not hold all of it.
        """
        wanted = tuple(slice(0, size) for size in self.shape) if region is None else region
        sizes = [cut.stop - cut.start for cut in wanted]
        needed = math.prod(sizes)
        chunk = ChunkStorageMetadata(torch.Size([cut.start for cut in wanted]), torch.Size(sizes))
        items = create_read_items_for_chunk_list(self.name, self.entry, [chunk]) if needed else []
        held = sum(math.prod(item.lengths) for item in items)
        if held != needed:  # before memory is taken for it
            raise CheckpointDamagedError(
                f"{self.folder.path}: the parts of {self.name!r} hold {held} of {needed} numbers. Copy the whole folder."
            )
        result = torch.empty(sizes, dtype=self.entry.properties.dtype)
        if items:
            self.folder.read(items, _Landing(result))
        return result


class _Landing:
    """Says to torch's reader where the parts go."""

    def __init__(self, result: Tensor) -> None:
        self._result = result
        self.value: Any = None

    def resolve_tensor(self, item: ReadItem) -> Tensor:
        part = self._result
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the part was read in place."""

    def load_bytes(self, item: ReadItem, value: Any) -> None:
        self.value = torch.load(value, weights_only=True)


# -- the pickle: records instead of objects ---------------------------------------------------------


_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_DCP}.metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata TensorProperties MetadataIndex StorageMeta "
        "_MEM_FORMAT_ENCODING"
    ),
    f"{_DCP}.filesystem": "_StorageInfo",
    "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
}
"""The classes that torch writes into ``.metadata``, by module."""


class _Record:
    """Stands for an object in the pickle: its class has the name, and `fields` are the saved values."""

    fields: Any = None

    def __init__(self, *arguments: object) -> None:
        """Take no notice of the arguments: those of members of enums and of paths are not used."""

    def __setstate__(self, state: Any) -> None:
        self.fields = state

    def get(self, field: str) -> Any:
        return self.fields.get(field)

    def __getitem__(self, field: str) -> Any:
        return self.fields[field]


class _Unpickler(pickle.Unpickler):
    """Makes records of the allowed classes, and refuses other names. The records of each pickle have classes of their own."""

    @staticmethod
    def records_in(path: Path) -> Any:
        with path.open("rb") as file:
            unpickler = _Unpickler(file)
            unpickler.path = path
            return unpickler.load()

    path: Path

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a global name of the pickle."""
        if name in _RECORDS.get(module, "").split():
            return type(name, (_Record,), {})
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return str
        if module == "torch" and isinstance(value := vars(torch).get(name), torch.dtype):
            return value
        raise CheckpointFormatError(
            f"{self.path} names {module}.{name}, which torch.distributed.checkpoint does not write there and which could run "
            "code. Nothing was executed, and nothing is used. Get the checkpoint from its author as safetensors."
        )


# -- what the records say, checked -------------------------------------------------------------------


class _Storage(NamedTuple):
    """Where the bytes of a part are. torch's reader asks for these four."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str]


def _metadata(record: Any, folder: Path) -> Metadata:
    """Return torch's metadata from a record. Raises any error if the record is of another kind."""
    _require(_is(record, "Metadata"), "its content is no Metadata")
    entries = {_text(name): _entry(name, value) for name, value in record["state_dict_metadata"].items()}
    sizes: dict[str, int] = {}
    storage = {}
    for index, value in record["storage_data"].items():
        name, offset = index["fqn"], index.get("offset")
        stored = _storage(value)
        if stored.relative_path not in sizes:
            sizes[stored.relative_path] = _size_of(folder, stored.relative_path)
        if stored.offset + stored.length > sizes[stored.relative_path]:
            raise CheckpointDamagedError(
                f"{folder / stored.relative_path} has {sizes[stored.relative_path]} bytes, and {name!r} ends at "
                f"{stored.offset + stored.length}. Copy the whole folder."
            )
        storage[MetadataIndex(name, None if offset is None else _numbers(offset))] = stored
    tensors = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            stored = storage[MetadataIndex(name, chunk.offsets)]
            fits = math.prod(chunk.sizes) * entry.properties.dtype.itemsize <= stored.length
            _require(fits or stored.transform_descriptors, f"a part of {name!r} is larger than its bytes")
    planner = record.get("planner_data")
    keys = {_text(name): tuple(path) for name, path in planner.items()} if isinstance(planner, Mapping) else {}
    return Metadata(entries, keys, storage)


def _entry(name: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is(record, "BytesStorageMetadata"):
        return BytesStorageMetadata()
    _require(_is(record, "TensorStorageMetadata"), f"{name!r} is neither a tensor nor an object")
    dtype, shape = record["properties"].fields[0], torch.Size(checked_shape(list(record["size"])))
    _require(isinstance(dtype, torch.dtype), f"{name!r} has the number format {dtype!r}")
    chunks = [ChunkStorageMetadata(_numbers(chunk["offsets"]), _numbers(chunk["sizes"])) for chunk in record["chunks"]]
    for chunk in chunks:
        cuts = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        _require(all(start + size <= whole for start, size, whole in cuts), f"a part of {name!r} is outside of its shape")
    return TensorStorageMetadata(TensorProperties(dtype), shape, chunks)


def _storage(record: Any) -> _Storage:
    path, (offset, length) = _text(record["relative_path"]), _numbers([record["offset"], record["length"]])
    plain = path == Path(path).name and "\\" not in path
    _require(plain, f"the file {path!r} is not in the folder itself")
    return _Storage(path, offset, length, [*map(_text, record.get("transform_descriptors") or ())])


def _size_of(folder: Path, file: str) -> int:
    try:
        return (folder / file).stat().st_size
    except FileNotFoundError:
        raise CheckpointDamagedError(f"{folder / file} is missing. Copy the whole folder.") from None


def _is(record: Any, name: str) -> bool:
    return isinstance(record, _Record) and type(record).__name__ == name


def _text(value: Any) -> str:
    _require(isinstance(value, str) and value.isprintable(), f"{value!r} is no name")
    return str(value)


def _numbers(values: Any) -> torch.Size:
    _require(all(type(value) is int and value >= 0 for value in values), f"{values!r} are no sizes")
    return torch.Size(values)


def _require(holds: object, told: str) -> None:
    if not holds:
        raise ValueError(told)
