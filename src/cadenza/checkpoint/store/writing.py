"""Write the files of a checkpoint into its folder: those of one process, and those of each rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from cadenza.checkpoint.store.content import Content
from cadenza.checkpoint.store.files import Files
from cadenza.checkpoint.store.layout import MODEL, RANK, STATE, Layout, joined, part_file
from cadenza.checkpoint.store.manifest import FILES, INDEX, PARTS
from cadenza.checkpoint.store.shards import header_of
from cadenza.checkpoint.store.tensor_files import Facts, pieces
from cadenza.drivers.agreeing import Meeting
from cadenza.files.disk import Unflushed


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
        FILES[0]: files.write_tensors(f"{folder}/{FILES[0]}", content.model, None, later),
        FILES[1]: files.write_tensors(f"{folder}/{FILES[1]}", content.tensors, None, later),
        FILES[2]: files.write(f"{folder}/{FILES[2]}", json.dumps(content.plain, allow_nan=False).encode(), later),
        **{name: files.add(f"{folder}/{name}", source) for name, source in content.files.items()},
    }


def write_part(files: Files, folder: str, content: Content, meeting: Meeting, layout: Layout) -> Part:
    """Write the files of a rank: its shards, and the state that only this rank has."""
    written: dict[str, Facts] = {}
    carried: bytes | None = None
    with Unflushed() as later:
        for kind, shards in ((MODEL, content.model_shards), (STATE, content.shards)):
            if held := {name: shard for name, shard in shards.items() if shard.part.numel()}:
                parts = {name: shard.part for name, shard in held.items()}
                written[kind] = files.write_tensors(f"{folder}/{_file(kind, meeting)}", parts, header_of(held), later)
        later.flush()
    if content.own is not None:
        plain, tensors = content.own
        header = {"state": json.dumps(plain, allow_nan=False)}
        try:
            written[RANK] = files.write_tensors(f"{folder}/{_file(RANK, meeting)}", tensors, header)
        except OSError:  # this machine may have disks of its own: the main process writes the small file
            if content.model_shards or content.shards:
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
