"""``nemo.backends.pytorch.tutorials``: the hello world."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet

__all__ = ["MSELoss", "RealFunctionDataLayer", "TaylorNet"]

advise(__name__)
