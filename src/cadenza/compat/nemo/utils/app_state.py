"""``nemo.utils.app_state``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.app_state import AppState

__all__ = ["AppState"]

advise(__name__)
