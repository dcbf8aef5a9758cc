"""The order of samples."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.samplers.reproducible_sampler import RandomSampler

__all__ = ["RandomSampler"]

advise(__name__)
