"""The meaning of the elements of a tensor, and the results of a comparison (``nemo.core.neural_types``)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

__all__ = [
    "AcousticEncodedRepresentation",
    "AudioSignal",
    "CategoricalValuesType",
    "ChannelType",
    "ElementType",
    "EmbeddedTextType",
    "EncodedRepresentation",
    "LabelsType",
    "LengthsType",
    "LogitsType",
    "LogprobsType",
    "LossType",
    "MFCCSpectrogramType",
    "MaskType",
    "MelSpectrogramType",
    "PredictionsType",
    "RegressionValuesType",
    "SpectrogramType",
    "VoidType",
]


class NeuralTypeComparisonResult(Enum):
    """The result of ``a.compare(b)``."""

    SAME = 0
    LESS = 1
    """a is a special case of b."""
    GREATER = 2
    """b is a special case of a."""
    DIM_INCOMPATIBLE = 3
    """The sizes of an axis differ."""
    TRANSPOSE_SAME = 4
    """The axes are equal in another order, or one is a list."""
    CONTAINER_SIZE_MISMATCH = 5
    """Containers of different lengths. No comparison gives it, in NeMo too."""
    INCOMPATIBLE = 6
    SAME_TYPE_INCOMPATIBLE_PARAMS = 7
    """The types are equal, their parameters are not."""


class ElementType:
    """The meaning of the elements of a tensor. A subclass is a special case of its base."""

    @property
    def type_parameters(self) -> Mapping[str, Any]:
        """Parameters that must be equal in two compatible types, such as a sampling frequency."""
        return {}

    @property
    def fields(self) -> tuple[str, ...] | None:
        """The names of the parts of a structure, which is the last dimension; None without a structure."""
        return None

    def compare(self, second: ElementType) -> NeuralTypeComparisonResult:
        """Return how this type relates to another."""
        if type(self) is not type(second):
            if isinstance(self, type(second)):
                return NeuralTypeComparisonResult.LESS
            if isinstance(second, type(self)):
                return NeuralTypeComparisonResult.GREATER
            return NeuralTypeComparisonResult.INCOMPATIBLE
        if self.type_parameters != second.type_parameters:
            return NeuralTypeComparisonResult.SAME_TYPE_INCOMPATIBLE_PARAMS
        same = self.fields == second.fields
        return NeuralTypeComparisonResult.SAME if same else NeuralTypeComparisonResult.INCOMPATIBLE

    def __repr__(self) -> str:
        return type(self).__name__


class VoidType(ElementType):
    """Any elements: a port of this type accepts every tensor with its axes."""

    def compare(self, second: ElementType) -> NeuralTypeComparisonResult:
        """Return SAME."""
        return NeuralTypeComparisonResult.SAME


class ChannelType(ElementType):
    """Features, such as activations or pixels."""


class EmbeddedTextType(ChannelType):
    """Embedded tokens."""


class EncodedRepresentation(ChannelType):
    """The output of an encoder."""


class AcousticEncodedRepresentation(EncodedRepresentation):
    """The output of an acoustic encoder."""


class SpectrogramType(ChannelType):
    """A spectrogram."""


class MelSpectrogramType(SpectrogramType):
    """A mel spectrogram."""


class MFCCSpectrogramType(SpectrogramType):
    """Mel-frequency cepstral coefficients."""


class AudioSignal(ElementType):
    """Samples of a sound.

    Args:
        freq: The sampling frequency in Hz. Signals of different frequencies are incompatible.
    """

    def __init__(self, freq: int = 16000) -> None:
        self._params = {"freq": freq}

    @property
    def type_parameters(self) -> Mapping[str, Any]:
        return self._params


class LogitsType(ElementType):
    """Scores before a softmax."""


class LogprobsType(ElementType):
    """Logarithms of probabilities."""


class LengthsType(ElementType):
    """Lengths of sequences."""


class LossType(ElementType):
    """A loss."""


class LabelsType(ElementType):
    """Labels of any kind."""


class PredictionsType(LabelsType):
    """Predictions of a model."""


class RegressionValuesType(PredictionsType):
    """Values of a regression."""


class CategoricalValuesType(PredictionsType):
    """Classes."""


class MaskType(PredictionsType):
    """A mask of booleans."""
