"""``nemo.backends.pytorch.common``: losses, and small modules and data layers."""

from cadenza.compat.neural.data_layers import DataCombination, MultiDataLayer, ZerosDataLayer, neuralType2TensorShape
from cadenza.compat.neural.layers import Attention, MultiLayerPerceptron, SequenceEmbedding, ZerosLikeNM
from cadenza.compat.neural.losses import CrossEntropyLossNM, LossAggregatorNM, MSELoss, SequenceLoss

__all__ = [
    "Attention",
    "CrossEntropyLossNM",
    "DataCombination",
    "LossAggregatorNM",
    "MSELoss",
    "MultiDataLayer",
    "MultiLayerPerceptron",
    "SequenceEmbedding",
    "SequenceLoss",
    "ZerosDataLayer",
    "ZerosLikeNM",
    "neuralType2TensorShape",
]
