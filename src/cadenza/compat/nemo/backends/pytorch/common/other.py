"""``nemo.backends.pytorch.common.other``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.layers import SequenceEmbedding, ZerosLikeNM

__all__ = ["SequenceEmbedding", "ZerosLikeNM"]

advise(__name__)
