"""``nemo.core.neural_modules`` of NeMo 0.11."""

from cadenza.compat.neural.kinds import ModuleType, OperationMode, WeightShareTransform
from cadenza.compat.neural.tensors import NeuralModule, NmTensor

__all__ = ["ModuleType", "NeuralModule", "NmTensor", "OperationMode", "WeightShareTransform"]
