"""Check that an object yields batches: a dataset yields samples, and a generator can be read only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza.loading.loaders import is_of


def check_loader(loader: object, what: str, *, again: bool = False) -> None:
    """Raise `TypeError` if the class of `loader` shows that it yields no batches.

    A list of samples is accepted, because it looks like a list of batches.

    Args:
        loader: The object to check.
        what: The name of the object in messages.
        again: Whether it must be readable more than once.
    """
    if isinstance(loader, DataLoader):
        return
    if isinstance(loader, type) or (not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__")):
        raise TypeError(f"{what} must be an iterable of batches; got {loader!r}. Pass a DataLoader.")
    if isinstance(loader, str | bytes | Mapping | nn.Module):
        raise TypeError(f"{what} must be an iterable of batches; got a {type(loader).__name__}. Pass a DataLoader.")
    if isinstance(loader, Tensor) or is_of(loader, "numpy", "ndarray") or is_of(loader, "pandas", "DataFrame"):
        raise TypeError(
            f"{what} must be an iterable of batches; got a {type(loader).__name__}: each row would become a batch. "
            "Pass TensorBatches(inputs, targets, batch_size=32), or a DataLoader."
        )
    if _is_data_set(loader):
        raise TypeError(
            f"{what} must be an iterable of batches; got the data set {type(loader).__name__}: each sample would become "
            "a batch. Pass DataLoader(dataset, batch_size=32), or DataLoader(dataset, batch_size=None) if it yields batches."
        )
    if again and is_read_once(loader):
        raise TypeError(
            f"{what} is read at each evaluation; got a {type(loader).__name__}, which can be read once. Pass a list, a "
            "DataLoader, or another iterable that starts again at each iter()."
        )


def is_read_once(loader: object) -> bool:
    """Return whether a loader is an iterator of Python, such as a generator. Other iterators may start again at ``iter()``."""
    return isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools")


def _is_data_set(loader: Any) -> bool:
    if is_of(loader, "datasets", "Dataset") or is_of(loader, "datasets", "IterableDataset"):  # of Hugging Face
        return True
    # A WebLoader is a loader, and a torch data set by its base class.
    return isinstance(loader, Dataset) and not is_of(loader, "webdataset", "WebLoader")
