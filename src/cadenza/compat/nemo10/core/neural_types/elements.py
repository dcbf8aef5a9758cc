"""``nemo.core.neural_types.elements``."""

from cadenza.compat.absent import advise
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
    PredictionsType,
    RegressionValuesType,
    SpectrogramType,
    VoidType,
)

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

advise(__name__)
