"""The types of the inputs and outputs of modules (``nemo.core.neural_types``)."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.compat.neural.axes import AxisType, axes_of, compared
from cadenza.compat.neural.elements import ElementType, NeuralTypeComparisonResult, VoidType
from cadenza.errors import CadenzaError


class NeuralTypeError(CadenzaError):
    """The base of the errors of neural types."""

    @property
    def message(self) -> str:
        """The text of the error."""
        return str(self)


class NeuralPortNameMismatchError(NeuralTypeError):
    """A module was called with inputs that are not its ports, or without a required one."""


class NeuralPortNmTensorMismatchError(NeuralTypeError):
    """A module was called with a tensor that its port does not accept."""


class NeuralType:
    """The type of a port.

    Args:
        axes: The meaning of each dimension: short names such as ``("B", "C", "H", "W")``, or AxisTypes. None without a
            VoidType describes no dimensions, such as those of a loss.
        elements_type: The meaning of the elements. A VoidType without axes accepts every tensor.
        optional: Whether a module can be called without this input.

    Raises:
        ValueError: `elements_type` is not an instance of an ElementType, or an axis is wrong.
    """

    def __init__(
        self,
        axes: Sequence[str | AxisType] | None = None,
        elements_type: ElementType | None = None,
        optional: bool = False,
    ) -> None:
        elements = VoidType() if elements_type is None else elements_type
        if not isinstance(elements, ElementType):
            raise ValueError(f"elements_type must be an instance such as ChannelType(); got {elements!r}")
        self.elements_type: VoidType | ElementType = elements
        self.optional: bool = optional
        self.axes: tuple[AxisType, ...] | None = None if axes is None else axes_of(axes)

    def compare(self, second: NeuralType) -> NeuralTypeComparisonResult:
        """Return how this type relates to another. A port accepts SAME and GREATER.

        >>> NeuralType(("B", "T")).compare(NeuralType(("T", "B")))
        <NeuralTypeComparisonResult.TRANSPOSE_SAME: 4>
        """
        if self.axes is None and isinstance(self.elements_type, VoidType):
            return NeuralTypeComparisonResult.SAME
        axes = compared(self.axes, second.axes)
        elements = self.elements_type.compare(second.elements_type)
        if axes is NeuralTypeComparisonResult.SAME:
            return elements
        return axes if elements is NeuralTypeComparisonResult.SAME else NeuralTypeComparisonResult.INCOMPATIBLE

    def accepts(self, other: NeuralType) -> bool:
        """Return whether a tensor of type `other` fits. A tensor of a module without types fits every port."""
        if other is ANY:
            return True
        return self.compare(other) in (NeuralTypeComparisonResult.SAME, NeuralTypeComparisonResult.GREATER)

    def __str__(self) -> str:
        return f"axes: {self.axes}; elements_type: {type(self.elements_type).__name__}"


ANY = NeuralType()
"""The type of ports without a type. Its tensors fit every port."""
