"""``nemo.core`` of NeMo 0.10."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo10.core import callbacks as callbacks
from cadenza.compat.nemo10.core import neural_types as neural_types
from cadenza.compat.nemo10.core.callbacks import (
    ActionCallback,
    CheckpointCallback,
    EvaluatorCallback,
    SimpleLossLoggerCallback,
    WandbCallback,
)
from cadenza.compat.nemo10.core.neural_factory import NeuralModuleFactory
from cadenza.compat.nemo10.core.neural_types import *  # noqa: F403  # all of them, as in NeMo
from cadenza.compat.neural.kinds import Backend, DeviceType, Optimization
from cadenza.compat.neural.ports import NeuralPortNameMismatchError, NeuralPortNmTensorMismatchError, NeuralType
from cadenza.compat.neural.tensors import NeuralModule, NmTensor

__all__ = [
    "ActionCallback",
    "Backend",
    "CheckpointCallback",
    "DeviceType",
    "EvaluatorCallback",
    "NeuralModule",
    "NeuralModuleFactory",
    "NeuralPortNameMismatchError",
    "NeuralPortNmTensorMismatchError",
    "NeuralType",
    "NmTensor",
    "Optimization",
    "SimpleLossLoggerCallback",
    "WandbCallback",
]
__all__ += neural_types.__all__

advise(__name__)
