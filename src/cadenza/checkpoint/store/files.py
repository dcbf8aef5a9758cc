"""Folders of files on a local disk, where a rename is atomic; tensors in files; links to checkpoints."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from queue import Queue
from typing import Any, BinaryIO

import torch
from torch import Tensor

from cadenza.files.disk import Unflushed, flush, open_regular, replacing
from cadenza.files.paths import local_text
from cadenza.lazy import imported
from cadenza.status.branches import Saved


class LocalFiles:
    """A folder on a local disk. Everything that is written is flushed to the disk, names included.

    Paths are relative to the folder, with ``/``. What writes a file returns its size and checksum, which are computed of the
    bytes in memory: nothing is read back. Its content survives a power cut, with `later` once that is flushed.
    """

    atomic: bool = True
    """Whether a folder can appear whole, by a rename."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folders(self) -> list[str]:
        """Return the names of all folders; none if the folder or URL does not exist."""
        entries = os.scandir(self.root) if self.root.is_dir() else ()
        return sorted([entry.name for entry in entries if entry.is_dir() or entry.is_symlink()])

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises FileNotFoundError, and OSError if it is no regular file, such as a FIFO."""
        with open_regular(self.root / path, follow=False) as file:
            return file.read()

    def make(self, folder: str, *, lasting: bool = True) -> None:
        """Make a folder, and the folders that contain it. Their names survive a power cut, its own if it is to be `lasting`."""
        target = self.root / folder
        for missing in reversed([path for path in (target, *target.parents) if not path.is_dir()]):
            missing.mkdir(exist_ok=True)
            if lasting or missing != target:
                flush(missing.parent)

    def open(self, path: str) -> BinaryIO:
        """Open a file to read it from its beginning to its end. Raises the errors of `read`."""
        return open_regular(self.root / path, follow=False)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, without reading it. Raises FileNotFoundError, and OSError."""
        return (self.root / path).lstat().st_size

    def write(self, path: str, content: bytes, later: Unflushed | None = None) -> Facts:
        """Write a file. Raises OSError."""
        return self._write(path, [content], later)

    def write_tensors(
        self, path: str, tensors: dict[str, Tensor], header: dict[str, str] | None = None, later: Unflushed | None = None
    ) -> Facts:
        """Write a safetensors file. Raises OSError."""
        total = Sum.of_size(sum(tensor.nbytes for tensor in tensors.values()))
        return self._write(path, pieces(tensors, header), later, total)

    def _write(
        self, path: str, content: Iterable[bytes | memoryview], later: Unflushed | None = None, total: Sum | None = None
    ) -> Facts:
        total = total or Sum()
        with Unflushed() as own, closing(total):
            file = (self.root / path).open("wb")
            (later or own).add(file)
            for piece in content:
                total.add(piece)
                file.write(piece)
            file.flush()
            own.flush()
        return total.facts

    def add(self, path: str, source: Path) -> Facts:
        """Add a local file, which stays where it is, so that its content survives a power cut. Missing folders are made.

        The local file is read once: for its checksum, and to copy it where it cannot be linked.
        """
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, target)  # no second copy of the data
        except OSError:  # another disk, or one without hard links
            with source.open("rb") as file:
                facts = self._write(path, iter(partial(file.read, CHUNK), b""))
        else:
            flush(target)
            with self.open(path) as file:
                facts = SummedFile(file).rest()
        flush(target.parent)
        return facts

    def read_part(self, path: str, name: str, region: tuple[slice, ...]) -> Tensor:
        """Return a part of one tensor of a safetensors file, on the host. Raises OSError."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.root / path, framework="pt") as file:
                part: Tensor = file.get_slice(name)[region] if region else file.get_tensor(name)
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error
        return part

    def rename(self, old: str, new: str) -> None:
        """Rename a folder, so that its new name survives a power cut."""
        if not (self.root / old).is_symlink():  # its target may be gone
            flush(self.root / old)
        (self.root / old).rename(self.root / new)
        flush(self.root)

    def hide(self, names: Mapping[str, str]) -> None:
        """Rename folders that are about to be deleted, so that none of them is a checkpoint again after a power cut."""
        for old, new in names.items():
            (self.root / old).rename(self.root / new)
        if not all(old.startswith(".") for old in names):
            flush(self.root)

    def remove(self, folder: str) -> None:
        """Delete a folder and its content. Of a symbolic link to a folder, only the link is deleted."""
        path = self.root / folder
        if path.is_symlink():  # the target of the link belongs to another run
            path.unlink()
        else:
            shutil.rmtree(path)

    def put(self, path: str, content: bytes) -> None:
        """Write a file, or replace it, as a whole."""
        with replacing(self.root / path) as beside:
            beside.write_bytes(content)

    def link(self, name: str, target: str) -> None:
        """Make `name` a link to a folder beside it, or point it to another folder, at once.

        After a power cut it may lead to the folder that it led to before; a run that continues sets it again.
        Where there are no symbolic links, as behind fsspec, it is a small file with the name of the folder.
        """
        path = self.root / name
        if path.exists() and not path.is_symlink() and name not in self.links():
            raise FileExistsError(
                errno.EEXIST, "a file or folder that is no link to a checkpoint has the name of one", str(path)
            )
        beside = self.root / f".new-{name}"
        beside.unlink(missing_ok=True)  # left by a killed process
        try:
            beside.symlink_to(target, target_is_directory=True)
        except (OSError, NotImplementedError):
            beside.write_text(target)
        beside.replace(path)

    def links(self) -> dict[str, str]:
        """Return the links that `link` made: by name, the folder that each names, which may be gone."""
        targets: dict[str, str | None] = {}
        for entry in os.scandir(self.root) if self.root.is_dir() else ():
            if is_link_name(entry.name) and not entry.is_dir(follow_symlinks=False):
                with suppress(OSError):  # it was deleted meanwhile
                    if entry.is_symlink():
                        targets[entry.name] = target_in(os.readlink(entry.path).encode())
                    else:
                        with self.open(entry.name) as file:
                            targets[entry.name] = target_in(file.read(CHUNK))
        return {name: target for name, target in sorted(targets.items()) if target is not None}

    def unlink(self, name: str) -> None:
        """Delete a link."""
        (self.root / name).unlink(missing_ok=True)

    def __str__(self) -> str:
        return str(self.root)


Files = LocalFiles
"""The file operations of a `Store`. Those of a URL are in a wing: `cadenza.parallel.remote_files`."""


def files_at(location: str | os.PathLike[str]) -> Files:
    """Return the files at a local path or an fsspec URL."""
    text = local_text(location)
    return _remote(text).RemoteFiles(text) if "://" in text else LocalFiles(Path(text))


def absolute_path(location: str | os.PathLike[str]) -> str:
    """Return a local path as an absolute path, which stays valid if the script changes its working directory; a URL unchanged.

    Raises:
        MissingExtraError, ValueError: The URL cannot be used.
    """
    text = local_text(location)
    if "://" not in text:
        return str(Path(text).absolute())
    _remote(text).check_url(text)
    return text


def _remote(url: str) -> Any:
    return imported("cadenza.parallel.remote_files", needed_by=f"the URL {url!r}")


# -- links ---------------------------------------------------------------------------------------------

LAST, BEST = "last", "best"
"""The names of the links to the newest and to the best checkpoint. Of several results, the links are ``best-eval-acc``."""
_LINK = re.compile(rf"{LAST}|{BEST}(?:-[\w.-]+)?", re.ASCII)


def is_link_name(name: str) -> bool:
    """Return whether a link to a checkpoint may have this name.

    >>> [is_link_name(name) for name in ("last", "best", "best-eval-acc", "latest")]
    [True, True, True, False]
    """
    return _LINK.fullmatch(name) is not None


def best_link(monitor: str) -> str:
    """Return the name of the link to the best checkpoint by one result.

    >>> best_link("eval/acc")
    'best-eval-acc'
    """
    return f"{BEST}-{re.sub('[^A-Za-z0-9_.]+', '-', monitor).strip('-') or 'result'}"


def target_in(content: bytes) -> str | None:
    """Return the name of a folder that a link holds; None if it holds no name."""
    text = content.decode(errors="replace").strip()
    return None if Saved.named(text) is None else text


# -- safetensors, written and read in one pass with a checksum -------------------------------------


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

    @classmethod
    def of_size(cls, size: int) -> Sum:
        """Return a sum of so many bytes. A thread computes that of a large file; for others it costs more than it saves."""
        return SumBeside() if size > 4 * CHUNK else Sum()

    @property
    def facts(self) -> Facts:
        """Size and checksum of the bytes so far."""
        return {"size": self.size, "crc32": f"{self.crc:08x}"}


class SumBeside(Sum):
    """A `Sum` that a thread computes while the caller reads or writes. The bytes must not change until `close`.

    `close` raises the error of the thread. The thread is at most 8 pieces behind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chunks: Queue[bytes | memoryview | None] = Queue(8)
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
        while (chunk := self._chunks.get()) is not None:
            try:
                super().add(chunk)
            except Exception as error:  # such as a lack of memory
                self._error = error


def facts_of(content: bytes) -> Facts:
    """Return size and checksum of the bytes of a file.

    >>> facts_of(b"abc")
    {'size': 3, 'crc32': '352441c2'}
    """
    return {"size": len(content), "crc32": f"{zlib.crc32(content):08x}"}


class SummedFile:
    """An open file, with the size and the checksum of the bytes that were read.

    Args:
        file: The file, at its beginning.
        total: Sums the bytes; the caller closes it.
    """

    def __init__(self, file: BinaryIO, total: Sum | None = None) -> None:
        self._file: Any = file
        self._total = Sum() if total is None else total

    def read(self, count: int = -1) -> bytes:
        """Read at most so many bytes; all that are left without a count."""
        content: bytes = self._file.read(count)
        self._total.add(content)
        return content

    def fill(self, tensor: Tensor) -> None:
        """Read the numbers of a contiguous tensor on the host into its memory. Raises ValueError if there are fewer."""
        if sys.byteorder == "big":
            _byte_swapped(tensor, _read(self, tensor.nbytes))
            return
        memory = _bytes_of(tensor)
        for start in range(0, len(memory), CHUNK):
            piece = memory[start : start + CHUNK]
            if self._file.readinto(piece) < len(piece):
                raise ValueError("the file ends before its last tensor")
            self._total.add(piece)

    def rest(self) -> Facts:
        """Read to the end; return the size and the checksum of the whole file."""
        while self.read(CHUNK):
            pass
        self._total.close()
        return self._total.facts


FORMAT_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError)
"""The errors with which content of another format is read."""


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
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that all numbers are aligned
    entries: dict[str, Any] = {} if header is None else {"__metadata__": dict(header)}
    at = 0
    for name in order:
        tensor, start = tensors[name], at
        if tensor.dtype not in _NAMES:
            raise ValueError(f"the tensor {name!r} has the number format {tensor.dtype}, which a safetensors file cannot hold")
        at += tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, at]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        data = _bytes_of(tensors[name])
        yield from (data[start : start + CHUNK] for start in range(0, len(data), CHUNK))


def read_tensors(file: SummedFile, size: int, header: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file. Raises one of `FORMAT_ERRORS` if it has another format.

    Each tensor is in memory of its own, which torch has aligned. In the file they are adjacent and 8-byte aligned, and some
    builds of torch's kernels round differently there: an optimizer that kept such tensors would not continue bit for bit.

    Args:
        file: The open file.
        size: The size that the file is expected to have, in bytes. No more memory is taken.
        header: Gets the texts of the header.
    """
    length = int.from_bytes(_read(file, 8), "little")
    if 8 + length > size:
        raise ValueError(f"its header has {length} bytes, more than the file")
    entries = json.loads(_read(file, length))
    header = {} if header is None else header
    header.update(entries.pop("__metadata__", None) or {})
    tensors: dict[str, Tensor] = {}
    at, end = 0, size - 8 - length
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (start, stop) = _DTYPES[entry["dtype"]], checked_shape(entry["shape"]), entry["data_offsets"]
        if not all(type(bound) is int and bound >= 0 for bound in (start, stop)) or start != at or stop > end:
            raise ValueError(f"the tensor {name!r} is not where it can be")
        count = dtype.itemsize * math.prod(shape)
        if count != stop - start:
            raise ValueError(f"the tensor {name!r} has {stop - start} bytes instead of {count}")
        tensors[name] = torch.empty(shape, dtype=dtype)
        file.fill(tensors[name])
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


def _byte_swapped(tensor: Tensor, content: bytes) -> None:
    width = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
    numbers = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    tensor.copy_(numbers.view(-1, width).flip(1).contiguous().view(-1).view(tensor.dtype).view(tensor.shape))


def _read(file: SummedFile, count: int) -> bytes:
    content = file.read(count)
    if len(content) < count:
        raise ValueError("the file ends too early")
    return content


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host; it can be written to."""
    import numpy  # here: without it torch gives no view of the memory, and its own error does not name the package

    return numpy.asarray(tensor.detach().reshape(-1).view(torch.uint8)).data
