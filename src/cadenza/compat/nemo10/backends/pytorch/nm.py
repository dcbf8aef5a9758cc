"""``nemo.backends.pytorch.nm``: the kinds of neural modules."""

from cadenza.compat.neural import modules
from cadenza.compat.neural.modules import DataLayerNM, LossNM, TrainableNM

__all__ = ["DataLayerNM", "LossNM", "NonTrainableNM", "TrainableNM"]


class NonTrainableNM(modules.NonTrainableNM):
    """A module without weights. A subclass defines ``input_ports``, ``output_ports`` and ``forward``.

    No gradient flows through it. For a gradient without weights, use a `TrainableNM` without parameters.
    """

    _gradients = False
