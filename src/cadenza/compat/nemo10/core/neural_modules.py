"""``nemo.core.neural_modules`` of NeMo 0.10."""

from cadenza.compat.neural.kinds import WeightShareTransform
from cadenza.compat.neural.tensors import NeuralModule, NmTensor

__all__ = ["NeuralModule", "NmTensor", "WeightShareTransform"]
