"""``nemo.backends.pytorch``."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.backends.pytorch import actions as actions
from cadenza.compat.nemo.backends.pytorch import nm as nm
from cadenza.compat.nemo.backends.pytorch import optimizers as optimizers
from cadenza.compat.nemo.backends.pytorch import tutorials as tutorials

advise(__name__)
