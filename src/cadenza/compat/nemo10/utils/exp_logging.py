"""``nemo.utils.exp_logging``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.logs import get_logger

__all__ = ["get_logger"]

advise(__name__)
