"""Checkpoints on disk: each a folder that appears whole or not at all."""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cadenza.checkpoint.store.content import Content, Part, facts_of_ranks, write_common, write_part, write_whole
from cadenza.checkpoint.store.files import Files, files_at, is_link_name
from cadenza.checkpoint.store.manifest import (
    FORMAT,
    MANIFEST,
    PARTS,
    CheckpointUnfinishedError,
    best_text,
    canonical,
    checked,
    files_in,
    listed,
)
from cadenza.checkpoint.store.reading import Folder, Loaded
from cadenza.checkpoint.store.shards import checksum_of, layout_of
from cadenza.drivers.consensus import Meeting, agreed, by_main, decided
from cadenza.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointFormatError,
    DirectoryError,
    DistributedError,
    MissingExtraError,
)
from cadenza.files.disk import Unflushed
from cadenza.status.branches import Branch, Saved, owner_of
from cadenza.status.formats import printable
from cadenza.version import __version__

if TYPE_CHECKING:
    from cadenza.drivers.base import Driver


_NAMING = threading.Lock()
OWNER = "owner.txt"
"""On storage without atomic renames: the file that names the run that writes a checkpoint."""
_HIDDEN = re.compile(r"\.(?:tmp|trash)-step-[\d-]+-(\w*)-[0-9a-f]{8}")


class Entry(NamedTuple):
    """A checkpoint in a store: its folder and its manifest. Its other files are not verified yet."""

    store: Store
    saved: Saved
    manifest: dict[str, Any] | None
    """The manifest; None if it cannot be read."""
    is_unfinished: bool = False
    """Whether the write was killed, on storage without atomic renames."""
    branch: Branch | None = None
    """The branch that wrote the checkpoint; None if unknown."""
    best: Mapping[str, Any] = MappingProxyType({})
    """If it was chosen as the best: monitor, mode, value, step, checkpoint, and the averaged weights that had the value."""

    def __str__(self) -> str:
        return f"{self.name}, the best by {self.best['monitor']} ({best_text(self.best)})" if self.best else self.name

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.saved.name

    @property
    def path(self) -> str:
        """The path or the URL."""
        return f"{self.store.files}/{self.name}"

    @property
    def is_damaged(self) -> bool:
        """Whether the manifest cannot be read, although the write was completed."""
        return self.manifest is None and not self.is_unfinished

    def problem(self, *, exact: bool = True) -> str | None:
        """Return a sentence on why the checkpoint cannot be used or, if `exact`, not be continued; None if it can.

        All of its files are read.
        """
        try:
            manifest = self.store.verify(self.saved)
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            return str(error)
        return not_exact(self.name, manifest) if exact else None


class Store:
    """The checkpoints in a folder or URL. Only the main process may write there; any process may read.

    Args:
        location: A local folder, or an fsspec URL such as ``memory://runs/a``. The first `write` creates it.
        run: The id of the run that writes; `sweep` deletes only what it left unfinished.
        branch: The branch of the run that writes; branch 0 if left out.
    """

    def __init__(self, location: str | os.PathLike[str], run: str = "", branch: Branch | None = None) -> None:
        self.files: Files = files_at(location)
        self.run = run
        self.branch: Branch = branch or Branch(owner_of(run))
        self._parent = self.branch.at
        self._whole = {self.branch.at}  # written or verified here, or read by this process as it continued there
        self._tag = re.sub(r"\W", "", run)[:12]
        self.notes: str = f".kept-{self._tag}.json"
        """The file in which the run notes which rules keep which checkpoints."""

    def saved(self) -> list[Saved]:
        """Return every folder that has the name of a checkpoint, oldest step first, verified or not."""
        return sorted(saved for name in self.files.folders() if (saved := Saved.named(name)) is not None)

    def entries(self) -> list[Entry]:
        """Return all of `saved` with their manifests, oldest step first."""
        return [self.entry(saved) for saved in self.saved()]

    def entry(self, saved: Saved) -> Entry:
        """Return a checkpoint with its manifest, read now."""
        try:
            manifest = self.manifest(saved)
            return Entry(self, saved, manifest, branch=Branch.of(manifest, manifest["run"]))
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            return Entry(self, saved, None, isinstance(error, CheckpointUnfinishedError) and not self.files.atomic)

    def named(self, name: str) -> Saved | None:
        """Return the checkpoint of this name, verified or not; None if there is none."""
        return next((saved for saved in self.saved() if saved.name == name), None)

    def linked(self, name: str) -> Saved | None:
        """Return the checkpoint that a link such as ``last`` or ``best`` names; None if there is no such link.

        Raises:
            CheckpointError: The checkpoint is gone.
        """
        target = self.files.links().get(name) if is_link_name(name) else None
        if target is None:
            return None
        if (saved := self.named(target)) is None:
            there = ", ".join(saved.name for saved in self.saved()) or "no other"
            raise CheckpointError(
                f"the link {name!r} in {self.files} names {target}, which is gone. There is {there}: give the path of one. The "
                "next save of the run sets the link again."
            )
        return saved

    def set_links(self, targets: Mapping[str, str], gone: Collection[str] = ()) -> None:
        """Point links to checkpoints, by name, and delete the others if their checkpoint is gone, or is among `gone`.

        Raises:
            OSError: A link cannot be set.
        """
        present = self.files.links()
        for name, target in targets.items():
            if present.get(name) != target:
                self.files.link(name, target)
        if others := present.keys() - targets.keys():
            there = {saved.name for saved in self.saved()} - {*gone}
            for name in others:
                if present[name] not in there:
                    self.files.unlink(name)

    def next_name(self, step: int) -> Saved:
        """Return the next checkpoint of a step. Its name is new: earlier checkpoints of the step stay."""
        name = f"step-{step:08d}"
        length = len(name)
        alike = [Saved.named(folder) for folder in self.files.folders() if folder[:length] == name]
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
        own = layout_of(content.model, content.tensors)
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
        Folder(self.files, saved.name, manifest).verify()
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
            rank: This rank. If multiple ranks read, each verifies its part of the files that not all of them read.
            ranks: The number of ranks that read.
            keep: If as many ranks read as wrote, keep the shards of this rank in memory, so that they are read once.

        Raises:
            CheckpointDamagedError: As `verify`.
            CheckpointFormatError: As `verify`; or a file has the right checksum, but not the expected format.
        """
        manifest = self.manifest(saved)
        loaded = Folder(self.files, saved.name, manifest, rank, ranks).load(lazily=lazily, keep=keep)
        self._whole.add(saved.name)
        return loaded

    def can_continue(self, saved: Saved) -> bool:
        """Return whether a run can continue at a checkpoint.

        The files of a checkpoint that this store has written or verified are not read again: their sizes are compared.
        """
        entry = self.entry(saved)
        if saved.name not in self._whole:
            return entry.problem() is None
        if entry.manifest is None or not_exact(saved.name, entry.manifest) is not None:
            return False
        with suppress(OSError):
            files = files_in(entry.manifest).items()
            return all(self.files.size(f"{saved.name}/{file}") == said["size"] for file, said in files)
        return False

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
        return saved

    def _discard(self, folder: str) -> None:
        with suppress(Exception):  # the original error matters more; leftovers are removed when the run continues
            self.files.remove(folder)


def not_exact(name: str, manifest: Mapping[str, Any]) -> str | None:
    """Return a sentence on why a run cannot continue at a checkpoint; None if it can."""
    if manifest.get("weights_only"):
        return f"{name}: it holds weights only"
    return None if manifest["exact"] else f"{name}: written in the middle of a step ({printable(manifest['reason'])})"


def _unwritten(rank: int, problem: str) -> OSError:
    return OSError(f"rank {rank} could not write its shards: {problem}")


def probe_on_all_ranks(store: Store, driver: Driver) -> None:
    """Write and remove a small checkpoint file on each rank that writes. Every rank must call this.

    Raises:
        DirectoryError: This rank cannot write it.
        MissingExtraError: A package is missing.
        DistributedError: Another rank cannot write it.
    """
    agreed(
        driver.gather_unequal,
        lambda: probe(store) if driver.is_main or driver.shards else None,
        lambda rank, problem: DistributedError(f"rank {rank} cannot write checkpoints, so the run cannot start: {problem}"),
    )


def probe(store: Store) -> None:
    """Write a small file of tensors in a hidden folder, rename and remove it, as a save does.

    Raises:
        DirectoryError: One of these operations fails.
        MissingExtraError: A package is missing.
    """
    files, folder = store.files, store.hidden("tmp", "step-00000000")
    names = [folder]
    try:
        files.make(folder, lasting=False)
        with Unflushed() as later:
            files.write_tensors(f"{folder}/{uuid.uuid4().hex}.safetensors", {"probe": torch.zeros(1)}, None, later)
        if files.atomic:
            names.append(store.hidden("trash", "step-00000000"))
            files.hide({folder: names[1]})
    except ImportError as error:
        raise MissingExtraError(error.name or str(error), needed_by="Checkpoint") from error
    except Exception as error:  # each storage raises its own kinds of errors
        raise DirectoryError(
            f"checkpoints cannot be written to {str(files)!r}: {getattr(error, 'strerror', None) or repr(error)}. Give "
            "Checkpoint(directory=) a folder or URL in which files can be created, renamed and removed, or free space there."
        ) from error
    finally:
        for name in names:
            with suppress(Exception):  # leftovers are removed when the run continues
                files.remove(name)
