"""``fastNLP.core.callbacks``."""

from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.compat.fastnlp.core.callbacks.callback_event import Event, Filter
from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.compat.fastnlp.core.callbacks.checkpoint_callback import CheckpointCallback
from cadenza.compat.fastnlp.core.callbacks.early_stop_callback import EarlyStopCallback
from cadenza.compat.fastnlp.core.callbacks.fitlog_callback import FitlogCallback
from cadenza.compat.fastnlp.core.callbacks.has_monitor_callback import (
    ExecuteOnceBetterMonitor,
    HasMonitorCallback,
    ResultsMonitor,
)
from cadenza.compat.fastnlp.core.callbacks.load_best_model_callback import LoadBestModelCallback
from cadenza.compat.fastnlp.core.callbacks.lr_scheduler_callback import LRSchedCallback
from cadenza.compat.fastnlp.core.callbacks.more_evaluate_callback import MoreEvaluateCallback
from cadenza.compat.fastnlp.core.callbacks.progress_callback import (
    ExtraInfoStatistics,
    ProgressCallback,
    RawTextCallback,
    RichCallback,
    TqdmCallback,
    choose_progress_callback,
)
from cadenza.compat.fastnlp.core.callbacks.timer_callback import TimerCallback
from cadenza.compat.fastnlp.core.callbacks.topk_saver import TopkSaver
from cadenza.compat.fastnlp.core.callbacks.torch_callbacks import TorchGradClipCallback, TorchWarmupCallback

__all__ = [
    "Callback",
    "CallbackManager",
    "CheckpointCallback",
    "EarlyStopCallback",
    "Event",
    "ExecuteOnceBetterMonitor",
    "ExtraInfoStatistics",
    "Filter",
    "FitlogCallback",
    "HasMonitorCallback",
    "LRSchedCallback",
    "LoadBestModelCallback",
    "MoreEvaluateCallback",
    "ProgressCallback",
    "RawTextCallback",
    "ResultsMonitor",
    "RichCallback",
    "TimerCallback",
    "TopkSaver",
    "TorchGradClipCallback",
    "TorchWarmupCallback",
    "TqdmCallback",
    "choose_progress_callback",
]
