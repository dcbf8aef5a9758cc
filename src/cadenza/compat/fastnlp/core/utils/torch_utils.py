"""``fastNLP.core.utils.torch_utils``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cadenza.compat.fastnlp.core.utils.nested import apply_to_collection


class _Movable(type):
    """The type of all objects with a method ``to``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return not isinstance(instance, type) and callable(getattr(instance, "to", None))


class TorchTransferableDataType(metaclass=_Movable):
    """Any object with a method ``to(device)``, as ``isinstance`` sees it."""


def torch_move_data_to_device(batch: Any, device: torch.device | str | None = None, non_blocking: bool | None = True) -> Any:
    """Return a batch with everything in it that has a method ``to`` on a device.

    Args:
        batch: A tensor, or tensors inside of collections.
        device: The device; None returns `batch`.
        non_blocking: Whether to copy tensors without waiting for the device.
    """
    if device is None:
        return batch

    def moved(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(device, non_blocking=bool(non_blocking))
        result = part.to(device)
        return part if result is None else result  # an in-place method

    return apply_to_collection(batch, TorchTransferableDataType, moved)


def is_torch_module(model: object) -> bool:
    """Return whether an object is a module of torch."""
    return isinstance(model, nn.Module)
