"""The content of a checkpoint: copied to the host, and written to its folder by one process or by each rank."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cadenza.checkpoint.store.files import Facts, Files, pieces
from cadenza.checkpoint.store.manifest import FILES, INDEX, PARTS, is_other
from cadenza.checkpoint.store.shards import MODEL, RANK, STATE, Layout, Shard, header_of, joined, part_file, shards_in
from cadenza.drivers.consensus import Meeting
from cadenza.drivers.sharding import is_sharded
from cadenza.errors import StateError
from cadenza.files.disk import Unflushed
from cadenza.optim.non_finite import all_finite
from cadenza.status.encoding import encode, host_copy


class JoinedFiles(dict[str, Path]):
    """Local files that join a checkpoint, by their paths in it, such as ``"pretrained/config.json"``.

    They appear with the checkpoint, and are verified and deleted with it. They must not change until it is written.
    """

    def __setitem__(self, name: str, source: Path) -> None:
        if not is_other(name):
            raise StateError(
                f"the path of a file that joins a checkpoint must be in a folder of it, with '/' between its parts; got "
                f"{name!r}. Give a path such as 'pretrained/config.json'."
            )
        super().__setitem__(name, source)

    def take_folder(self, name: str, folder: Path) -> None:
        """Add all files in a local folder, as the folder `name`. The local folder is deleted once the checkpoint is written."""
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for source in sorted(folder.rglob("*")):
            if source.is_file():
                self[f"{name}/{source.relative_to(folder).as_posix()}"] = source


@dataclass(slots=True)
class Content:
    """The content of a checkpoint, copied to the host, so that it does not change during the write."""

    model: dict[str, Tensor | Shard]
    """The model's ``state_dict``, tensors only, or the shards of this rank; a file of its own, readable by every tool that
    knows safetensors."""
    plain: Any
    tensors: dict[str, Tensor | Shard]
    """The other tensors, or the shards of this rank."""
    facts: dict[str, Any]
    """The facts for the manifest: step, epoch, reason, and whether the checkpoint is exact."""
    own: tuple[Any, dict[str, Tensor]] | None = None
    """The state that only this rank has, as plain values and tensors. That of the main process is in `plain`."""
    files: JoinedFiles = field(default_factory=lambda: JoinedFiles())
    """Local files that join the checkpoint, by their paths in it. Each is in a folder there, such as ``pretrained/``."""

    finite: bool | None = None
    """Whether all weights of this rank are finite; None until `is_finite` has looked."""

    @property
    def nbytes(self) -> int:
        """The size of the tensors that are not in shards, in bytes."""
        return sum(tensor.nbytes for some in (self.model, self.tensors) for tensor in whole_in(some).values())

    @property
    def is_sharded(self) -> bool:
        """Whether this rank has shards."""
        return any(isinstance(value, Shard) for some in (self.model, self.tensors) for value in some.values())

    @staticmethod
    def of(
        model: Mapping[str, Tensor],
        state: Any,
        facts: Mapping[str, Any],
        *,
        own: Any = None,
        whole: bool = True,
        copy: Callable[[Tensor], Tensor] = host_copy,
    ) -> Content:
        """Copy model and state to the host, each tensor once.

        Args:
            model: The weights by name.
            state: Nested plain values and tensors.
            facts: Facts for the manifest.
            own: The state that only this rank has, if it is not the main process.
            whole: Copy the tensors that are not in shards: the main process writes them.
            copy: Copies a tensor; `HostBuffers` may leave the copy on the device. With `NoBuffers`, the content must be
                written, or `mapped` with `host_copy`, before it changes.

        Raises:
            StateError: A value in `state` or `own` cannot be saved.
        """

        def copied(tensor: Tensor) -> Tensor | Shard | None:
            return Shard.of(tensor, copy) if is_sharded(tensor) else copy(tensor) if whole else None

        plain, others = encode(state, copied)
        both = ({name: copied(tensor) for name, tensor in model.items()}, others)
        weights, tensors = ({name: value for name, value in some.items() if value is not None} for some in both)
        return Content(weights, plain, tensors, dict(facts), None if own is None else encode(own))

    def is_finite(self) -> bool:
        """Return whether all weights of this rank are finite. They are read once, by the first call."""
        if self.finite is None:
            self.finite = all_finite([*map(_part, self.model.values())])
        return self.finite

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Content:
        """Return it with each tensor replaced. With `host_copy`, it may be written later."""

        def changed(value: Tensor | Shard) -> Tensor | Shard:
            return replace(value, part=change(value.part)) if isinstance(value, Shard) else change(value)

        model, tensors = ({name: changed(value) for name, value in some.items()} for some in (self.model, self.tensors))
        return replace(self, model=model, tensors=tensors)

    def emptied(self) -> list[Tensor]:
        """Return its tensors and keep none, so that nothing reads them from here any more."""
        found = [*map(_part, (*self.model.values(), *self.tensors.values()))]
        self.model, self.tensors = {}, {}
        return found


def _part(value: Tensor | Shard) -> Tensor:
    return value.part if isinstance(value, Shard) else value


def whole_in(values: Mapping[str, Tensor | Shard]) -> dict[str, Tensor]:
    """Return the tensors that are not in shards."""
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class HostBuffers:
    """The memory of the checkpoint that was written last. New memory costs more than the copy: the system clears each page.

    It never holds more than one checkpoint. The memory of a checkpoint comes here when it is written, never before.

    >>> buffers = HostBuffers()
    >>> first = buffers.copy(torch.ones(3))
    >>> buffers.take_back([first])
    >>> buffers.copy(torch.zeros(3)) is first
    True
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy on the host."""
        free = self._free.get((tensor.dtype, tensor.shape))
        return host_copy(tensor, free.pop() if free else None)

    def copied(self) -> None:
        """Clear the memory that nothing needs any more, as all tensors are copied."""
        self._free = {}

    def fetched(self, content: Content) -> Content:
        """Return the content on the host."""
        return content

    def take_back(self, tensors: Iterable[Tensor]) -> None:
        """Take the copies of a checkpoint that is written, and clear the rest. Nothing may read them any more."""
        self._free = {}
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self._free.setdefault((tensor.dtype, tensor.shape), []).append(tensor)


class DeviceBuffers(HostBuffers):
    """The same for tensors on CUDA devices. What has room is first copied there: a gigabyte takes about a millisecond.

    The training goes on, and the thread that writes copies to the host. Copies on a device take half of its free memory at
    most, until they are on the host; the rest is copied to the host at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._room: dict[torch.device, int] = {}  # the bytes that copies may still take on a device
        self._pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # tensors to copy on a device, and their copies
        self._ready: dict[torch.device, torch.cuda.Event] = {}  # when the copies on a device are made

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, which holds the numbers after `copied`: on the device, if it has room; else contiguous on the host."""
        if not tensor.is_cuda or tensor.layout is not torch.strided or not self._takes(tensor):
            return super().copy(tensor)
        try:
            copy = torch.empty_like(tensor, requires_grad=False)
        except torch.OutOfMemoryError:  # no single piece is large enough
            return super().copy(tensor)
        sources, copies = self._pairs.setdefault(tensor.dtype, ([], []))
        sources.append(tensor.detach())
        copies.append(copy)
        return copy

    def copied(self) -> None:
        """Copy what stays on a device for now, as all tensors are known. Clear the memory that nothing needs any more."""
        for sources, copies in self._pairs.values():
            torch._foreach_copy_(copies, sources)
        self._ready = {device: torch.cuda.current_stream(device).record_event() for device in self._room}
        self._pairs, self._room = {}, {}
        if not self._ready:
            super().copied()

    def fetched(self, content: Content) -> Content:
        """Return the content on the host. The thread that writes calls this; the devices do their work beside it."""
        streams = {device: torch.cuda.Stream(device) for device in self._ready}
        for device, stream in streams.items():
            stream.wait_event(self._ready[device])

        def on_host(tensor: Tensor) -> Tensor:
            if not tensor.is_cuda:
                return tensor
            with torch.cuda.stream(streams[tensor.device]):
                return HostBuffers.copy(self, tensor)

        if self._ready:
            content, self._ready = content.mapped(on_host), {}
            super().copied()
        return content

    def _takes(self, tensor: Tensor) -> bool:
        """Return whether a copy may stay on the device, and count its bytes then."""
        if tensor.device not in self._room:
            self._room[tensor.device] = torch.cuda.mem_get_info(tensor.device)[0] // 2
        fits = tensor.nbytes <= self._room[tensor.device]
        self._room[tensor.device] -= tensor.nbytes * fits
        return fits


class NoBuffers(HostBuffers):
    """Copies only what must be copied to be written, for a write that ends before the training goes on.

    >>> weight = torch.ones(2)
    >>> NoBuffers().copy(weight).data_ptr() == weight.data_ptr()
    True
    """

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself, detached, if it is contiguous and on the host; else a copy as of `host_copy`."""
        detached = tensor.detach()
        plain = detached.layout is torch.strided and not detached.is_conj() and not detached.is_neg()
        return detached if plain and detached.device.type == "cpu" and detached.is_contiguous() else host_copy(detached)

    def take_back(self, tensors: Iterable[Tensor]) -> None:
        """Take nothing: the tensors belong to the training."""


# -- the files of a checkpoint -----------------------------------------------------------------------


class Part(NamedTuple):
    """What a rank tells the main process about its files."""

    files: dict[str, Facts]
    """By kind, size and checksum of each file that the rank has written."""
    finite: bool
    """Whether all of its weights are finite."""
    layout: Layout
    """The layout of its tensors if it differs from that of the main process; else empty."""
    carried: bytes | None = None
    """The content of the file of its own state, if this machine cannot write in the folder."""


def write_common(files: Files, folder: str, content: Content, later: Unflushed) -> dict[str, Facts]:
    """Write the files of the main process; return their sizes and checksums. The caller flushes."""
    return {
        FILES[0]: files.write_tensors(f"{folder}/{FILES[0]}", whole_in(content.model), None, later),
        FILES[1]: files.write_tensors(f"{folder}/{FILES[1]}", whole_in(content.tensors), None, later),
        FILES[2]: files.write(f"{folder}/{FILES[2]}", json.dumps(content.plain, allow_nan=False).encode(), later),
        **{name: files.add(f"{folder}/{name}", source) for name, source in content.files.items()},
    }


def write_part(files: Files, folder: str, content: Content, meeting: Meeting, layout: Layout) -> Part:
    """Write the files of a rank: its shards, and the state that only this rank has."""
    written: dict[str, Facts] = {}
    carried: bytes | None = None
    with Unflushed() as later:
        for kind, values in ((MODEL, content.model), (STATE, content.tensors)):
            if held := {name: shard for name, shard in shards_in(values).items() if shard.part.numel()}:
                parts = {name: shard.part for name, shard in held.items()}
                written[kind] = files.write_tensors(f"{folder}/{_file(kind, meeting)}", parts, header_of(held), later)
        later.flush()
    if content.own is not None:
        plain, tensors = content.own
        header = {"state": json.dumps(plain, allow_nan=False)}
        try:
            written[RANK] = files.write_tensors(f"{folder}/{_file(RANK, meeting)}", tensors, header)
        except OSError:  # this machine may have disks of its own: the main process writes the small file
            if content.is_sharded:
                raise
            carried = b"".join(pieces(tensors, header))
    return Part(written, content.is_finite(), layout, carried)


def write_whole(
    files: Files, folder: str, content: Content, layout: Layout, parts: Sequence[Part], later: Unflushed
) -> dict[str, Facts]:
    """Write the files of the main process, the layout, and the sizes and checksums of the files of all ranks.

    The caller flushes `later`.

    Returns:
        Sizes and checksums for the manifest. That of ``parts.json`` stands for the files of all ranks.
    """
    common = write_common(files, folder, content, later)
    for rank, part in enumerate(parts):
        if part.carried is not None:
            part.files[RANK] = files.write(f"{folder}/{part_file(RANK, rank, len(parts))}", part.carried)
    index = joined([layout, *(part.layout for part in parts if part.layout)])
    table = {kind: [_brief(part.files.get(kind)) for part in parts] for kind in (MODEL, STATE, RANK)}
    return {
        **common,
        INDEX: files.write(f"{folder}/{INDEX}", _compact(index), later),
        PARTS: files.write(f"{folder}/{PARTS}", _compact(table), later),
    }


def facts_of_ranks(parts: Sequence[Part]) -> dict[str, Any]:
    """Return facts for the manifest: the number of ranks, whether all weights are finite, and the size of the ranks' files."""
    carried = sum(len(part.carried) for part in parts if part.carried is not None)
    size = sum(facts["size"] for part in parts for facts in part.files.values())
    return {"finite": all(part.finite for part in parts), "ranks": len(parts), "rank_bytes": size + carried}


def _file(kind: str, meeting: Meeting) -> str:
    return part_file(kind, meeting.rank, meeting.ranks)


def _brief(facts: Facts | None) -> list[Any] | None:
    return None if facts is None else [facts["size"], facts["crc32"]]


def _compact(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
