"""Callbacks that come with Cadenza: one idea a file."""

from cadenza.callbacks.best_weights import BestWeights
from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.callbacks.early_stopping import EarlyStopping
from cadenza.callbacks.ema import Ema
from cadenza.callbacks.evaluate import Evaluate
from cadenza.callbacks.learning_rate import LearningRate
from cadenza.callbacks.limit import Limit
from cadenza.callbacks.log_training import LogTraining
from cadenza.callbacks.stop_on_non_finite import StopOnNonFinite
from cadenza.callbacks.time_limit import TimeLimit
from cadenza.outputs import Derive

__all__ = [
    "BestWeights",
    "Checkpoint",
    "ClipGradients",
    "Derive",
    "EarlyStopping",
    "Ema",
    "Evaluate",
    "LearningRate",
    "Limit",
    "LogTraining",
    "StopOnNonFinite",
    "TimeLimit",
]
