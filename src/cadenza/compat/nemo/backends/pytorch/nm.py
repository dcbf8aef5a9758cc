"""``nemo.backends.pytorch.nm``: the kinds of neural modules."""

from cadenza.compat.neural.modules import DataLayerNM, LossNM, NonTrainableNM, TrainableNM

__all__ = ["DataLayerNM", "LossNM", "NonTrainableNM", "TrainableNM"]
