"""``nemo.backends``: PyTorch is the only one."""

from cadenza.compat.nemo10.backends import pytorch as pytorch
