"""``nemo.backends``: PyTorch is the only one."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.backends import pytorch as pytorch
from cadenza.compat.nemo.backends import torch_backend as torch_backend
from cadenza.compat.nemo.backends.torch_backend import get_state_dict, load, save, set_state_dict

__all__ = ["get_state_dict", "load", "save", "set_state_dict"]

advise(__name__)
