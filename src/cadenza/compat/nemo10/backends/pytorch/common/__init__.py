"""``nemo.backends.pytorch.common``: losses, and small modules and data layers."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo10.backends.pytorch.common import losses as losses
from cadenza.compat.nemo10.backends.pytorch.common import multi_data as multi_data
from cadenza.compat.nemo10.backends.pytorch.common import other as other
from cadenza.compat.nemo10.backends.pytorch.common import parts as parts
from cadenza.compat.nemo10.backends.pytorch.common import zero_data as zero_data
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

advise(__name__)
