"""Any iterable of batches as a loader: checks, its length, its epoch, its first batches, and its workers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from inspect import isgeneratorfunction
from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from cadenza.status.reprs import brief


class Limited:
    """The first `count` batches of each pass over a loader."""

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader: Iterable[Any] = loader
        self.count: int = count

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        try:
            yield from islice(batches, self.count)
        finally:
            end_workers(batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader."""
        set_loader_epoch(self.loader, epoch)

    def __len__(self) -> int:
        known = length_of(self.loader)
        return self.count if known is None else min(self.count, known)


def length_of(loader: object) -> int | None:
    """Return the number of batches in one pass over `loader`; None if it has no length."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # no __len__, or a DataLoader over a stream
        return None


def set_loader_epoch(loader: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader, its samplers and its dataset, where they have this method."""
    named = ("sampler", "batch_sampler", "dataset")
    for part in (loader, *(getattr(loader, name, None) for name in named)):
        if callable(set_epoch := getattr(part, "set_epoch", None)):
            set_epoch(epoch)
        elif is_of(part, "streaming", "StreamingDataset"):  # it counts its passes, and a new process would begin at 0
            part.next_epoch = epoch  # type: ignore[union-attr]


def is_of(loader: object, package: str, name: str) -> bool:
    """Return whether an object is an instance of a class of a package that need not be installed."""
    return any(kind.__name__ == name and kind.__module__.partition(".")[0] == package for kind in type(loader).__mro__)


def one_pass(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of one pass, and end its workers, also when it ends early or with an error."""
    batches = iter(loader)
    try:
        yield from batches
    finally:
        end_workers(batches)


def end_workers(batches: object, *, persistent: bool = False) -> None:
    """End the workers of an iterator of a `DataLoader`; persistent ones only if asked to.

    torch does it when the iterator is deleted. The traceback of an error of the data set refers to the iterator. If both are
    deleted by the garbage collection, the queues are closed first: no worker receives its end, and torch waits 10 seconds for
    each.
    """
    end = getattr(batches, "_shutdown_workers", None)  # there is no public function
    if end is not None and (persistent or not getattr(batches, "_persistent_workers", True)):
        end()


def is_worker_death(error: Exception, batches: Any) -> bool:
    """Return whether an error in reading a batch comes from the death of a worker, which may cut off a batch in transfer."""
    if str(error).startswith("DataLoader worker (pid"):
        return True
    if "in DataLoader worker process" in str(error):  # raised by the dataset
        return False
    workers = getattr(batches, "_workers", ())
    # A worker that was killed just now is still reported alive.
    until = time.monotonic() + (5.0 if isinstance(error, EOFError | ConnectionError) else 0.1)
    while workers and all(worker.is_alive() for worker in workers) and time.monotonic() < until:
        time.sleep(0.005)
    return any(not worker.is_alive() for worker in workers)


def started(loader: DataLoader[Any]) -> Iterator[Any]:
    """Return the iterator of a loader, with the deaths of its workers reported by ``next``, within 5 seconds.

    By default, torch's handler of SIGCHLD raises when a registered worker dies, in whatever line the main thread executes, also
    inside an optimizer step or a save. The handler may be installed already for another loader of the user.
    """
    batches = iter(loader)
    remove = getattr(signal_handling, "_remove_worker_pids", None)  # there is no public function
    if remove is not None and getattr(batches, "_worker_pids_set", False):
        remove(id(batches))
        batches._worker_pids_set = False  # type: ignore[attr-defined]  # or it would remove them again at its end
    return batches


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
        instead = f", or the list of its batches: [*{brief(loader)}()]" if isgeneratorfunction(loader) else ""
        raise TypeError(f"{what} must be an iterable of batches; got {brief(loader)}. Pass a DataLoader{instead}.")
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
    """Return whether a loader is an iterator of Python or of a DataLoader. Other iterators may start again at ``iter()``."""
    return isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", "itertools", "torch.utils.data.dataloader")


def _is_data_set(loader: Any) -> bool:
    if is_of(loader, "datasets", "Dataset") or is_of(loader, "datasets", "IterableDataset"):  # of Hugging Face
        return True
    # A WebLoader is a loader, and a torch data set by its base class.
    return isinstance(loader, Dataset) and not is_of(loader, "webdataset", "WebLoader")
