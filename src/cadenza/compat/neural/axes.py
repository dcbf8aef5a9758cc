"""The meaning of the dimensions of a tensor (``nemo.core.neural_types``)."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise

from cadenza.compat.neural.elements import NeuralTypeComparisonResult


class AxisKindAbstract(Enum):
    """The base of enums of axis kinds. Derive your own from it if `AxisKind` lacks one."""


class AxisKind(AxisKindAbstract):
    """The meaning of a dimension. ``Dimension`` and ``Channel`` are equal; ``Any`` accepts every kind."""

    Batch = 0
    Time = 1
    Dimension = 2
    Channel = 2
    Width = 3
    Height = 4
    Any = 5
    Sequence = 6

    def __str__(self) -> str:
        return self.name.lower()

    __repr__ = __str__

    @staticmethod
    def from_str(label: str) -> AxisKind:
        """Return the kind of a short name, such as ``"B"`` or ``"time"``; upper and lower case are equal.

        Raises:
            ValueError: There is no such name.
        """
        kind = SHORT.get(label.lower().strip())
        if kind is None:
            raise ValueError(f"there is no axis kind {label!r}. The names are {', '.join(SHORT)}")
        return kind


SHORT = {
    "b": AxisKind.Batch,
    "n": AxisKind.Batch,
    "batch": AxisKind.Batch,
    "t": AxisKind.Time,
    "time": AxisKind.Time,
    "d": AxisKind.Dimension,
    "c": AxisKind.Dimension,
    "channel": AxisKind.Dimension,
    "w": AxisKind.Width,
    "width": AxisKind.Width,
    "h": AxisKind.Height,
    "height": AxisKind.Height,
    "any": AxisKind.Any,
}
"""The short names of axis kinds, in lower case. NeMo has none for ``Sequence``."""


class AxisType:
    """A dimension.

    Args:
        kind: Its meaning.
        size: Its size; None for any.
        is_list: Whether it is a list of tensors.

    Raises:
        ValueError: A list has a size.
    """

    def __init__(self, kind: AxisKindAbstract, size: int | None = None, is_list: bool = False) -> None:
        if size is not None and is_list:
            raise ValueError(f"an axis that is a list has no fixed size; got size={size}")
        self.kind: AxisKindAbstract = kind
        self.size: int | None = size
        self.is_list: bool = is_list

    def fits(self, other: AxisType) -> bool:
        """Return whether a port with this axis accepts the other one."""
        sized = self.size is None or self.size == other.size
        return self.kind is other.kind and self.is_list == other.is_list and sized

    def __repr__(self) -> str:
        size = "" if self.size is None else f":{self.size}"
        return f"{self.kind}{size}{'_listdim' if self.is_list else ''}"


def axes_of(given: Sequence[str | AxisType]) -> tuple[AxisType, ...]:
    """Return axes, given as short names or as axes.

    Raises:
        ValueError: One is neither, names and axes are mixed, or a list follows a dimension of a tensor.
    """
    for axis in given:
        if not isinstance(axis, str | AxisType):
            raise ValueError(f"an axis must be a name such as 'B', or an AxisType; got {axis!r}")
    axes = [axis for axis in given if isinstance(axis, AxisType)]
    if axes and len(axes) < len(given):
        raise ValueError(f"use names or AxisTypes for all axes; got {tuple(given)!r}")
    if any(two.is_list and not axis.is_list for axis, two in pairwise(axes)):
        raise ValueError(f"axes that are lists must stand before those of the tensor; got {tuple(given)!r}")
    return tuple(AxisType(AxisKind.from_str(axis)) if isinstance(axis, str) else axis for axis in given)


def compared(first: Sequence[AxisType] | None, second: Sequence[AxisType] | None) -> NeuralTypeComparisonResult:
    """Return SAME, TRANSPOSE_SAME, DIM_INCOMPATIBLE or INCOMPATIBLE.

    As in NeMo, an axis ``Any`` accepts all axes before it too, so that ``('T', 'Any')`` accepts ``('B', 'D')``.
    """
    if first is None or second is None:
        both = first is None and second is None
        return NeuralTypeComparisonResult.SAME if both else NeuralTypeComparisonResult.INCOMPATIBLE
    if len(first) != len(second):
        return NeuralTypeComparisonResult.INCOMPATIBLE
    any_of_first = [position for position, axis in enumerate(first) if axis.kind is AxisKind.Any]
    checked = slice(any_of_first[-1] + 1 if any_of_first else 0, None)
    if all(axis.fits(other) for axis, other in zip(first[checked], second[checked], strict=True)):
        return NeuralTypeComparisonResult.SAME
    sizes, others = ({axis.kind: axis.size for axis in axes} for axes in (first, second))
    if sizes.keys() != others.keys():
        return NeuralTypeComparisonResult.INCOMPATIBLE
    return NeuralTypeComparisonResult.TRANSPOSE_SAME if sizes == others else NeuralTypeComparisonResult.DIM_INCOMPATIBLE
