"""Folders behind fsspec, for checkpoints: object storage, where the manifest that is written last commits a checkpoint."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from cadenza.checkpoint.store.files import Facts, LocalFiles, SummedFile, facts_of, is_link_name, pieces, target_in
from cadenza.errors import MissingExtraError
from cadenza.files.disk import Unflushed


class RemoteFiles(LocalFiles):
    """A folder behind fsspec, such as ``memory://runs/a`` or ``s3://bucket/runs/a``. Files appear whole, folders do not."""

    atomic: bool = False

    def __init__(self, url: str) -> None:
        import fsspec

        check_url(url)
        self.url: str = url.rstrip("/")
        self._system: Any
        self.root: Any
        self._system, self.root = fsspec.core.url_to_fs(self.url)
        self._headers: dict[str, tuple[int, dict[str, Any]]] = {}

    def folders(self) -> list[str]:
        return self._names("directory")

    def _names(self, kind: str) -> list[str]:
        entries = []
        with suppress(FileNotFoundError):
            entries = self._system.ls(self.root, detail=True, refresh=True)
        return sorted(entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == kind)

    def read(self, path: str) -> bytes:
        full = f"{self.root}/{path}"
        if "file" in self._system.protocol and self._system.info(full)["type"] != "file":
            raise OSError(errno.EINVAL, "it is not a regular file", full)  # opening a FIFO could block without end
        content: bytes = self._system.cat_file(full)
        return content

    def make(self, folder: str, *, lasting: bool = True) -> None:
        self._system.makedirs(f"{self.root}/{folder}", exist_ok=True)

    def open(self, path: str) -> BinaryIO:
        return BytesIO(self.read(path))

    def size(self, path: str) -> int:
        return int(self._system.info(f"{self.root}/{path}")["size"])

    def write(self, path: str, content: bytes, later: Unflushed | None = None) -> Facts:
        self._system.pipe_file(f"{self.root}/{path}", content)
        return facts_of(content)

    def write_tensors(
        self, path: str, tensors: dict[str, Tensor], header: dict[str, str] | None = None, later: Unflushed | None = None
    ) -> Facts:
        return self.write(path, b"".join(pieces(tensors, header)))

    def add(self, path: str, source: Path) -> Facts:
        self._system.makedirs(f"{self.root}/{path}".rpartition("/")[0], exist_ok=True)
        self._system.put_file(str(source), f"{self.root}/{path}")
        with source.open("rb") as file:
            return SummedFile(file).rest()

    def read_part(self, path: str, name: str, region: tuple[slice, ...]) -> Tensor:
        from safetensors.torch import load

        # Only the bytes of this tensor are read, and get a header of their own.
        start, tensors = self._header(path)
        first, last = tensors[name]["data_offsets"]
        content = self._system.cat_file(f"{self.root}/{path}", start=start + first, end=start + last)
        header = json.dumps({name: {**tensors[name], "data_offsets": [0, last - first]}}).encode()
        return load(len(header).to_bytes(8, "little") + header + content)[name][region]

    def _header(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return the offset of the numbers in a safetensors file, and its header. They are read once."""
        if path not in self._headers:
            full = f"{self.root}/{path}"
            size = int.from_bytes(self._system.cat_file(full, start=0, end=8), "little")
            self._headers[path] = (8 + size, json.loads(self._system.cat_file(full, start=8, end=8 + size)))
        return self._headers[path]

    def rename(self, old: str, new: str) -> None:
        self._system.mv(f"{self.root}/{old}", f"{self.root}/{new}", recursive=True)

    def hide(self, names: Mapping[str, str]) -> None:
        for old, new in names.items():
            self.rename(old, new)

    def remove(self, folder: str) -> None:
        self._system.rm(f"{self.root}/{folder}", recursive=True)

    def put(self, path: str, content: bytes) -> None:
        self._system.makedirs(self.root, exist_ok=True)
        self.write(path, content)

    def link(self, name: str, target: str) -> None:
        self.put(name, target.encode())

    def links(self) -> dict[str, str]:
        targets = {name: target_in(self.read(name)) for name in self._names("file") if is_link_name(name)}
        return {name: target for name, target in targets.items() if target is not None}

    def unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(f"{self.root}/{name}")

    def __str__(self) -> str:
        return self.url


_INDIRECT = {
    "reference", "cached", "blockcache", "filecache", "simplecache", "zip", "tar", "libarchive", "dir", "generic", "git", "dvc",
    "dask", "async_wrapper", "asyncwrapper", "asynclocal",
}  # fmt: skip
"""Protocols of fsspec that open other files or machines, which their URL or a file names. ``reference`` may run templates."""


def check_url(url: str) -> None:
    """Check that a URL leads nowhere else, and that fsspec supports it.

    Raises:
        MissingExtraError: The package for this kind of URL is not installed.
        ValueError: fsspec does not support this kind of URL, or it opens another file or machine.
    """
    import fsspec

    protocol = fsspec.utils.get_protocol(url)
    if "::" in url or protocol in _INDIRECT:
        raise ValueError(
            f"the URL {url!r} opens other files or machines: expected one without '::', of a protocol such as s3. Give the "
            "folder itself, such as 's3://bucket/runs/a'."
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        package = error.name or re.sub(r"Install (\S+) .*", r"\1", str(error))  # the message of fsspec
        raise MissingExtraError(package, needed_by=f"the URL {url!r}") from error
    except ValueError as error:
        raise ValueError(f"fsspec cannot reach {url!r}: {error}. Give a local folder or another URL.") from None
