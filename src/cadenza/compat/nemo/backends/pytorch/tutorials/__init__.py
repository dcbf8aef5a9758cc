"""``nemo.backends.pytorch.tutorials``: the hello world."""

from cadenza.compat.neural.tutorials import CrossEntropyLoss, L1Loss, MSELoss, RealFunctionDataLayer, TaylorNet

__all__ = ["CrossEntropyLoss", "L1Loss", "MSELoss", "RealFunctionDataLayer", "TaylorNet"]
