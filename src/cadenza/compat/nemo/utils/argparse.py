"""``nemo.utils.argparse``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.script_arguments import NemoArgParser

__all__ = ["NemoArgParser"]

advise(__name__)
