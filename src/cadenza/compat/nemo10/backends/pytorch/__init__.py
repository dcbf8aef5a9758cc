"""``nemo.backends.pytorch``."""

from cadenza.compat.nemo10.backends.pytorch import actions as actions
from cadenza.compat.nemo10.backends.pytorch import common as common
from cadenza.compat.nemo10.backends.pytorch import nm as nm
from cadenza.compat.nemo10.backends.pytorch import tutorials as tutorials
from cadenza.compat.nemo10.backends.pytorch.actions import PtActions
from cadenza.compat.nemo10.backends.pytorch.common import *  # noqa: F403  # all of them, as in NeMo
from cadenza.compat.nemo10.backends.pytorch.nm import DataLayerNM, LossNM, NonTrainableNM, TrainableNM

__all__ = ["DataLayerNM", "LossNM", "NonTrainableNM", "PtActions", "TrainableNM"]
__all__ += common.__all__
