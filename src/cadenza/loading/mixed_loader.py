"""A mixture in the form that the loop reads: it can be resumed at any batch, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from cadenza.errors import DataError
from cadenza.loading.mixture import Mixture, SourcePosition, length_in_rounds, rounds, set_source
from cadenza.loading.resumable_base import Located, ResumableLoader
from cadenza.loading.rng import derive_seed
from cadenza.loading.shards import Shard

NumBatches = Callable[[object, Shard], int | None]
"""Returns how many batches a rank gets in one pass over a loader."""

PASS = 2**20  # added to the epoch of a loader in each new pass


class OpenLoader(Protocol):
    """A function that makes a loader resumable."""

    def __call__(self, loader: Any, seed: int, *, shard: Shard) -> ResumableLoader: ...


class MixedLoader(ResumableLoader):
    """A `Mixture`, resumable. Its state has the position in each loader.

    Args:
        mixture: The loaders.
        seed: The seed of the run.
        shard: The shard that this rank reads of each loader that is not sharded already.
        open_loader: Makes one of the loaders resumable.
        num_batches: Returns the number of batches of one of the loaders.
    """

    def __init__(self, mixture: Mixture, seed: int, shard: Shard, open_loader: OpenLoader, num_batches: NumBatches) -> None:
        self._mixture, self._seed, self._given = mixture, seed, shard
        self._open, self._num_batches = open_loader, num_batches
        self._names, self._loaders = list(mixture.loaders), list(mixture.loaders.values())
        self._positions = [SourcePosition() for _ in self._names]
        self._sources: dict[int, ResumableLoader] = {}
        self._restored: Mapping[str, Any] | None = None
        self._last: dict[int, Any] = {}
        self._replicated_at: int | None = None
        self.source: str | None = None
        """The name of the loader that the last batch comes from; None in the mode zip."""
        self.shard: Shard = self._shard_of_all()

    @property
    def obstacle(self) -> str | None:
        return next((one for index in range(len(self._names)) if (one := self._source(index).obstacle) is not None), None)

    def check_inside(self, skip: int) -> None:
        """Do nothing: the positions in the loaders decide, when these are read."""

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        restored, self._restored = self._restored, None
        self._positions, self._replicated_at = self._positions_at(epoch, skip, restored), None
        if skip:
            self._sources.clear()  # they are opened again with the part of their pass that other world sizes have read
        for index, name in enumerate(self._names if skip and restored else ()):
            if restored and (state := restored["loaders"][name]["state"]) is not None:
                self._source(index).load_state_dict(state)
        given = rounds(self._mixture, self._positions, lambda i, at: self._pass(epoch, i, at), self._seed, epoch, skip)
        return self._noted(given, skip)

    def state_dict(self) -> dict[str, Any]:
        if self._restored is not None:  # nothing was read since
            return dict(self._restored)
        loaders = {}
        for index, (name, at) in enumerate(zip(self._names, self._positions, strict=True)):
            inside = at.read and index in self._sources
            loaders[name] = {
                "passes": at.passes,
                "read": at.read,
                "ended": at.ended,
                "consumed": [list(done) for done in at.consumed],
                "state": self._sources[index].state_dict() if inside else None,
            }
        return {"ranks": self._given.world_size, "source": self.source, "loaders": loaders}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored = state if list(state.get("loaders", ())) == self._names else None
        if self._restored is not None:
            self.source = state["source"]
            set_source(self.source)

    @property
    def replicated_at(self) -> int | None:
        return self._replicated_at

    def size_of(self, batch: Any) -> int:
        """Return the number of samples in the last batch; in the mode zip, the sum over the loaders."""
        if self._mixture.mode != "zip":
            index = next(iter(self._last), None)
            return super().size_of(batch) if index is None else self._sources[index].size_of(batch)
        alike = self._given.rank > 0 and self._replicated_at is None  # then a part that all ranks train on counts on rank 0
        parts = self._mixture.parts_of(batch)
        return sum(
            self._sources[index].size_of(parts[name])
            for index, name in enumerate(self._names)
            if not (alike and self._is_replicated(index))
        )

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        """Return the indices in the dataset of the loader that batch `number` comes from; None in the mode zip."""
        return None if self._mixture.mode == "zip" else next((one.indices for one in self.located(epoch, number)), None)

    def located(self, epoch: int, number: int) -> list[Located]:
        positions = self._walked(epoch, number)
        if positions is None:
            return [Located("", epoch, number, None)]
        walk, found = self._walk(positions, epoch, number, self._given), list[Located]()
        for index in next(walk, ()):
            at, name = positions[index], self._names[index]
            shard = self._given.resumed(at.consumed)
            source = self._open(self._loaders[index], derive_seed(self._seed, index + 1), shard=shard)
            inside = source.located(epoch + at.passes * PASS, at.read - 1)
            found += [one._replace(source=f"{name}/{one.source}" if one.source else name) for one in inside]
        return found

    # -- positions ---------------------------------------------------------------------------------

    def _shard_of_all(self) -> Shard:
        """Return the shard with ``share_data=False`` if one of the loaders is sharded already."""
        shards = [self._source(index).shard for index in range(len(self._names))]
        return replace(self._given, share_data=all(shard.share_data for shard in shards))

    def close(self) -> None:
        for source in self._sources.values():
            source.close()

    def _source(self, index: int) -> ResumableLoader:
        """Return one of the loaders, resumable, at its position."""
        if index not in self._sources:
            shard = self._given.resumed(self._positions[index].consumed)
            self._sources[index] = self._open(self._loaders[index], derive_seed(self._seed, index + 1), shard=shard)
        return self._sources[index]

    def _pass(self, epoch: int, index: int, at: SourcePosition) -> Iterator[Any]:
        return self._source(index).batches(epoch + at.passes * PASS, at.read)

    def _positions_at(self, epoch: int, skip: int, restored: Mapping[str, Any] | None) -> list[SourcePosition]:
        if not skip:
            return [SourcePosition() for _ in self._names]
        if restored is not None:
            return [self._position_in(restored, name) for name in self._names]
        walked = self._walked(epoch, skip)
        if walked is None:
            raise DataError(
                f"the run must continue at batch {skip + 1} of an epoch, but the checkpoint holds no position for "
                f"{self._mixture!r}, and one of its loaders has no length. Resume with the loader of the checkpoint."
            )
        return walked

    def _position_in(self, restored: Mapping[str, Any], name: str) -> SourcePosition:
        saved = restored["loaders"][name]
        consumed = tuple((ranks, done) for ranks, done in saved["consumed"])
        at = SourcePosition(saved["passes"], saved["read"], saved["ended"], consumed)
        at.suspended(restored["ranks"])
        at.resumed(self._given.world_size)
        return at

    def _walked(self, epoch: int, number: int) -> list[SourcePosition] | None:
        """Return the positions before round `number`, from the lengths of the loaders; None if one has no length."""
        shard, own = self._given.at_round(number)
        positions = walked(self._mixture, shard, self._num_batches, self._seed, epoch)
        if positions is not None:
            for _ in islice(self._walk(positions, epoch, number - own, self._given), own):
                pass
        return positions

    def _walk(self, positions: list[SourcePosition], epoch: int, first: int, shard: Shard) -> Iterator[dict[int, Any]]:
        return _walk(self._mixture, positions, shard, self._num_batches, self._seed, epoch, first)

    # -- the batches -------------------------------------------------------------------------------

    def _noted(self, given: Iterator[dict[int, Any]], first: int) -> Iterator[Any]:
        """Yield the batches, and set the current source."""
        zipped = self._mixture.mode == "zip"
        for number, batches in enumerate(given, first):
            # The positions are enough to count samples: a batch that is kept here would keep its memory.
            self._last = dict.fromkeys(batches)
            self._replicated_at = number if all(map(self._is_replicated, batches)) else None
            if zipped:
                self.source = None
            else:
                (index,) = batches
                inner = getattr(self._sources[index], "source", None)
                self.source = self._names[index] if inner is None else f"{self._names[index]}/{inner}"
            set_source(self.source)
            yield self._mixture.batch_of(batches)

    def _is_replicated(self, index: int) -> bool:
        return self._sources[index].replicated_at == self._positions[index].read - 1


def num_mixed_batches(mixture: Mixture, shard: Shard, num_batches: NumBatches) -> int | None:
    """Return how many batches a rank gets in one pass over a mixture; None if it is not known.

    Args:
        mixture: The mixture.
        shard: The shard of the rank.
        num_batches: Returns the number for one of its loaders.
    """
    lengths = [num_batches(loader, replace(shard, consumed=())) for loader in mixture.loaders.values()]
    length = length_in_rounds(mixture, lengths)
    if length is None or not shard.consumed:
        return length
    positions = walked(mixture, shard, num_batches, 0, 0)
    assert positions is not None  # all lengths are known
    done = shard.consumed_rounds
    return done + sum(1 for _ in _walk(mixture, positions, shard, num_batches, 0, 0, done))


def walked(mixture: Mixture, shard: Shard, num_batches: NumBatches, seed: int, epoch: int) -> list[SourcePosition] | None:
    """Return the positions after the consumed part of an epoch, from the lengths of the loaders; None if one has no length."""
    if any(num_batches(loader, replace(shard, consumed=())) is None for loader in mixture.loaders.values()):
        return None
    positions, number = [SourcePosition() for _ in mixture.loaders], 0
    for world_size, done in shard.consumed:
        part = replace(shard, rank=0, world_size=world_size, consumed=())
        for at in positions:
            at.resumed(world_size)
        for _ in islice(_walk(mixture, positions, part, num_batches, seed, epoch, number), done):
            pass
        for at in positions:
            at.suspended(world_size)
        number += done
    for at in positions:
        at.resumed(shard.world_size)
    return positions


def _walk(
    mixture: Mixture,
    positions: list[SourcePosition],
    shard: Shard,
    num_batches: NumBatches,
    seed: int,
    epoch: int,
    first: int,
) -> Iterator[dict[int, Any]]:
    """Yield the rounds without reading a batch: the positions change as they do when the batches are read."""
    loaders = list(mixture.loaders.values())

    def numbers(index: int, at: SourcePosition) -> Iterator[int]:
        return iter(range(at.read, num_batches(loaders[index], shard.resumed(at.consumed)) or 0))

    return rounds(mixture, positions, numbers, seed, epoch, first)
