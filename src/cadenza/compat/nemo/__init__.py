"""NeMo 0.11: ``import cadenza.compat.nemo as nemo``. See docs/guides/from-nemo.md."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo import backends as backends
from cadenza.compat.nemo import core as core
from cadenza.compat.nemo import utils as utils
from cadenza.compat.nemo.backends.pytorch import tutorials as tutorials
from cadenza.compat.neural.aliases import OF_0_11, provide
from cadenza.compat.neural.logs import logging as logging
from cadenza.compat.neural.logs import logging_mode as logging_mode

__version__ = "0.11.0"  # of the NeMo that this adapter follows

provide(__name__, OF_0_11)
advise(__name__)
