"""The ``logs`` of Keras's events: running means of an epoch. They are copied to the host when a callback reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from cadenza.engine.tally import NOT_AVERAGED
from cadenza.loading.batches import size_of
from cadenza.records.scalars import as_number

_WEIGHTS = frozenset({"weight", "samples"})


class Means:
    """Weighted means of the numbers in batch outputs, in float32 as in Keras. Adding a batch does not synchronize."""

    __slots__ = ("totals", "weights")

    def __init__(self) -> None:
        self.totals: dict[str, Any] = {}
        self.weights: dict[str, Any] = {}

    def add(self, outputs: dict[str, Any], batch: Any, samples: int | None) -> None:
        """Add the numbers in the outputs of a batch. Called in each step, so it makes few calls.

        Args:
            outputs: The outputs. ``weight`` or ``samples`` in them is the weight of the batch.
            batch: The batch. Its size is the weight by default.
            samples: The number of samples that the loader has counted; None if it does not count.
        """
        weight: Any = samples
        if _WEIGHTS & {*outputs}:
            weight = dict.get(outputs, "weight", dict.get(outputs, "samples", samples))
        if weight is None:
            first = batch[0] if type(batch) in (tuple, list) and batch else None
            weight = first.shape[0] if type(first) is Tensor and first.ndim else size_of(batch)
        totals, weights = self.totals, self.weights
        for name in outputs:
            if name in NOT_AVERAGED:
                continue
            value = outputs[name]
            if type(value) is Tensor or isinstance(value, Tensor):
                if value.ndim or value.dtype.is_complex:
                    continue
                value = value.detach() if value.requires_grad else value
                value = value if value.dtype is torch.float32 else value.float()
            elif not isinstance(value, int | float):
                continue
            if name in totals:  # create new tensors, so that logs of earlier batches keep their sums
                totals[name], weights[name] = totals[name] + value * weight, weights[name] + weight
            else:
                totals[name], weights[name] = value * weight, weight

    def logs(self) -> Logs:
        """Return the means so far."""
        logs = Logs(self.totals)  # create the names now, since C code such as json reads the length
        logs.sums = dict(self.totals), dict(self.weights)
        return logs

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the weights."""
        return {"totals": dict(self.totals), "weights": dict(self.weights)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue with these sums."""
        for name in self.__slots__:
            sums = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in state[name].items()}
            setattr(self, name, sums)

    def add_all(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Add the sums of another rank."""
        other = Means()
        other.load_state_dict(state, device)
        for name, total in other.totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + total
            self.weights[name] = self.weights.get(name, 0) + other.weights[name]


def _lazy(name: str) -> Callable[..., Any]:
    plain = getattr(dict, name)

    def method(self: Logs, *arguments: Any, **keywords: Any) -> Any:
        self._fill()
        return plain(self, *arguments, **keywords)

    method.__name__ = name
    return method


class Logs(dict[str, Any]):
    """A dict of floats that is filled on first use, when the host waits for the device."""

    sums: tuple[dict[str, Any], dict[str, Any]] | None = None
    """The sums and weights of means that are not computed yet."""

    def _fill(self) -> None:
        if self.sums is not None:
            (totals, weights), self.sums = self.sums, None
            means = {name: total / weights[name] for name, total in totals.items()}
            tensors = {name: mean for name, mean in means.items() if isinstance(mean, Tensor)}
            if tensors:
                device = next(iter(tensors.values())).device
                numbers = torch.stack([as_number(mean, device, torch.float32) for mean in tensors.values()]).tolist()
                means.update(zip(tensors, numbers, strict=True))
            dict.update(self, means)

    for _name in (
        *("__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__ne__", "__or__", "__repr__", "__ror__"),
        *("__setitem__", "clear", "get", "items", "pop", "popitem", "setdefault", "update", "values"),
    ):
        locals()[_name] = _lazy(_name)
    del _name

    __hash__ = None  # as for a dict

    def copy(self) -> dict[str, Any]:
        """Return a plain dict."""
        return dict(self.items())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)
