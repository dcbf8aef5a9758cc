"""``fastNLP.core.samplers.reproducible_batch_sampler``: batches that depend only on a seed and the epoch, with a position."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from itertools import chain
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.compat.fastnlp.core.samplers.positions import Positioned, lengths_of, longest_first

__all__ = ["BucketedBatchSampler", "RandomBatchSampler", "ReproduceBatchSampler", "ReproducibleBatchSampler"]

Batches = list[list[int]]


class ReproducibleBatchSampler(Sampler[list[int]]):
    """The base class of batch samplers with a state. Override all methods.

    ``set_distributed`` selects the shard of one rank. A `Trainer` does not need it: it gives each rank its shard.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.num_replicas = 1

    def set_distributed(self, num_replicas: int, rank: int, pad: bool = True) -> Any:
        raise NotImplementedError(f"{type(self).__name__} needs a method set_distributed")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} needs a method __len__")

    def __iter__(self) -> Iterator[list[int]]:
        raise NotImplementedError(f"{type(self).__name__} needs a method __iter__")

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} needs a method state_dict")

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        raise NotImplementedError(f"{type(self).__name__} needs a method load_state_dict")

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""

    @property
    def batch_idx_in_epoch(self) -> int:
        """The number of batches of this epoch that were read."""
        raise NotImplementedError(f"{type(self).__name__} needs a property batch_idx_in_epoch")


class RandomBatchSampler(Positioned, ReproducibleBatchSampler):
    """Random batches of a data set, shuffled in each epoch by numpy's ``default_rng(abs(seed + epoch))``.

    A trainer sets the epoch, from 0. Without a trainer the epoch counts down from -1, so that each pass has another order.

    Args:
        dataset: An object with a length.
        batch_size: The number of samples in a batch.
        shuffle: Shuffle the samples; False yields them in order.
        drop_last: Drop a smaller last batch.
        seed: The seed of the order.
        kwargs: The state of another sampler.
    """

    num_consumed_samples: int

    def __init__(
        self,
        dataset: Sized,
        batch_size: int = 32,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        self.dataset: Sized = dataset
        self.batch_size: int = batch_size
        self.shuffle: bool = shuffle
        self.drop_last: bool = drop_last
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1; got {batch_size!r}")
        self.seed: int = int(seed)
        self.start(kwargs)
        self.old_batch_size: int = kwargs.get("old_batch_size", batch_size)
        self.old_num_replicas: int = kwargs.get("old_num_replicas", self.num_replicas)

    def __len__(self) -> int:
        return self._batches_of(self.total_size // self.num_replicas)

    def __iter__(self) -> Iterator[list[int]]:
        self.begin()
        batches = self._padded(self._shuffled() if self.shuffle else self._in_order())
        if self.drop_last and batches and len(batches[-1]) < self.batch_size:
            batches = batches[:-1]
        for batch in batches:
            self.num_consumed_samples += self.num_replicas * len(batch)
            yield [int(index) for index in batch]
        self.end()
        self._keep_settings()
        if self.epoch < 0:
            self.epoch -= 1

    @property
    def batch_idx_in_epoch(self) -> int:
        return self._batches_of(self.num_samples // self.num_replicas) - self._batches_of(self.num_left_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the order and the size of the data set.

        Raises:
            RuntimeError: The epoch of a checkpoint with another batch size is not over.
        """
        self._check_settings()
        order = {"seed": self.seed, "epoch": self.epoch, "shuffle": self.shuffle}
        return {**order, "batch_size": self.batch_size, "num_replicas": self.num_replicas, **self.position()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from a state, with its seed and order. The batch size and the number of ranks may be others.

        Raises:
            AssertionError: The sampler is being read, or the state is that of another sampler or another size.
        """
        self.go_to(states)
        self.seed = states["seed"]
        self.epoch: int = states["epoch"]
        if self.shuffle != states["shuffle"]:
            logger.info(f"{type(self).__name__} uses shuffle={states['shuffle']} of the checkpoint, not shuffle={self.shuffle}")
        self.shuffle = states["shuffle"]
        self.old_batch_size, self.old_num_replicas = states["batch_size"], states["num_replicas"]

    # -- batches of a pass -------------------------------------------------------------------------

    def batchify(self, indices: Any, batch_size: int, seed: int) -> Batches:
        """Shuffle indices in place, and return them in batches."""
        np.random.default_rng(abs(seed)).shuffle(indices)
        return [list(indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]

    def _order(self) -> list[int]:
        """Return the indices of all ranks before they are shuffled."""
        return list(range(self.num_samples))

    def _batched(self, indices: Any) -> Batches:
        return self.batchify(indices, self.batch_size, self.seed + self.epoch)

    def _batched_before(self, indices: Any) -> Batches:
        """Return the batches of the pass that the checkpoint interrupted."""
        return self.batchify(indices, self.old_batch_size, self.seed + self.epoch)

    def _rest(self, indices: list[int]) -> Any:
        """Return the remaining indices in the order in which they are shuffled."""
        return indices

    def _keep_settings(self) -> None:
        self.old_batch_size, self.old_num_replicas = self.batch_size, self.num_replicas

    def _check_settings(self) -> None:
        if self.old_batch_size != self.batch_size:
            raise RuntimeError(
                f"{type(self).__name__} continues a checkpoint with batch_size={self.old_batch_size}. Save it after the end of "
                "this epoch."
            )

    def _shuffled(self) -> Batches:
        indices: Any = self._order()
        if self.num_consumed_samples:
            of_ranks = [self._batched_before(indices[rank :: self.old_num_replicas]) for rank in range(self.old_num_replicas)]
            together = chain.from_iterable(chain.from_iterable(zip(*of_ranks, strict=False)))
            indices = self._rest(list(together)[self.num_consumed_samples :])
        return self._batched(indices[self.rank :: self.num_replicas])

    def _in_order(self) -> Batches:
        indices = self._order()[self.num_consumed_samples + self.rank :: self.num_replicas]
        return [indices[start : start + self.batch_size] for start in range(0, len(indices), self.batch_size)]

    def _padded(self, batches: Batches) -> Batches:
        """Repeat the first sample of the last batch, or drop its last one, so that all ranks have as many samples."""
        more = (self.num_samples - self.num_consumed_samples) % self.num_replicas
        if not more or not batches:
            return batches
        if self.pad and more <= self.rank:
            extra = batches[-1][0]
            return [*batches[:-1], [*batches[-1], extra]] if len(batches[-1]) < self.batch_size else [*batches, [extra]]
        if not self.pad and more > self.rank:
            shorter = batches[-1][:-1]
            return [*batches[:-1], shorter] if shorter else batches[:-1]
        return batches

    def _batches_of(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)


class BucketedBatchSampler(RandomBatchSampler):
    """Random batches of samples with similar lengths, so that there is little padding.

    Samples are sorted, the longest first, and shuffled inside of buckets of ``batch_size * num_batch_per_bucket`` samples. Then
    the batches are shuffled, except for the last one, which may be smaller.

    Args:
        dataset: An object with a length.
        length: The length of each sample; for a `DataSet` also the name of a field, of numbers or of lists.
        batch_size: The number of samples in a batch.
        num_batch_per_bucket: The number of batches in a bucket.
        shuffle: Shuffle; False yields the longest samples first.
        drop_last: Drop a smaller last batch.
        seed: The seed of the order.
        kwargs: The state of another sampler.

    >>> sampler = BucketedBatchSampler(range(12), length=list(range(12)), batch_size=3, num_batch_per_bucket=2)
    >>> sampler.set_epoch(0)
    >>> list(sampler)
    [[1, 0, 4], [8, 9, 6], [7, 11, 10], [3, 5, 2]]
    """

    def __init__(
        self,
        dataset: Sized,
        length: str | Sequence[int],
        batch_size: int = 32,
        num_batch_per_bucket: int = 10,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(dataset, batch_size, shuffle, drop_last, seed, **kwargs)
        self.length: Any = lengths_of(dataset, length)
        self.sorted_indices: list[int] = longest_first(self.length)
        if not isinstance(num_batch_per_bucket, int) or num_batch_per_bucket < 1:
            raise ValueError(f"num_batch_per_bucket must be a whole number of at least 1; got {num_batch_per_bucket!r}")
        self.num_batch_per_bucket = num_batch_per_bucket
        self.old_num_batch_per_bucket: int = kwargs.get("old_num_batch_per_bucket", num_batch_per_bucket)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_batch_per_bucket": self.num_batch_per_bucket}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        super().load_state_dict(states)
        self.old_num_batch_per_bucket = states["num_batch_per_bucket"]

    def bucketerize(self, sorted_indices: Any, batch_size: int, num_batch_per_bucket: int, seed: int) -> Batches:
        """Return sorted indices in random batches."""
        size = batch_size * num_batch_per_bucket
        generator = np.random.default_rng(abs(seed))
        batches: Batches = []
        for start in range(0, len(sorted_indices), size):
            bucket = sorted_indices[start : start + size]
            generator.shuffle(bucket)
            batches += [list(bucket[first : first + batch_size]) for first in range(0, len(bucket), batch_size)]
        numbers = list(range(len(batches) - 1))
        np.random.default_rng(abs(seed)).shuffle(numbers)  # equal on all ranks, also if their buckets differ in size
        return [batches[number] for number in numbers] + batches[-1:]

    def _order(self) -> list[int]:
        return list(self.sorted_indices)

    def _batched(self, indices: Any) -> Batches:
        return self.bucketerize(indices, self.batch_size, self.num_batch_per_bucket, self.seed + self.epoch)

    def _batched_before(self, indices: Any) -> Batches:
        return self.bucketerize(indices, self.old_batch_size, self.old_num_batch_per_bucket, self.seed + self.epoch)

    def _rest(self, indices: list[int]) -> Any:
        return np.array(indices, dtype=int)[np.argsort(self.length[indices])[::-1]]

    def _keep_settings(self) -> None:
        super()._keep_settings()
        self.old_num_batch_per_bucket = self.num_batch_per_bucket

    def _check_settings(self) -> None:
        super()._check_settings()
        if (old := self.old_num_batch_per_bucket) != self.num_batch_per_bucket:
            raise RuntimeError(
                f"{type(self).__name__} continues a checkpoint with num_batch_per_bucket={old}. Save it after this epoch."
            )


class ReproduceBatchSampler(ReproducibleBatchSampler):
    """The indices of another sampler, in batches and with a position.

    The other sampler is read completely at the begin of each pass.

    Args:
        batch_sampler: Yields indices, or lists of indices.
        batch_size: The number of samples in a batch.
        drop_last: Drop a smaller last batch.
        kwargs: The state of another sampler.
    """

    def __init__(self, batch_sampler: Iterable[int | list[int]], batch_size: int, drop_last: bool, **kwargs: Any) -> None:
        self.batch_sampler: Iterable[int | list[int]] = batch_sampler
        self.batch_size: int = batch_size
        self.drop_last: bool = drop_last
        self.num_consumed_samples: int = kwargs.get("num_consumed_samples", 0)
        self.index_list: array[int] = kwargs["index_list"] if "index_list" in kwargs else self._read()
        self.need_reinitialize: bool = kwargs.get("need_reinitialize", False)

    def __len__(self) -> int:
        return self._batches_of(len(self.index_list))

    def __iter__(self) -> Iterator[list[int]]:
        if self.need_reinitialize:
            self.index_list = self._read()
            self.num_consumed_samples = 0
        self.need_reinitialize = True
        indices = self.index_list[self.num_consumed_samples :].tolist()
        for start in range(0, len(indices), self.batch_size):
            batch = indices[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                self.num_consumed_samples += len(batch)
                yield batch
        self.num_consumed_samples = 0

    @property
    def batch_idx_in_epoch(self) -> int:
        return len(self) - self._batches_of(len(self.index_list) - self.num_consumed_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the indices of this pass, and the position in it."""
        return {
            "index_list": self.index_list[:],
            "num_consumed_samples": self.num_consumed_samples,
            "sampler_type": type(self).__name__,
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue the pass of a state.

        Raises:
            AssertionError: The state is that of another sampler or another size.
        """
        found = states["sampler_type"], len(states["index_list"])
        if found != (own := (type(self).__name__, len(self.index_list))):
            raise AssertionError(f"the checkpoint has the sampler and the length {found}, but this sampler has {own}")
        self.index_list, self.num_consumed_samples = states["index_list"], states["num_consumed_samples"]
        self.need_reinitialize = False

    def set_distributed(self, num_replicas: int, rank: int, pad: bool = True) -> Any:
        raise RuntimeError("ReproduceBatchSampler has no shards. Use RandomBatchSampler or BucketedBatchSampler.")

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the other sampler, if it has one."""
        inner = getattr(self.batch_sampler, "sampler", None)
        if callable(set_epoch := getattr(inner, "set_epoch", None)):
            set_epoch(epoch)

    def _read(self) -> array[int]:
        indices = (item if isinstance(item, list) else [item] for item in self.batch_sampler)
        return array("Q", chain.from_iterable(indices))

    def _batches_of(self, samples: int) -> int:
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)
