"""``nemo.backends.pytorch``."""

from cadenza.compat.nemo10.backends.pytorch import nm as nm
from cadenza.compat.nemo10.backends.pytorch import tutorials as tutorials
