"""``nemo.backends``: PyTorch is the only one."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.backends import pytorch as pytorch

advise(__name__)
