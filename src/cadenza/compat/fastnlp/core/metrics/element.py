"""A number that a metric accumulates, on one rank or on all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Number
from typing import Any, Literal

from torch import Tensor

from cadenza.compat.fastnlp.core.metrics.backend import AutoBackend, Backend

Aggregate = Literal["sum", "mean", "max", "min"]


class Element:
    """A number, or a list of numbers, that can be used in calculations. ``+=`` keeps it on its device.

    Calculations and comparisons return numbers, or lists. Attributes that it does not have are those of its tensor, `value`, so
    ``element.item()`` and ``element.tolist()`` work.

    Args:
        name: The metric's attribute.
        value: The initial value, which `reset` restores.
        aggregate_method: How the values of the ranks become one: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; None: no
            aggregation.
        backend: ``"auto"``, ``"torch"`` or a backend.
    """

    def __init__(
        self,
        name: str,
        value: float | Sequence[float],
        aggregate_method: Aggregate | None = None,
        backend: str | Backend = "auto",
    ) -> None:
        if aggregate_method not in ("sum", "mean", "max", "min", None):
            raise ValueError(f"aggregate_method must be 'sum', 'mean', 'max', 'min' or None; got {aggregate_method!r}")
        self.name: str = name
        self.init_value: float | Sequence[float] = value
        self.aggregate_method = aggregate_method
        self.backend: Backend | AutoBackend = backend if isinstance(backend, Backend) else AutoBackend(backend)
        self._value = self.backend.create_tensor(value)

    @property
    def value(self) -> Tensor:
        """The tensor: shape (1,), or (N,) for a list of N numbers."""
        return self._value

    @value.setter
    def value(self, value: Any) -> None:
        self.fill_value(_plain(value))

    def reset(self) -> None:
        """Restore the initial value."""
        self.fill_value(self.init_value)

    def fill_value(self, value: Any) -> None:
        """Set the value: a number, a list or a tensor."""
        self._value = self.backend.fill_value(self._value, value)

    def get_scalar(self) -> float:
        """Return the value as a number.

        Raises:
            RuntimeError: It is a list.
        """
        return self.backend.get_scalar(self._value)

    def to_list(self) -> list[float]:
        """Return the value as a list."""
        return self.backend.to_list(self._value)

    def tensor2numpy(self) -> Any:
        """Return the value as an array."""
        return self.backend.tensor2numpy(self._value)

    def plain(self) -> float | list[float]:
        """Return the value as a number, or as a list if it was registered as one."""
        return self.get_scalar() if isinstance(self.init_value, Number) else self.to_list()

    def to(self, device: Any) -> None:
        """Move the value to a device."""
        self._value = self.backend.move_tensor_to_device(self._value, device)

    def aggregate(self) -> None:
        """Replace the value with the aggregation of all ranks' values. Every rank must call this."""
        self._value = self.backend.aggregate(self._value, self.aggregate_method)

    # -- calculations ------------------------------------------------------------------------------

    def _result(self, value: Any) -> Any:
        """Return a tensor as a number or a list."""
        if isinstance(self.init_value, Number):
            return value.item() if value.numel() == 1 else value
        return value.tolist()

    def _both(self, other: Any) -> tuple[Tensor, Any]:
        """Return the value and another value on the same device."""
        other = _plain(other)
        if isinstance(other, Tensor):
            return self.backend.move_tensor_to_device(self._value, other.device), other
        return self._value, other if isinstance(other, Number) else self.backend.create_tensor(other, self._value.device)

    def _binary(self, calculate: Callable[[Any, Any], Any], other: Any) -> Any:
        return self._result(calculate(*self._both(other)))

    def _update(self, calculate: Callable[[Any, Any], Any], other: Any) -> Element:
        result = calculate(*self._both(other))
        if result.numel() != self._value.numel():
            raise ValueError(f"the element {self.name!r} has {self._value.numel()} numbers; the result has {result.numel()}")
        self._value = self.backend.create_tensor(result, result.device)
        return self

    def __add__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own + given, other)

    def __radd__(self, other: Any) -> Any:
        return self._binary(lambda own, given: given + own, other)

    def __iadd__(self, other: Any) -> Element:
        return self._update(lambda own, given: own + given, other)

    def __sub__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own - given, other)

    def __rsub__(self, other: Any) -> Any:
        return self._binary(lambda own, given: given - own, other)

    def __isub__(self, other: Any) -> Element:
        return self._update(lambda own, given: own - given, other)

    def __mul__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own * given, other)

    __rmul__ = __mul__

    def __imul__(self, other: Any) -> Element:
        return self._update(lambda own, given: own * given, other)

    def __truediv__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own / given, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._binary(lambda own, given: given / own, other)

    def __itruediv__(self, other: Any) -> Element:
        return self._update(lambda own, given: own / given, other)

    def __floordiv__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own // given, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._binary(lambda own, given: given // own, other)

    def __mod__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own % given, other)

    def __rmod__(self, other: Any) -> Any:
        return self._binary(lambda own, given: given % own, other)

    def __pow__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own**given, other)

    def __rpow__(self, other: Any) -> Any:
        return self._binary(lambda own, given: given**own, other)

    def __neg__(self) -> Any:
        return self._result(-self._value)

    def __abs__(self) -> Any:
        return self._result(self._value.abs())

    # -- comparisons -------------------------------------------------------------------------------

    def __eq__(self, other: object) -> Any:
        return False if other is None else self._binary(lambda own, given: own == given, other)

    def __ne__(self, other: object) -> Any:
        return True if other is None else self._binary(lambda own, given: own != given, other)

    def __lt__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own < given, other)

    def __le__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own <= given, other)

    def __gt__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own > given, other)

    def __ge__(self, other: Any) -> Any:
        return self._binary(lambda own, given: own >= given, other)

    def __hash__(self) -> int:
        return object.__hash__(self)

    __array_ufunc__ = None  # numpy leaves calculations with its numbers to the methods above

    # -- as a number, and as a list ----------------------------------------------------------------

    def __float__(self) -> float:
        return float(self.get_scalar())

    def __int__(self) -> int:
        return int(self.get_scalar())

    def __bool__(self) -> bool:
        return bool(self._value.any())

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.get_scalar(), digits)

    def __format__(self, text: str) -> str:
        return format(self.plain() if text else str(self), text)

    def __getitem__(self, item: int) -> float:
        self._check_list()
        return self._value[item].item()

    def __setitem__(self, item: int, value: Any) -> None:
        self._check_list()
        self._value[item] = _plain(value)

    def __len__(self) -> int:
        self._check_list()
        return len(self._value)

    def _check_list(self) -> None:
        if isinstance(self.init_value, Number):
            raise TypeError(f"the element {self.name!r} is a number, and has no items. Register it with a list as its value.")

    def __str__(self) -> str:
        return str(self._value)

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_value":  # not set yet, while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self._value, name)


def _plain(other: Any) -> Any:
    return other.value if isinstance(other, Element) else other
