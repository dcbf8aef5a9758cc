"""Callbacks that come with Cadenza: one idea a file."""

from cadenza.callbacks.best_weights import BestWeights
from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.callbacks.confusion_matrix import ConfusionMatrix
from cadenza.callbacks.device_stats import DeviceStats
from cadenza.callbacks.early_stopping import EarlyStopping
from cadenza.callbacks.ema import Ema
from cadenza.callbacks.evaluate import Evaluate
from cadenza.callbacks.find_batch_size import FindBatchSize
from cadenza.callbacks.find_learning_rate import FindLearningRate
from cadenza.callbacks.freeze import Freeze
from cadenza.callbacks.histograms import Histograms
from cadenza.callbacks.learning_rate import LearningRate
from cadenza.callbacks.limit import Limit
from cadenza.callbacks.log_training import LogTraining
from cadenza.callbacks.move_modules import MoveModules
from cadenza.callbacks.profile import Profile
from cadenza.callbacks.sample_images import SampleImages
from cadenza.callbacks.save_predictions import SavePredictions
from cadenza.callbacks.schedule_value import ScheduleValue
from cadenza.callbacks.stop_on_non_finite import StopOnNonFinite
from cadenza.callbacks.summary import Summary
from cadenza.callbacks.swa import Swa
from cadenza.callbacks.sync_batch_norm import ConvertSyncBatchNorm
from cadenza.callbacks.time_limit import TimeLimit
from cadenza.callbacks.warmup import Warmup
from cadenza.outputs import Derive

__all__ = [
    "BestWeights",
    "Checkpoint",
    "ClipGradients",
    "ConfusionMatrix",
    "ConvertSyncBatchNorm",
    "Derive",
    "DeviceStats",
    "EarlyStopping",
    "Ema",
    "Evaluate",
    "FindBatchSize",
    "FindLearningRate",
    "Freeze",
    "Histograms",
    "LearningRate",
    "Limit",
    "LogTraining",
    "MoveModules",
    "Profile",
    "SampleImages",
    "SavePredictions",
    "ScheduleValue",
    "StopOnNonFinite",
    "Summary",
    "Swa",
    "TimeLimit",
    "Warmup",
]
