"""Loaders that can be resumed: the form in which the loop reads them, and changes of their batches, such as cut sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from cadenza.errors import DataError, nearest
from cadenza.loading.batches import SampleCounter
from cadenza.loading.loaders import end_workers
from cadenza.loading.rng import isolated_rng
from cadenza.loading.shards import Shard


class Located(NamedTuple):
    """A batch, by its position in a loader."""

    source: str
    """The name of the loader in a `Mixture`; empty without one."""
    epoch: int
    """The epoch of the loader; see `Mixture` for its passes."""
    number: int
    """The number of the batch in this epoch on this rank, from 0."""
    indices: Sequence[Any] | None
    """The indices of its samples; None if the loader has no indices."""


class ResumableLoader(SampleCounter, ABC):
    """A training loader in the form that the loop reads: batches by epoch and number, for one rank.

    `cadenza.loading.resumable` makes one of any loader.

    >>> from cadenza.loading import resumable
    >>> list(resumable([10, 20, 30], seed=0).batches(epoch=0, skip=1))
    [20, 30]
    """

    shard: Shard = Shard()
    """The shard that this rank reads."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: reads {self.shard}>"

    @property
    def replicated_at(self) -> int | None:
        """The number in the epoch, from 0, of a batch that is the same on all ranks, when fewer samples are left than ranks."""
        return None

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        """Return the dataset indices of the samples in batch `number`, from 0; None if the loader has no indices."""
        return None

    def located(self, epoch: int, number: int) -> list[Located]:
        """Return where batch `number`, from 0, comes from: of a `Mixture` in the mode zip, one position in each loader."""
        return [Located("", epoch, number, self.indices(epoch, number))]

    @property
    def obstacle(self) -> str | None:
        """Why a run cannot continue inside an epoch of this loader, and what to do; None if it can."""
        return None

    def check_inside(self, skip: int) -> None:
        """Raise `DataError` if a run must continue at batch `skip`, from 0, and this loader cannot start there."""
        if skip and (obstacle := self.obstacle) is not None:
            raise DataError(f"the run must continue at batch {skip + 1} of an epoch, but {obstacle}")

    @abstractmethod
    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        """Return the batches of an epoch from number `skip` on. Earlier batches may have been read with another world size.

        Raises:
            DataError: `skip` is not 0, and the loader can only start at the beginning of an epoch.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold besides the numbers of epoch and batch."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # most loaders need no more than epoch and batch
        """Restore the state of `state_dict`. The next `batches` continue there."""

    def close(self) -> None:  # most loaders have none
        """End persistent workers. No batches are read after it."""


END: Any = object()
"""Returned instead of a batch by loaders that have no more."""


def read_with_seeds(batches: Iterator[Any], seeds: Iterable[int]) -> Iterator[Any]:
    """Yield the batches of a pass, each read with a seed of its own, and end the workers of the pass."""
    try:
        for seed in seeds:
            with isolated_rng(seed):
                batch = next(batches, END)
            if batch is END:
                return
            yield batch
    finally:
        end_workers(batches)


def no_position() -> DataError:
    """Return the error for a checkpoint without the state that a loader needs inside an epoch."""
    return DataError(
        "the checkpoint holds no position for this loader: it was saved with another kind of loader. Resume with that kind, or "
        "read and discard the batches with fit(resume=..., replay=True)."
    )


class LimitedLoader(ResumableLoader):
    """The first batches of each epoch; see `cadenza.loading.loaders.Limited`."""

    def __init__(self, inner: ResumableLoader, count: int) -> None:
        self._inner, self._count = inner, count
        self.shard: Shard = inner.shard

    @property
    def replicated_at(self) -> int | None:
        return self._inner.replicated_at

    @property
    def obstacle(self) -> str | None:
        return self._inner.obstacle

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        yield from islice(self._inner.batches(epoch, skip), max(self._count - skip, 0))

    def size_of(self, batch: Any) -> int:
        return self._inner.size_of(batch)

    def indices(self, epoch: int, number: int) -> Sequence[Any] | None:
        return self._inner.indices(epoch, number)

    def located(self, epoch: int, number: int) -> list[Located]:
        return self._inner.located(epoch, number)

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._inner.load_state_dict(state)

    def close(self) -> None:
        self._inner.close()


def changed(source: ResumableLoader, change: Callable[[Any], Any] | None) -> ResumableLoader:
    """Return a loader of the same batches, changed by a function; `source` for None."""
    return source if change is None else ChangedLoader(source, change)


class ChangedLoader(LimitedLoader):
    """A loader of which each batch passes through a function, in the main process, when the training takes it."""

    def __init__(self, inner: ResumableLoader, change: Callable[[Any], Any]) -> None:
        super().__init__(inner, 0)
        self._change = change

    def batches(self, epoch: int, skip: int) -> Iterator[Any]:
        return map(self._change, self._inner.batches(epoch, skip))


def cut_to(batch: Any, length: int, keys: Sequence[str | int] | None, dim: int) -> Any:
    """Return a batch with sequences of at most `length` tokens. The given batch is not changed; tensors are views.

    Args:
        batch: A tensor, or a mapping, tuple or list of tensors.
        length: The largest size of dimension `dim`.
        keys: The keys or indices of the tensors; None: all that have this dimension.
        dim: The dimension.

    Raises:
        DataError: The batch has no entry of a key.

    >>> import torch
    >>> cut = cut_to({"ids": torch.zeros(2, 8), "label": torch.zeros(2)}, 5, None, 1)
    >>> cut["ids"].shape, cut["label"].shape
    (torch.Size([2, 5]), torch.Size([2]))
    """
    if isinstance(batch, Tensor):
        return batch.narrow(dim, 0, length) if batch.ndim > dim and batch.shape[dim] > length else batch
    if isinstance(batch, Mapping):
        known: list[Any] = list(batch)
    elif isinstance(batch, list | tuple):
        known = list(range(len(batch)))
    else:
        return batch
    for key in keys or ():
        if key not in known:
            raise DataError(
                f"SequenceLength cuts {key!r}, which a batch does not have.{nearest(str(key), map(str, known))} It has {known}."
            )
    parts = {key: cut_to(batch[key], length, None, dim) for key in (known if keys is None else keys)}
    if isinstance(batch, Mapping):
        if type(batch) is dict:
            return {**batch, **parts}
        again: Any = copy(batch)
        again.update(parts)
        return again
    every = [parts.get(index, item) for index, item in enumerate(batch)]
    return type(batch)(*every) if hasattr(batch, "_fields") else type(batch)(every)
