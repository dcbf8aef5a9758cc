"""``nemo.core.neural_types``: the types of ports."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.axes import (
    AxisKind,
    AxisKindAbstract,
    AxisType,
)
from cadenza.compat.neural.elements import (
    AcousticEncodedRepresentation,
    AudioSignal,
    CategoricalValuesType,
    ChannelType,
    ElementType,
    EmbeddedTextType,
    EncodedRepresentation,
    LabelsType,
    LengthsType,
    LogitsType,
    LogprobsType,
    LossType,
    MaskType,
    MelSpectrogramType,
    MFCCSpectrogramType,
    NeuralTypeComparisonResult,
    PredictionsType,
    RegressionValuesType,
    SpectrogramType,
    VoidType,
)
from cadenza.compat.neural.ports import (
    NeuralPortNameMismatchError,
    NeuralPortNmTensorMismatchError,
    NeuralType,
    NeuralTypeError,
)
from cadenza.compat.neural.tensors import NmTensor

__all__ = [
    "AcousticEncodedRepresentation",
    "AudioSignal",
    "AxisKind",
    "AxisKindAbstract",
    "AxisType",
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
    "NeuralPortNameMismatchError",
    "NeuralPortNmTensorMismatchError",
    "NeuralType",
    "NeuralTypeComparisonResult",
    "NeuralTypeError",
    "NmTensor",
    "PredictionsType",
    "RegressionValuesType",
    "SpectrogramType",
    "VoidType",
]

advise(__name__)
