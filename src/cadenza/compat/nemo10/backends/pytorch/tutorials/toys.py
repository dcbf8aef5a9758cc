"""``nemo.backends.pytorch.tutorials.toys``: the hello world."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.tutorials import CrossEntropyLoss, L1Loss, MSELoss, RealFunctionDataLayer, TaylorNet, TaylorNetO

__all__ = ["CrossEntropyLoss", "L1Loss", "MSELoss", "RealFunctionDataLayer", "TaylorNet", "TaylorNetO"]

advise(__name__)
