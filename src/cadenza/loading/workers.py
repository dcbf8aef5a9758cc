"""The workers of a `DataLoader`: their start, their deaths and their end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling


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
    if getattr(batches, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]  # there is no public function
        batches._worker_pids_set = False  # type: ignore[attr-defined]  # or it would remove them again at its end
    return batches
