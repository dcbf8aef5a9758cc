"""``pytorch_accelerated.schedulers``."""

from cadenza.compat.accelerated.schedulers.cosine_scheduler import CosineLrScheduler
from cadenza.compat.accelerated.schedulers.scheduler_base import ScheduleError, SchedulerBase, StatefulSchedulerBase
from cadenza.compat.accelerated.schedulers.wsd_scheduler import WSDLrScheduler

__all__ = ["CosineLrScheduler", "ScheduleError", "SchedulerBase", "StatefulSchedulerBase", "WSDLrScheduler"]
