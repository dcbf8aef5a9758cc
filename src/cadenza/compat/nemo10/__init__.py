"""NeMo 0.10: ``import cadenza.compat.nemo10 as nemo``. See docs/guides/from-nemo.md."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo10 import backends as backends
from cadenza.compat.nemo10 import core as core
from cadenza.compat.nemo10 import utils as utils
from cadenza.compat.nemo10.backends.pytorch import tutorials as tutorials
from cadenza.compat.neural.aliases import OF_0_10, provide
from cadenza.compat.neural.logs import logging as logging
from cadenza.compat.neural.logs import logging_mode as logging_mode

__version__ = "0.10.1"  # of the NeMo that this adapter follows

provide(__name__, OF_0_10)
advise(__name__)
