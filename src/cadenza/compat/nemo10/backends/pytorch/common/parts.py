"""``nemo.backends.pytorch.common.parts``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.layers import Attention, MultiLayerPerceptron

__all__ = ["Attention", "MultiLayerPerceptron"]

advise(__name__)
