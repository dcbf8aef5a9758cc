"""``nemo.core.neural_types``: the types of ports."""

from cadenza.compat.nemo.core.neural_types import elements
from cadenza.compat.nemo.core.neural_types.elements import *  # noqa: F403  # its __all__
from cadenza.compat.neural.axes import AxisKind, AxisKindAbstract, AxisType
from cadenza.compat.neural.elements import NeuralTypeComparisonResult
from cadenza.compat.neural.ports import (
    NeuralPortNameMismatchError,
    NeuralPortNmTensorMismatchError,
    NeuralType,
    NeuralTypeError,
)
from cadenza.compat.neural.tensors import NmTensor

__all__ = [
    "AxisKind",
    "AxisKindAbstract",
    "AxisType",
    "NeuralPortNameMismatchError",
    "NeuralPortNmTensorMismatchError",
    "NeuralType",
    "NeuralTypeComparisonResult",
    "NeuralTypeError",
    "NmTensor",
]
__all__ += elements.__all__
