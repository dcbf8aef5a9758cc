"""``pytorch_accelerated.callbacks``."""

from cadenza.compat.accelerated.callbacks.averages import ModelEmaCallback
from cadenza.compat.accelerated.callbacks.base import TrainerCallback
from cadenza.compat.accelerated.callbacks.defaults import get_default_callbacks
from cadenza.compat.accelerated.callbacks.limits import (
    LimitBatchesCallback,
    LimitEvalStepsCallback,
    StepBasedEvaluationCallback,
)
from cadenza.compat.accelerated.callbacks.modules import ConvertSyncBatchNormCallback, MoveModulesToDeviceCallback
from cadenza.compat.accelerated.callbacks.saving import SaveBestModelCallback, SaveTrainingStateCallback
from cadenza.compat.accelerated.callbacks.showing import LogMetricsCallback, PrintProgressCallback, ProgressBarCallback
from cadenza.compat.accelerated.callbacks.stopping import EarlyStoppingCallback, TerminateOnNaNCallback
from cadenza.compat.accelerated.callbacks.wsd import WSDCheckpointCallback
from cadenza.compat.accelerated.events import CallbackMethodNotImplementedError, StopTrainingError
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.tracking import LossTracker
from cadenza.compat.accelerated.utils import DataLoaderSlice, ModelEma

__all__ = [
    "CallbackHandler",
    "CallbackMethodNotImplementedError",
    "ConvertSyncBatchNormCallback",
    "DataLoaderSlice",
    "EarlyStoppingCallback",
    "LimitBatchesCallback",
    "LimitEvalStepsCallback",
    "LogMetricsCallback",
    "LossTracker",
    "ModelEma",
    "ModelEmaCallback",
    "MoveModulesToDeviceCallback",
    "PrintProgressCallback",
    "ProgressBarCallback",
    "SaveBestModelCallback",
    "SaveTrainingStateCallback",
    "StepBasedEvaluationCallback",
    "StopTrainingError",
    "TerminateOnNaNCallback",
    "TrainerCallback",
    "WSDCheckpointCallback",
    "get_default_callbacks",
]
