"""The weights of a model as Keras's variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cadenza.drivers.sharding import laid_out, whole


def to_numpy(tensor: Tensor) -> Any:
    """Return a copy as an array of NumPy; of bfloat16 in float32, since NumPy has no such format. Every rank must call this."""
    host = whole(tensor).to("cpu", copy=True)
    return host.float().numpy() if host.dtype is torch.bfloat16 else host.numpy()


@torch.no_grad()
def assign(tensor: Tensor, value: Any) -> None:
    """Copy a tensor, an array or numbers of the same shape into `tensor`. Every rank must call this."""
    source = value.value if isinstance(value, Variable) else value
    given = source.detach() if isinstance(source, Tensor) else torch.as_tensor(source)
    if given.shape != tensor.shape:
        raise ValueError(f"expected an array of shape {tuple(tensor.shape)}; got {tuple(given.shape)}")
    tensor.copy_(laid_out(given.to(tensor.device, tensor.dtype), tensor))


class Variable:
    """A weight of the model, with the names that Keras gives to a variable.

    Args:
        path: Its name in ``state_dict``.
        value: The tensor of the model.
        may_set: Returns whether `assign` has an effect: not while a resumed run repeats an event.
    """

    def __init__(self, path: str, value: Tensor, may_set: Callable[[], bool]) -> None:
        self.path: str = path.replace(".", "/")
        """Its name with slashes, as Keras writes it."""
        self.name: str = path.rpartition(".")[2]
        """The last part of its path."""
        self.value: Tensor = value
        """The tensor of the model."""
        self._may_set = may_set

    def __repr__(self) -> str:
        return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        """The name of its format, such as ``float32``."""
        return str(self.value.dtype).removeprefix("torch.")

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""
        return self.value.requires_grad

    def numpy(self) -> Any:
        """Return a copy as an array of NumPy."""
        return to_numpy(self.value)

    def assign(self, value: Any) -> Variable:
        """Copy `value` into the weight."""
        if self._may_set():
            assign(self.value, value)
        return self

    def assign_add(self, value: Any) -> Variable:
        """Add `value` to the weight."""
        return self.assign(self.numpy() + value)

    def assign_sub(self, value: Any) -> Variable:
        """Subtract `value` from the weight."""
        return self.assign(self.numpy() - value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)


def arrays(tensors: Iterable[Tensor]) -> list[Any]:
    """Return copies as arrays of NumPy. Every rank must call this."""
    return [to_numpy(tensor) for tensor in tensors]


def assign_all(names: list[str], tensors: list[Tensor], values: Iterable[Any], what: str) -> None:
    """Copy arrays into tensors, in order. Every rank must call this.

    Raises:
        ValueError: There are more or fewer arrays than tensors, or a shape differs.
    """
    given = list(values)
    if len(given) != len(tensors):
        raise ValueError(
            f"{what} expected {len(tensors)} arrays, one for each tensor of state_dict() in its order "
            f"({', '.join(names[:4])}, ...); got {len(given)}"
        )
    for tensor, value in zip(tensors, given, strict=True):
        assign(tensor, value)
