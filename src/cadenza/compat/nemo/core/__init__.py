"""``nemo.core`` of NeMo 0.11."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.core import actions as actions
from cadenza.compat.nemo.core import callbacks as callbacks
from cadenza.compat.nemo.core import neural_types as neural_types
from cadenza.compat.nemo.core.actions import TrainingState
from cadenza.compat.nemo.core.callbacks import (
    CheckpointCallback,
    EvaluatorCallback,
    NeMoCallback,
    SimpleLogger,
    TensorboardLogger,
    WandBLogger,
)
from cadenza.compat.nemo.core.neural_factory import NeuralModuleFactory
from cadenza.compat.nemo.core.neural_types import *  # noqa: F403  # all of them, as in NeMo
from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.kinds import Backend, DeviceType, Optimization
from cadenza.compat.neural.loss_logger import SimpleLossLoggerCallback, WandbCallback
from cadenza.compat.neural.ports import NeuralPortNameMismatchError, NeuralPortNmTensorMismatchError, NeuralType
from cadenza.compat.neural.tensors import NeuralModule, NmTensor

__all__ = [
    "ActionCallback",
    "Backend",
    "CheckpointCallback",
    "DeviceType",
    "EvaluatorCallback",
    "NeMoCallback",
    "NeuralModule",
    "NeuralModuleFactory",
    "NeuralPortNameMismatchError",
    "NeuralPortNmTensorMismatchError",
    "NeuralType",
    "NmTensor",
    "Optimization",
    "SimpleLogger",
    "SimpleLossLoggerCallback",
    "TensorboardLogger",
    "TrainingState",
    "WandBLogger",
    "WandbCallback",
]
__all__ += neural_types.__all__

advise(__name__)
