"""``fastNLP.core.samplers.unrepeated_sampler``: shards without repeated samples, which may differ in size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

from cadenza.compat.fastnlp.core.samplers.positions import lengths_of, longest_first
from cadenza.compat.fastnlp.core.samplers.reproducible_sampler import RandomSampler

__all__ = ["UnrepeatedRandomSampler", "UnrepeatedSampler", "UnrepeatedSequentialSampler", "UnrepeatedSortedSampler"]


class UnrepeatedSampler:
    """The base class."""


class UnrepeatedRandomSampler(RandomSampler, UnrepeatedSampler):
    """The order of `RandomSampler`. Each rank gets every ``num_replicas``-th sample, and none is repeated or dropped.

    Args:
        dataset: An object with a length.
        shuffle: Shuffle the indices; False yields them in order.
        seed: The seed of the order.
        kwargs: ``num_replicas``, ``rank`` and ``epoch``.
    """

    def __init__(self, dataset: Sized, shuffle: bool = False, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(dataset, shuffle, seed, **kwargs)

    def __len__(self) -> int:
        return len(range(self.rank, self.num_samples, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        yield from self.generate_indices()[self.rank :: self.num_replicas]

    def set_distributed(self, num_replicas: int, rank: int, pad: bool = False) -> Any:
        """Read only the shard of one rank. Return self. `pad` is ignored.

        Raises:
            AssertionError: There are more ranks than samples, or there is no such rank.
        """
        if isinstance(num_replicas, int) and num_replicas > self.num_samples:
            raise AssertionError(f"there are {num_replicas} ranks, but only {self.num_samples} samples")
        return super().set_distributed(num_replicas, rank, pad=False)


class UnrepeatedSortedSampler(UnrepeatedRandomSampler):
    """The longest sample first, as `SortedSampler`.

    Args:
        dataset: An object with a length.
        length: The length of each sample; for a `DataSet` also the name of a field, of numbers or of lists.
        kwargs: ``num_replicas`` and ``rank``.
    """

    def __init__(self, dataset: Sized, length: str | Sequence[int], **kwargs: Any) -> None:
        super().__init__(dataset, **{**kwargs, "shuffle": False, "seed": 0})
        self.sorted_indices: list[int] = longest_first(lengths_of(dataset, length))

    def generate_indices(self) -> Sequence[int]:
        return self.sorted_indices


class UnrepeatedSequentialSampler(UnrepeatedRandomSampler):
    """The samples in order.

    Args:
        dataset: An object with a length.
        chunk_dist: Each rank gets consecutive samples; False: every ``num_replicas``-th.
        kwargs: ``num_replicas`` and ``rank``.
    """

    def __init__(self, dataset: Sized, chunk_dist: bool = False, **kwargs: Any) -> None:
        super().__init__(dataset, **{**kwargs, "shuffle": False, "seed": 0})
        self.chunk_dist = chunk_dist

    def __len__(self) -> int:
        return len(self._shard())

    def __iter__(self) -> Iterator[int]:
        yield from self._shard()

    def _shard(self) -> range:
        count = self.num_samples
        if not self.chunk_dist:
            return range(self.rank, count, self.num_replicas)
        size = count // self.num_replicas
        return range(size * self.rank, count if self.rank == self.num_replicas - 1 else size * (self.rank + 1))

    def generate_indices(self) -> Sequence[int]:
        return range(self.num_samples)
