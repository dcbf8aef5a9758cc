"""What ``cadenza checkpoint`` does: list, verify, show, export, prune."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError
from cadenza.store import Saved, Store
from cadenza.weights import export_weights


def show_list(arguments: argparse.Namespace) -> None:
    """Print one line a checkpoint: name, time, size, what it was written for, whether it can be read."""
    store = _store(arguments.path)
    rows = [("name", "written", "MB", "state", "reason")]
    for saved in store.saved():
        manifest, problem = _tried(store, saved)
        if manifest is None:
            rows.append((saved.name, "", "", "damaged", problem))
            continue
        size = sum(file["size"] for file in manifest["files"].values()) / 1e6
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest["time"]))
        rows.append((saved.name, written, f"{size:.1f}", _state(manifest), manifest["reason"]))
    _print_table(rows)


def verify_all(arguments: argparse.Namespace) -> None:
    """Print for each checkpoint whether every file is as it was written.

    Raises:
        CheckpointError: One is not.
    """
    store = _store(arguments.path)
    problems = []
    for saved in store.saved():
        manifest, problem = _tried(store, saved)
        _say(f"{saved.name}  {'ok' if manifest is not None else problem}")
        problems += [problem] if manifest is None else []
    if problems:
        raise CheckpointError(f"{len(problems)} of {len(store.saved())} checkpoints cannot be used")


def show_newest(arguments: argparse.Namespace) -> None:
    """Print what a checkpoint holds: its manifest, the model's tensors, whose states."""
    store = _store(arguments.path)
    saved = _named(store, arguments.name) if arguments.name else _newest(store)
    loaded = store.read(saved)
    facts = {key: value for key, value in loaded.manifest.items() if key not in ("files", "crc32")}
    for key, value in facts.items():
        _say(f"{key:16} {value}")
    _say(f"{'callbacks':16} {', '.join(loaded.state['callbacks']) or 'none with a state'}")
    count = sum(tensor.numel() for tensor in loaded.model.values())
    _say(f"{'model':16} {len(loaded.model)} tensors, {count:,} numbers")
    _print_table([(name, str(tuple(tensor.shape)), str(tensor.dtype)) for name, tensor in loaded.model.items()])


def export(arguments: argparse.Namespace) -> None:
    """Write the model's weights in a checkpoint to one safetensors file.

    Raises:
        CheckpointError: There is none, or it cannot be used.
    """
    store = _store(arguments.path)
    saved = _named(store, arguments.name) if arguments.name else _newest(store)
    export_weights(f"{store.files}/{saved.name}", arguments.file)
    _say(f"wrote the weights of {saved.name} to {arguments.file}")


def prune(arguments: argparse.Namespace) -> None:
    """Delete all but the newest checkpoints; never the newest that verifies, and only those of one run.

    Raises:
        CheckpointError: Fewer than one is to be kept, or none can be used.
    """
    if arguments.keep_last < 1:
        raise CheckpointError(f"--keep-last must be at least 1; got {arguments.keep_last}")
    store = _store(arguments.path)
    newest = _newest(store)
    store.run = store.verify(newest)["run"]
    gone = store.prune(saved.name for saved in store.saved()[-arguments.keep_last :])
    _say(f"deleted {len(gone)}: {', '.join(gone)}" if gone else "nothing to delete")


def _store(path: str) -> Store:
    inner = path if "://" in path or not Path(path, "checkpoints").is_dir() else f"{path}/checkpoints"
    store = Store(inner)
    if not store.saved():
        raise CheckpointError(f"there are no checkpoints in {path!r}: expected a run directory or a folder of checkpoints")
    return store


def _newest(store: Store) -> Saved:
    newest, skipped = store.latest(exact=False)
    if newest is None:
        raise CheckpointError(f"none of the checkpoints can be used: {'; '.join(skipped)}")
    return newest


def _named(store: Store, name: str) -> Saved:
    found = store.named(name)
    if found is None:
        raise CheckpointError(f"there is no checkpoint {name!r}; there is {', '.join(saved.name for saved in store.saved())}")
    return found


def _tried(store: Store, saved: Saved) -> tuple[dict[str, Any] | None, str]:
    try:
        return store.verify(saved), ""
    except (CheckpointDamagedError, CheckpointFormatError) as error:
        return None, str(error).removeprefix(f"{saved.name}: ")


def _state(manifest: dict[str, Any]) -> str:
    marks = [mark for mark, holds in (("not exact", not manifest["exact"]), ("not finite", not manifest["finite"])) if holds]
    return ", ".join(marks) or "ok"


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        _say("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
