"""Batches: the number of samples and the tensors in them, and their transfer to the device.

Samples are counted where the loader collates them, because the shapes in a batch may mislead, as in a list of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from functools import cache
from inspect import signature
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import BatchSampler, DataLoader

from cadenza.errors import DataError
from cadenza.loading.loaders import Limited, length_of


def size_of(batch: object) -> int:
    """Estimate the number of samples in a batch: the first dimension of its first tensor or array with dimensions; else 1.

    A `PackedSequence` counts its sequences. A list of samples is not recognized: see `cadenza.loading.batches`.

    >>> size_of({"scale": torch.tensor(0.5), "ids": torch.zeros(8, 3), "label": torch.zeros(8)})
    8
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else None  # type: ignore[index]  # in most batches a tensor
    # Not its shape, which a nested tensor does not have.
    return first.size(0) if type(first) is Tensor and first.ndim else next(_sizes_in(batch), 1)


def moved(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """Return `batch` with all its tensors on `device`; the same object if they are there already.

    Dicts, lists, tuples, named tuples, dataclasses and objects with a method ``to`` may be nested. Other values do not change.

    Raises:
        DataError: A part of the batch cannot be moved. The message names its path, such as ``batch[0].inputs``.
    """
    try:
        return _moved(batch, device, non_blocking)
    except Exception as error:
        path, part = _unmovable(batch, device, "batch")
        what = f"a tensor on {part.device}" if isinstance(part, Tensor) else f"a {type(part).__name__}"
        raise DataError(
            f"{path} cannot be moved to {device}: it is {what}, and its to({str(device)!r}) failed with {error!r}. The loader "
            "must yield tensors that hold data, or objects with a method to(device) that works."
        ) from error


class Mover:
    """Moves batches to a device.

    On CUDA the copy runs on a separate stream, while the device still computes the previous step. Only the device waits for the
    copy. No batch is prefetched: the host runs ahead of the device as long as nothing waits for a value, and the position of
    the loader stays exact.

    Copies from pinned memory do not block the host. In a run, a `DataLoader` with workers pins its batches in its own thread.
    Batches of other loaders are copied without pinning, which would take the host as long as the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_cpu = device.type == "cpu"
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batch: Any) -> Any:
        """Return `batch` on the device, ready for use on the current stream."""
        if self._on_cpu and type(batch) in (tuple, list):  # the common case
            for part in batch:
                if type(part) is not Tensor or not part.is_cpu:
                    break
            else:
                return batch
        if self._stream is None:
            return moved(batch, self.device)
        with torch.cuda.stream(self._stream):
            batch = moved(batch, self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in tensors_in(batch):
            for part in _stored(tensor):
                if part.is_cuda:  # its memory must not be reused before the current stream has finished with it
                    part.record_stream(current)
        return batch


def pinned(batch: Any) -> Any:
    """Return `batch` with all its tensors in pinned memory. Containers keep their types; torch turns tuples into lists."""
    if callable(pin := getattr(batch, "pin_memory", None)):
        return pin()
    return batch if isinstance(batch, str | bytes | int | float | None) else rebuilt(batch, pinned)


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield every tensor in a nested batch.

    Unlike ``torch.utils._pytree``, this enters mappings and objects of any class, such as the batches of tokenizers.
    """
    if isinstance(batch, Tensor):
        yield batch
    elif not isinstance(batch, str | bytes | int | float | None):
        for part in _parts(batch):
            yield from tensors_in(part)


def _stored(tensor: Tensor) -> Iterable[Tensor]:
    """Return the tensors that hold the numbers of a tensor. A sparse one has no memory of its own."""
    match tensor.layout:
        case torch.sparse_coo:
            return tensor._indices(), tensor._values()
        case torch.sparse_csr | torch.sparse_bsr:
            return tensor.crow_indices(), tensor.col_indices(), tensor.values()
        case torch.sparse_csc | torch.sparse_bsc:
            return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
        case _:
            return (tensor,)


def _sizes_in(part: Any) -> Iterator[int]:
    """Yield the size of the first dimension of each tensor and array in a nested batch that has dimensions."""
    if isinstance(part, PackedSequence):
        yield int(part.batch_sizes[0])  # always on the host
    elif isinstance(part, Tensor) or (hasattr(part, "__array__") and isinstance(getattr(part, "shape", None), tuple)):
        if len(part.shape):
            yield int(part.shape[0])
    elif not isinstance(part, str | bytes | int | float | None):
        for piece in _parts(part):
            yield from _sizes_in(piece)


def _parts(batch: object) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch):
        return (getattr(batch, field.name) for field in fields(batch))
    if not hasattr(batch, "to"):
        return ()
    slots = (name for kind in type(batch).__mro__ for name in vars(kind).get("__slots__", ()))
    return (*getattr(batch, "__dict__", {}).values(), *(getattr(batch, name) for name in slots if hasattr(batch, name)))


def _moved(value: Any, device: torch.device, non_blocking: bool) -> Any:
    kind = type(value)
    if kind is Tensor:
        return value if value.device == device else value.to(device, non_blocking=non_blocking)
    if kind is tuple or kind is list:
        parts = [_moved(part, device, non_blocking) for part in value]
        return value if all(map(is_, parts, value)) else kind(parts)
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if callable(to := getattr(value, "to", None)):
        # mypy holds that a class cannot be hashed
        quietly = non_blocking and _takes_non_blocking(kind)  # type: ignore[arg-type]
        return to(device, non_blocking=True) if quietly else to(device)
    return rebuilt(value, lambda part: _moved(part, device, non_blocking))


@cache
def _takes_non_blocking(kind: Any) -> bool:
    """Return whether the method ``to`` of a class takes ``non_blocking``, and does not wait for the copy then."""
    try:
        parameters = signature(kind.to).parameters
    except (AttributeError, TypeError, ValueError):  # an attribute of the object alone, or a function without a signature
        return False
    # One with *args and **kwargs, such as that of a PackedSequence, may pass all to the tensors or refuse it.
    return "non_blocking" in parameters or kind is PackedSequence


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with `change` applied to its parts; the same object if no part changed, or if it is no container."""
    if isinstance(value, Mapping):
        named = {key: change(part) for key, part in value.items()}
        same = all(named[key] is part for key, part in value.items())
        return value if same else named if type(value) is dict else _refilled(value, named)
    if isinstance(value, list | tuple):
        parts = [change(part) for part in value]
        if all(map(is_, parts, value)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if is_dataclass(value) and not isinstance(value, type):
        named = {field.name: change(getattr(value, field.name)) for field in fields(value) if field.init}
        same = all(getattr(value, name) is part for name, part in named.items())
        return value if same else replace(value, **named)
    return value


def _refilled(mapping: Mapping[Any, Any], named: dict[Any, Any]) -> Any:
    """Return a mapping of the same kind, such as a defaultdict, with other values."""
    if not isinstance(mapping, MutableMapping):
        return type(mapping)(named)  # type: ignore[call-arg]  # a mapping is expected to take a mapping
    again = copy(mapping)
    again.update(named)
    return again


def _unmovable(batch: object, device: torch.device, path: str) -> tuple[str, object]:
    """Return the path and the value of the part of a batch that cannot be moved."""
    named: Iterable[tuple[str, Any]] = ()
    if isinstance(batch, Mapping):
        named = ((f"{path}[{key!r}]", part) for key, part in batch.items())
    elif isinstance(batch, list | tuple):
        named = ((f"{path}[{index}]", part) for index, part in enumerate(batch))
    elif is_dataclass(batch):
        named = ((f"{path}.{field.name}", getattr(batch, field.name)) for field in fields(batch))
    for inner, part in named:
        try:
            _moved(part, device, non_blocking=False)
        except Exception:
            return _unmovable(part, device, inner)
    return path, batch


class CountedBatch:
    """A batch from a `DataLoader` with its number of samples; None if the number is unknown."""

    __slots__ = ("batch", "samples")

    def __init__(self, batch: Any, samples: int | None) -> None:
        self.batch: Any = batch
        self.samples: int | None = samples

    def pin_memory(self) -> CountedBatch:
        """Return a copy with the batch in pinned memory. torch calls this."""
        return CountedBatch(pinned(self.batch), self.samples)


class CountingCollate:
    """A ``collate_fn`` that counts the samples it receives."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> CountedBatch:
        return CountedBatch(self.collate(samples), len(samples))


class SampleCounter:
    """Counts the samples of each batch when it is read."""

    samples: int | None = None
    """The number of samples in the last batch; None if it is unknown."""

    def counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield each batch, and record its number of samples."""
        for batch in batches:
            if type(batch) is CountedBatch:
                self.samples = batch.samples
                yield batch.batch
            else:
                self.samples = None
                yield batch

    def size_of(self, batch: Any) -> int:
        """Return the number of samples in the last batch: from the loader or, if it is unknown there, from `batch`."""
        return size_of(batch) if self.samples is None else self.samples


def with_sample_counts(loader: Any) -> Any:
    """Return a loader that yields each batch as a `CountedBatch`; `loader` itself if it is no `DataLoader` of samples.

    The result is a copy with another ``collate_fn``. Each loader has one copy, so that persistent workers are reused.
    """
    if isinstance(loader, Limited):
        return Limited(with_sample_counts(loader.loader), loader.count)
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not uses_torch_iteration(loader):
        return loader
    copied = _COPIES.get(loader)
    if copied is None:
        _COPIES[loader] = copied = copy(loader)
        copied._iterator = None
    own = {name: value for name, value in vars(loader).items() if name != "_iterator"}
    vars(copied).update(own, collate_fn=CountingCollate(loader.collate_fn))  # the class rejects assignments to some of them
    return copied


def batch_sizes(loader: Any) -> list[int] | None:
    """Return the number of samples in each batch of an epoch, without reading data; None if that is not known."""
    if isinstance(loader, list | tuple):
        return [size_of(batch) for batch in loader]
    samples = length_of(getattr(loader, "dataset", None))
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler or samples is None:
        return None
    size = loader.batch_sampler.batch_size
    drawn = length_of(loader.sampler)
    whole, rest = divmod(samples if drawn is None else drawn, size)
    return [size] * whole + ([rest] if rest and not loader.drop_last else [])


_COPIES: WeakKeyDictionary[DataLoader[Any], DataLoader[Any]] = WeakKeyDictionary()


def uses_torch_iteration(loader: DataLoader[Any]) -> bool:
    """Return whether the class of a loader uses torch's iteration. The iteration of another class cannot be reproduced."""
    own, of_torch = (getattr(kind, "_get_iterator", None) for kind in (type(loader), DataLoader))
    return type(loader).__iter__ is DataLoader.__iter__ and own is of_torch
