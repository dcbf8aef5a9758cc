"""``pytorch_accelerated.schedulers``."""

from cadenza.compat.absent import advise
from cadenza.compat.accelerated.schedulers.cosine_scheduler import CosineLrScheduler
from cadenza.compat.accelerated.schedulers.scheduler_base import SchedulerBase, StatefulSchedulerBase

__all__ = ["CosineLrScheduler", "SchedulerBase", "StatefulSchedulerBase"]

advise(__name__)
