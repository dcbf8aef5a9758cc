"""``nemo.backends.pytorch``."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo10.backends.pytorch import nm as nm
from cadenza.compat.nemo10.backends.pytorch import optimizers as optimizers
from cadenza.compat.nemo10.backends.pytorch import tutorials as tutorials

advise(__name__)
