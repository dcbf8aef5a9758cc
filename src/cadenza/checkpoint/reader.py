"""Read the checkpoint at which a run continues: on one process, or on all ranks, of which each reads and verifies its part."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from cadenza.checkpoint.store import Entry, Loaded, Saved, Store
from cadenza.checkpoint.store.checkpoints import not_exact
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, DistributedError

if TYPE_CHECKING:
    from cadenza.drivers.base import Driver

T = TypeVar("T")


class Reader:
    """Reads checkpoints, and keeps the last one, so that no checkpoint is read twice while a start is chosen."""

    def __init__(self) -> None:
        self.last: tuple[str, Loaded] | None = None
        """The path of the checkpoint that was read last, and its content."""

    def read(self, entry: Entry) -> Loaded:
        """Return a checkpoint's content, verified.

        Raises:
            CheckpointError: It cannot be used, or not on all ranks.
        """
        if self.last is None or self.last[0] != entry.path:
            self.last = None  # its memory is free before the next one is read
            self.last = entry.path, self._read(entry)
        return self.last[1]

    def problem(self, entry: Entry, *, exact: bool = False) -> str | None:
        """Return a sentence on why a checkpoint cannot be used or, if `exact`, not be continued; None if it can.

        It is read for this.
        """
        why = not_exact(entry.name, entry.manifest) if exact and entry.manifest is not None else None
        try:
            if why is None:
                self.read(entry)
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            return str(error)
        return why

    def _read(self, entry: Entry) -> Loaded:
        return entry.store.read(entry.saved, lazily=True)


class _OnAllRanks(Reader):
    """Reads on all ranks what the main process chooses. The main process learns the problems of all ranks."""

    def __init__(self, driver: Driver, *, keep: bool) -> None:
        super().__init__()
        self._driver, self._keep = driver, keep

    def _read(self, entry: Entry) -> Loaded:
        # The checksum of the manifest: all ranks must see the same checkpoint.
        order = str(entry.store.files), entry.saved, entry.store.manifest(entry.saved)["crc32"]
        self._driver.broadcast(order)
        loaded, problems = self._take_part(*order)
        for rank, problem in enumerate(problems):
            if problem is not None:
                kind, message = problem
                raise kind(message if rank == 0 or kind is CheckpointError else f"{message} (rank {rank})")
        assert loaded is not None, "a rank that has no problem has read it"
        return loaded

    def follow(self) -> None:
        """Read what the main process reads, until it has chosen. Every other rank must call this."""
        while (order := self._driver.broadcast(None)) is not None:
            self.last = None
            location, saved, _ = order
            loaded, _ = self._take_part(*order)
            self.last = None if loaded is None else (f"{location}/{saved.name}", loaded)

    def _take_part(self, location: str, saved: Saved, crc32: str) -> tuple[Loaded | None, list[Any]]:
        """Read this rank's part; return it, and on the main process the problems of all ranks."""
        loaded: Loaded | None = None
        problem: tuple[type[CheckpointError], str] | None = None
        try:
            loaded = self._own(Store(location), saved, crc32)
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            problem = type(error), str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            problem = CheckpointError, f"rank {self._driver.rank} cannot read {saved.name}: {why}"
        return loaded, self._driver.gather_on_main(problem)

    def _own(self, store: Store, saved: Saved, crc32: str) -> Loaded:
        manifest = store.entry(saved).manifest
        if manifest is None or manifest["crc32"] != crc32:
            raise LookupError(
                f"on {platform.node()} there is {'no' if manifest is None else 'another'} checkpoint of this name in "
                f"{store.files}. Each rank reads the checkpoint itself: all machines must see the same folder under the same "
                "path. Put it on a file system that they share, or copy it to each machine"
            )
        return store.read(saved, lazily=True, rank=self._driver.rank, ranks=self._driver.world_size, keep=self._keep)


def on_all_ranks(driver: Driver, choose: Callable[[Reader], tuple[T, bool]], *, keep: bool = True) -> tuple[T, Loaded | None]:
    """Return what the main process chooses, and the checkpoint that belongs to it, read here. Every rank must call this.

    Args:
        driver: The driver of the run.
        choose: Called on the main process. Returns its choice, without content of a checkpoint, and whether the checkpoint that
            it read last belongs to it.
        keep: Keep the shards of this rank in memory when they are verified, since all of them will be read.

    Raises:
        CheckpointError: Nothing can be chosen.
        DistributedError: The main process could not choose.
    """
    reader = _OnAllRanks(driver, keep=keep) if driver.world_size > 1 else Reader()
    choice: tuple[T, bool] | None = None
    error: Exception | None = None
    if driver.is_main:
        try:
            choice = choose(reader)
        except Exception as raised:
            error = raised
        if driver.world_size > 1:
            driver.broadcast(None)  # not in the block: a rank that does not come is no error of the choice
    elif isinstance(reader, _OnAllRanks):
        reader.follow()
    choice, problem = driver.broadcast((choice, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    if choice is None:
        raise DistributedError(f"the main process cannot begin, so rank {driver.rank} cannot: {problem}")
    value, has_read = choice
    return value, reader.last[1] if has_read and reader.last is not None else None
