"""``nemo.core.neural_types.neural_type``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.ports import (
    NeuralPortNameMismatchError,
    NeuralPortNmTensorMismatchError,
    NeuralType,
    NeuralTypeError,
)
from cadenza.compat.neural.tensors import NmTensor

__all__ = ["NeuralPortNameMismatchError", "NeuralPortNmTensorMismatchError", "NeuralType", "NeuralTypeError", "NmTensor"]

advise(__name__)
