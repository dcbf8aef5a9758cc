"""Change batches between the loader and the device, such as cutting their sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from cadenza.errors import DataError, nearest
from cadenza.loading.resumable_base import LimitedLoader, ResumableLoader


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
    every = [parts.get(index, one) for index, one in enumerate(batch)]
    return type(batch)(*every) if hasattr(batch, "_fields") else type(batch)(every)
