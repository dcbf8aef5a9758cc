"""``nemo.utils.misc``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.helpers import pad_to

__all__ = ["pad_to"]

advise(__name__)
