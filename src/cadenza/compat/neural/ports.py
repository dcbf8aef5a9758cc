"""What goes into a module and comes out of it: names, axes, kinds of values."""

from __future__ import annotations

from collections.abc import Sequence

from cadenza.errors import CadenzaError


class NeuralPortNameMismatchError(CadenzaError):
    """A module was called with inputs that are not its ports, or without one that it needs."""


class NeuralPortNmTensorMismatchError(CadenzaError):
    """A module was called with a tensor of another kind than its port takes."""


class ElementType:
    """What the numbers of a tensor are. A subclass is a special case of its base."""

    def __repr__(self) -> str:
        return type(self).__name__


class VoidType(ElementType):
    """Anything: fits every port, and every tensor fits it."""


class ChannelType(ElementType):
    """Features, such as activations or pixels."""


class AudioSignal(ElementType):
    """Samples of a sound."""


class MaskType(ElementType):
    """What counts, and what is padding."""


class LengthsType(ElementType):
    """Lengths of sequences."""


class LabelsType(ElementType):
    """Targets of a classification."""


class PredictionsType(ElementType):
    """What a model predicts."""


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
        axes: What each dimension is, such as ``("B", "C", "H", "W")``; None says nothing about them.
        elements_type: What the numbers are; None says nothing about them.
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

    def takes(self, other: NeuralType) -> bool:
        """Return whether a tensor of type `other` may come in here."""
        if self.axes is not None and other.axes is not None and self.axes != other.axes:
            return False
        own, given = self.elements_type, other.elements_type
        if own is None or given is None or isinstance(own, VoidType) or isinstance(given, VoidType):
            return True
        return isinstance(given, type(own))

    def __repr__(self) -> str:
        return f"axes {self.axes or 'any'}, elements {self.elements_type or 'any'}"


ANY = NeuralType()
