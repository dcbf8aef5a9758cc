"""``nemo.utils``."""

from cadenza.compat.neural.helpers import get_checkpoint_from_dir, get_cuda_device, get_device, rgetattr, rsetattr
from cadenza.compat.neural.logs import get_logger, logging, logging_mode
from cadenza.compat.neural.script_arguments import NemoArgParser

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
