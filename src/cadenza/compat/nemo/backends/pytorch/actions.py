"""``nemo.backends.pytorch.actions`` of NeMo 0.11."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.core.actions import State as StateWrapper

__all__ = ["StateWrapper"]

advise(__name__)
