"""``nemo.backends.torch_backend``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.state_dicts import get_state_dict, load, save, set_state_dict

__all__ = ["get_state_dict", "load", "save", "set_state_dict"]

advise(__name__)
