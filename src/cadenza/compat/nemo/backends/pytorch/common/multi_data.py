"""``nemo.backends.pytorch.common.multi_data``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.data_layers import DataCombination, MultiDataLayer, MultiDataset

__all__ = ["DataCombination", "MultiDataLayer", "MultiDataset"]

advise(__name__)
