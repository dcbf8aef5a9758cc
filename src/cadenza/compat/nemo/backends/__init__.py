"""``nemo.backends``: PyTorch is the only one."""

from cadenza.compat.nemo.backends import pytorch as pytorch
from cadenza.compat.neural.state_dicts import get_state_dict, load, save, set_state_dict

__all__ = ["get_state_dict", "load", "save", "set_state_dict"]
