"""``nemo.core.deprecated_callbacks`` of NeMo 0.11: the callbacks of 0.10."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.evaluator import EvaluatorCallback
from cadenza.compat.neural.loss_logger import SimpleLossLoggerCallback, WandbCallback
from cadenza.compat.neural.module_callbacks import ModuleSaverCallback, UnfreezeCallback, ValueSetterCallback

__all__ = [
    "ActionCallback",
    "EvaluatorCallback",
    "ModuleSaverCallback",
    "SimpleLossLoggerCallback",
    "UnfreezeCallback",
    "ValueSetterCallback",
    "WandbCallback",
]

advise(__name__)
