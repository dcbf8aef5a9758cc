"""``nemo.utils``."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo10.utils import argparse as argparse
from cadenza.compat.nemo10.utils import decorators as decorators
from cadenza.compat.nemo10.utils import exp_logging as exp_logging
from cadenza.compat.nemo10.utils import helpers as helpers
from cadenza.compat.nemo10.utils import lr_policies as lr_policies
from cadenza.compat.nemo10.utils import misc as misc
from cadenza.compat.nemo10.utils import nemo_logging as nemo_logging
from cadenza.compat.nemo10.utils.argparse import NemoArgParser
from cadenza.compat.nemo10.utils.exp_logging import get_logger
from cadenza.compat.nemo10.utils.helpers import get_checkpoint_from_dir, get_cuda_device, get_device, rgetattr, rsetattr
from cadenza.compat.neural.logs import logging, logging_mode

__all__ = [
    "NemoArgParser",
    "get_checkpoint_from_dir",
    "get_cuda_device",
    "get_device",
    "get_logger",
    "logging",
    "logging_mode",
    "rgetattr",
    "rsetattr",
]

advise(__name__)
