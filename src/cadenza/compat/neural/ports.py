"""The types of the inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.errors import CadenzaError


class NeuralPortNameMismatchError(CadenzaError):
    """A module was called with inputs that are not its ports, or without a required one."""


class NeuralPortNmTensorMismatchError(CadenzaError):
    """A module was called with a tensor that its port does not accept."""


class ElementType:
    """The meaning of the elements of a tensor. A subclass is a special case of its base."""

    def __repr__(self) -> str:
        return type(self).__name__


class VoidType(ElementType):
    """Any elements: fits every port, and accepts every tensor."""


class ChannelType(ElementType):
    """Features, such as activations or pixels."""


class AudioSignal(ElementType):
    """Samples of a sound."""


class MaskType(ElementType):
    """A mask of padding."""


class LengthsType(ElementType):
    """Lengths of sequences."""


class LabelsType(ElementType):
    """Targets of a classification."""


class PredictionsType(ElementType):
    """Predictions of a model."""


class LogitsType(PredictionsType):
    """Scores before a softmax."""


class LogprobsType(PredictionsType):
    """Logarithms of probabilities."""


class RegressionValuesType(PredictionsType):
    """Predictions of numbers."""


class LossType(ElementType):
    """A loss."""


class NeuralType:
    """The type of a port.

    Args:
        axes: The meaning of each dimension, such as ``("B", "C", "H", "W")``; None accepts any dimensions.
        elements_type: The meaning of the elements; None accepts any elements.
        optional: Whether a module can be called without this input.
    """

    def __init__(
        self,
        axes: Sequence[str] | None = None,
        elements_type: ElementType | None = None,
        optional: bool = False,
    ) -> None:
        self.axes = None if axes is None else tuple(axes)
        self.elements_type, self.optional = elements_type, optional

    def accepts(self, other: NeuralType) -> bool:
        """Return whether a tensor of type `other` fits."""
        if self.axes is not None and other.axes is not None and self.axes != other.axes:
            return False
        own, given = self.elements_type, other.elements_type
        if own is None or given is None or isinstance(own, VoidType) or isinstance(given, VoidType):
            return True
        return isinstance(given, type(own))

    def __repr__(self) -> str:
        return f"axes {self.axes or 'any'}, elements {self.elements_type or 'any'}"


ANY = NeuralType()
