"""``nemo.core.neural_types``: what ports take and give."""

from cadenza.compat.neural.ports import (
    AudioSignal,
    ChannelType,
    ElementType,
    LabelsType,
    LengthsType,
    LogitsType,
    LogprobsType,
    LossType,
    MaskType,
    NeuralType,
    PredictionsType,
    RegressionValuesType,
    VoidType,
)

__all__ = [
    "AudioSignal",
    "ChannelType",
    "ElementType",
    "LabelsType",
    "LengthsType",
    "LogitsType",
    "LogprobsType",
    "LossType",
    "MaskType",
    "NeuralType",
    "PredictionsType",
    "RegressionValuesType",
    "VoidType",
]
