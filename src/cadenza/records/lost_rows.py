"""Restore rows of ``metrics.jsonl`` that a power cut destroyed, from the history in a checkpoint."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from cadenza.files.disk import open_regular, replacing
from cadenza.records.history import History
from cadenza.records.reading import read_records
from cadenza.records.record import Record

_TAIL = 1 << 20


def write_again(path: Path, history: History) -> int:
    """Write the records that a history has and the file lacks, and return their number. Other rows do not change.

    The file is read only if its last line differs from the newest record. Whole numbers come back as floats.

    Args:
        path: The ``metrics.jsonl`` of the run, cut to its length at the time of the checkpoint.
        history: The history in the checkpoint. Records that a thinned history does not keep are lost.
    """
    newest = history.newest
    return 0 if newest is None or _last_key(path) == _key(newest) else _write_missing(path, history, newest)


def _write_missing(path: Path, history: History, newest: Record) -> int:
    expected = list(history.records())
    last = _key(newest)[2]  # batches
    there = [record for record in read_records(path) if record.at.batch <= last]
    known = Counter(map(_key, there))
    missing = []
    for record in expected:
        if known[_key(record)]:
            known[_key(record)] -= 1
        else:
            missing.append(record)
    with replacing(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines(f"{record.to_json()}\n" for record in sorted([*there, *missing], key=lambda one: one.at.batch))
    return len(missing)


def _key(record: Record) -> tuple[int, int, int, int]:
    return record.at.epoch, record.at.step, record.at.batch, record.at.samples


def _last_key(path: Path) -> tuple[int, int, int, int] | None:
    """Return the key of the last line; None if there is no line, or it is cut."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            lines = file.read().splitlines(keepends=True)
        line = json.loads(lines[-1]) if lines and lines[-1].endswith(b"\n") else {}
        return line["epoch"], line["step"], line["batch"], line["samples"]
    except (FileNotFoundError, LookupError, TypeError, ValueError, RecursionError):
        return None
