"""``nemo.utils.nemo_logging``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.logs import Logger, LogMode

__all__ = ["LogMode", "Logger"]

advise(__name__)
