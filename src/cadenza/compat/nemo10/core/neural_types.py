"""``nemo.core.neural_types``: the types of ports."""

from cadenza.compat.absent import advise
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

advise(__name__)
