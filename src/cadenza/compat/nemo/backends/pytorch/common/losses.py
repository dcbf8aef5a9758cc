"""``nemo.backends.pytorch.common.losses``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.losses import CrossEntropyLossNM, LossAggregatorNM, MSELoss, SequenceLoss

__all__ = ["CrossEntropyLossNM", "LossAggregatorNM", "MSELoss", "SequenceLoss"]

advise(__name__)
