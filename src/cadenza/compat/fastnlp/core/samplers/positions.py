"""The position of samplers in an epoch, and the lengths of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np

from cadenza.compat.fastnlp.core.dataset import DataSet


class Positioned:
    """The position of a sampler in an epoch, and the shard of one rank.

    ``during_iter`` is True while the sampler is read. A pass that begins then starts at the first sample.
    """

    dataset: Sized

    def start(self, given: Mapping[str, Any]) -> None:
        """Set the position to the begin of an epoch, or to the state of another sampler."""
        self.num_consumed_samples: int = given.get("num_consumed_samples", 0)
        """Samples of this epoch that were read, on all ranks."""
        self.num_replicas: int = given.get("num_replicas", 1)
        self.rank: int = given.get("rank", 0)
        self.epoch: int = given.get("epoch", -1)
        self.pad: bool = given.get("pad", False)
        self.during_iter: bool = given.get("during_iter", False)

    def begin(self) -> None:
        """Begin a pass, from the position of a loaded state."""
        if self.during_iter:
            self.num_consumed_samples = 0
        self.during_iter = True

    def end(self) -> None:
        """End a complete pass."""
        self.during_iter = False
        self.num_consumed_samples = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch, from 0."""
        self.epoch = epoch

    def set_distributed(self, num_replicas: int, rank: int, pad: bool = True) -> Any:
        """Read only the shard of one rank. Return self.

        Args:
            num_replicas: The number of ranks.
            rank: The rank of this process, from 0.
            pad: Repeat samples, so that all shards have the same size; False drops some instead.

        Raises:
            AssertionError: The sampler is being read, or there is no such rank.
        """
        self._check_idle("set_distributed")
        if not (isinstance(num_replicas, int) and isinstance(rank, int) and 0 <= rank < num_replicas):
            raise AssertionError(f"rank must be at least 0, and less than num_replicas; got {rank!r} and {num_replicas!r}")
        self.num_replicas, self.rank, self.pad = num_replicas, rank, pad
        return self

    @property
    def num_samples(self) -> int:
        """The number of samples of the data set."""
        total = getattr(self.dataset, "total_len", None)
        return total if isinstance(total, int) else len(self.dataset)

    @property
    def num_left_samples(self) -> int:
        """The number of samples of this rank until the end of the epoch."""
        left = (self.num_samples - self.num_consumed_samples) / self.num_replicas
        return math.ceil(left) if self.pad else math.floor(left)

    @property
    def total_size(self) -> int:
        """The number of samples of all ranks in this epoch, including repeated and excluding dropped ones."""
        return self.num_consumed_samples + self.num_replicas * self.num_left_samples

    def position(self) -> dict[str, Any]:
        """Return the position, for a checkpoint."""
        return {
            "num_consumed_samples": self.num_consumed_samples,
            "sampler_type": type(self).__name__,
            "length": self.num_samples,
        }

    def go_to(self, states: Mapping[str, Any]) -> None:
        """Continue from the position of a checkpoint; at its end, from the begin of an epoch."""
        self._check_idle("load_state_dict")
        for what, own in (("sampler_type", type(self).__name__), ("length", self.num_samples)):
            if states[what] != own:
                raise AssertionError(f"the checkpoint has {what}={states[what]!r}, but this sampler has {own!r}")
        consumed = states["num_consumed_samples"]
        self.num_consumed_samples = consumed if consumed < self.num_samples else 0

    def _check_idle(self, method: str) -> None:
        if self.during_iter:
            raise AssertionError(f"{type(self).__name__}.{method} must not be called while the sampler is being read")


def lengths_of(dataset: Sized, length: str | Sequence[int]) -> Any:
    """Return the length of each sample as an array, shape (N,).

    Args:
        dataset: The data set.
        length: The lengths; for a `DataSet` also the name of a field, of numbers or of lists.

    Raises:
        AssertionError: There is not one length for each sample.
        TypeError: The name of a field is given, but `dataset` is no `DataSet`.
    """
    if isinstance(length, str):
        if not isinstance(dataset, DataSet):
            raise TypeError(f"length={length!r} names a field, so dataset must be a DataSet; got a {type(dataset).__name__}")
        values = dataset.get_field(length).content
        length = values if all(isinstance(value, int) for value in values) else [len(value) for value in values]
    if len(length) != len(dataset):
        raise AssertionError(f"length must have a number for each of the {len(dataset)} samples; got {len(length)}")
    return np.array(length, dtype=int)


def longest_first(lengths: Any) -> list[int]:
    """Return the indices of the samples, the longest first, in numpy's order if several are equal."""
    indices: list[int] = np.argsort(lengths)[::-1].tolist()
    return indices
