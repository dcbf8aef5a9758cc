"""A reader for the files that wandb writes: a log of blocks as LevelDB has it, with protobuf records in it."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

Record: Any = wandb_internal_pb2.Record  # type: ignore[attr-defined]  # made when it is imported

_BLOCK, _HEADER = 32 * 1024, 7
_WHOLE, _LAST = 1, 4


class WandbFile:
    """What stands in one ``run-*.wandb`` file, when its run is over.

    Wandb says that a run is over a moment before all of it is in the file.
    """

    def __init__(self, path: Path, patience_s: float = 120.0) -> None:
        deadline = time.monotonic() + patience_s
        self.records = self._read(path)
        while not any(record.HasField("exit") for record in self.records):
            assert time.monotonic() < deadline, f"{path} never got its last record"
            time.sleep(0.01)
            self.records = self._read(path)

    @staticmethod
    def _read(path: Path) -> list[Any]:
        return [Record.FromString(entry) for entry in _entries(path.read_bytes())]

    @property
    def run(self) -> Any:
        """Name, project, id, tags of the run."""
        return next(record.run for record in self.records if record.HasField("run"))

    @property
    def config(self) -> dict[str, Any]:
        """Its configuration."""
        return {item.key: json.loads(item.value_json) for item in self.run.config.update}

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was logged, a dict for each step."""
        rows = [record.history.item for record in self.records if record.HasField("history")]
        return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]

    @property
    def exit_code(self) -> int:
        """How it ended."""
        return next(int(record.exit.exit_code) for record in self.records if record.HasField("exit"))


def _entries(content: bytes) -> Iterator[bytes]:
    assert not content or content.startswith(b":W&B")
    offset, entry = _HEADER, b""
    while offset + _HEADER <= len(content):
        if _BLOCK - offset % _BLOCK < _HEADER:  # too little for a header: the block ends in zeros
            offset += _BLOCK - offset % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, offset)
        offset += _HEADER
        if offset + length > len(content):  # it is still being written
            return
        entry += content[offset : offset + length]
        offset += length
        if kind in (_WHOLE, _LAST):
            yield entry
            entry = b""
