"""Checkpoints in a folder that each machine has for itself, such as memory: each holds its part, and that of its neighbour."""

from __future__ import annotations

import os
import pickle
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from cadenza.checkpoint.store.checkpoints import Store
from cadenza.checkpoint.store.content import Content, facts_of_ranks, write_part, write_whole
from cadenza.checkpoint.store.manifest import MANIFEST, files_in
from cadenza.checkpoint.store.reading import Folder
from cadenza.checkpoint.store.shards import checksum_of, layout_of, part_file
from cadenza.drivers.base import Driver
from cadenza.drivers.consensus import Meeting, agreed, by_main, decided
from cadenza.errors import CheckpointError
from cadenza.files.disk import Unflushed
from cadenza.status.branches import Branch, Saved

_PIECE = 64 * 2**20


@dataclass(frozen=True)
class Machines:
    """Which ranks see the same folder under one path, and how they send files to each other."""

    rank: int
    first: list[int]
    """For each rank, the first rank that sees the same folder."""
    group: Any

    @staticmethod
    def of(root: Path, driver: Driver) -> Machines:
        """Find out who sees the same folder, by a file that each rank makes there. Every rank must call this."""
        name = driver.broadcast(uuid.uuid4().hex)
        mark = root / f".rank-{driver.rank}-{name}"

        def make() -> None:
            root.mkdir(parents=True, exist_ok=True)
            mark.touch()

        agreed(driver.gather_unequal, make, lambda rank, why: OSError(f"rank {rank} cannot use the local folder {root}: {why}"))
        first = driver.gather_unequal(min(int(path.name.split("-")[1]) for path in root.glob(f".rank-*-{name}")))
        mark.unlink()
        return Machines(driver.rank, first if len(first) > 1 else first * driver.world_size, driver.parcels())

    @property
    def leads(self) -> list[int]:
        """The first rank of each machine."""
        return sorted({*self.first})

    @property
    def leading(self) -> bool:
        return self.first[self.rank] == self.rank

    def on(self, lead: int) -> list[int]:
        """Return the ranks of a machine."""
        return [rank for rank, first in enumerate(self.first) if first == lead]

    def before(self, lead: int) -> int:
        """Return the neighbour that a machine keeps the files of."""
        return self.leads[self.leads.index(lead) - 1]

    def keeper(self, rank: int) -> int:
        """Return the rank of the next machine that gets the files of a rank."""
        leads, own = self.leads, self.on(self.first[rank])
        there = self.on(leads[(leads.index(self.first[rank]) + 1) % len(leads)])
        return there[own.index(rank) % len(there)]

    def send(self, to: int, folder: Path, names: Iterable[str]) -> None:
        """Send files of a folder to a rank, which calls `receive`. One that is not there is left out.

        Raises:
            OSError: A file cannot be read. Zeros are sent, since the other rank waits, and then that they are not the file.
        """
        sizes, problems = dict[str, int](), list[OSError]()
        for name in names:
            try:
                sizes[name] = (folder / name).stat().st_size
            except FileNotFoundError:
                pass
            except OSError as error:
                problems.append(error)
        head = pickle.dumps(sizes)
        self._send(to, torch.tensor([len(head)]))
        self._send(to, torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for name, size in sizes.items():
            known = len(problems)
            for piece in _read(folder / name, size, problems):
                self._send(to, torch.frombuffer(piece, dtype=torch.uint8))
            self._send(to, torch.tensor([len(problems) == known]))
        _raise_first(problems)

    def receive(self, source: int, folder: Path) -> None:
        """Write the files that another rank sends into a folder. A resume verifies them.

        Raises:
            OSError: A file cannot be written, or the other rank could not read it. All have been received then.
        """
        length = self._receive(source, torch.zeros(1, dtype=torch.int64))
        head = self._receive(source, torch.empty(int(length), dtype=torch.uint8))
        sizes: dict[str, int] = pickle.loads(head.numpy().tobytes())
        acts: list[Callable[[], object]] = []
        for name, size in sizes.items():
            pieces = self._pieces(source, name, size)
            acts += [partial(_write, folder / name, pieces), partial(deque, pieces, 0)]  # after an error the rest of it
        _each(acts)

    def _pieces(self, source: int, name: str, size: int) -> Iterator[torch.Tensor]:
        for begin in range(0, size, _PIECE):
            yield self._receive(source, torch.empty(min(_PIECE, size - begin), dtype=torch.uint8))
        if not self._receive(source, torch.zeros(1, dtype=torch.bool)):
            raise OSError(f"rank {source} could not read {name}")

    def _send(self, to: int, tensor: torch.Tensor) -> None:
        dist.send(tensor, to, self.group)

    def _receive(self, source: int, tensor: torch.Tensor) -> torch.Tensor:
        dist.recv(tensor, source, self.group)
        return tensor


def store_of(root: Path, branch: Branch, driver: Driver) -> LocalStore:
    """Return the store for the checkpoints that a run writes. Every rank must call this."""
    return LocalStore(root, branch, Machines.of(root, driver))


class LocalStore(Store):
    """A store in a folder of each machine. Each holds the common files, those of its ranks and those of one neighbour's ranks.

    Args:
        root: The folder, by the same path on all machines.
        branch: The branch of the run that writes.
        machines: Who sees which folder.
    """

    def __init__(self, root: Path, branch: Branch, machines: Machines) -> None:
        super().__init__(root, branch.run, branch)
        self._root, self._machines = root, machines
        self._wrote = False  # until then, machines that are absent may have the rest of an incomplete checkpoint
        if machines.leading and machines.rank:
            self.sweep()

    def write_together(self, content: Content, meeting: Meeting) -> Saved:
        machines = self._machines
        if len(machines.leads) == 1:
            return super().write_together(content, meeting)
        own = layout_of(content.model, content.tensors)
        begin = lambda: (self._new_folder(content), checksum_of(own), [saved.name for saved in self.saved()])  # noqa: E731
        folder, known, there = by_main(meeting, begin, _failed)

        def part() -> Any:
            if machines.leading and self._wrote:
                self._drop(there)
            self.files.make(folder, lasting=False)
            return write_part(self.files, folder, content, meeting, {} if checksum_of(own) == known else own)

        def whole(parts: Any) -> Any:
            facts = {**content.facts, **facts_of_ranks(parts)}
            with Unflushed() as later:
                files = write_whole(self.files, folder, content, own, parts, later)
                return self._commit(folder, facts, files, later), [*files, MANIFEST]

        saved: Saved | None = None
        try:
            saved, common = decided(meeting, part, whole, _failed)
            at = self._root / (saved.name if machines.first[machines.rank] == 0 else folder)
            decided(meeting, lambda: self._spread(at, common), lambda _: None, _failed)
            decided(meeting, lambda: self._appear(folder, saved.name), lambda _: None, _failed)
        except BaseException:
            if machines.leading:
                self._discard(folder)
                if saved is not None:
                    self._discard(saved.name)
            raise
        self._whole.add(saved.name)
        self._wrote = True
        return saved

    def _drop(self, there: list[str]) -> None:
        """Delete the checkpoints of the run that the main process keeps no more."""
        gone = [entry for entry in self.entries() if entry.name not in there and entry.branch is not None]
        self.delete([entry.name for entry in gone if entry.branch is not None and entry.branch.run == self.run])

    def _spread(self, at: Path, common: list[str]) -> None:
        """Send the common files along a tree of the machines, and those of each rank to the next machine."""
        machines = self._machines
        rank, leads = machines.rank, machines.leads
        acts: list[Callable[[], object]] = []
        if machines.leading:
            number = leads.index(rank)
            if number:
                acts.append(partial(machines.receive, leads[(number - 1) // 2], at))
            acts += [partial(machines.send, child, at, common) for child in leads[2 * number + 1 : 2 * number + 3]]
        own = [part_file(kind, rank, len(machines.first)) for kind in ("model", "state", "rank")]
        with ThreadPoolExecutor(1) as beside:  # each sends and receives: a send waits until it is received
            others = [other for other in machines.on(machines.before(machines.first[rank])) if machines.keeper(other) == rank]
            ring: list[Callable[[], object]] = [partial(machines.receive, other, at) for other in others]

            def exchange() -> None:
                sent = beside.submit(machines.send, machines.keeper(rank), at, own)
                _each([*ring, sent.result])

            _each([*acts, exchange])

    def _appear(self, folder: str, name: str) -> None:
        if self._machines.leading and self._machines.rank:
            self._discard(name)  # an incomplete one, which the main process does not have
            self.files.rename(folder, name)


def complete(root: Path, driver: Driver) -> None:
    """Bring each machine the files that its ranks need to read the checkpoints in a folder, from machines that have them.

    One of which a file is on no machine stays unchanged, since machines that are absent may have the file; each that is here
    gets the manifest, by which it finds that the file is missing. Every rank must call this, before the checkpoints are read.

    Raises:
        OSError: A machine cannot send or write a file, for example as its memory is full.
    """
    machines, store = Machines.of(root, driver), Store(root)
    if len(machines.leads) == 1:
        return
    problems: list[OSError] = []
    everyone = agreed(driver.gather_unequal, lambda: dict(_listed(store)) if machines.leading else {}, _failed)
    for name in sorted({name for held in everyone for name in held}, reverse=True):
        found = {lead: everyone[lead][name] for lead in machines.leads if name in everyone[lead]}
        crc = next(iter(found.values()))[0]
        holders = {lead: files for lead, (other, files) in found.items() if other == crc}
        wanted, ranks = driver.broadcast(_wanted(store, name) if machines.rank == min(holders) else None, min(holders))
        moves = [*_moves(machines, holders, wanted, alike=ranks == driver.world_size)]
        if any(source is None for source, _, _ in moves):
            moves = [(min(holders), lead, [MANIFEST]) for lead in machines.leads if lead not in found]
        elif machines.leading and machines.rank not in holders and name in everyone[machines.rank]:
            store.delete([name])  # another one of this name
        for source, target, files in moves:
            try:
                if machines.rank == source:
                    machines.send(target, root / name, files)
                elif machines.rank == target and source is not None:
                    machines.receive(source, root / name)
            except OSError as error:
                problems.append(error)
    agreed(driver.gather_unequal, partial(_raise_first, problems), _failed)


def _listed(store: Store) -> Iterator[tuple[str, tuple[str, set[str]]]]:
    """Return the checkpoints of this machine: names, checksums of manifests, and the files."""
    for entry in store.entries():
        if entry.manifest is not None:
            folder = Path(str(store.files)) / entry.name
            files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
            yield entry.name, (str(entry.manifest["crc32"]), files)


def _wanted(store: Store, name: str) -> tuple[list[tuple[str, int | None]], int]:
    """Return the files of a checkpoint, each with its rank or None for the common ones, and the number of ranks."""
    manifest = store.manifest(Saved.named(name) or Saved(0, 1, name))
    try:
        table = Folder(store.files, name, manifest)._table
    except CheckpointError:
        table = {}
    ranks = int(manifest.get("ranks", 1))
    sizes = [(kind, rank, facts) for kind, some in table.items() for rank, facts in enumerate(some)]
    parts = [(part_file(kind, rank, ranks), rank) for kind, rank, facts in sizes if facts is not None]
    return [*((file, None) for file in (*files_in(manifest), MANIFEST)), *parts], ranks


def _moves(
    machines: Machines, holders: dict[int, set[str]], wanted: list[tuple[str, int | None]], *, alike: bool
) -> Iterator[tuple[int | None, int, list[str]]]:
    """Return who sends which files to whom: the first machine that has them, or None if none has. Manifests come last."""
    for lead in machines.leads:
        ranks = {*machines.on(lead), *machines.on(machines.before(lead))}
        lacks = [
            file
            for file, rank in wanted
            if (rank is None or not alike or rank in ranks) and file not in holders.get(lead, set())
        ]
        sources: dict[int | None, list[str]] = {}
        for file in sorted(lacks, key=lambda file: file == MANIFEST):
            sources.setdefault(next((one for one, files in holders.items() if file in files), None), []).append(file)
        yield from ((source, lead, files) for source, files in sources.items())


def _each(acts: Iterable[Callable[[], object]]) -> None:
    """Call all functions, as other ranks wait for what they do; then raise the first `OSError`."""
    problems: list[OSError] = []
    for act in acts:
        try:
            act()
        except OSError as error:
            problems.append(error)
    _raise_first(problems)


def _raise_first(problems: list[OSError]) -> None:
    if problems:
        raise problems[0]


def _read(path: Path, size: int, problems: list[OSError]) -> Iterator[bytearray]:
    """Return the pieces of a file. After an error, which is added to `problems`, they are zeros."""
    left = size
    try:
        with path.open("rb") as file:
            while left and (piece := file.read(min(_PIECE, left))):
                left -= len(piece)
                yield bytearray(piece)
        if left:
            problems.append(OSError(f"{path} has become shorter"))
    except OSError as error:
        problems.append(error)
    while left:
        yield bytearray(min(_PIECE, left))
        left -= min(_PIECE, left)


def _write(path: Path, pieces: Iterable[torch.Tensor]) -> None:
    """Write a file, which appears when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        with beside.open("wb") as file:
            for piece in pieces:
                file.write(piece.numpy().data)
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def _failed(rank: int, problem: str) -> OSError:
    return OSError(f"rank {rank} could not exchange or write its part of the local checkpoints: {problem}")
