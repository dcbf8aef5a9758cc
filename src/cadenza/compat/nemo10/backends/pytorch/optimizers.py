"""``nemo.backends.pytorch.optimizers``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.updates import AdamW, Novograd, master_params

__all__ = ["AdamW", "Novograd", "master_params"]

advise(__name__)
