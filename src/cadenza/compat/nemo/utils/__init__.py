"""``nemo.utils``."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.utils import decorators as decorators
from cadenza.compat.nemo.utils import lr_policies as lr_policies
from cadenza.compat.nemo.utils.argparse import NemoArgParser as NemoArgParser

advise(__name__)
