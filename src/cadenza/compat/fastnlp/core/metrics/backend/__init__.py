"""``fastNLP.core.metrics.backend``: how elements keep their values. Cadenza has one backend, torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from cadenza.compat.fastnlp.envs.distributed import may_exchange

__all__ = ["AutoBackend", "Backend"]

_OPERATIONS = {"sum": "SUM", "mean": "SUM", "max": "MAX", "min": "MIN"}


class Backend:
    """Functions on the tensor of an element."""

    def is_specified(self) -> bool:
        """Return True: the backend is known before the first update."""
        return True

    def create_tensor(self, value: Any, device: torch.device | str = "cpu") -> Tensor:
        """Return the tensor of a number, shape (1,), or of a list of N numbers, shape (N,).

        It is float64, so that counts stay exact, and float32 on devices without it.
        """
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        return torch.as_tensor(value, dtype=dtype, device=device).detach().clone().reshape(-1)

    def fill_value(self, tensor: Tensor, value: Any) -> Tensor:
        """Return a tensor with a new value, on the same device."""
        return self.create_tensor(value, tensor.device)

    def get_scalar(self, tensor: Tensor) -> float:
        """Return a tensor of one element as a number."""
        return tensor.item()

    def to_list(self, tensor: Tensor) -> list[float]:
        """Return the elements of a tensor."""
        numbers: list[float] = tensor.tolist()
        return numbers

    def tensor2numpy(self, tensor: Any) -> Any:
        """Return a tensor, an array or a number as an array, or as a number.

        Raises:
            ValueError: It is something else.
        """
        if isinstance(tensor, Tensor):
            return tensor.detach().cpu().numpy()
        if isinstance(tensor, np.ndarray | float | int):
            return tensor
        raise ValueError(f"a tensor, an array or a number is needed; got a {type(tensor).__name__}")

    def move_tensor_to_device(self, tensor: Tensor, device: torch.device | str) -> Tensor:
        """Return a tensor on a device."""
        return self.create_tensor(tensor, device)

    def aggregate(self, tensor: Tensor, method: str | None) -> Tensor:
        """Return the aggregation of all ranks' tensors. Every rank must call this with a method."""
        if method is None or not may_exchange():
            return tensor
        on_gpu = torch.distributed.get_backend() == "nccl" and not tensor.is_cuda
        whole = tensor.clone().cuda() if on_gpu else tensor.clone()
        torch.distributed.all_reduce(whole, getattr(torch.distributed.ReduceOp, _OPERATIONS[method]))
        whole = whole.to(tensor.device)
        return whole / torch.distributed.get_world_size() if method == "mean" else whole

    def all_gather_object(self, obj: Any, group: Any = None) -> list[Any]:
        """Return the objects of all ranks, in the order of the ranks. Every rank must call this. Objects are pickled."""
        if not may_exchange():
            return [obj]
        found: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(found, obj, group)
        return found


class AutoBackend(Backend):
    """The backend of a metric.

    Args:
        backend: ``"auto"``, ``"torch"``, None or a backend.

    Raises:
        ValueError: It is the name of another framework.
    """

    def __init__(self, backend: str | Backend | None = "auto") -> None:
        if backend not in ("auto", "torch", None) and not isinstance(backend, Backend):
            raise ValueError(f"backend must be 'auto' or 'torch', because Cadenza trains with torch; got {backend!r}")
