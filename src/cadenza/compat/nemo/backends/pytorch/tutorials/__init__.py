"""``nemo.backends.pytorch.tutorials``: the hello world."""

from cadenza.compat.neural.tutorials import MSELoss, RealFunctionDataLayer, TaylorNet

__all__ = ["MSELoss", "RealFunctionDataLayer", "TaylorNet"]
