"""Every state in which a power cut can leave the disk: there is always a whole checkpoint, none older than the last promised.

What the store does to the disk is recorded, and each beginning of that record is played to a model of a disk that forgets
whatever was not flushed: the content of files and the entries of folders, each on its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cadenza.checkpoint.store import Store
from cadenza.checkpoint.store.files import LocalFiles
from tests.checkpoint.store.contents import content, latest, prune, step_in


@dataclass
class Node:
    """A file or a folder: what a process sees of it, and what has been flushed."""

    is_folder: bool
    content: bytes = b""
    flushed: bytes | None = None
    entries: dict[str, Node] = field(default_factory=dict)
    flushed_entries: dict[str, Node] = field(default_factory=dict)


class Disk:
    """Plays operations, and can be cut off from its power at any time."""

    def __init__(self) -> None:
        self.root = Node(True)

    def do(self, operation: str, path: str, more: str | bytes = b"") -> None:
        parent, name = self._parent(path)
        match operation:
            case "mkdir":
                parent.entries[name] = Node(True)
            case "data":
                node = parent.entries.setdefault(name, Node(False))
                node.content = bytes(more) if isinstance(more, bytes) else b""
            case "flush":
                node = parent.entries[name] if path else self.root
                node.flushed, node.flushed_entries = node.content, dict(node.entries)
            case "rename":
                parent.entries[self._parent(str(more))[1]] = parent.entries.pop(name)
            case "unlink":
                del parent.entries[name]

    def _parent(self, path: str) -> tuple[Node, str]:
        *folders, name = path.split("/")
        node = self.root
        for folder in folders:
            node = node.entries[folder]
        return node, name

    def lay_out(self, folder: Path, dice: random.Random | None, damage: str) -> None:
        """Write the files after a power cut: without `dice` only the flushed ones, else some of the rest, too."""
        self._lay_out(self.root, folder, dice, damage)

    def _lay_out(self, node: Node, path: Path, dice: random.Random | None, damage: str) -> None:
        if not node.is_folder:
            whole = node.content if node.flushed != node.content else None
            path.write_bytes(node.flushed or b"" if whole is None else damaged(whole, damage))
            return
        path.mkdir()
        newer = dice is not None and dice.random() < 0.8
        for name, child in (node.entries if newer else node.flushed_entries).items():
            self._lay_out(child, path / name, dice, damage)


def damaged(whole: bytes, damage: str) -> bytes:
    return {"empty": b"", "cut": whole[: len(whole) // 2], "zeros": bytes(len(whole)), "whole": whole}[damage]


Operation = tuple[str, str, str | bytes]


class Recorder(LocalFiles):
    """Files that record their operations; flushes, new folders and renames are recorded at the call of the system."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(root)
        self.done: list[Operation] = []
        fsync, mkdir, rename = os.fsync, os.mkdir, os.rename

        def noting_fsync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if os.path.isfile(path):
                self._note("data", path, Path(path).read_bytes())
            self._note("flush", path)
            fsync(descriptor)

        def noting_mkdir(path: Path, mode: int = 0o777) -> None:
            mkdir(path, mode)
            self._note("mkdir", str(path))

        def noting_rename(old: Path, new: Path) -> None:
            rename(old, new)
            self._note("rename", str(old), self._inside(str(new)) or "")

        monkeypatch.setattr(os, "fsync", noting_fsync)
        monkeypatch.setattr(os, "mkdir", noting_mkdir)
        monkeypatch.setattr(os, "rename", noting_rename)

    def remove(self, folder: str) -> None:
        for path in sorted((self.root / folder).iterdir()):
            self._note("unlink", str(path))
        self._note("unlink", str(self.root / folder))
        super().remove(folder)

    def _note(self, operation: str, path: str, more: str | bytes = b"") -> None:
        inside = self._inside(path)
        if inside is not None:
            self.done.append((operation, inside, more))

    def _inside(self, path: str) -> str | None:
        top = str(self.root.parent)
        return None if not path.startswith(top) else path[len(top) :].lstrip("/")


@dataclass
class Recorded:
    done: list[Operation]
    promised: list[tuple[int, int]]
    """From how many operations on which step must be there, at least."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    disk = tmp_path_factory.mktemp("recorded") / "disk"
    disk.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        files = Recorder(disk / "checkpoints", patch)
        store, promised = Store(files.root, "r1"), []
        store.files = files
        for step in (1, 2, 2, 3, 4, 5):  # step 2 is saved again
            store.write(content(step))
            promised.append((len(files.done), step))
            prune(store, [saved.name for saved in store.saved()][-2:])
    return Recorded(files.done, promised)


def crash_states(recorded: Recorded, folder: Path, *, flushes: bool = True, every: int = 1) -> Iterator[tuple[int, Path]]:
    """Yield each n-th state, laid out in a folder, and the step that must be there; 0 if none was promised yet."""
    disk, dice = Disk(), random.Random(1)
    kinds = [(None, "empty"), *((dice, damage) for damage in ("empty", "cut", "zeros", "whole"))]
    for count in range(len(recorded.done) + 1):
        if count and (flushes or recorded.done[count - 1][0] != "flush"):
            disk.do(*recorded.done[count - 1])
        promised = max((step for after, step in recorded.promised if after <= count), default=0)
        for number, (luck, damage) in enumerate(kinds):
            if (len(kinds) * count + number) % every == 0:
                state = folder / f"{count}-{number}"
                disk.lay_out(state, luck, damage)
                yield promised, state


def found(state: Path) -> int:
    """Return the step of the checkpoint that a run would continue at."""
    store = Store(state / "checkpoints", "r1")
    newest, _ = latest(store)
    return 0 if newest is None else step_in(store, newest)


def test_after_a_power_cut_there_is_a_whole_checkpoint_not_older_than_the_last_that_was_promised(
    recorded: Recorded, tmp_path: Path
) -> None:
    states = 0
    for promised, state in crash_states(recorded, tmp_path):
        assert found(state) >= promised, state
        states += 1
    assert states == 5 * (len(recorded.done) + 1) > 400


def test_the_states_are_hard_enough_to_show_a_store_that_does_not_flush(recorded: Recorded, tmp_path: Path) -> None:
    lost = sum(found(state) < promised for promised, state in crash_states(recorded, tmp_path, flushes=False))
    assert lost > 100


def test_a_continued_run_sweeps_what_a_cut_left_and_can_write(recorded: Recorded, tmp_path: Path) -> None:
    swept = 0
    for promised, state in crash_states(recorded, tmp_path, every=11):
        store = Store(state / "checkpoints", "r1")
        swept += any(name.startswith(".") for name in store.files.folders())
        store.sweep()
        assert not [name for name in store.files.folders() if name.startswith(".")]
        assert found(state) >= promised
        saved = store.write(content(9))
        prune(store, [])
        assert step_in(store, saved) == found(state) == 9
    assert swept > 5
