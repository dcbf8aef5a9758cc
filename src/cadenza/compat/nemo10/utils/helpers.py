"""``nemo.utils.helpers``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.helpers import get_checkpoint_from_dir, get_cuda_device, get_device, rgetattr, rsetattr

__all__ = ["get_checkpoint_from_dir", "get_cuda_device", "get_device", "rgetattr", "rsetattr"]

advise(__name__)
