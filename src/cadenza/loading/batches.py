"""Batches: their size, their transfer to the device, and the accumulation window."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass, replace
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from cadenza.errors import DataError, LossError


def size_of(batch: object) -> int:
    """Estimate the number of samples in a batch: the first dimension of its first tensor or array with dimensions; else 1.

    A `PackedSequence` counts its sequences. A list of samples is not recognized: see `cadenza.loading.sample_counts`.

    >>> size_of({"scale": torch.tensor(0.5), "ids": torch.zeros(8, 3), "label": torch.zeros(8)})
    8
    """
    first = batch[0] if type(batch) in (tuple, list) and batch else None  # type: ignore[index]  # in most batches a tensor
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
        if self._stream is None:
            return batch if self._on_cpu and _plainly_on_cpu(batch) else moved(batch, self.device)
        with torch.cuda.stream(self._stream):
            batch = moved(batch, self.device, non_blocking=True)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self._stream)
        for tensor in tensors_in(batch):
            if tensor.is_cuda:  # its memory must not be reused before the current stream has finished with it
                tensor.record_stream(current)
        return batch


def pinned(batch: Any) -> Any:
    """Return `batch` with all its tensors in pinned memory. Containers keep their types; torch turns tuples into lists."""
    if callable(pin := getattr(batch, "pin_memory", None)):
        return pin()
    return batch if isinstance(batch, str | bytes | int | float | None) else _rebuilt(batch, pinned)


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield every tensor in a nested batch."""
    if isinstance(batch, Tensor):
        yield batch
    elif not isinstance(batch, str | bytes | int | float | None):
        for part in _parts(batch):
            yield from tensors_in(part)


class Limited:
    """The first `count` batches of each pass over a loader."""

    def __init__(self, loader: Iterable[Any], count: int) -> None:
        self.loader, self.count = loader, count

    def __iter__(self) -> Iterator[Any]:
        # Not islice, which would read one batch more than it yields.
        batches = iter(self.loader)
        for _ in range(self.count):
            try:
                yield next(batches)
            except StopIteration:
                return

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


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yield every parameter that the optimizers update."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def distinct_gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the gradients of all parameters of the optimizers, without duplicates in the same memory.

    Two optimizers may hold one parameter, and two parameters may shard one gradient.
    """
    found: dict[Any, Tensor] = {}
    for parameter in parameters_of(optimizers):
        gradient = parameter.grad
        if gradient is not None:
            dense = type(gradient) is Tensor and gradient.layout is torch.strided
            found[(gradient.data_ptr(), gradient.shape) if dense else id(gradient)] = gradient
    return list(found.values())


class Group:
    """The batches of one step, and how much each counts in its gradient.

    A step's gradient is that of the mean loss of its batches or, where batches report a ``weight``, of the weighted mean.
    How many there will be, and how heavy, is not known when the first gradient is added. So each loss counts for a shard, as if
    the group were full and all batches as heavy as the first, and `correction` puts it right at the end.
    """

    __slots__ = ("_mean_over_ranks", "_reference", "_share", "losses", "seen", "size", "unreduced", "weights")

    def __init__(self, size: int, mean_over_ranks: Callable[[Tensor], Tensor] | None = None) -> None:
        self.size, self._mean_over_ranks = size, mean_over_ranks
        self._share = 1.0 / size
        self.clear()

    def clear(self) -> None:
        """Start the next step."""
        self.seen, self.unreduced = 0, False
        self.losses: list[Tensor] = []
        self.weights: list[float | Tensor] = []
        self._reference: float | Tensor | None = None

    def share_of(self, loss: Tensor, weight: float | Tensor | None) -> float | Tensor:
        """Add a batch; return by how much its loss counts. The loss is kept without its graph, which would keep activations."""
        if self.losses and (weight is None) != (self._reference is None):
            raise LossError("either all batches of a step report outputs['weight'], or none does")
        self.losses.append(loss.detach())
        if weight is None:
            return self._share
        if not isinstance(weight, Tensor) or weight.is_cpu:  # a number on the host, in whatever form, counts alike
            weight = float(weight)
        if self._reference is None:
            reference = weight + (weight == 0)  # a batch of nothing, such as one of padding only, is no measure
            self._reference = self._mean(reference, loss)  # the gradients of all ranks are added before they are put right
        self.weights.append(weight)
        return weight / (self._reference * self.size)

    @property
    def complete(self) -> bool:
        """Whether the sum of the shares is the mean as it stands."""
        return len(self.losses) == self.size and self._reference is None

    def correction(self) -> float | Tensor:
        """Return the factor by which the gradients of an incomplete step must still be multiplied."""
        if self._reference is None:
            return self.size / len(self.losses)
        total = self._mean(sum(self.weights), self.losses[0])
        return self._reference * self.size / (total + (total == 0))

    def _mean(self, weight: float | Tensor, like: Tensor) -> float | Tensor:
        """Return the mean of `weight` over all ranks."""
        if self._mean_over_ranks is None:
            return weight
        return self._mean_over_ranks(as_number(weight, like.device, widened(like).dtype))

    def mean_loss(self) -> Tensor | None:
        """Return the (weighted) mean loss of the batches so far, shape (), without graph; None before the first.

        A batch of weight 0 is ignored, even if its loss is NaN. The mean of such batches alone is 0.
        """
        one_by_one, heavy = self.losses, self.weights  # read once: a progress bar asks from another thread
        if not one_by_one:
            return None
        if len(one_by_one) == 1:
            return without_weightless(one_by_one[0], heavy[0]) if heavy else one_by_one[0]
        losses = torch.stack([widened(loss) for loss in one_by_one])
        if not heavy:
            return losses.mean()
        weights = torch.stack([as_number(weight, losses.device, losses.dtype) for weight in heavy])
        return quotient(weighted_sum(losses, weights), weights.sum())


def without_weightless(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return `loss`, or 0 if `weight` is 0; both have shape (). Does not wait for the device."""
    return torch.where(as_number(weight, loss.device) == 0, 0.0, loss)


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of `losses` times `weights`, both of shape (N,), as shape (); a loss of weight 0 may be NaN."""
    return torch.where(weights == 0, 0.0, losses * weights).sum()


def quotient(total: Tensor, count: Tensor) -> Tensor:
    """Return `total` over `count`, both of shape (), or 0 if `count` is 0; without waiting for the device."""
    return total / (count + (count == 0))


def widened(value: Tensor) -> Tensor:
    """Return a real number as float32, or unchanged if it is a float64, so that sums lose no digits."""
    return value if value.dtype is torch.float64 else value.float()


def as_number(value: float | Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a `dtype` of shape () on `device`. A number is filled in there: copying one from the host waits for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype)
    return torch.full((), float(value), dtype=dtype, device=device)


def as_numbers(like: Tensor, values: list[Any]) -> Tensor:
    """Return numbers, and tensors of shape (), as one tensor of shape (N,), with the dtype and on the device of another."""
    if any(isinstance(value, Tensor) for value in values):
        return torch.stack([as_number(value, like.device, like.dtype) for value in values])
    return torch.tensor(values, dtype=like.dtype, device=like.device)


def _plainly_on_cpu(batch: Any) -> bool:
    """Return whether a batch is a tuple or list of tensors on the CPU: a fast check of the common case."""
    if type(batch) not in (tuple, list):
        return False
    for part in batch:  # noqa: SIM110  # a generator for all() costs as much as the rest
        if type(part) is not Tensor or not part.is_cpu:
            return False
    return True


def _sizes_in(part: Any) -> Iterator[int]:
    """Yield the size of the first dimension of each tensor and array in a nested batch that has dimensions."""
    if isinstance(part, PackedSequence):
        yield int(part.batch_sizes[0])  # always on the host
    elif isinstance(part, Tensor) or (hasattr(part, "__array__") and isinstance(getattr(part, "shape", None), tuple)):
        if len(part.shape):
            yield int(part.shape[0])
    elif not isinstance(part, str | bytes | int | float | None):
        for one in _parts(part):
            yield from _sizes_in(one)


def _parts(batch: object) -> Iterable[Any]:
    if isinstance(batch, Mapping):
        return batch.values()
    if isinstance(batch, list | tuple):
        return batch
    if is_dataclass(batch):
        return (getattr(batch, field.name) for field in fields(batch))
    return vars(batch).values() if hasattr(batch, "__dict__") and hasattr(batch, "to") else ()


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
        return to(device)
    return _rebuilt(value, lambda part: _moved(part, device, non_blocking))


def _rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
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
