"""Which batches each step of a run read: kept in ``run.json`` and in checkpoints, as points from which the rest is computed.

The order of a loader is plain data, of which a loader of the same order is made without the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from cadenza.lazy import imported
from cadenza.loading.batches import uses_torch_iteration
from cadenza.loading.loaders import Limited, length_of
from cadenza.loading.resumable_base import PASS, Composite, Located, ResumableLoader, is_sharded_stream
from cadenza.loading.resumable_loader import resumable
from cadenza.loading.shards import Consumed, Shard
from cadenza.loading.tensors import TensorBatches
from cadenza.status.run_info import BatchSamples, StepSamples


class Point(NamedTuple):
    """A step boundary. Up to the next point, all steps follow from it."""

    step: int
    """Complete steps."""
    epoch: int
    """Complete epochs."""
    read: int
    """Complete batches of this epoch, on each rank."""
    batch: int
    """Complete batches, over all epochs."""
    accumulate: int
    """The batches in each step from here on."""
    here: int | None
    """The batches of each rank in this epoch; None if that is not known."""
    whole: int | None
    """The batches of each rank in each later epoch; None if that is not known."""

    def after(self, step: int) -> tuple[int, int]:
        """Return the epoch and the batches of it that are complete after a later step, if nothing unforeseen happens."""
        steps = step - self.step
        if self.here is None:
            return self.epoch, self.read + steps * self.accumulate
        left = -(-(self.here - self.read) // self.accumulate)
        if steps < left:
            return self.epoch, self.read + steps * self.accumulate
        if self.whole is None:
            return self.epoch + 1, (steps - left) * self.accumulate
        epochs, rest = divmod(steps - left, max(1, -(-self.whole // self.accumulate)))
        return self.epoch + 1 + epochs, rest * self.accumulate

    def batches_before(self, epoch: int, read: int) -> int:
        """Return how many batches are complete, over all epochs, at a later position."""
        if epoch == self.epoch:
            return self.batch + read - self.read
        return self.batch + (self.here or 0) - self.read + (epoch - self.epoch - 1) * (self.whole or 0) + read

    def length_of(self, epoch: int) -> int | None:
        """Return the number of batches of each rank in an epoch."""
        return self.here if epoch == self.epoch else self.whole


class Window(NamedTuple):
    """The batches of one step."""

    step: int
    """The number of the step, from 1."""
    epoch: int
    """The epoch, from 0."""
    size: int
    """The number of batches on each rank."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a run with one loader, one number of ranks and one seed."""

    seed: int
    """The seed of the order."""
    permuted: int
    """See `resumable`."""
    ranks: int
    """The number of ranks."""
    dealt: bool
    """Whether Cadenza shards loaders that are not sharded already."""
    consumed: Consumed
    """The part of its first epoch that other numbers of ranks had read."""
    loader: Mapping[str, Any]
    """See `cadenza.loading.batch_log.described`."""
    points: list[Point] = field(default_factory=list, compare=False)

    def opened(self, rank: int, epoch: int) -> ResumableLoader:
        """Return the loader that a rank reads in an epoch, without its data."""
        consumed = self.consumed if epoch == self.points[0].epoch else ()
        shard = Shard(rank, self.ranks, share_data=self.dealt, consumed=consumed)
        return resumable(rebuilt(self.loader, rank), self.seed, shard=shard, permuted=self.permuted)


class BatchLog:
    """The batches that each step of a run read.

    Each start of the run adds a segment, unless it goes on as before. A point is added where the position is not the one that
    follows from the last point: at a change of ``accumulate``, and after an epoch of unexpected length.

    >>> from cadenza.loading.batch_log import described
    >>> course = BatchLog()
    >>> course.go_on(Segment(1, 2**20, 1, True, (), described([10, 20, 30])), Point(0, 0, 0, 0, 2, 3, 3))
    >>> print(course.samples(4))
    step 4, in epoch 2:
      rank 0, batch 3: index in the list 2
    """

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self.segments: list[Segment] = [*segments]
        self._opened: dict[tuple[int, int, bool], ResumableLoader] = {}

    def go_on(self, segment: Segment, at: Point) -> None:
        """Begin, or continue, a run at a point."""
        if not self.segments or self.segments[-1] != segment:
            self.segments.append(segment)
        self.note(at)

    def note(self, at: Point) -> bool:
        """Add a point, unless it follows from the last one; return whether it was added."""
        points = self.segments[-1].points if self.segments else None
        if points is None:
            return False  # the run has not begun
        # Before an epoch's end is carried out, the last batch of it is the same position as the first of the next.
        if points and points[-1].after(at.step) == at.after(at.step) and points[-1][4:] == at[4:]:
            return False
        if len(points) > 1 and points[-1].step == at.step:
            points.pop()  # no step follows from it: a run was resumed at the end of an epoch
        points.append(at)
        return True

    def samples(self, step: int) -> StepSamples:
        """Return the samples of a step, from 1.

        Raises:
            ValueError: The step lies before the first point.
        """
        segment, at, after = self._point_before(step)
        epoch, read = at.after(step - 1)
        length = at.length_of(epoch)
        count = at.accumulate if length is None else min(at.accumulate, length - read)
        if after is not None:
            count = min(count, after.batch - at.batches_before(epoch, read))
        batches = [
            entry
            for rank in range(segment.ranks)
            for number in range(read, read + count)
            for entry in self._named(segment, rank, epoch, number)
        ]
        return StepSamples(step, epoch, segment.ranks, tuple(batches))

    def windows(self, until: int) -> Iterator[Window]:
        """Yield the steps from the first point to step `until`."""
        points = [point for segment in self.segments for point in segment.points]
        for at, after in zip_longest(points, points[1:]):
            end = until if after is None else min(until, after.step)
            epoch, read = at.after(at.step)
            total, length = at.batch, at.length_of(epoch)
            for step in range(at.step + 1, end + 1):
                size = at.accumulate if length is None else min(at.accumulate, length - read)
                size = size if after is None else min(size, after.batch - total)
                yield Window(step, epoch, size)
                read, total = read + size, total + size
                if read == length:
                    epoch, read, length = epoch + 1, 0, at.whole

    def to_plain(self) -> list[dict[str, Any]]:
        """Return it as plain values."""
        return [{**asdict(segment), "points": [list(point) for point in segment.points]} for segment in self.segments]

    @staticmethod
    def from_plain(plain: Sequence[Mapping[str, Any]]) -> BatchLog:
        """Return the course from the result of `to_plain`."""
        segments = []
        for entry in plain:
            points = [Point(*point) for point in entry["points"]]
            consumed = tuple((ranks, done) for ranks, done in entry["consumed"])
            segments.append(Segment(**{**entry, "points": points, "consumed": consumed}))
        return BatchLog(segments)

    def _point_before(self, step: int) -> tuple[Segment, Point, Point | None]:
        """Return the last point before a step, its segment, and the point after it."""
        points = [(segment, point) for segment in self.segments for point in segment.points]
        index = max((i for i, (_, point) in enumerate(points) if point.step < step), default=None)
        if not points:
            raise ValueError(f"the samples of step {step} are not known: the loop of cadenza.attach(...) brings its own data.")
        if index is None:
            raise ValueError(
                f"the samples of step {step} are not known: the first step that run.json describes is step "
                f"{points[0][1].step + 1}. An earlier version of Cadenza did the steps before."
            )
        following = (point for _, point in points[index + 1 :])
        return *points[index], next(following, None)

    def _named(self, segment: Segment, rank: int, epoch: int, number: int) -> list[BatchSamples]:
        key = self.segments.index(segment), rank, epoch == segment.points[0].epoch
        if key not in self._opened:
            self._opened[key] = segment.opened(rank, epoch)
        found = self._opened[key].located(epoch, number)
        return [_batch(segment, rank, number) for number in found]


def _batch(segment: Segment, rank: int, at: Located) -> BatchSamples:
    leaf = _leaf(segment.loader, at.source)
    kind, why = leaf["kind"], leaf.get("why", "")
    if kind == "stream":
        why = f"a stream has no indices; this rank reads {_shards(leaf, rank, segment)}"
    elif at.indices is None and not why:
        why = (
            "one of the loaders of the mixture has no length, so the position in each is not known" if kind == "mixture" else ""
        )
    passes, epoch = divmod(at.epoch, PASS)
    unit: Any = "batches" if kind == "list" else "samples"
    return BatchSamples(rank, epoch, at.number, at.indices, unit, at.source, passes, why)


def _leaf(loader: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """Return the description of a loader inside of mixtures and limits."""
    while loader["kind"] == "limited":
        loader = loader["loader"]
    if loader["kind"] != "mixture" or not source:
        return loader
    name, _, rest = source.partition("/")
    return _leaf(loader["loaders"][name], rest)


def _shards(leaf: Mapping[str, Any], rank: int, segment: Segment) -> str:
    ranks = segment.ranks if segment.dealt else 1
    own = [*range(rank % ranks, leaf["shards"], ranks)]
    text = ", ".join(map(str, own)) if len(own) <= 4 else f"{own[0]}, {own[1]}, ..., {own[-1]}"
    return f"shards {text}" if leaf["workers"] == 1 else f"shards {text} with {leaf['workers']} workers in turn"


def described(loader: Any, rank: int = 0) -> dict[str, Any]:
    """Return all that the order of a loader depends on, apart from the seed of the run, in the same way on each rank.

    Args:
        loader: The loader of a run.
        rank: The rank that reads it. A ``DistributedSampler`` may have been given another one.

    >>> described(DataLoader(range(10), batch_size=4, shuffle=True))
    {'kind': 'data set', 'samples': 10, 'batch_size': 4, 'drop_last': False, 'sampler': {'kind': 'random'}}
    """
    if isinstance(loader, Limited):
        return {"kind": "limited", "count": loader.count, "loader": described(loader.loader, rank)}
    if isinstance(loader, Composite):
        return loader.description(rank)
    if isinstance(loader, TensorBatches):
        names = ("samples", "batch_size", "drop_last", "shuffle", "seed")
        return {"kind": "tensors", **{name: getattr(loader, name) for name in names}}
    if isinstance(loader, list | tuple) and loader and loader[0] is not None:  # adapters that read the data give [None]
        return {"kind": "list", "batches": len(loader)}
    if is_sharded_stream(loader):
        return {"kind": "stream", "workers": max(loader.num_workers, 1), "shards": len(loader.dataset.shards())}
    if isinstance(loader, DataLoader):
        return _of_data_loader(loader, rank)
    return _other(loader, f"a {type(loader).__name__} yields batches, and no indices")


def _of_data_loader(loader: DataLoader[Any], rank: int) -> dict[str, Any]:
    name = type(loader).__name__
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return _other(loader, f"a {name} has its own position, and no indices")
    if isinstance(loader.dataset, IterableDataset):
        return _other(loader, f"a stream ({type(loader.dataset).__name__}) has no indices")
    if not uses_torch_iteration(loader):
        return _other(loader, f"a {name} has an iteration of its own")
    batches, samples = loader.batch_sampler, length_of(loader.dataset)
    sampler = loader.sampler if batches is None else getattr(batches, "sampler", None)
    own = batches if batches is not None and type(batches) is not BatchSampler else sampler
    settings = {"samples": samples, "batch_size": getattr(batches, "batch_size", None)}
    settings["drop_last"] = bool(getattr(batches, "drop_last", False))
    drawn = None if own is batches or samples is None else _of_sampler(sampler, rank)
    if drawn is not None:
        return {"kind": "data set", **settings, "sampler": drawn}
    why = f"a {type(own).__name__} draws the indices, and run.json does not have its order"
    return {"kind": "unknown order", **settings, "batches": length_of(loader), "why": why}


def _of_sampler(sampler: Any, rank: int) -> dict[str, Any] | None:
    """Return the settings of a sampler of torch; None for any other."""
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is RandomSampler:
        generator = sampler.generator
        seed = {} if generator is None else {"seed": generator.initial_seed()}
        number = {} if sampler.num_samples == len(sampler.data_source) else {"num_samples": sampler.num_samples}
        return {"kind": "random", **({"replacement": True} if sampler.replacement else {}), **number, **seed}
    if type(sampler) is DistributedSampler:
        names = ("num_replicas", "shuffle", "seed", "drop_last")
        first = (sampler.rank - rank) % sampler.num_replicas
        return {
            "kind": "distributed",
            **{name: getattr(sampler, name) for name in names},
            **({"first": first} if first else {}),
        }
    return None


def _other(loader: Any, why: str) -> dict[str, Any]:
    return {"kind": "other", "batches": length_of(loader), "why": why}


def rebuilt(description: Mapping[str, Any], rank: int) -> Any:
    """Return a loader of the described order. It holds no data.

    Args:
        description: The result of `described`.
        rank: The rank that reads it, for a ``DistributedSampler``.
    """
    kind = description["kind"]
    if kind == "limited":
        return Limited(rebuilt(description["loader"], rank), description["count"])
    if kind == "mixture":
        return imported("cadenza.sources.mixture", needed_by="a run of a Mixture").Mixture.rebuilt(description, rank)
    if kind == "tensors":
        options = {name: description[name] for name in ("batch_size", "drop_last", "shuffle", "seed")}
        return TensorBatches(torch.empty(description["samples"], 0), **options)
    if kind == "list":
        return [0] * description["batches"]
    if kind == "data set":
        return _data_loader(description, rank)
    return _Without(description.get("batches"))


def _data_loader(description: Mapping[str, Any], rank: int) -> DataLoader[Any]:
    samples: Any = range(description["samples"])
    settings, size = description["sampler"], description["batch_size"]
    generator = torch.Generator().manual_seed(settings["seed"]) if "seed" in settings else None
    sampler: Any
    if settings["kind"] == "sequential":
        sampler = SequentialSampler(samples)
    elif settings["kind"] == "distributed":
        options = {name: settings[name] for name in ("num_replicas", "shuffle", "seed", "drop_last")}
        part = (settings.get("first", 0) + rank) % settings["num_replicas"]
        sampler = DistributedSampler(samples, rank=part, **options)
    else:
        number = settings.get("num_samples")
        sampler = RandomSampler(samples, settings.get("replacement", False), number, generator)
    if size is None:
        return DataLoader(samples, batch_size=None, sampler=sampler)
    return DataLoader(samples, batch_sampler=BatchSampler(sampler, size, description["drop_last"]))


class _Without:
    """Stands for a loader without indices."""

    def __init__(self, batches: int | None) -> None:
        self._batches = batches

    def __len__(self) -> int:
        if self._batches is None:
            raise TypeError("this loader has no length")
        return self._batches

    def __iter__(self) -> Iterator[Any]:
        return iter(())
