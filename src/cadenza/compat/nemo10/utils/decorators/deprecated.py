"""``nemo.utils.decorators.deprecated``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.decorators import deprecated

__all__ = ["deprecated"]

advise(__name__)
