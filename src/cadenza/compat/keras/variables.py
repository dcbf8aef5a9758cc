"""Values with the methods of Keras's variables: the weights of a model, learning rates and counters."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from cadenza.drivers.sharding import laid_out, whole


def to_numpy(tensor: Tensor) -> Any:
    """Return a copy as an array of NumPy; bfloat16 becomes float32, since NumPy lacks it. Every rank must call this."""
    host = whole(tensor).to("cpu", copy=True)
    return host.float().numpy() if host.dtype is torch.bfloat16 else host.numpy()


@torch.no_grad()
def assign(tensor: Tensor, value: Any) -> None:
    """Copy a tensor, an array or numbers of the same shape into `tensor`. Every rank must call this."""
    source = value.value if isinstance(value, Value) else value
    given = source.detach() if isinstance(source, Tensor) else torch.as_tensor(source)
    if given.shape != tensor.shape:
        raise ValueError(f"expected an array of shape {tuple(tensor.shape)}; got {tuple(given.shape)}")
    tensor.copy_(laid_out(given.to(tensor.device, tensor.dtype), tensor))


def _operator(name: str, *, reflected: bool = False) -> Callable[..., Any]:
    act = getattr(operator, name)

    def method(self: Value, *others: Any) -> Any:
        own = self.value
        given = [_like(own, value_of(other)) for other in others]
        return act(*given, own) if reflected else act(own, *given)

    method.__name__ = f"__{'r' if reflected else ''}{name.strip('_')}__"
    return method


class Value:
    """A value that is read on each use, with the operators of Keras's variables.

    Functions of torch and ``keras.ops`` accept it as a tensor.
    """

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""
        return False

    @property
    def value(self) -> Any:
        """The tensor, or the number."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return ()

    @property
    def ndim(self) -> int:
        """The number of its dimensions."""
        return len(self.shape)

    def numpy(self) -> Any:
        """Return a copy as an array of NumPy."""
        raise NotImplementedError

    def assign(self, value: Any) -> Any:
        """Set the value."""
        raise NotImplementedError

    def assign_add(self, value: Any) -> Any:
        """Add `value`."""
        return self.assign(operator.add(self, value))

    def assign_sub(self, value: Any) -> Any:
        """Subtract `value`."""
        return self.assign(operator.sub(self, value))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.asarray(self.numpy(), dtype=dtype)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*pytree.tree_map(value_of, arguments), **pytree.tree_map(value_of, keywords or {}))

    def __getitem__(self, index: Any) -> Any:
        return self.value[index]

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.value, digits) if digits is not None else round(self.value)

    def __format__(self, form: str) -> str:
        return format(self.value if form else str(self), form)

    for _name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge"),
        *("neg", "pos", "abs"),
    ):
        locals()[f"__{_name}__"] = _operator(_name)
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"):
        locals()[f"__r{_name}__"] = _operator(_name, reflected=True)
    del _name


class Number(Value):
    """A number of a run, such as a learning rate or a counter.

    Args:
        name: Its name in Keras.
        read: Returns the number.
        write: Sets it.
        dtype: The name of the format that it has in Keras.
    """

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[Any], None], dtype: str = "float32") -> None:
        self.name: str = name
        """Its name in Keras."""
        self.dtype: str = dtype
        """The name of the format that it has in Keras."""
        self._read, self._write = read, write

    def __repr__(self) -> str:
        return f"<{self.name}: {self.value}>"

    def __str__(self) -> str:
        return str(self.value)

    def __eq__(self, other: object) -> bool:
        return bool(self.value == value_of(other))

    def __hash__(self) -> int:
        return hash(self.value)

    @property
    def value(self) -> Any:
        """The number."""
        return self._read()

    def numpy(self) -> Any:
        """Return it as a number of NumPy, in the format that it has in Keras."""
        import numpy

        return numpy.dtype(self.dtype).type(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy

        return numpy.asarray(self.value, dtype=dtype)

    def assign(self, value: Any) -> Number:
        """Set the number."""
        self._write(value_of(value))
        return self


class Variable(Value):
    """A weight of the model with the attributes of a Keras variable.

    Args:
        path: Its name in ``state_dict``.
        value: The tensor of the model.
        may_set: Returns whether `assign` has an effect. It has none while a resumed run repeats an event.
    """

    def __init__(self, path: str, value: Tensor, may_set: Callable[[], bool]) -> None:
        self.path: str = path.replace(".", "/")
        """Its slash-separated name, as in Keras."""
        self.name: str = path.rpartition(".")[2]
        """The last part of its path."""
        self._tensor = value
        self._may_set = may_set

    def __repr__(self) -> str:
        return f"<Variable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    @property
    def value(self) -> Tensor:
        """The tensor of the model."""
        return self._tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._tensor.shape)

    @property
    def dtype(self) -> str:
        """The name of its dtype, such as ``float32``."""
        return str(self._tensor.dtype).removeprefix("torch.")

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""
        return self._tensor.requires_grad

    def numpy(self) -> Any:
        """Return a copy as an array of NumPy."""
        return to_numpy(self._tensor)

    def assign(self, value: Any) -> Variable:
        """Copy `value` into the weight."""
        if self._may_set():
            assign(self._tensor, value)
        return self


def plain_inside(value: Any) -> Any:
    """Return lists and dicts with their numbers replaced by current values; anything else unchanged."""
    is_number = isinstance(value, Number)
    return value if is_number else pytree.tree_map(lambda leaf: leaf.value if isinstance(leaf, Number) else leaf, value)


def value_of(value: Any) -> Any:
    """Return the tensor or the number of a `Value`; anything else unchanged."""
    return value.value if isinstance(value, Value) else value


def _like(own: Any, other: Any) -> Any:
    """Return the other operand; an array or list becomes a tensor on the device of `own`, if that is a tensor."""
    is_array = isinstance(other, list) or hasattr(other, "__array__")
    return torch.as_tensor(other, device=own.device) if is_array and isinstance(own, Tensor) else other


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
