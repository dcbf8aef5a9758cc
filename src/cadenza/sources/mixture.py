"""Several loaders that are read as one."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count, islice
from typing import Any, Literal, get_args

import torch

from cadenza.errors import DataError, nearest
from cadenza.loading.batch_log import described, rebuilt
from cadenza.loading.loaders import check_loader, length_of, set_loader_epoch
from cadenza.loading.resumable_base import END, PASS, Composite, Located, ResumableLoader, set_source
from cadenza.loading.resumable_loader import num_batches, resumable
from cadenza.loading.rng import derive_seed
from cadenza.loading.settings import CLASS_NAMES, loader_settings
from cadenza.loading.shards import Consumed, Shard

Mode = Literal["zip", "cycle", "sequential", "weighted"]
Stop = Literal["shortest", "longest"]

_ORDER = 0x6D69787475726573  # separates the seeds of the order of a weighted mixture from those of the data


class Mixture(Composite):
    """Several loaders that are read as one, in training and in evaluation.

    ============  =======================================  ========================================  =======================
    mode          a batch                                  ``stop="shortest"``: an epoch ends        ``stop="longest"``: it ends
    ============  =======================================  ========================================  =======================
    zip           ``{"a": ..., "b": ...}``: one batch      when one loader has no batch left:        when each loader was read
                  of each loader                           min(lengths)                              to its end: max(lengths)
    cycle         of a, then of b, then of a, ...          when the loader in turn has none left     likewise
    weighted      of a loader that is drawn by `weights`   when the drawn loader has none left       likewise
    sequential    of a to its end, then of b               after the last loader: sum(lengths)       not accepted
    ============  =======================================  ========================================  =======================

    A loader is known to be at its end when it is asked for a batch and has none. In ``"longest"``, it then begins a new pass,
    and the epoch ends when the last loader that had not been at its end is found there. A new epoch starts all loaders anew.
    Pass p (from 0) of a loader in epoch e reads it as its epoch ``e + p * 2**20``, so that it is shuffled differently;
    ``set_epoch`` receives this number.

    With ``"cycle"``, the loader of a batch depends on the number of the batch in the epoch alone; with ``"weighted"``, also on
    the seed of the run and the epoch. A run resumes at any batch if each loader can, also on another number of ranks. Each
    loader is sharded over the ranks by its own rules, and all ranks read the same loader at the same time. Each loader has its
    own seed, which is derived from that of the run.

    With all modes but ``"zip"``, the batches are those of the loaders, and `current_source` returns the name of the loader. An
    evaluation then reads each loader once, to its end, one after another, and reports results for each: see `Evaluation`.

    Args:
        loaders: By name, loaders of any kind that a run accepts, also a `Mixture`. The batches of a nested mixture have names
            such as ``"web/english"``. At least one; names must not contain ``/``.
        mode: The order of the batches.
        weights: With ``"weighted"`` only: for each name, a number above 0. The chance of a loader is its weight divided by
            the sum of all.
        stop: When an epoch ends.

    Raises:
        TypeError: A loader yields no batches or, with ``stop="longest"``, is an iterator, which cannot begin a new pass.
        ValueError: Another argument is wrong.

    A weighted mixture has no length, because the number of its batches is drawn with the order: limit the run with
    ``max_steps``.

    >>> list(Mixture({"a": [1, 2, 3], "b": [10, 20]}, mode="cycle"))
    [1, 10, 2, 20, 3]
    >>> list(Mixture({"a": [1, 2, 3], "b": [10, 20]}, mode="zip", stop="longest"))
    [{'a': 1, 'b': 10}, {'a': 2, 'b': 20}, {'a': 3, 'b': 10}]
    """

    def __init__(
        self,
        loaders: Mapping[str, Iterable[Any]],
        mode: Mode,
        *,
        weights: Mapping[str, float] | None = None,
        stop: Stop = "shortest",
    ) -> None:
        for what, value, known in (("mode", mode, get_args(Mode)), ("stop", stop, get_args(Stop))):
            if value not in known:
                hint = nearest(str(value), known)
                raise ValueError(f"{what} must be one of {', '.join(map(repr, known))}; got {value!r}.{hint}")
        if not isinstance(loaders, Mapping) or not loaders:
            raise ValueError(f"loaders must be a mapping of names to at least one loader; got {loaders!r}")
        if mode == "sequential" and stop == "longest":
            raise ValueError('mode="sequential" reads each loader once, to its end. Leave out stop="longest".')
        for name, loader in loaders.items():
            _check_source(name, loader, loaders, again=stop == "longest")
        self.loaders: dict[str, Iterable[Any]] = dict(loaders)
        self.mode: Mode = mode
        self.stop: Stop = stop
        self.weights: dict[str, float] | None = _checked_weights(mode, weights, self.loaders)
        self._bounds = list(accumulate((self.weights or dict.fromkeys(self.loaders, 1.0)).values()))

    def __repr__(self) -> str:
        names = ", ".join(f"{name}: {type(loader).__name__}" for name, loader in self.loaders.items())
        weights = "" if self.weights is None else f", weights={self.weights}"
        return f"Mixture({{{names}}}, mode={self.mode!r}{weights}, stop={self.stop!r})"

    def __len__(self) -> int:
        length = length_in_rounds(self, [length_of(loader) for loader in self.loaders.values()])
        if length is None:
            raise TypeError(f"{self!r} has no length: its order is drawn, or one of its loaders has none")
        return length

    def __iter__(self) -> Iterator[Any]:
        loaders, seed = list(self.loaders.values()), 0
        if self.mode == "weighted":
            seed = int(torch.randint(2**62, ()).item())
        positions = [SourcePosition() for _ in loaders]
        for given in rounds(self, positions, lambda index, at: iter(loaders[index]), seed, 0, 0):
            yield self.batch_of(given)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of every loader, for a plain loop. In a run this call is not needed."""
        for loader in self.loaders.values():
            set_loader_epoch(loader, epoch)

    def choose(self, seed: int, epoch: int, number: int) -> int:
        """Return the index of the loader that batch `number` of an epoch comes from, in the modes cycle and weighted."""
        if self.mode == "cycle":
            return number % len(self.loaders)
        drawn = derive_seed(seed, epoch, number, _ORDER) / 2**63 * self._bounds[-1]
        return min(bisect_right(self._bounds, drawn), len(self.loaders) - 1)

    def batch_of(self, given: Mapping[int, Any]) -> Any:
        """Return the batch of a round of `rounds`: with zip, a mapping by name."""
        if self.mode == "zip":
            return dict(zip(self.loaders, given.values(), strict=True))
        return next(iter(given.values()))

    def parts_of(self, batch: Any) -> Mapping[str, Any]:
        """Return the batches of all loaders by name, of a batch with zip: the inverse of `batch_of`."""
        parts: Mapping[str, Any] = batch
        return parts

    def leaves(self) -> dict[str, Iterable[Any]]:
        """Return the loaders by name, and those of nested mixtures; none in the mode zip. Nested, that mode counts as a loader.

        >>> list(Mixture({"a": [1], "b": Mixture({"c": [2], "d": [3]}, mode="cycle")}, mode="sequential").leaves())
        ['a', 'b/c', 'b/d']
        """
        found: dict[str, Iterable[Any]] = {}
        for name, loader in self.loaders.items() if self.mode != "zip" else ():
            inner = loader.leaves() if isinstance(loader, Mixture) else {}
            found |= {f"{name}/{key}": leaf for key, leaf in inner.items()} or {name: loader}
        return found

    def resumable(self, seed: int, shard: Shard, **options: Any) -> ResumableLoader:
        return MixedLoader(self, seed, shard, **options)

    def num_batches(self, shard: Shard) -> int | None:
        return _num_batches(self, shard)

    @property
    def begins_new_passes(self) -> bool:
        return self.stop == "longest"

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"loader": "Mixture", "loaders": list(self.loaders), "mode": self.mode, "stop": self.stop}
        settings |= {} if self.weights is None else {"weights": list(self.weights.values())}
        for name, loader in self.loaders.items():
            own = loader_settings(loader)
            settings |= {f"{name}/{key}": value for key, value in own.items() if key not in CLASS_NAMES}
        return settings

    def description(self, rank: int) -> dict[str, Any]:
        weights = {} if self.weights is None else {"weights": self.weights}
        loaders = {name: described(value, rank) for name, value in self.loaders.items()}
        return {"kind": "mixture", "mode": self.mode, "stop": self.stop, **weights, "loaders": loaders}

    @staticmethod
    def rebuilt(description: Mapping[str, Any], rank: int) -> Mixture:
        """Return a mixture of the order that `description` returned. Its loaders hold no data."""
        loaders = {name: rebuilt(value, rank) for name, value in description["loaders"].items()}
        return Mixture(loaders, description["mode"], weights=description.get("weights"), stop=description["stop"])


@dataclass(slots=True)
class SourcePosition:
    """The position of a run in one loader of a mixture, in an epoch."""

    passes: int = 0
    """The number of complete passes."""
    read: int = 0
    """The number of batches that this rank has read in the current pass; with other world sizes, the number of rounds."""
    ended: bool = False
    """Whether the loader has been at its end."""
    consumed: Consumed = ()
    """The part of the current pass that was read with other world sizes."""

    def resumed(self, world_size: int) -> None:
        """Continue with a world size: do not count its own rounds as consumed."""
        if self.consumed and self.consumed[-1][0] == world_size:
            self.consumed = self.consumed[:-1]

    def suspended(self, world_size: int) -> None:
        """Count all rounds that were read with a world size as consumed."""
        own = self.read - sum(done for _, done in self.consumed)
        if own:
            self.consumed = (*self.consumed, (world_size, own))


def rounds(
    mixture: Mixture,
    positions: Sequence[SourcePosition],
    open_source: Callable[[int, SourcePosition], Iterator[Any]],
    seed: int,
    epoch: int,
    first: int,
) -> Iterator[dict[int, Any]]:
    """Yield the batches of each round of an epoch by the index of the loader, and keep `positions` up to date.

    Args:
        mixture: The loaders and their order.
        positions: The position in each loader before round `first`. They are changed.
        open_source: Returns the batches of a loader from a position on.
        seed: The seed of a weighted order.
        epoch: The number of the epoch, counted from 0.
        first: The number of the first round, counted from 0.
    """
    asked = _Asked(mixture, positions, open_source)
    if mixture.mode == "zip":
        return _together(asked)
    if mixture.mode == "sequential":
        return _one_after_another(asked)
    return _by_turns(asked, (mixture.choose(seed, epoch, number) for number in count(first)))


class _Asked:
    """The loaders of a mixture, which are asked for one batch at a time."""

    def __init__(
        self,
        mixture: Mixture,
        positions: Sequence[SourcePosition],
        open_source: Callable[[int, SourcePosition], Iterator[Any]],
    ) -> None:
        self.positions = positions
        self._mixture, self._open = mixture, open_source
        # Loaders inside a pass are opened now, so that one that cannot continue there is an error at the start.
        inside = [i for i, at in enumerate(positions) if at.read and not (mixture.mode == "sequential" and at.ended)]
        self._opened = {i: open_source(i, positions[i]) for i in inside}

    def next(self, index: int) -> Any:
        """Return the next batch of a loader; `END` if the epoch is over or, if the mode is sequential, the loader."""
        at = self.positions[index]
        while True:
            batches = self._opened.get(index)
            if batches is None:
                batches = self._opened[index] = self._open(index, at)
            batch = next(batches, END)
            if batch is not END:
                at.read += 1
                return batch
            del self._opened[index]
            if not at.read:
                raise DataError(_no_batch(list(self._mixture.loaders)[index], at.passes))
            at.ended = True
            if self._mixture.stop == "shortest" or all(position.ended for position in self.positions):
                return END
            at.passes, at.read, at.consumed = at.passes + 1, 0, ()


def _by_turns(asked: _Asked, order: Iterable[int]) -> Iterator[dict[int, Any]]:
    for index in order:
        if (batch := asked.next(index)) is END:
            return
        yield {index: batch}


def _one_after_another(asked: _Asked) -> Iterator[dict[int, Any]]:
    for index, at in enumerate(asked.positions):
        while not at.ended and (batch := asked.next(index)) is not END:
            yield {index: batch}


def _together(asked: _Asked) -> Iterator[dict[int, Any]]:
    while True:
        given: dict[int, Any] = {}
        for index in range(len(asked.positions)):
            if (batch := asked.next(index)) is END:
                return
            given[index] = batch
        yield given


def length_in_rounds(mixture: Mixture, lengths: Sequence[int | None]) -> int | None:
    """Return the number of rounds in an epoch; None if it is not known.

    Args:
        mixture: The order.
        lengths: The number of batches in a pass over each loader.
    """
    known = [length for length in lengths if length is not None]
    if len(known) < len(lengths) or mixture.mode == "weighted":
        return None
    if mixture.mode == "sequential":
        return sum(known)
    if mixture.mode == "cycle":  # loader i is found at its end when it is asked for the first time after its last batch
        known = [length * len(known) + index for index, length in enumerate(known)]
    return min(known) if mixture.stop == "shortest" else max(known)


def _no_batch(name: str, passes: int) -> str:
    again = f" in pass {passes + 1}" if passes else ""
    return (
        f"the loader {name!r} of a Mixture gave no batch{again}: expected at least one. An iterator is used up after one pass, "
        "a loader is not; with drop_last=True, a data set smaller than a batch gives none."
    )


def _check_source(name: Any, loader: Any, loaders: Mapping[str, Any], *, again: bool) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"the names of loaders must be strings without '/'; got {name!r}")
    if not isinstance(loader, Mixture):
        check_loader(loader, f"the loader {name!r}", again=again)
    if again and isinstance(loader, Iterator):
        raise TypeError(
            f'the loader {name!r} is an iterator, which can be read once; with stop="longest" it must be able to begin a new '
            "pass. Pass a list, a DataLoader, or another iterable that starts again at each iter()."
        )
    if twin := next((other for other, value in loaders.items() if value is loader and other != name), None):
        raise ValueError(f"the loaders {name!r} and {twin!r} are one object, which has one position. Create two loaders.")


def _checked_weights(mode: Mode, weights: Any, loaders: Mapping[str, Any]) -> dict[str, float] | None:
    if (mode == "weighted") != (weights is not None):
        hint = "Pass weights={'a': 0.7, 'b': 0.3}." if weights is None else "Leave out weights."
        raise ValueError(f'weights belong to mode="weighted"; got mode={mode!r} and weights={weights!r}. {hint}')
    if weights is None:
        return None
    if not isinstance(weights, Mapping) or set(weights) != set(loaders):
        raise ValueError(f"weights must be a mapping with the names of the loaders, {list(loaders)}; got {weights!r}")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(
                f"the weight of {name!r} must be a number above 0; got {weight!r}. Leave out a loader not to read it."
            )
    return {name: float(weights[name]) for name in loaders}


# -- read by a run ----------------------------------------------------------------------------------


class MixedLoader(ResumableLoader):
    """A `Mixture`, resumable. Its state has the position in each loader.

    Args:
        mixture: The loaders.
        seed: The seed of the run.
        shard: The shard that this rank reads of each loader that is not sharded already.
        options: Further arguments of `resumable` for each of the loaders.
    """

    def __init__(self, mixture: Mixture, seed: int, shard: Shard, **options: Any) -> None:
        self._mixture, self._seed, self._given, self._options = mixture, seed, shard, options
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
        return next((why for index in range(len(self._names)) if (why := self._source(index).obstacle) is not None), None)

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
        return (
            None if self._mixture.mode == "zip" else next((position.indices for position in self.located(epoch, number)), None)
        )

    def located(self, epoch: int, number: int) -> list[Located]:
        positions = self._walked(epoch, number)
        if positions is None:
            return [Located("", epoch, number, None)]
        walk, found = _walk(self._mixture, positions, self._given, self._seed, epoch, number), list[Located]()
        for index in next(walk, ()):
            at, name = positions[index], self._names[index]
            inside = self._open(index, at).located(epoch + at.passes * PASS, at.read - 1)
            found += [position._replace(source=f"{name}/{position.source}" if position.source else name) for position in inside]
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
            self._sources[index] = self._open(index, self._positions[index])
        return self._sources[index]

    def _open(self, index: int, at: SourcePosition) -> ResumableLoader:
        shard = self._given.resumed(at.consumed)
        return resumable(self._loaders[index], derive_seed(self._seed, index + 1), shard=shard, **self._options)

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
        positions = _walked(self._mixture, shard, self._seed, epoch)
        if positions is not None:
            for _ in islice(_walk(self._mixture, positions, self._given, self._seed, epoch, number - own), own):
                pass
        return positions

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


def _num_batches(mixture: Mixture, shard: Shard) -> int | None:
    """Return how many batches a rank gets in one pass over a mixture; None if it is not known."""
    lengths = [num_batches(loader, replace(shard, consumed=())) for loader in mixture.loaders.values()]
    length = length_in_rounds(mixture, lengths)
    if length is None or not shard.consumed:
        return length
    positions = _walked(mixture, shard, 0, 0)
    assert positions is not None  # all lengths are known
    done = shard.consumed_rounds
    return done + sum(1 for _ in _walk(mixture, positions, shard, 0, 0, done))


def _walked(mixture: Mixture, shard: Shard, seed: int, epoch: int) -> list[SourcePosition] | None:
    """Return the positions after the consumed part of an epoch, from the lengths of the loaders; None if one has no length."""
    if any(num_batches(loader, replace(shard, consumed=())) is None for loader in mixture.loaders.values()):
        return None
    positions, number = [SourcePosition() for _ in mixture.loaders], 0
    for world_size, done in shard.consumed:
        part = replace(shard, rank=0, world_size=world_size, consumed=())
        for at in positions:
            at.resumed(world_size)
        for _ in islice(_walk(mixture, positions, part, seed, epoch, number), done):
            pass
        for at in positions:
            at.suspended(world_size)
        number += done
    for at in positions:
        at.resumed(shard.world_size)
    return positions


def _walk(
    mixture: Mixture, positions: list[SourcePosition], shard: Shard, seed: int, epoch: int, first: int
) -> Iterator[dict[int, Any]]:
    """Yield the rounds without reading a batch: the positions change as they do when the batches are read."""
    loaders = list(mixture.loaders.values())

    def numbers(index: int, at: SourcePosition) -> Iterator[int]:
        return iter(range(at.read, num_batches(loaders[index], shard.resumed(at.consumed)) or 0))

    return rounds(mixture, positions, numbers, seed, epoch, first)
