"""Numbers of shape (): conversions and sums that do not wait for the device, copies to the host, and reductions.

A reduction says how the values that are logged under one name become one number: those of a step, and those of all ranks.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cadenza.errors import nearest

Reduce = Literal["mean", "sum", "max", "min", "last"]
EXTREMES = ("max", "min")


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """Return the sum of `losses` times `weights`, of the same shape, as shape (). A loss of weight 0 may be NaN."""
    return torch.where(weights == 0, 0.0, losses * weights).sum()


def widened(value: Tensor) -> Tensor:
    """Return a real tensor as float32, or unchanged if it is float64, so that sums lose no precision."""
    return value if value.dtype is torch.float64 else value.float()


def host_number(value: Any) -> Any:
    """Return a tensor of shape () on the host as a number, and all else unchanged."""
    return value.item() if isinstance(value, Tensor) and value.is_cpu else value


def exact_zero(device: torch.device) -> Tensor:
    """Return a zero of shape () with the dtype in which sums of numbers are exact: float64. MPS has none, and gets float32."""
    return torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


def as_number(value: float | Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a `dtype` of shape () on `device`. A number is filled in there: a copy would wait for the device."""
    if isinstance(value, Tensor):
        return value.detach().to(device, dtype)
    return torch.full((), float(value), dtype=dtype, device=device)


def as_numbers(like: Tensor, values: list[Any]) -> Tensor:
    """Return numbers and tensors of shape () as one tensor of shape (N,), with the dtype and the device of `like`."""
    if like.is_cpu and values:  # four times as fast as torch.tensor
        return torch.frombuffer(array("d", values), dtype=torch.float64).to(like.dtype)
    if any(isinstance(value, Tensor) for value in values):
        alike = len({(value.device, value.dtype) if isinstance(value, Tensor) else None for value in values}) == 1
        numbers = values if alike else [as_number(value, like.device, like.dtype) for value in values]
        return torch.stack(numbers).detach().to(like.device, like.dtype)  # for numbers that are alike, two kernels
    # From pinned memory, the copy does not wait for the device.
    return torch.tensor(values, dtype=like.dtype, pin_memory=like.is_cuda).to(like.device, non_blocking=like.is_cuda)


def arriving(value: Tensor) -> float | Arriving:
    """Return a number to read with ``float`` later, after it has come from the device of a 0-d tensor.

    >>> float(arriving(torch.tensor(0.5)))
    0.5
    """
    return value.item() if value.is_cpu else Arriving(value)


class Arriving:
    """A tensor that is copied to the host. To read it waits for the work before the copy, not for later work."""

    __slots__ = ("_event", "_value")

    def __init__(self, value: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._value = value = value.detach()
        if value.is_cuda:
            self._value = value.to("cpu", non_blocking=True)
            self._event = torch.cuda.current_stream(value.device).record_event()  # of its device, not of the current one

    @property
    def arrived(self) -> bool:
        """Whether reading it does not wait."""
        return self._event is None or self._event.query()

    def tolist(self) -> Any:
        """Return its numbers, as ``Tensor.tolist`` does."""
        if self._event is not None:
            self._event.synchronize()
        return self._value.tolist()

    def __float__(self) -> float:
        return float(self.tolist())


class ArrivingNumbers:
    """Tensors of shape () that are copied to the host, those of one device and dtype in one operation.

    >>> [*ArrivingNumbers([torch.tensor(0.5), torch.tensor(3), torch.tensor(1.5)])]
    [0.5, 3, 1.5]
    """

    __slots__ = ("_copies", "_kinds")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._kinds = [(tensor.device, tensor.dtype) for tensor in tensors]
        alike: defaultdict[Any, list[Tensor]] = defaultdict(list)
        for kind, tensor in zip(self._kinds, tensors, strict=True):
            alike[kind].append(tensor)
        self._copies = {kind: Arriving(torch.stack(those)) for kind, those in alike.items()}

    @property
    def arrived(self) -> bool:
        """Whether reading them does not wait."""
        return all(copy.arrived for copy in self._copies.values())

    def __iter__(self) -> Iterator[Any]:
        numbers = {kind: iter(copy.tolist()) for kind, copy in self._copies.items()}
        return map(next, map(numbers.__getitem__, self._kinds))  # without a call of Python for each number


class Reduced:
    """The values of one name in one step, as far as they are logged. A tensor on a device is not read.

    A mean has a total and a weight, all others have a total. Without `how` it is a number that was logged without a
    reduction: over ranks it becomes the mean, and does not change if all have the same number.
    """

    __slots__ = ("how", "total", "weight")

    def __init__(self, how: Reduce | None, total: Any = None, weight: Any = 0) -> None:
        self.how: Reduce | None = how
        self.total: Any = total
        self.weight: Any = weight

    def add(self, value: Any, weight: Any = 1) -> None:
        """Add a value: a number, or a tensor of shape (). A value of weight 0 is ignored, even if it is NaN."""
        value = _wide(value)
        if self.how == "mean":
            value, self.weight = _weighted(value, weight), self.weight + _wide(weight)
        if self.total is None or self.how == "last":
            self.total = value
        elif self.how in EXTREMES:
            self.total = self.chosen(self.total, value)
        else:
            self.total = self.total + value

    @property
    def kind(self) -> str:
        """What plain values of it name: `how`, but for sums of an interval."""
        return self.how or ""

    @property
    def on_device(self) -> bool:
        """Whether the number is on a device."""
        return any(isinstance(part, Tensor) for part in (self.total, self.weight))

    @property
    def value(self) -> Any:
        """The number: a float, or a tensor of shape () on the device. A mean of which all weights are 0 is NaN."""
        if self.how != "mean":
            return self.total
        if not isinstance(self.weight, Tensor):
            return self.total / self.weight if self.weight else float("nan")
        like = next(part for part in (self.total, self.weight) if isinstance(part, Tensor))
        total, weight = (as_number(part, like.device, like.dtype) for part in (self.total, self.weight))
        return total / weight

    def chosen(self, value: Any, other: Any) -> Any:
        """Return the larger or the smaller of two values; NaN if one of them is, as in numpy and torch."""
        tensors = [part for part in (value, other) if isinstance(part, Tensor)]
        if tensors:
            device, dtype = tensors[0].device, tensors[0].dtype
            choose = torch.maximum if self.how == "max" else torch.minimum
            return choose(as_number(value, device, dtype), as_number(other, device, dtype))
        if value != value or other != other:  # NaN
            return float("nan")
        return max(value, other) if self.how == "max" else min(value, other)

    # -- over ranks --------------------------------------------------------------------------------

    def terms(self, *, first: bool) -> list[Any]:
        """Return the numbers of which ranks exchange the sum. The last value is that of the `first` rank."""
        if self.how == "mean":
            return [self.total, self.weight]
        if self.how == "last":
            return [self.total if first else 0.0]
        return [] if self.how in EXTREMES else [self.total]

    def put(self, sums: Iterator[Any], ranks: int) -> None:
        """Take the sums of the terms over all ranks, of which so many count."""
        if self.how is None:
            mean = next(sums) / ranks
            rounded = ranks * sys.float_info.epsilon
            if isinstance(mean, Tensor) or not math.isclose(mean, self.total, rel_tol=rounded):
                self.total = mean
        elif self.how == "mean":
            self.total, self.weight = next(sums), next(sums)
        elif self.how not in EXTREMES:
            self.total = next(sums)

    def with_others(self, others: Sequence[Reduced]) -> Reduced:
        """Return the number of this rank and of later ranks, with all parts on the host."""
        result = Reduced(self.how, self.total, self.weight)
        if self.how is None:
            totals = [value.total for value in (self, *others)]
            result.total = self.total if totals.count(self.total) == len(totals) else sum(totals) / len(totals)
            return result
        for other in others:
            if self.how in EXTREMES:
                result.total = self.chosen(result.total, other.total)
            elif self.how != "last":
                result.total, result.weight = result.total + other.total, result.weight + other.weight
        return result

    def on_host(self) -> Reduced:
        """Return a copy with plain numbers. Waits for the device."""
        return type(self)(self.how, float(self.total), float(self.weight))


class IntervalSums(Reduced):
    """The sums of a mean over several steps. A number that a hook logs under the same name replaces it."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        return "interval"


def extremes(numbers: Sequence[Reduced]) -> Tensor:
    """Return what ranks exchange about the largest and smallest values, shape (2N,), for a maximum: numbers, marks of NaN.

    A maximum over ranks is not defined for NaN by all backends.
    """
    like = next((number.total for number in numbers if isinstance(number.total, Tensor)), torch.zeros((), dtype=torch.float64))
    values = torch.stack(
        [as_number(number.total, like.device, like.dtype) * (1 if number.how == "max" else -1) for number in numbers]
    )
    lost = values.isnan()
    return torch.cat([values.masked_fill(lost, -torch.inf), lost.to(values.dtype)])


def put_extremes(numbers: Sequence[Reduced], over_ranks: Tensor) -> None:
    """Take the maximum over all ranks of what `extremes` returned."""
    values, lost = over_ranks.chunk(2)
    values = values.masked_fill(lost > 0, torch.nan)
    found = values.tolist() if values.is_cpu else values.unbind()
    for number, value in zip(numbers, found, strict=True):
        number.total = value if number.how == "max" else -value


def checked_reduce(how: object) -> Reduce:
    """Return `how`; raise `ValueError` for an unknown one."""
    known: tuple[Reduce, ...] = get_args(Reduce)
    for item in known:
        if how == item:
            return item
    hint = nearest(
        {"avg": "mean", "average": "mean", "add": "sum", "maximum": "max", "minimum": "min"}.get(str(how), str(how)), known
    )
    raise ValueError(f"reduce must be one of {', '.join(map(repr, known))}; got {how!r}.{hint}")


def mixed(name: str, value: object, other: object) -> ValueError:
    """Return the error for a name that is logged in two ways."""
    ways = " and ".join("without reduce=" if how is None else f"with reduce={how!r}" for how in (value, other))
    return ValueError(f"{name!r} is logged {ways}: expected one of the two in a run. Give one of the values another name.")


def _wide(value: Any) -> Any:
    """Return a bool as a number, and a tensor with a dtype in which sums lose no precision."""
    if not isinstance(value, Tensor):
        return float(value) if isinstance(value, bool) else value
    exact = value.dtype.is_floating_point or value.device.type == "mps"  # which has no float64
    return value if value.dtype is torch.float64 else value.float() if exact else value.double()


def _weighted(value: Any, weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, as_number(value, weight.device) * weight)
    return value * weight if weight else 0.0
