"""Checkpoints on disk: each a folder that appears whole or not at all."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from cadenza.checkpoint.store.content import Content
from cadenza.checkpoint.store.files import Files, files_at
from cadenza.checkpoint.store.layout import checksum_of
from cadenza.checkpoint.store.manifest import (
    FORMAT,
    MANIFEST,
    PARTS,
    CheckpointUnfinishedError,
    canonical,
    check_file,
    checked,
    files_in,
    listed,
)
from cadenza.checkpoint.store.reading import Loaded, files_of_ranks, loaded_from
from cadenza.checkpoint.store.shards import layout_of
from cadenza.checkpoint.store.writing import Part, facts_of_ranks, write_common, write_part, write_whole
from cadenza.drivers.agreeing import Meeting, by_main, decided
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError
from cadenza.files.disk import Unflushed
from cadenza.status.branches import Branch, Rank, Saved, owner_of, present
from cadenza.status.counting import counted
from cadenza.status.folding import printable
from cadenza.version import __version__

_NAMING = threading.Lock()
OWNER = "owner.txt"
"""On storage without atomic renames: the file that names the run that writes a checkpoint."""
_HIDDEN = re.compile(r"\.(?:tmp|trash)-step-[\d-]+-(\w*)-[0-9a-f]{8}")


class Entry(NamedTuple):
    """A folder with the name of a checkpoint, and its manifest."""

    saved: Saved
    manifest: dict[str, Any] | None
    """The manifest; None if it cannot be read."""
    is_unfinished: bool = False
    """Whether the write was killed, on storage without atomic renames."""
    branch: Branch | None = None
    """The branch that wrote the checkpoint; None if unknown."""


class Store:
    """The checkpoints in a folder or URL. Only the main process may write there; any process may read.

    Args:
        location: A local folder, or an fsspec URL such as ``memory://runs/a``. The first `write` creates it.
        run: The id of the run that writes; `prune` deletes only what it wrote.
        branch: The branch of the run that writes; branch 0 if left out.
    """

    def __init__(self, location: str | os.PathLike[str], run: str = "", branch: Branch | None = None) -> None:
        self.files: Files = files_at(location)
        self.run = run
        self.branch: Branch = branch or Branch(owner_of(run))
        self._parent = self.branch.at
        self._whole: set[str] = set()  # the checkpoints that this store has written or verified
        self._read: dict[str, Entry] = {}  # by name: a manifest that was read does not change
        self._tag = re.sub(r"\W", "", run)[:12]
        self.notes: str = f".kept-{self._tag}.json"
        """The file in which the run notes which rules keep which checkpoints."""

    def saved(self) -> list[Saved]:
        """Return every folder that has the name of a checkpoint, oldest step first, verified or not."""
        return sorted(saved for name in self.files.folders() if (saved := Saved.named(name)) is not None)

    def entries(self) -> list[Entry]:
        """Return all of `saved` with their manifests; their other files are not read."""
        return [self._entry(saved) for saved in self.saved()]

    def known(self) -> list[Entry]:
        """Return `entries`, for the process that writes: a manifest that it has read is not read again."""
        folders = self.files.folders()
        new = [self._entry(saved) for name in folders if name not in self._read and (saved := Saved.named(name)) is not None]
        before = [self._read[name] for name in folders if name in self._read]
        self._read = {entry.saved.name: entry for entry in (*before, *new) if entry.manifest is not None}
        return [*before, *new]

    def named(self, name: str) -> Saved | None:
        """Return the checkpoint of this name, verified or not; None if there is none."""
        return next((saved for saved in self.saved() if saved.name == name), None)

    def ranked(self, entries: Iterable[Entry] | None = None) -> list[tuple[Entry, Rank]]:
        """Return the readable checkpoints of the run that writes, in its order: abandoned ones first. None: of `known`."""
        entries = self.known() if entries is None else entries
        own = [one for one in entries if one.branch is not None and one.branch.run == owner_of(self.run)]
        ranked = [(one, rank) for one in own if one.branch and (rank := self.branch.rank(one.saved, one.branch)) is not None]
        return sorted(ranked, key=lambda pair: pair[1])

    def next_name(self, step: int) -> Saved:
        """Return the next checkpoint of a step. Its name is new: earlier checkpoints of the step stay."""
        name = f"step-{step:08d}"
        alike = [Saved.named(folder) for folder in self.files.folders() if folder[: len(name)] == name]
        again = 1 + max((saved.again for saved in alike if saved is not None and saved.step == step), default=0)
        return Saved(step, again, name + (f"-{again}" if again > 1 else ""))

    def write(self, content: Content) -> Saved:
        """Write a checkpoint. It appears whole and survives a power cut, or it does not appear.

        Raises:
            OSError: It could not be written. Nothing of it is left then, and older checkpoints are unchanged.
        """
        folder = self._new_folder(content)
        try:
            facts = {**content.facts, "finite": content.is_finite()}
            with Unflushed() as later:
                return self._commit(folder, facts, write_common(self.files, folder, content, later), later)
        except BaseException:
            self._discard(folder)
            raise

    def write_together(self, content: Content, meeting: Meeting) -> Saved:
        """Write a checkpoint to which each rank adds its files. It appears whole or not at all. Every rank must call this.

        The main process gets one short message of each rank: names, sizes and checksums of its files, and no state.

        Args:
            content: The content of this rank. The main process writes the tensors that are not in shards.
            meeting: The ranks. They exchange values three times.

        Raises:
            OSError: It could not be written by this rank, or by another one. Nothing of it is left then.
            RuntimeError: Another rank is gone. The checkpoint does not appear, unless all shards were written.
        """
        own = layout_of(content.model_shards, content.shards)
        folder, known = by_main(meeting, lambda: (self._new_folder(content), checksum_of(own)), _unwritten)

        def commit(parts: list[Part]) -> Saved:
            facts = {**content.facts, **facts_of_ranks(parts)}
            with Unflushed() as later:
                return self._commit(folder, facts, write_whole(self.files, folder, content, own, parts, later), later)

        try:
            part = lambda: write_part(self.files, folder, content, meeting, {} if checksum_of(own) == known else own)  # noqa: E731
            saved = decided(meeting, part, commit, _unwritten)
        except BaseException:
            if meeting.rank == 0:
                self._discard(folder)
            raise
        self._whole.add(saved.name)
        return saved

    def verify(self, saved: Saved) -> dict[str, Any]:
        """Return the manifest of a checkpoint after a check that all of its files are unchanged.

        Raises:
            CheckpointDamagedError: A file is missing, cut or changed; the message names it.
            CheckpointFormatError: A newer version wrote it, or it is no checkpoint of Cadenza.
        """
        manifest = self.manifest(saved)
        for name, said in (files_in(manifest) | files_of_ranks(self.files, saved.name, manifest)).items():
            check_file(self.files, saved.name, name, said)
        self._whole.add(saved.name)
        return manifest

    def manifest(self, saved: Saved) -> dict[str, Any]:
        """Return the manifest of a checkpoint. Its other files are not read.

        Raises:
            CheckpointDamagedError: The manifest was cut or changed.
            CheckpointFormatError: As `verify`.
        """
        try:
            written = self.files.read(f"{saved.name}/{MANIFEST}")
        except FileNotFoundError:
            raise CheckpointUnfinishedError(
                f"{saved.name}: it has no {MANIFEST}: it is unfinished, or not a checkpoint of cadenza"
            ) from None
        except OSError as error:
            raise CheckpointDamagedError(f"{saved.name}: {MANIFEST} cannot be read: {error}") from None
        return checked(written, saved.name, saved.step)

    def read(self, saved: Saved, *, lazily: bool = False, rank: int = 0, ranks: int = 1, keep: bool = True) -> Loaded:
        """Return a checkpoint's content, verified. Nothing in it is ever executed.

        Args:
            saved: The checkpoint.
            lazily: Return a `Stored` for each tensor that is stored in shards. Any part of it can be read later.
            rank: This rank. If several ranks read, each verifies its part of the files that not all of them read.
            ranks: The number of ranks that read.
            keep: If as many ranks read as wrote, keep the shards of this rank in memory, so that they are read once.

        Raises:
            CheckpointDamagedError: As `verify`.
            CheckpointFormatError: As `verify`; or a file has the right checksum, but not the expected format.
        """
        manifest = self.manifest(saved)
        loaded = loaded_from(self.files, saved.name, manifest, lazily=lazily, rank=rank, ranks=ranks, keep=keep)
        self._whole.add(saved.name)
        return loaded

    def latest(self, *, exact: bool = True, branch: Branch | None = None) -> tuple[Saved | None, list[str]]:
        """Return the newest checkpoint of a branch that verifies, and the reason why each newer one was skipped.

        Args:
            exact: Skip checkpoints from the middle of a step, and those that hold weights only.
            branch: None: the newest branch of the run that wrote them.

        Raises:
            CheckpointError: `branch` is None, and several runs save here.
        """
        entries = self.entries()
        branch = branch or only_branch(entries, str(self.files))
        skipped: list[str] = []
        for entry in on_line(entries, branch):
            problem = self.problem(entry, exact=exact)
            if problem is None:
                return entry.saved, skipped
            skipped.append(problem)
        return None, skipped

    def problem(self, entry: Entry, *, exact: bool = True) -> str | None:
        """Return a sentence on why a checkpoint cannot be used or, if `exact`, not be continued; None if it can."""
        try:
            manifest = self.verify(entry.saved)
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            return str(error)
        return not_exact(entry.saved.name, manifest) if exact else None

    def newest_whole(self, entries: Iterable[Entry] | None = None) -> Saved | None:
        """Return the newest checkpoint of the branch that writes at which a run can continue; None if there is none.

        The files of a checkpoint that this store has written or verified are not read again: their sizes are compared.
        """
        for entry in on_line(self.known() if entries is None else entries, self.branch):
            name = entry.saved.name
            if name not in self._whole:
                problem = self.problem(entry)
            elif (manifest := self._entry(entry.saved).manifest) is not None:
                problem = not_exact(name, manifest) or self._other_sizes(name, manifest)
            else:
                problem = "its manifest cannot be read"
            if problem is None:
                return entry.saved
        return None

    def trust(self, name: str | None) -> None:
        """Take a checkpoint as verified: it was read by this process when the run was resumed."""
        self._whole |= set() if name is None else {name}

    def _other_sizes(self, name: str, manifest: Mapping[str, Any]) -> str | None:
        for file, said in files_in(manifest).items():
            try:
                found = self.files.size(f"{name}/{file}")
            except OSError as error:
                return f"{name}: {file}: {error}"
            if found != said["size"]:
                return f"{name}: {file} has {found} bytes instead of {said['size']}"
        return None

    def prune(self, keep: Iterable[str]) -> list[str]:
        """Delete the checkpoints of this run, except `keep` and the newest of the branch that verifies.

        Folders of other runs, unfinished and damaged ones stay. Returns the names of the deleted checkpoints.
        """
        newest = self.newest_whole()
        kept = {*keep, *([] if newest is None else [newest.name])}
        return self.delete(entry.saved.name for entry, _ in self.ranked() if entry.saved.name not in kept)

    def delete(self, names: Iterable[str]) -> list[str]:
        """Delete checkpoints; return their names."""
        gone = list(names)
        folders = gone
        if gone and self.files.atomic:  # hidden first, so that no process reads them while they are being deleted
            hidden = {name: self.hidden("trash", name) for name in gone}
            self.files.hide(hidden)
            folders = [*hidden.values()]
        for folder in folders:
            self.files.remove(folder)
        return gone

    def sweep(self) -> None:
        """Delete unfinished checkpoints that a killed process of this run left. The caller must hold the lock of the run."""
        for name in self.files.folders():
            if (match := _HIDDEN.fullmatch(name)) and match[1] == self._tag:
                self._discard(name)
        if not self.files.atomic:
            for entry in self.entries():
                if entry.is_unfinished and self._owns(entry.saved):
                    self._discard(entry.saved.name)

    def _owns(self, saved: Saved) -> bool:
        """Return whether the mark in a folder names this run as its writer."""
        try:
            return self.files.read(f"{saved.name}/{OWNER}") == self.run.encode()
        except OSError:
            return False

    def hidden(self, kind: str, name: str) -> str:
        """Return a name that readers skip, with a tag of this run."""
        return f".{kind}-{name}-{self._tag}-{uuid.uuid4().hex[:8]}"

    def _new_folder(self, content: Content) -> str:
        """Create the folder to write in, and return its name. It is hidden if a rename commits it, else the manifest does."""
        step = int(content.facts["step"])
        folder = self.hidden("tmp", f"step-{step:08d}") if self.files.atomic else self.next_name(step).name
        self.files.make(folder, lasting=not self.files.atomic)  # a name that a rename replaces need not last
        if not self.files.atomic:
            self.files.write(f"{folder}/{OWNER}", self.run.encode())  # first: after a kill it names the writer of the folder
        return folder

    def _commit(self, folder: str, facts: Mapping[str, Any], files: Mapping[str, Any], later: Unflushed) -> Saved:
        manifest = {
            "format": FORMAT if PARTS in files else 1,  # so that an older version reads what it can
            "cadenza": __version__,
            "run": self.run,
            **self.branch.to_plain(),
            "parent": self._parent,
            "time": time.time(),
            **facts,
            **listed(files),
        }
        self.files.write(f"{folder}/{MANIFEST}", canonical(manifest), later)
        later.flush()
        if not self.files.atomic:
            saved = next(saved for saved in self.saved() if saved.name == folder)
        else:
            with _NAMING:  # a second writer of this process may have taken the name meanwhile
                saved = self.next_name(int(facts["step"]))
                self.files.rename(folder, saved.name)
        self._parent = saved.name
        self._whole.add(saved.name)
        self._read.pop(saved.name, None)  # an earlier checkpoint of this name was deleted by hand
        return saved

    def _discard(self, folder: str) -> None:
        with suppress(Exception):  # the original error matters more; leftovers are removed when the run continues
            self.files.remove(folder)

    def _entry(self, saved: Saved) -> Entry:
        try:
            manifest = self.manifest(saved)
            return Entry(saved, manifest, branch=Branch.of(manifest, manifest["run"]))
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            return Entry(saved, None, isinstance(error, CheckpointUnfinishedError) and not self.files.atomic)


def not_exact(name: str, manifest: Mapping[str, Any]) -> str | None:
    """Return a sentence on why a run cannot continue at a checkpoint; None if it can."""
    if manifest.get("weights_only"):
        return f"{name}: it holds weights only"
    return None if manifest["exact"] else f"{name}: written in the middle of a step ({printable(manifest['reason'])})"


def _unwritten(rank: int, problem: str) -> OSError:
    return OSError(f"rank {rank} could not write its shards: {problem}")


def on_line(entries: Iterable[Entry], branch: Branch) -> list[Entry]:
    """Return the entries on the line of a branch, newest first. Entries without a readable manifest are ordered by step."""
    ranked = [(branch.rank(entry.saved, entry.branch or branch), entry) for entry in entries]
    line = sorted(((rank, entry) for rank, entry in ranked if rank is not None and rank[0]), key=lambda pair: pair[0])
    return [entry for _, entry in reversed(line)]


def only_branch(entries: Iterable[Entry], folder: str) -> Branch:
    """Return the newest branch of the only run that saves in a folder or URL.

    Raises:
        CheckpointError: Several runs save there.
    """
    found = present(branch for entry in entries if (branch := entry.branch) is not None)
    if len(found) > 1:
        raise CheckpointError(
            f"{folder} holds checkpoints of {counted(len(found), 'run')}: "
            f"{', '.join(branch.run[:12] for branch in found)}. Give the path "
            "of one checkpoint or, to a command, the --run that is meant."
        )
    return found[0] if found else Branch()
