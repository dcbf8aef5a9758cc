"""``fastNLP.core.samplers.reproducible_sampler``: orders that depend only on a seed and the epoch, with a position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.compat.fastnlp.core.samplers.positions import Positioned, lengths_of, longest_first

__all__ = ["RandomSampler", "ReproducibleSampler", "SequentialSampler", "SortedSampler"]


class ReproducibleSampler(Sampler[int]):
    """The base class of samplers with a state. Override all methods.

    ``set_distributed`` selects the shard of one rank. A `Trainer` does not need it: it gives each rank its shard.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.num_replicas = 1

    def set_distributed(self, num_replicas: int, rank: int, pad: bool = True) -> Any:
        raise NotImplementedError(f"{type(self).__name__} needs a method set_distributed")

    def __len__(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} needs a method __len__")

    def __iter__(self) -> Iterator[int]:
        raise NotImplementedError(f"{type(self).__name__} needs a method __iter__")

    def state_dict(self) -> dict[str, Any]:
        raise NotImplementedError(f"{type(self).__name__} needs a method state_dict")

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        raise NotImplementedError(f"{type(self).__name__} needs a method load_state_dict")

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""


class RandomSampler(Positioned, ReproducibleSampler):
    """The indices of a data set, shuffled in each epoch by numpy's ``default_rng(abs(seed + epoch))``.

    A trainer sets the epoch, from 0. Without a trainer the epoch counts down from -1, so that each pass has another order.

    Args:
        dataset: An object with a length.
        shuffle: Shuffle the indices; False yields them in order.
        seed: The seed of the order.
        kwargs: The state of another sampler.

    >>> sampler = RandomSampler(range(80))
    >>> sampler.set_epoch(0)
    >>> list(sampler)[:8]
    [50, 5, 19, 66, 53, 9, 64, 36]
    """

    num_consumed_samples: int

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0, **kwargs: Any) -> None:
        self.dataset: Sized = dataset
        self.shuffle: bool = shuffle
        self.seed: int = int(seed)
        self.start(kwargs)

    def __len__(self) -> int:
        return self.total_size // self.num_replicas

    def __iter__(self) -> Iterator[int]:
        self.begin()
        indices = list(self.generate_indices())
        size = self.total_size
        if self.pad and size > len(indices):
            indices *= math.ceil(size / len(indices))
        shard = indices[:size][self.num_consumed_samples + self.rank :: self.num_replicas]
        for index in shard:
            self.num_consumed_samples += self.num_replicas
            yield index
        self.end()

    def generate_indices(self) -> Sequence[int]:
        """Return the indices of all ranks in the order of this epoch."""
        indices = list(range(self.num_samples))
        if self.shuffle:
            np.random.default_rng(abs(self.seed + self.epoch)).shuffle(indices)
            if self.epoch < 0:
                self.epoch -= 1
        return indices

    def state_dict(self) -> dict[str, Any]:
        """Return the position, the order and the size of the data set."""
        return {"seed": self.seed, "epoch": self.epoch, "shuffle": self.shuffle, **self.position()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Continue from a state, with its seed and order.

        Raises:
            AssertionError: The sampler is being read, or the state is that of another sampler or another size.
        """
        self.go_to(states)
        self.seed = states["seed"]
        self.epoch: int = states["epoch"]
        if self.shuffle != states["shuffle"]:
            logger.info(f"{type(self).__name__} uses shuffle={states['shuffle']} of the checkpoint, not shuffle={self.shuffle}")
        self.shuffle = states["shuffle"]


class SequentialSampler(RandomSampler):
    """The indices of a data set in order. Of multiple ranks each gets every ``num_replicas``-th.

    Args:
        dataset: An object with a length.
        kwargs: The state of another sampler.
    """

    def __init__(self, dataset: Sized, **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)

    def generate_indices(self) -> Sequence[int]:
        return range(self.num_samples)

    def state_dict(self) -> dict[str, Any]:
        return self.position()

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        self.go_to(states)


class SortedSampler(SequentialSampler):
    """The indices of a data set, the longest sample first.

    Args:
        dataset: An object with a length.
        length: The length of each sample; for a `DataSet` also the name of a field, of numbers or of lists.
        kwargs: The state of another sampler.

    >>> list(SortedSampler(["a", "bcd", "ef"], length=[1, 3, 2]))
    [1, 2, 0]
    """

    def __init__(self, dataset: Sized, length: str | Sequence[int], **kwargs: Any) -> None:
        super().__init__(dataset, **kwargs)
        self.length: Any = lengths_of(dataset, length)
        self.sorted_indices: list[int] = longest_first(self.length)

    def generate_indices(self) -> Sequence[int]:
        return self.sorted_indices
