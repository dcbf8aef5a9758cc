"""One process on one device: CPU, CUDA or MPS."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.drivers.base import Driver, Reduction
from cadenza.drivers.meta_tensors import materialize, tensors_of
from cadenza.loading.batches import Mover


class SingleDriver(Driver):
    """One process, one device.

    A model goes to this device, unless its parameters are on several devices already: then it is not moved.

    Args:
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``; None takes the best that exists.

    >>> SingleDriver("cpu").reduce(torch.tensor(3.0))
    tensor(3.)
    """

    rank = 0
    local_rank = 0
    world_size = 1
    reduces = False

    def __init__(self, device: str | torch.device | None = None) -> None:
        self.device: torch.device = _existing(torch.device(device)) if device is not None else _best()
        self.to_device: Callable[[Any], Any] = Mover(self.device)

    def prepare(self, model: nn.Module) -> nn.Module:
        if _is_on(self.device, model):
            return model
        split = is_split(model)
        materialize(model, self.device, self.meeting)
        return model if split else model.to(self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return nullcontext()

    def reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        return

    def reduce(self, value: Tensor, how: Reduction = "mean") -> Tensor:
        return value

    def reduce_later(self, value: Tensor) -> Callable[[], Tensor]:
        return lambda: value

    def any_rank(self, flag: bool) -> bool:
        return flag

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any, source: int = 0) -> Any:
        return value

    def barrier(self) -> None:
        return

    def __repr__(self) -> str:
        return f"SingleDriver({str(self.device)!r})"


def is_split(model: nn.Module) -> bool:
    """Return whether a model has parameters on several devices, so that it stays there."""
    return len({parameter.device for parameter in model.parameters() if not parameter.is_meta}) > 1


def _is_on(device: torch.device, model: nn.Module) -> bool:
    """Return whether ``model.to(device)`` would move nothing. A module that moves its tensors in a way of its own may."""
    modules = [*model.modules()]
    plain = all(kind._apply is nn.Module._apply and kind.to is nn.Module.to for kind in {type(module) for module in modules})
    return plain and {tensor.device for tensor in tensors_of(modules)} <= {device}


def _best() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def _existing(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return device
    exists = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not exists.get(device.type, True):
        raise ValueError(f"device {str(device)!r} does not exist; this machine has {[name for name in exists if exists[name]]}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
