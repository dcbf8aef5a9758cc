"""``nemo.backends.pytorch.common.zero_data``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.data_layers import ZerosDataLayer, neuralType2TensorShape

__all__ = ["ZerosDataLayer", "neuralType2TensorShape"]

advise(__name__)
