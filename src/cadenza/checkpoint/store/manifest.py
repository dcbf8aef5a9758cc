"""The manifest of a checkpoint: its bytes and their checks."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, TypeVar

from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError
from cadenza.records.reading import count_in, time_in
from cadenza.status.branches import Branch
from cadenza.status.formats import number

T = TypeVar("T")

FORMAT = 3
"""1: the main process wrote all files. 2 was of a development version.

3: `PARTS` has the sizes and checksums of the files of each rank, and `INDEX` the layout, from which the parts follow. The
state of each rank but the first is in a file of its own.
"""
MANIFEST = "manifest.json"
FILES = ("model.safetensors", "state.safetensors", "state.json")
INDEX = "shards.json"
PARTS = "parts.json"


def listed(files: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the entries of a manifest that list files with their checksums: files in folders have an entry of their own."""
    others = {name: said for name, said in files.items() if "/" in name}
    return {"files": {name: files[name] for name in files if name not in others}} | ({"others": others} if others else {})


def files_in(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return all files of a checkpoint with their sizes and checksums, also those that callbacks added."""
    return {**manifest["files"], **manifest.get("others", {})}


def bytes_in(manifest: Mapping[str, Any]) -> int:
    """Return the size of a checkpoint in bytes, without its manifest."""
    return sum([int(file["size"]) for file in files_in(manifest).values()], int(manifest.get("rank_bytes", 0)))


class CheckpointUnfinishedError(CheckpointFormatError):
    """A folder has the name of a checkpoint, but no manifest."""


def checked(written: bytes, name: str, step: int) -> dict[str, Any]:
    """Parse and check the bytes of a manifest.

    Args:
        written: The bytes of the file.
        name: The checkpoint's name, for messages.
        step: The step in the name.

    Raises:
        CheckpointDamagedError: The bytes were cut or changed, or belong to another step.
        CheckpointFormatError: A newer version wrote the bytes, or they are no manifest of Cadenza.
    """
    foreign = CheckpointFormatError(f"{name}: its {MANIFEST} is not one of cadenza")
    try:
        manifest = json.loads(written)
        if not isinstance(manifest, dict) or "format" not in manifest:
            raise foreign
        if manifest["format"] == 2 or manifest["format"] > FORMAT:
            raise CheckpointFormatError(
                f"{name}: it has format {manifest['format']}, and this version reads 1 and {FORMAT}. Use the version of "
                "cadenza that wrote it, or a later one."
            )
        body = written[: -len(_LAST % 0)]
        if written[len(body) :] != _LAST % zlib.crc32(body + _END):
            raise CheckpointDamagedError(f"{name}: {MANIFEST} has changed since it was written")
        if not _has_its_files(manifest) or not {"run", "exact", "reason"} <= manifest.keys():
            raise foreign
        Branch.of(manifest, manifest["run"])
        if strange := [file for file in manifest.get("others", {}) if not is_other(file)]:
            raise CheckpointFormatError(f"{name}: its {MANIFEST} names {strange[0]!r}, which is not a file of a checkpoint")
        summed = all(type(said["size"]) is int and type(said["crc32"]) is str for said in files_in(manifest).values())
        if not summed or not all(_is_best(fact) for fact in manifest.get("best", [])):
            raise foreign
        count_in(manifest["step"]), count_in(manifest.get("epoch", 0)), time_in(manifest.get("time", 0))
        if manifest["step"] != step:
            raise CheckpointDamagedError(f"{name}: {MANIFEST} belongs to step {manifest['step']}")
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointDamagedError(f"{name}: {MANIFEST} cannot be read: {error}") from None
    return manifest


def _has_its_files(manifest: Mapping[str, Any]) -> bool:
    names = set(manifest["files"])
    if manifest["format"] == 3:
        return names == {*FILES, INDEX, PARTS} and count_in(manifest["ranks"]) > 0 and count_in(manifest["rank_bytes"]) >= 0
    return names == set(FILES)


def is_other(path: str) -> bool:
    """Return whether a path can be that of a file that a callback added: in a folder of the checkpoint, and not above it."""
    parts = path.split("/")
    return len(parts) > 1 and all(part not in ("", ".", "..") and not {*part} & {*"\\:\0"} for part in parts)


def _is_best(fact: Any) -> bool:
    """Return whether an entry tells which checkpoint is the best, as `Best.fact` writes it."""
    texts = (fact["monitor"], fact["mode"], fact["checkpoint"], fact.get("weights", ""))
    known = all(type(text) is str for text in texts) and fact["mode"] in ("min", "max")
    return known and count_in(fact["step"]) >= 0 and not math.isnan(best_value(fact))


def best_value(fact: Mapping[str, Any]) -> float:
    """Return the value in an entry of ``best``, in which a value that is not finite is a text."""
    return float(fact["value"])


def best_text(fact: Mapping[str, Any]) -> str:
    """Return the value in an entry of ``best`` as text."""
    return number(best_value(fact))


def best_brief(fact: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a decision says of an entry of ``best``."""
    return {key: fact[key] for key in ("monitor", "mode", "value", "step")}


_END = b"\n}"
_LAST = b',\n "crc32": "%08x"\n}'
"""The end of a manifest. Its checksum is that of the bytes before it, with the end that they would have without it."""


def canonical(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest, including a checksum that detects any change."""
    body = json.dumps(manifest, indent=1).encode()
    return body.removesuffix(_END) + _LAST % zlib.crc32(body)
