"""A random order that depends only on a seed and the epoch."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from torch.utils.data import Sampler

from cadenza.compat.absent import advise
from cadenza.errors import MissingExtraError

advise(__name__)


class RandomSampler(Sampler[int]):
    """The indices of a data set, shuffled in each epoch by numpy's ``default_rng(abs(seed + epoch))``.

    A trainer sets the epoch, from 0. Without a trainer the epoch counts down from -1, so that each pass has another order.

    Args:
        dataset: An object with a length.
        shuffle: Shuffle the indices; False yields them in order.
        seed: The seed of the order.

    >>> sampler = RandomSampler(range(80))
    >>> sampler.set_epoch(0)
    >>> list(sampler)[:8]
    [50, 5, 19, 66, 53, 9, 64, 36]
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, int(seed)
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch, from 0."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            try:
                from numpy.random import default_rng
            except ImportError:
                raise MissingExtraError("numpy", needed_by="RandomSampler", extra="data") from None
            default_rng(abs(self.seed + self.epoch)).shuffle(indices)
            if self.epoch < 0:
                self.epoch -= 1
        return iter(indices)
