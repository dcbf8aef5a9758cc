"""``nemo.backends``: PyTorch is the only one."""

from cadenza.compat.nemo.backends import pytorch as pytorch
