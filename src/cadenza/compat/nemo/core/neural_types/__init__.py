"""``nemo.core.neural_types``: the types of ports."""

from cadenza.compat.neural import elements as _elements
from cadenza.compat.neural import elements_of_0_11 as _elements_of_0_11
from cadenza.compat.neural.axes import AxisKind, AxisKindAbstract, AxisType
from cadenza.compat.neural.elements import *  # noqa: F403  # its __all__
from cadenza.compat.neural.elements import NeuralTypeComparisonResult
from cadenza.compat.neural.elements_of_0_11 import *  # noqa: F403
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
__all__ += _elements.__all__
__all__ += _elements_of_0_11.__all__
